# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of some rows over a paged prompt: two passes over its keys, none over V.

The *softmax* pass finds the maximum and the denominator of every row. It is skipped if the
attention kernel returned the log-sum-exp and no statistic needs the maximum. The *columns* pass
recomputes the probabilities and adds them up over the heads of a group and over the rows. It can
write the head averages of A, from which weighted sums are computed without reading the keys again.

The order of float additions does not depend on timing: programs write their parts of a sum
separately, and these are added afterwards. So the same prompt always gives the same bits.

Cost of a layer, with P keys, H KV heads of D values, O rows of G query heads, b bytes per value:

- memory: 2*P*H*D*b bytes of keys (one read per KV head and pass; tiles of further rows find them in
  L2), and 4*S*O*P bytes of averages, written and read again, if they are requested;
- arithmetic: 4*P*O*H*G*D on the tensor cores and 2*P*O*H*G exponentials, half of both if the
  log-sum-exp is given. With 64 rows, G = 4 and D = 128 that is 256 operations per byte of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant
from vllm_tgvkv.kernels.statistics import (
    THRESHOLD,
    FirstPass,
    ObservedAttention,
    ObservedRows,
    Scratch,
    Statistic,
)

_FLOAT_BYTES = 4
# Enough for every multiprocessor of any GPU to have several. A constant, since the order of the
# sums, and with it the last bit, depends on it.
_SOFTMAX_PROGRAMS = 512
_COLUMNS_PROGRAMS = 1024
_MOST_SPLITS = 64
_COMBINED_VALUES = 32
_WEIGHED_COLUMNS = 64
_WEIGHED_ROWS = 32
# Padding of the averages' rows, a multiple of every tile, so that stores are known to be aligned.
_COLUMNS_MULTIPLE = 128


@triton.jit
def _slot_offsets(
    block_ids, positions, num_keys, block_stride, slot_stride, BLOCK_SIZE: tl.constexpr
):
    """Offsets of the keys at ``positions`` in the pages of head 0; int64, since pools are large."""
    blocks = tl.load(block_ids + positions // BLOCK_SIZE, mask=positions < num_keys, other=0)
    return blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride


@triton.jit
def _load_vectors(
    pointer, offsets, valid, dim_stride, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Vectors of HEAD_SIZE values, padded with zeros; all zero where not valid."""
    dims = tl.arange(0, WIDTH)
    mask = valid[:, None]
    if HEAD_SIZE < WIDTH:
        mask = mask & (dims < HEAD_SIZE)[None, :]
    return tl.load(pointer + offsets[:, None] + dims[None, :] * dim_stride, mask=mask, other=0.0)


@triton.jit
def _products(rows, columns):
    """float32 ``rows @ columns^T``. Products of 16-bit values are exact, others are IEEE's."""
    if rows.dtype != columns.dtype:
        rows = rows.to(tl.float32)
        columns = columns.to(tl.float32)
    return tl.dot(rows, tl.trans(columns), input_precision="ieee")


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "keys_per_split", "subset_stride"],
    do_not_specialize_on_alignment=["row_positions", "subset"],
)
def _softmax_kernel(
    queries,
    key_pages,
    block_ids,
    row_positions,
    subset,
    split_maxima,
    split_totals,
    num_rows,
    num_keys,
    keys_per_split,
    scale,
    query_row_stride,
    query_head_stride,
    query_member_stride,
    query_dim_stride,
    block_stride,
    head_stride,
    slot_stride,
    dim_stride,
    subset_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SUBSET: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Maximum and sum of exponentials of ROWS query vectors of one head over one split of the keys.

    Vector i is row i // GROUP of query head i % GROUP: all query heads of a KV head share its keys.
    A row that sees none of them gets -inf and 0.
    """
    tile, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    vector = tile * ROWS + tl.arange(0, ROWS)
    row, member = vector // GROUP, vector % GROUP
    exists = row < num_rows
    positions = tl.load(row_positions + row, mask=exists, other=-1).to(tl.int32)
    offsets = row.to(tl.int64) * query_row_stride + member * query_member_stride
    vectors = _load_vectors(
        queries + head * query_head_stride, offsets, exists, query_dim_stride, HEAD_SIZE, WIDTH
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first = split * keys_per_split
    # No row sees keys after the last row's position.
    end = tl.minimum(tl.minimum(first + keys_per_split, num_keys), tl.max(positions, 0) + 1)
    for start in range(first, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        slots = _slot_offsets(block_ids, columns, num_keys, block_stride, slot_stride, BLOCK_SIZE)
        keys = _load_vectors(
            key_pages + head * head_stride,
            slots,
            columns < num_keys,
            dim_stride,
            HEAD_SIZE,
            WIDTH,
        )
        logits = _products(vectors, keys) * scale
        visible = columns[None, :] <= positions[:, None]
        if HAS_SUBSET:
            chosen = tl.load(
                subset + head * subset_stride + columns, mask=columns < num_keys, other=0
            )
            visible = visible & (chosen != 0)[None, :]
        logits = tl.where(visible, logits, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # -inf - -inf is NaN; rows that saw no key so far have nothing to rescale.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        maximum = larger
    place = (split * tl.num_programs(2) + head) * num_rows * GROUP + vector
    tl.store(split_maxima + place, maximum, mask=exists)
    tl.store(split_totals + place, total, mask=exists)


@triton.jit(do_not_specialize=["num_splits", "num_values"])
def _combine_kernel(
    split_maxima,
    split_totals,
    maxima,
    log_sum_exp,
    num_splits,
    num_values,
    SPLITS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Maximum and log-sum-exp over all keys of VALUES query vectors, from those of the splits.

    For a row that sees no key, they are -inf and inf, so that all its probabilities become 0.
    """
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    split = tl.arange(0, SPLITS)
    mask = (split < num_splits)[:, None] & (value < num_values)[None, :]
    place = split[:, None] * num_values + value[None, :]
    parts = tl.load(split_maxima + place, mask=mask, other=float("-inf"))
    totals = tl.load(split_totals + place, mask=mask, other=0.0)
    maximum = tl.max(parts, 0)
    sees = maximum > float("-inf")
    shift = tl.where(sees, maximum, 0.0)
    total = tl.sum(totals * tl.exp(parts - shift[None, :]), 0)
    result = tl.where(sees, shift + tl.log(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(maxima + value, maximum, mask=value < num_values)
    tl.store(log_sum_exp + value, result, mask=value < num_values)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_keys",
        "tiles_per_split",
        "weights_group_stride",
        "weights_sum_stride",
        "weights_row_stride",
        "subset_stride",
    ],
    do_not_specialize_on_alignment=["row_positions", "weights", "subset"],
)
def _columns_kernel(
    queries,
    key_pages,
    block_ids,
    row_positions,
    maxima,
    log_sum_exp,
    weights,
    subset,
    sums,
    averages,
    counts,
    entropies,
    num_rows,
    num_keys,
    tiles_per_split,
    scale,
    query_row_stride,
    query_head_stride,
    query_member_stride,
    query_dim_stride,
    block_stride,
    head_stride,
    slot_stride,
    dim_stride,
    averages_stride,
    weights_group_stride,
    weights_sum_stride,
    weights_row_stride,
    subset_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SUBSET: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    STORES_AVERAGES: tl.constexpr,
    COUNTS_BELOW: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
    LOG_THRESHOLD: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sums of KEYS columns of one group's A over one split of the rows.

    Probabilities have keys along the first dimension and query vectors along the second; vector
    m * ROWS + r is row r of query head m. So the mean over the group adds registers of one thread,
    and sums over rows need no other warp. The exponentials of keys that a row does not see are
    meaningless; they are masked after the mean, where there are fewer values.
    """
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits, num_blocks = tl.num_programs(0), tl.num_programs(1)
    columns = block * KEYS + tl.arange(0, KEYS)
    exist = columns < num_keys
    slots = _slot_offsets(block_ids, columns, num_keys, block_stride, slot_stride, BLOCK_SIZE)
    vector = tl.arange(0, PADDED_GROUP * ROWS)
    member, row_in_tile = vector // ROWS, vector % ROWS
    offsets = row_in_tile * query_row_stride + member * query_member_stride
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_rows, ROWS))
    if not STORES_AVERAGES and not HAS_ENTROPIES:
        # Rows before the keys see none of them. Rows ascend, so their number is the first to visit.
        before = 0
        for start in range(0, num_rows, 1024):
            some = start + tl.arange(0, 1024)
            last = (block + 1) * KEYS  # never before any key
            position = tl.load(row_positions + some, mask=some < num_rows, other=last)
            before += tl.sum((position < block * KEYS).to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, before // ROWS)
    sum_0 = tl.zeros([KEYS], tl.float32)
    sum_1 = tl.zeros([KEYS], tl.float32)
    count = tl.zeros([KEYS], tl.int32)
    if HEADS == 1:
        keys = _load_vectors(
            key_pages + group * head_stride, slots, exist, dim_stride, HEAD_SIZE, WIDTH
        )
    for tile in range(first_tile, last_tile):
        row = tile * ROWS + row_in_tile
        has_vector = (row < num_rows) & (member < GROUP)
        tile_queries = queries + tl.cast(tile * ROWS, tl.int64) * query_row_stride
        row_of_tile = tile * ROWS + tl.arange(0, ROWS)
        has_row = row_of_tile < num_rows
        positions = tl.load(row_positions + row_of_tile, mask=has_row, other=-1).to(tl.int32)
        visible = columns[:, None] <= positions[None, :]
        mean = tl.zeros([KEYS, ROWS], tl.float32)
        entropy = tl.zeros([ROWS], tl.float32)
        for head_of_group in range(HEADS):
            head = group * HEADS + head_of_group
            if HEADS > 1:
                keys = _load_vectors(
                    key_pages + head * head_stride, slots, exist, dim_stride, HEAD_SIZE, WIDTH
                )
            vectors = _load_vectors(
                tile_queries + head * query_head_stride,
                offsets,
                has_vector,
                query_dim_stride,
                HEAD_SIZE,
                WIDTH,
            )
            place = (head * num_rows + row) * GROUP + member
            shift = tl.load(log_sum_exp + place, mask=has_vector, other=float("inf"))
            logits = _products(keys, vectors) * scale
            probabilities = tl.exp(logits - shift[None, :])
            of_group = tl.sum(tl.reshape(probabilities, [KEYS, PADDED_GROUP, ROWS]), 1)
            mean += tl.where(visible, of_group, 0.0)
            if COUNTS_BELOW:
                limit = LOG_THRESHOLD + tl.load(
                    maxima + place, mask=has_vector, other=float("-inf")
                )
                is_below = (logits < limit[None, :]).to(tl.int32)
                below = tl.sum(tl.reshape(is_below, [KEYS, PADDED_GROUP, ROWS]), 1)
                count += tl.sum(tl.where(visible, below, 0), 1)
            if HAS_ENTROPIES:
                # 0 * inf is NaN; a probability of 0 adds nothing to the entropy.
                surprise = tl.where(probabilities > 0, shift[None, :] - logits, 0.0)
                terms = tl.reshape(probabilities * surprise, [KEYS, PADDED_GROUP, ROWS])
                entropy += tl.sum(tl.where(visible, tl.sum(terms, 1), 0.0), 0)
        mean *= 1.0 / (HEADS * GROUP)
        if NUM_WEIGHTS == 0:
            sum_0 += tl.sum(mean, 1)
        else:
            weight = weights + group * weights_group_stride + row_of_tile * weights_row_stride
            weight_0 = tl.load(weight, mask=has_row, other=0.0)
            sum_0 += tl.sum(mean * weight_0[None, :], 1)
            if NUM_WEIGHTS == 2:
                weight_1 = tl.load(weight + weights_sum_stride, mask=has_row, other=0.0)
                sum_1 += tl.sum(mean * weight_1[None, :], 1)
        if STORES_AVERAGES:
            place = (group * num_rows + row_of_tile).to(tl.int64) * averages_stride
            place = place[None, :] + columns[:, None]
            tl.store(averages + place, mean, mask=has_row[None, :])
        if HAS_ENTROPIES:
            place = (block * tl.num_programs(2) + group) * num_rows + row_of_tile
            tl.store(entropies + place, entropy * (1.0 / (HEADS * GROUP)), mask=has_row)
    if HAS_SUBSET:
        chosen = tl.load(subset + group * subset_stride + columns, mask=exist, other=0) != 0
        # Columns outside the subset hold meaningless sums: the softmax did not include them.
        sum_0 = tl.where(chosen, sum_0, 0.0)
        sum_1 = tl.where(chosen, sum_1, 0.0)
    NUM_SUMS: tl.constexpr = 1 if NUM_WEIGHTS == 0 else NUM_WEIGHTS
    place = (split * tl.num_programs(2) + group) * NUM_SUMS
    target = sums + place.to(tl.int64) * num_keys + columns
    tl.store(target, sum_0, mask=exist)
    if NUM_WEIGHTS == 2:
        tl.store(target + num_keys, sum_1, mask=exist)
    if COUNTS_BELOW:
        place = (group * num_splits + split) * num_blocks + block
        tl.store(counts + place, tl.sum(count, 0))


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_keys",
        "weights_group_stride",
        "weights_sum_stride",
        "weights_row_stride",
    ],
    do_not_specialize_on_alignment=["weights"],
)
def _weigh_kernel(
    averages,
    weights,
    sums,
    num_rows,
    num_keys,
    averages_stride,
    weights_group_stride,
    weights_sum_stride,
    weights_row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One weighted sum of COLUMNS columns of one group's stored averages."""
    block, number, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    weights += group * weights_group_stride + number * weights_sum_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < num_rows
        weight = tl.load(weights + row * weights_row_stride, mask=exists, other=0.0)
        place = (group * num_rows + row).to(tl.int64) * averages_stride
        average = tl.load(
            averages + place[:, None] + columns[None, :], mask=exists[:, None], other=0.0
        )
        total += average * weight[:, None]
    place = (group * tl.num_programs(1) + number).to(tl.int64) * num_keys
    tl.store(sums + place + columns, tl.sum(total, 0), mask=columns < num_keys)


@dataclass(frozen=True)
class _Tiles:
    """Sizes of the matrix products, for one model on one type of GPU."""

    width: int
    """D, padded to a power of two."""
    padded_group: int
    """G, likewise."""
    softmax_rows: int
    softmax_keys: int
    softmax_stages: int
    columns_vectors: int
    """Rows times padded group."""
    columns_keys: int
    columns_warps: int
    columns_stages: int

    @staticmethod
    def of(head_size: int, group_size: int, element_size: int, shared_bytes: int) -> _Tiles:
        """Return sizes that fit the shared memory of a program."""
        width = max(16, triton.next_power_of_2(head_size))
        padded_group = triton.next_power_of_2(group_size)
        side = 128 if width * element_size <= 256 else 64
        if shared_bytes < 160 * 1024:
            side //= 2
        return _Tiles(
            width=width,
            padded_group=padded_group,
            softmax_rows=side,
            softmax_keys=min(side, 64),
            softmax_stages=3 if side == 128 else 2,
            # The mean over a small group is nearly as large as its input.
            columns_vectors=side if padded_group > 2 else min(side, 64),
            columns_keys=side,
            columns_warps=8 if width * element_size > 256 or side == 128 else 4,
            columns_stages=2 if width * element_size <= 512 else 1,
        )

    def rows_of_columns(self, has_row_statistics: bool) -> int:
        """Return the rows of a columns tile: fewer if a probability needs more registers."""
        vectors = min(self.columns_vectors, 64) if has_row_statistics else self.columns_vectors
        return vectors // self.padded_group


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 1 << 20
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


class TritonAttention(ObservedAttention):
    """Statistics in Triton; the module describes the passes.

    Queries and keys are multiplied in their own dtypes (16-bit products are exact); all sums are
    float32. The log-sum-exp is subtracted before the exponential, so that logits of any size keep
    float32's precision. Counts are exact except for entries that float32 cannot distinguish from
    the threshold.

    Scratch memory: head averages are kept if they fit ``workspace_bytes``; otherwise, each weighted
    sum reads the keys again. Partial results of the programs take a few MiB at most, maxima and
    log-sum-exps of the rows 16*H*G*O bytes.
    """

    def __init__(
        self,
        rows: ObservedRows,
        per_head: bool,
        statistics: frozenset[Statistic],
        workspace_bytes: int,
        scratch: Scratch,
    ) -> None:
        super().__init__(rows, per_head, statistics, workspace_bytes, scratch)
        queries = rows.queries
        self._queries = queries.float() if queries.dtype == torch.float64 else queries
        self._log_sum_exp = rows.log_sum_exp
        element_size = max(queries.element_size(), rows.key_pages.element_size())
        self._tiles = _Tiles.of(
            self.head_size, self.group_size, element_size, _shared_bytes(queries.device)
        )

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        first = self.num_rows - 1 if last_row_only else 0
        rows = self._rows(first)
        softmax = self._softmax_pass(rows, "subset ", keys)
        return self._columns_pass(
            rows, softmax, weights=weights.float()[:, None, first:], subset=keys
        ).sums.squeeze(1)

    @cached_property
    def _first_pass(self) -> FirstPass:
        queried = self._statistics
        averages = None
        stride = triton.cdiv(self.num_keys, _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE
        shape = (self.num_groups, self.num_rows, stride)
        if (
            "row_averages" in queried
            and self.num_groups * self.num_rows * stride * _FLOAT_BYTES <= self._workspace_bytes
        ):
            averages = self._take("averages", *shape)
        columns = self._columns_pass(
            self._rows(),
            self._softmax,
            averages=averages,
            counts_below="share_below" in queried,
            has_entropies="row_entropies" in queried,
        )
        share, entropies = columns.counts, columns.entropies
        if "share_below" in queried:
            share = self._share_of_visible(share)
        if "row_entropies" in queried:
            entropies = entropies.sum(dim=0)
        return FirstPass(columns.sums.squeeze(1), averages, share, entropies)

    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        weights = weights.float()
        sums = self._empty(self.num_groups, weights.shape[1], self.num_keys)
        grid = (triton.cdiv(self.num_keys, _WEIGHED_COLUMNS), weights.shape[1], self.num_groups)
        _weigh_kernel[grid](
            averages,
            weights,
            sums,
            self.num_rows,
            self.num_keys,
            averages.stride(1),
            _stride_of_sets(weights),
            weights.stride(1),
            weights.stride(2),
            ROWS=_WEIGHED_ROWS,
            COLUMNS=_WEIGHED_COLUMNS,
            num_warps=4,
        )
        return sums

    def _weighted_pass(self, weights: Tensor) -> Tensor:
        rows, weights = self._rows(), weights.float()
        pairs = [
            self._columns_pass(rows, self._softmax, weights=pair).sums
            for pair in weights.split(2, dim=1)
        ]
        return pairs[0] if len(pairs) == 1 else torch.cat(pairs, dim=1)

    @cached_property
    def _softmax(self) -> _Softmax:
        """The softmax of all rows over all keys."""
        # The log-sum-exp does not show which entries are below a fraction of the maximum.
        if self._log_sum_exp is None or "share_below" in self._statistics:
            return self._softmax_pass(self._rows(), "")
        log_sum_exp = self._take("log-sum-exp", self.num_heads, self.num_rows, self.group_size)
        return _Softmax(None, log_sum_exp.copy_(self._log_sum_exp.transpose(0, 1)))

    def _softmax_pass(self, rows: _Rows, name: str, subset: Tensor | None = None) -> _Softmax:
        """Compute maxima and log-sum-exps of the rows, in buffers whose names begin with `name`."""
        heads, tiles = self.num_heads, self._tiles
        shape = (heads, rows.number, self.group_size)
        maxima, log_sum_exp = self._take(f"{name}maxima", *shape), self._take(f"{name}lse", *shape)
        num_values = maxima.numel()
        if num_values == 0:
            return _Softmax(maxima, log_sum_exp)
        num_tiles = triton.cdiv(rows.number * self.group_size, tiles.softmax_rows)
        key_tiles = triton.cdiv(self.num_keys, tiles.softmax_keys)
        wanted = triton.cdiv(_SOFTMAX_PROGRAMS, num_tiles * heads)
        tiles_per_split = triton.cdiv(key_tiles, min(wanted, _MOST_SPLITS, key_tiles))
        num_splits = triton.cdiv(key_tiles, tiles_per_split)
        of_splits = (
            self._take("split maxima", num_splits, *shape),
            self._take("split totals", num_splits, *shape),
        )
        _softmax_kernel[(num_tiles, num_splits, heads)](
            rows.queries,
            self._key_pages,
            self._block_ids,
            rows.positions,
            _bytes_of(subset),
            *of_splits,
            rows.number,
            self.num_keys,
            tiles_per_split * tiles.softmax_keys,
            self._scale,
            *rows.queries.stride(),
            *self._key_pages.stride(),
            0 if subset is None else _stride_of_sets(subset),
            GROUP=self.group_size,
            HEAD_SIZE=self.head_size,
            BLOCK_SIZE=self._key_pages.shape[2],
            HAS_SUBSET=subset is not None,
            ROWS=tiles.softmax_rows,
            KEYS=tiles.softmax_keys,
            WIDTH=tiles.width,
            num_warps=4,
            num_stages=tiles.softmax_stages,
        )
        _combine_kernel[(triton.cdiv(num_values, _COMBINED_VALUES),)](
            *of_splits,
            maxima,
            log_sum_exp,
            num_splits,
            num_values,
            SPLITS=_MOST_SPLITS,
            VALUES=_COMBINED_VALUES,
            num_warps=4,
        )
        return _Softmax(maxima, log_sum_exp)

    def _columns_pass(
        self,
        rows: _Rows,
        softmax: _Softmax,
        weights: Tensor | None = None,
        subset: Tensor | None = None,
        averages: Tensor | None = None,
        counts_below: bool = False,
        has_entropies: bool = False,
    ) -> _Columns:
        """Compute column sums, plain or with weights float32 ``[S or 1, 1 or 2, O]``."""
        tiles, groups = self._tiles, self.num_groups
        num_sums = 1 if weights is None else weights.shape[1]
        rows_of_tile = tiles.rows_of_columns(counts_below or has_entropies)
        num_tiles = triton.cdiv(rows.number, rows_of_tile)
        num_blocks = triton.cdiv(self.num_keys, tiles.columns_keys)
        wanted = triton.cdiv(_COLUMNS_PROGRAMS, num_blocks * groups)
        tiles_per_split = triton.cdiv(num_tiles, max(1, min(wanted, num_tiles)))
        num_splits = triton.cdiv(num_tiles, tiles_per_split) if num_tiles else 1
        shape = (groups, num_sums, self.num_keys)
        if num_splits == 1:
            sums = self._empty(*shape)
        else:
            sums = self._take("split sums", num_splits, *shape)
        counts = self._empty(
            groups, num_splits * num_blocks if counts_below else 0, dtype=torch.int32
        )
        entropies = self._take("entropies", num_blocks if has_entropies else 0, groups, rows.number)
        _columns_kernel[(num_splits, num_blocks, groups)](
            rows.queries,
            self._key_pages,
            self._block_ids,
            rows.positions,
            softmax.maxima if counts_below else None,
            softmax.log_sum_exp,
            weights,
            _bytes_of(subset),
            sums,
            averages,
            counts,
            entropies,
            rows.number,
            self.num_keys,
            tiles_per_split,
            self._scale,
            *rows.queries.stride(),
            *self._key_pages.stride(),
            _COLUMNS_MULTIPLE if averages is None else averages.stride(1),
            0 if weights is None else _stride_of_sets(weights),
            0 if weights is None else weights.stride(1),
            0 if weights is None else weights.stride(2),
            0 if subset is None else _stride_of_sets(subset),
            HEADS=self.num_heads // groups,
            GROUP=self.group_size,
            HEAD_SIZE=self.head_size,
            BLOCK_SIZE=self._key_pages.shape[2],
            HAS_SUBSET=subset is not None,
            NUM_WEIGHTS=0 if weights is None else num_sums,
            STORES_AVERAGES=averages is not None,
            COUNTS_BELOW=counts_below,
            HAS_ENTROPIES=has_entropies,
            LOG_THRESHOLD=math.log(THRESHOLD),
            PADDED_GROUP=tiles.padded_group,
            ROWS=rows_of_tile,
            KEYS=tiles.columns_keys,
            WIDTH=tiles.width,
            num_warps=tiles.columns_warps,
            num_stages=tiles.columns_stages,
        )
        return _Columns(sums if num_splits == 1 else sums.sum(dim=0), counts, entropies)

    def _rows(self, first: int = 0) -> _Rows:
        return _Rows(
            self._queries[first:], self.row_positions[first:], max(0, self.num_rows - first)
        )

    def _share_of_visible(self, counts: Tensor) -> Tensor:
        """Return shares ``[S]`` from partial counts ``[S, *]`` over a group's query heads."""
        num_visible = (self.row_positions + 1).sum()
        num_heads = self.num_heads // self.num_groups * self.group_size
        return counts.sum(dim=1).double() / (num_visible * num_heads)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._scratch.take(name, shape, self._queries.device)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._queries.device)


@dataclass(frozen=True)
class _Rows:
    """Rows of a pass."""

    queries: Tensor
    """``[O, H, G, D]``."""
    positions: Tensor
    """int64 ``[O]``."""
    number: int


@dataclass(frozen=True)
class _Softmax:
    """Softmax of every query head and row, float32 ``[H, O, G]``."""

    maxima: Tensor | None
    """None if the attention kernel returned the log-sum-exp."""
    log_sum_exp: Tensor


@dataclass(frozen=True)
class _Columns:
    """Results of one pass over the columns; those that were not requested are empty."""

    sums: Tensor
    """float32 ``[S, K, P]``."""
    counts: Tensor
    """int32 ``[S, *]``, one per program."""
    entropies: Tensor
    """float32 ``[*, S, O]``, one per block of keys."""


def _stride_of_sets(tensor: Tensor) -> int:
    """Return the stride of the first dimension: 0 if it has size 1, for all sets to share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def _bytes_of(subset: Tensor | None) -> Tensor | None:
    return None if subset is None else subset.contiguous().view(torch.uint8)


def variants() -> Iterator[Variant]:
    """Yield the kernels of Qwen3-VL-8B, and other head sizes, groups and statistics."""
    for dtype, head_size, group, heads in (("bf16", 128, 4, 8), ("fp16", 64, 7, 4)):
        for subset in (False, True):
            yield _softmax_variant(dtype, head_size, group, subset)
        for heads_of_set in (1, heads):
            yield _columns_variant(dtype, head_size, group, heads_of_set, averages=True)
            yield _columns_variant(dtype, head_size, group, heads_of_set, weights=2)
    yield _columns_variant("bf16", 128, 4, 1, counts=True)
    yield _columns_variant("bf16", 128, 4, 8, averages=True, entropies=True)
    yield _columns_variant("bf16", 128, 4, 8, counts=True)
    yield _columns_variant("bf16", 128, 4, 8, weights=1, subset=True)
    yield _columns_variant("bf16", 128, 1, 16, averages=True)
    yield _columns_variant("bf16", 128, 16, 2, averages=True)
    yield _softmax_variant("bf16", 256, 2, False)
    yield _columns_variant("bf16", 256, 2, 1, averages=True)
    yield _columns_variant("bf16", 256, 2, 4, averages=True)
    yield _columns_variant("bf16", 256, 8, 4, weights=2)
    yield Variant(
        "fp32",
        _combine_kernel,
        _typed("*fp32", "split_maxima split_totals maxima log_sum_exp")
        | _typed("i32", "num_splits num_values"),
        {"SPLITS": _MOST_SPLITS, "VALUES": _COMBINED_VALUES},
    )
    yield Variant(
        "fp32",
        _weigh_kernel,
        _typed("*fp32", "averages weights sums")
        | _typed("i32", "num_rows num_keys averages_stride")
        | _typed("i32", "weights_group_stride weights_sum_stride weights_row_stride"),
        {"ROWS": _WEIGHED_ROWS, "COLUMNS": _WEIGHED_COLUMNS},
        aligned=("averages", "sums", "averages_stride"),
    )


def _typed(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


_SHARED_OF_VARIANTS = 227 * 1024
# A few load addresses, used once per tile, which some compilers spill for some GPUs.
_SPILL_LIMIT = 128
_PAGED = {
    **_typed("*i32", "block_ids"),
    **_typed("*i64", "row_positions"),
    **_typed("fp32", "scale"),
    **_typed("i32", "num_rows num_keys subset_stride"),
    **_typed("i32", "query_row_stride query_head_stride query_member_stride"),
    **_typed("i32", "block_stride head_stride slot_stride"),
}
_ALIGNED = (
    *("queries", "query_row_stride", "query_head_stride", "query_member_stride"),
    *("key_pages", "block_stride", "head_stride", "slot_stride"),
    "block_ids",
)


def _softmax_variant(dtype: str, head_size: int, group: int, subset: bool) -> Variant:
    tiles = _Tiles.of(head_size, group, 2, _SHARED_OF_VARIANTS)
    signature = _PAGED | _typed(f"*{dtype}", "queries key_pages")
    signature |= _typed("*fp32", "split_maxima split_totals") | _typed("i32", "keys_per_split")
    constants: dict[str, object] = {
        "query_dim_stride": 1,
        "dim_stride": 1,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": 16,
        "HAS_SUBSET": subset,
        "ROWS": tiles.softmax_rows,
        "KEYS": tiles.softmax_keys,
        "WIDTH": tiles.width,
    }
    if subset:
        signature |= _typed("*u8", "subset")
    else:
        constants["subset"] = None
    return Variant(
        f"{dtype} D{head_size} G{group}{' subset' * subset}",
        _softmax_kernel,
        signature,
        constants,
        num_warps=4,
        num_stages=tiles.softmax_stages,
        aligned=(*_ALIGNED, "split_maxima", "split_totals"),
        spill_limit=_SPILL_LIMIT,
    )


def _columns_variant(
    dtype: str,
    head_size: int,
    group: int,
    heads: int,
    weights: int = 0,
    averages: bool = False,
    counts: bool = False,
    entropies: bool = False,
    subset: bool = False,
) -> Variant:
    tiles = _Tiles.of(head_size, group, 2, _SHARED_OF_VARIANTS)
    signature = _PAGED | _typed(f"*{dtype}", "queries key_pages")
    signature |= _typed("*fp32", "log_sum_exp sums entropies") | _typed("*i32", "counts")
    signature |= _typed("i32", "tiles_per_split averages_stride")
    signature |= _typed("i32", "weights_group_stride weights_sum_stride weights_row_stride")
    constants: dict[str, object] = {
        "query_dim_stride": 1,
        "dim_stride": 1,
        "HEADS": heads,
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": 16,
        "HAS_SUBSET": subset,
        "NUM_WEIGHTS": weights,
        "STORES_AVERAGES": averages,
        "COUNTS_BELOW": counts,
        "HAS_ENTROPIES": entropies,
        "LOG_THRESHOLD": math.log(THRESHOLD),
        "PADDED_GROUP": tiles.padded_group,
        "ROWS": tiles.rows_of_columns(counts or entropies),
        "KEYS": tiles.columns_keys,
        "WIDTH": tiles.width,
    }
    name = f"{dtype} D{head_size} G{group} H{heads}" + " counts" * counts + " entropies" * entropies
    aligned = [*_ALIGNED, "log_sum_exp", "sums", "averages_stride"]
    for argument, kind, used in (
        ("maxima", "*fp32", counts),
        ("weights", "*fp32", weights > 0),
        ("subset", "*u8", subset),
        ("averages", "*fp32", averages),
    ):
        if not used:
            constants[argument] = None
            continue
        signature[argument] = kind
        if kind == "*fp32" and argument != "weights":
            aligned.append(argument)
        if argument != "maxima":
            name += f" {argument}"
    return Variant(
        name,
        _columns_kernel,
        signature,
        constants,
        num_warps=tiles.columns_warps,
        num_stages=tiles.columns_stages,
        aligned=aligned,
        spill_limit=_SPILL_LIMIT if heads > 1 else 0,
    )
