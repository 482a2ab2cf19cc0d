# SPDX-License-Identifier: Apache-2.0
"""Sums and maxima of the columns of A, from recomputed probabilities or from stored averages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import TYPES, Variant, launches
from vllm_tgvkv.kernels.gpu.paged_rows import (
    SPILL_LIMIT,
    PagedRows,
    Tiles,
    bytes_of,
    example,
    load_keys,
    load_vectors,
    products,
    served_by_vllm,
    stride_of_sets,
)
from vllm_tgvkv.kernels.gpu.softmax import Softmax
from vllm_tgvkv.kernels.statistics import THRESHOLD, Scratch

# As in the softmax pass.
_PROGRAMS = 1024
_WEIGHED_COLUMNS = 64
_WEIGHED_ROWS = 32
COLUMNS_MULTIPLE = 128
"""Padding of the averages' rows, a multiple of every tile, so that stores are aligned."""


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_keys",
        "tiles_per_split",
        "weights_group_stride",
        "weights_sum_stride",
        "weights_row_stride",
        "table_stride",
        "visible_stride",
        "scales_stride",
        "subset_stride",
    ],
    do_not_specialize_on_alignment=["tables", "num_visible", "scales", "weights", "subset"],
)
def _columns_kernel(
    queries,
    pool,
    tables,
    num_visible,
    scales,
    row_maxima,
    log_sum_exp,
    weights,
    subset,
    sums,
    maxima,
    averages,
    counts,
    entropies,
    num_rows,
    num_keys,
    tiles_per_split,
    query_layer_stride,
    query_row_stride,
    query_head_stride,
    query_member_stride,
    query_dim_stride,
    page_stride,
    slot_stride,
    dim_stride,
    table_stride,
    visible_stride,
    scales_stride,
    averages_stride,
    weights_group_stride,
    weights_sum_stride,
    weights_row_stride,
    subset_stride,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SUBSET: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_MAXIMA: tl.constexpr,
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

    A group is HEADS pairs of one layer: one, or all NUM_HEADS, whose rows see equally many keys.

    Probabilities have keys along the first dimension and query vectors along the second; vector
    m * ROWS + r is row r of query head m. So the mean over the group adds registers of one thread,
    and sums over rows need no other warp. The exponentials of keys that a row does not see are
    meaningless; they are masked after the mean, where there are fewer values.
    """
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits, num_blocks = tl.num_programs(0), tl.num_programs(1)
    first_pair = group * HEADS
    layer, first_head = first_pair // NUM_HEADS, first_pair % NUM_HEADS
    scale = tl.load(scales + layer * scales_stride)
    queries += tl.cast(layer, tl.int64) * query_layer_stride
    num_seen = num_visible + first_pair * visible_stride
    columns = block * KEYS + tl.arange(0, KEYS)
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
            seen = tl.load(num_seen + some, mask=some < num_rows, other=last)
            before += tl.sum((seen <= block * KEYS).to(tl.int32), 0)
        first_tile = tl.maximum(first_tile, before // ROWS)
    sum_0 = tl.zeros([KEYS], tl.float32)
    sum_1 = tl.zeros([KEYS], tl.float32)
    maximum = tl.zeros([KEYS], tl.float32)
    count = tl.zeros([KEYS], tl.int32)
    if HEADS == 1:
        # The last row sees most keys.
        limit = tl.load(num_seen + num_rows - 1, mask=num_rows > 0, other=0)
        table = tables + group * table_stride
        keys = load_keys(
            pool, table, columns, limit, page_stride, slot_stride, dim_stride,
            HEAD_SIZE, PAGE_SIZE, WIDTH,
        )  # fmt: skip
    for tile in range(first_tile, last_tile):
        row = tile * ROWS + row_in_tile
        has_vector = (row < num_rows) & (member < GROUP)
        tile_queries = queries + tl.cast(tile * ROWS, tl.int64) * query_row_stride
        row_of_tile = tile * ROWS + tl.arange(0, ROWS)
        has_row = row_of_tile < num_rows
        seen = tl.load(num_seen + row_of_tile, mask=has_row, other=0)
        visible = columns[:, None] < seen[None, :]
        mean = tl.zeros([KEYS, ROWS], tl.float32)
        entropy = tl.zeros([ROWS], tl.float32)
        for head_of_group in range(HEADS):
            pair, head = first_pair + head_of_group, first_head + head_of_group
            if HEADS > 1:
                limit = tl.load(num_visible + pair * visible_stride + num_rows - 1)
                table = tables + pair * table_stride
                keys = load_keys(
                    pool, table, columns, limit, page_stride, slot_stride, dim_stride,
                    HEAD_SIZE, PAGE_SIZE, WIDTH,
                )  # fmt: skip
            vectors = load_vectors(
                tile_queries + head * query_head_stride,
                offsets,
                has_vector,
                query_dim_stride,
                HEAD_SIZE,
                WIDTH,
            )
            place = (pair * num_rows + row) * GROUP + member
            shift = tl.load(log_sum_exp + place, mask=has_vector, other=float("inf"))
            logits = products(keys, vectors) * scale
            probabilities = tl.exp(logits - shift[None, :])
            of_group = tl.sum(tl.reshape(probabilities, [KEYS, PADDED_GROUP, ROWS]), 1)
            mean += tl.where(visible, of_group, 0.0)
            if COUNTS_BELOW:
                least = LOG_THRESHOLD + tl.load(
                    row_maxima + place, mask=has_vector, other=float("-inf")
                )
                is_below = (logits < least[None, :]).to(tl.int32)
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
        if HAS_MAXIMA:
            maximum = tl.maximum(maximum, tl.max(mean, 1))
        if STORES_AVERAGES:
            place = (group * num_rows + row_of_tile).to(tl.int64) * averages_stride
            place = place[None, :] + columns[:, None]
            tl.store(averages + place, mean, mask=has_row[None, :])
        if HAS_ENTROPIES:
            place = (block * tl.num_programs(2) + group) * num_rows + row_of_tile
            tl.store(entropies + place, entropy * (1.0 / (HEADS * GROUP)), mask=has_row)
    exist = columns < num_keys
    if HAS_SUBSET:
        chosen = tl.load(subset + group * subset_stride + columns, mask=exist, other=0) != 0
        # Columns outside the subset hold meaningless sums: the softmax did not include them.
        sum_0 = tl.where(chosen, sum_0, 0.0)
        sum_1 = tl.where(chosen, sum_1, 0.0)
    NUM_SUMS: tl.constexpr = 1 if NUM_WEIGHTS == 0 else NUM_WEIGHTS
    place = (split * tl.num_programs(2) + group).to(tl.int64)
    target = sums + place * NUM_SUMS * num_keys + columns
    tl.store(target, sum_0, mask=exist)
    if NUM_WEIGHTS == 2:
        tl.store(target + num_keys, sum_1, mask=exist)
    if HAS_MAXIMA:
        tl.store(maxima + place * num_keys + columns, maximum, mask=exist)
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
class Columns:
    """Results of one pass over the columns; those that were not requested are empty."""

    sums: Tensor
    """float32 `[S, K, P]`."""
    maxima: Tensor
    """float32 `[S, P]`."""
    counts: Tensor
    """int32 `[S, *]`, entries below the threshold, one number per program."""
    entropies: Tensor
    """float32 `[*, S, O]`, one per block of keys."""


def columns_pass(
    rows: PagedRows,
    softmax: Softmax,
    groups: int,
    tiles: Tiles,
    scratch: Scratch,
    weights: Tensor | None = None,
    subset: Tensor | None = None,
    averages: Tensor | None = None,
    has_maxima: bool = False,
    counts_below: bool = False,
    has_entropies: bool = False,
) -> Columns:
    """Compute column sums, plain or weighted, and what else is asked for.

    Args:
        softmax: of the rows, over the same keys.
        groups: S.
        weights: float32 `[S or 1, 1 or 2, O]`.
        subset: bool `[S or 1, P]`, of the softmax.
        averages: float32 `[S, O, >= P]`, written.
    """
    num_keys, device = rows.num_keys, rows.queries.device
    num_sums = 1 if weights is None else weights.shape[1]
    rows_of_tile = tiles.rows_of_columns(counts_below or has_entropies)
    num_tiles = triton.cdiv(rows.number, rows_of_tile)
    num_blocks = triton.cdiv(num_keys, tiles.columns_keys)
    wanted = triton.cdiv(_PROGRAMS, num_blocks * groups)
    tiles_per_split = triton.cdiv(num_tiles, max(1, min(wanted, num_tiles)))
    num_splits = triton.cdiv(num_tiles, tiles_per_split) if num_tiles else 1

    def output(name: str, *shape: int) -> Tensor:
        """Return a result `shape`, or partial ones of the splits, which are not kept."""
        if num_splits == 1:
            return rows.empty(*shape)
        return scratch.take(name, (num_splits, *shape), device)

    sums = output("split sums", groups, num_sums, num_keys)
    maxima = output("split column maxima", groups if has_maxima else 0, num_keys)
    counts = rows.empty(groups, num_splits * num_blocks if counts_below else 0, dtype=torch.int32)
    shape = (num_blocks if has_entropies else 0, groups, rows.number)
    entropies = scratch.take("entropies", shape, device)
    _columns_kernel[(num_splits, num_blocks, groups)](
        rows.queries,
        rows.pool,
        rows.tables,
        rows.num_visible,
        rows.scales,
        softmax.maxima if counts_below else None,
        softmax.log_sum_exp,
        weights,
        bytes_of(subset),
        sums,
        maxima if has_maxima else None,
        averages,
        counts,
        entropies,
        rows.number,
        num_keys,
        tiles_per_split,
        *rows.strides,
        COLUMNS_MULTIPLE if averages is None else averages.stride(1),
        *((0, 0, 0) if weights is None else _strides(weights)),
        0 if subset is None else stride_of_sets(subset),
        HEADS=rows.num_pairs // groups,
        NUM_HEADS=rows.num_heads,
        GROUP=rows.group_size,
        HEAD_SIZE=rows.head_size,
        PAGE_SIZE=rows.pool.shape[1],
        HAS_SUBSET=subset is not None,
        NUM_WEIGHTS=0 if weights is None else num_sums,
        HAS_MAXIMA=has_maxima,
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
    if num_splits > 1:
        sums, maxima = sums.sum(dim=0), maxima.amax(dim=0)
    return Columns(sums, maxima, counts, entropies)


def weigh(rows: PagedRows, averages: Tensor, weights: Tensor) -> Tensor:
    """Return K weighted sums float32 `[S, K, P]` of stored averages `[S, O, >= P]`.

    Weights are float32 `[S or 1, K, O]`.
    """
    groups, number = averages.shape[0], weights.shape[1]
    sums = rows.empty(groups, number, rows.num_keys)
    _weigh_kernel[(triton.cdiv(rows.num_keys, _WEIGHED_COLUMNS), number, groups)](
        averages,
        weights,
        sums,
        rows.number,
        rows.num_keys,
        averages.stride(1),
        *_strides(weights),
        ROWS=_WEIGHED_ROWS,
        COLUMNS=_WEIGHED_COLUMNS,
        num_warps=4,
    )
    return sums


def _strides(weights: Tensor) -> tuple[int, int, int]:
    return stride_of_sets(weights), weights.stride(1), weights.stride(2)


def variants() -> Iterator[Variant]:
    """Yield the kernels of Qwen3-VL-8B, and other head sizes, groups and statistics."""
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    for dtype, head_size, group, heads, per_head, parts in (
        (bf16, 128, 4, 8, True, ("averages", "weights", "", "maxima", "counts")),
        (bf16, 128, 4, 8, False, ("averages", "weights", "", "maxima", "counts", "subset")),
        (bf16, 128, 4, 8, False, ("averages entropies",)),
        (fp16, 64, 7, 4, True, ("averages", "weights")),
        (fp16, 64, 7, 4, False, ("averages", "weights")),
        (bf16, 128, 1, 16, False, ("averages",)),
        (bf16, 128, 16, 2, False, ("averages",)),
        (bf16, 256, 2, 4, True, ("averages",)),
        (bf16, 256, 2, 4, False, ("averages",)),
        (bf16, 256, 8, 4, False, ("weights",)),
        (bf16, 512, 8, 2, False, ("averages",)),
        (fp8, 128, 4, 8, True, ("averages", "weights", "maxima", "counts")),
        (fp8, 128, 4, 8, False, ("averages entropies", "subset")),
        (fp8, 256, 2, 4, True, ("averages",)),
    ):
        served = served_by_vllm(dtype, head_size)
        rows = example(dtype, head_size, group, heads)
        sets = rows.num_pairs if per_head else rows.num_pairs // heads
        softmax = Softmax(*[rows.empty(rows.num_pairs, rows.number, group)] * 2)
        weights = rows.empty(sets, 2, rows.number)
        averages = rows.empty(sets, rows.number, rows.num_keys)
        subset = rows.empty(sets, rows.num_keys, dtype=torch.bool)
        options: dict[str, dict[str, Any]] = {
            "averages": {"averages": averages},
            "weights": {"weights": weights},
            "subset": {"subset": subset, "weights": weights[:, :1]},
            "maxima": {"has_maxima": True},
            "counts": {"counts_below": True},
            "entropies": {"has_entropies": True},
        }
        given = rows, softmax, sets, Tiles.for_rows(rows), Scratch()
        for part in parts:
            chosen = {key: x for word in part.split() for key, x in options[word].items()}
            name = f"{TYPES[dtype]} D{head_size} G{group} H{rows.num_pairs // sets} {part}".strip()
            call = partial(columns_pass, *given, **chosen)
            found = launches(__name__, name, call, 0 if per_head else SPILL_LIMIT)
            yield from (replace(variant, capabilities=served) for variant in found)
    yield from launches(__name__, "fp32", partial(weigh, rows, averages, weights))
