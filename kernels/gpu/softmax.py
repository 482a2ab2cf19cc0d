# SPDX-License-Identifier: Apache-2.0
"""Maximum and log-sum-exp of every row of every query head, over all keys or a subset.

A learned sink is in the log-sum-exp over all keys, and in no maximum and no subset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

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
from vllm_tgvkv.kernels.statistics import Scratch

# Enough for every multiprocessor of any GPU to have several. A constant, since the order of the
# sums, and with it the last bit, depends on it.
_PROGRAMS = 512
_MOST_SPLITS = 64
_COMBINED_VALUES = 32


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "keys_per_split",
        "heads_of_set",
        "table_stride",
        "visible_stride",
        "scales_stride",
        "subset_stride",
    ],
    do_not_specialize_on_alignment=["tables", "num_visible", "scales", "subset"],
)
def _softmax_kernel(
    queries,
    pool,
    tables,
    num_visible,
    scales,
    subset,
    split_maxima,
    split_totals,
    num_rows,
    keys_per_split,
    heads_of_set,
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
    subset_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_SUBSET: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Maximum and sum of exponentials of ROWS query vectors of one pair over one split of the keys.

    Vector i is row i // GROUP of query head i % GROUP: all query heads of a KV head share its keys.
    A row that sees none of them gets -inf and 0.
    """
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, head = pair // NUM_HEADS, pair % NUM_HEADS
    scale = tl.load(scales + layer * scales_stride)
    vector = tile * ROWS + tl.arange(0, ROWS)
    row, member = vector // GROUP, vector % GROUP
    exists = row < num_rows
    seen = tl.load(num_visible + pair * visible_stride + row, mask=exists, other=0)
    offsets = row.to(tl.int64) * query_row_stride + member * query_member_stride
    of_pair = tl.cast(layer, tl.int64) * query_layer_stride + head * query_head_stride
    vectors = load_vectors(queries + of_pair, offsets, exists, query_dim_stride, HEAD_SIZE, WIDTH)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # No row sees keys after those that the last one sees.
    limit = tl.max(seen, 0)
    first = split * keys_per_split
    end = tl.minimum(first + keys_per_split, limit)
    for start in range(first, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        table = tables + pair * table_stride
        keys = load_keys(
            pool, table, columns, limit, page_stride, slot_stride, dim_stride,
            HEAD_SIZE, PAGE_SIZE, WIDTH,
        )  # fmt: skip
        logits = products(vectors, keys) * scale
        visible = columns[None, :] < seen[:, None]
        if HAS_SUBSET:
            of_set = subset + pair // heads_of_set * subset_stride
            chosen = tl.load(of_set + columns, mask=columns < limit, other=0)
            visible = visible & (chosen != 0)[None, :]
        logits = tl.where(visible, logits, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # -inf - -inf is NaN; rows that saw no key so far have nothing to rescale.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        maximum = larger
    place = (split * tl.num_programs(2) + pair) * num_rows * GROUP + vector
    tl.store(split_maxima + place, maximum, mask=exists)
    tl.store(split_totals + place, total, mask=exists)


@triton.jit(do_not_specialize=["num_splits", "num_values", "num_rows"])
def _combine_kernel(
    split_maxima,
    split_totals,
    sinks,
    maxima,
    log_sum_exp,
    num_splits,
    num_values,
    num_rows,
    GROUP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Maximum and log-sum-exp over all keys of VALUES query vectors, from the splits' values.

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
    largest = maximum
    if HAS_SINKS:
        # Values are ordered by pair, row, query head of the group.
        place = value // (num_rows * GROUP) * GROUP + value % GROUP
        sink = tl.load(sinks + place, mask=value < num_values, other=float("-inf"))
        largest = tl.maximum(maximum, sink)
    shift = tl.where(sees, largest, 0.0)
    total = tl.sum(totals * tl.exp(parts - shift[None, :]), 0)
    if HAS_SINKS:
        total += tl.exp(sink - shift)
    result = tl.where(sees, shift + tl.log(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(maxima + value, maximum, mask=value < num_values)
    tl.store(log_sum_exp + value, result, mask=value < num_values)


@dataclass(frozen=True)
class Softmax:
    """Softmax of every query head and row, float32 `[Q, O, G]`."""

    maxima: Tensor
    log_sum_exp: Tensor


def softmax_pass(
    rows: PagedRows,
    tiles: Tiles,
    scratch: Scratch,
    subset: Tensor | None = None,
) -> Softmax:
    """Compute maxima and log-sum-exps of the rows, over all keys or a subset.

    The result is in buffers of `scratch`, other ones for a subset.

    Args:
        subset: bool `[S or 1, P]`.
    """
    pairs, device = rows.num_pairs, rows.queries.device
    shape = (pairs, rows.number, rows.group_size)
    name = "" if subset is None else "subset "
    maxima = scratch.take(f"{name}maxima", shape, device)
    log_sum_exp = scratch.take(f"{name}lse", shape, device)
    num_values = maxima.numel()
    if num_values == 0:
        return Softmax(maxima, log_sum_exp)
    num_tiles = triton.cdiv(rows.number * rows.group_size, tiles.softmax_rows)
    key_tiles = triton.cdiv(rows.num_keys, tiles.softmax_keys)
    wanted = triton.cdiv(_PROGRAMS, num_tiles * pairs)
    tiles_per_split = triton.cdiv(key_tiles, min(wanted, _MOST_SPLITS, key_tiles))
    num_splits = triton.cdiv(key_tiles, tiles_per_split)
    of_splits = (
        scratch.take("split maxima", (num_splits, *shape), device),
        scratch.take("split totals", (num_splits, *shape), device),
    )
    _softmax_kernel[(num_tiles, num_splits, pairs)](
        rows.queries,
        rows.pool,
        rows.tables,
        rows.num_visible,
        rows.scales,
        bytes_of(subset),
        *of_splits,
        rows.number,
        tiles_per_split * tiles.softmax_keys,
        1 if subset is None else pairs // subset.shape[0],
        *rows.strides,
        0 if subset is None else stride_of_sets(subset),
        NUM_HEADS=rows.num_heads,
        GROUP=rows.group_size,
        HEAD_SIZE=rows.head_size,
        PAGE_SIZE=rows.pool.shape[1],
        HAS_SUBSET=subset is not None,
        ROWS=tiles.softmax_rows,
        KEYS=tiles.softmax_keys,
        WIDTH=tiles.width,
        num_warps=4,
        num_stages=tiles.softmax_stages,
    )
    # The softmax over a subset is the same with a sink as without.
    sinks = rows.sinks if subset is None else None
    _combine_kernel[(triton.cdiv(num_values, _COMBINED_VALUES),)](
        *of_splits,
        sinks,
        maxima,
        log_sum_exp,
        num_splits,
        num_values,
        rows.number,
        GROUP=rows.group_size,
        HAS_SINKS=sinks is not None,
        SPLITS=_MOST_SPLITS,
        VALUES=_COMBINED_VALUES,
        num_warps=4,
    )
    return Softmax(maxima, log_sum_exp)


def variants() -> Iterator[Variant]:
    """Yield the kernels of Qwen3-VL-8B, and of other head sizes and groups."""
    for dtype, head_size, group, heads, has_subset in (
        (torch.bfloat16, 128, 4, 8, False),
        (torch.bfloat16, 128, 4, 8, True),
        (torch.float16, 64, 7, 4, False),
        (torch.float16, 64, 7, 4, True),
        (torch.bfloat16, 256, 2, 4, False),
        (torch.bfloat16, 512, 8, 2, False),
        (torch.float8_e4m3fn, 128, 4, 8, True),
        (torch.float8_e4m3fn, 256, 2, 4, False),
    ):
        served = served_by_vllm(dtype, head_size)
        rows = example(dtype, head_size, group, heads)
        subset = rows.empty(1, rows.num_keys, dtype=torch.bool) if has_subset else None
        name = f"{TYPES[dtype]} D{head_size} G{group}{' subset' * has_subset}"
        call = partial(softmax_pass, rows, Tiles.for_rows(rows), Scratch(), subset)
        found = launches(__name__, name, call, SPILL_LIMIT)
        yield from (replace(variant, capabilities=served) for variant in found)
    # gpt-oss: 64 query heads of 64 values, 8 KV heads.
    rows = example(torch.bfloat16, 64, 8, 8)
    rows = replace(rows, sinks=rows.empty(36, 8, 8))
    call = partial(softmax_pass, rows, Tiles.for_rows(rows), Scratch())
    yield from launches(__name__, "bf16 D64 G8 sinks", call, SPILL_LIMIT)
