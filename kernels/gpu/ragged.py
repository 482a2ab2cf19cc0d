# SPDX-License-Identifier: Apache-2.0
"""Columns of a compressed row and slots of kept tokens, in a launch each and without scratch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_COLUMNS_PER_PROGRAM = 512


@triton.jit(do_not_specialize=["num_tokens", "num_columns", "width"])
def _columns_kernel(
    tables,
    lengths,
    region_positions,
    first_tail,
    found,
    num_tokens,
    num_columns,
    width,
    BY_COLUMN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Positions of TILE columns of one pair, by column; or the columns, by position."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    length = tl.load(lengths + pair)
    exists = column < length
    in_tail = column - length + num_tokens
    in_region = exists & (in_tail < tl.load(first_tail))
    page = tl.load(tables + pair * width + column // BLOCK_SIZE, mask=in_region, other=0)
    slot = page.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
    of_region = tl.load(region_positions + slot, mask=in_region, other=0)
    position = tl.where(in_region, of_region, tl.where(exists, in_tail, num_tokens))
    if BY_COLUMN:
        tl.store(found + pair * num_columns + column, position, mask=column < num_columns)
    else:
        tl.store(found + pair * num_tokens + position, column, mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _slots_kernel(
    positions,
    offsets,
    tables,
    columns,
    slots,
    num_tokens,
    width,
    NUM_PAIRS: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Slots of the tokens of one page of the region; 0 if no pair owns the page."""
    row = tl.program_id(0)
    # The last pair whose pages start at this one or before; pairs without pages come before it.
    low = row * 0
    high = low + NUM_PAIRS
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_after = tl.load(offsets + middle) > row
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    pair = low.to(tl.int64)
    own = tl.arange(0, SLOTS)
    exists = own < BLOCK_SIZE
    place = row.to(tl.int64) * BLOCK_SIZE + own
    is_owned = exists & (place < tl.load(offsets + NUM_PAIRS).to(tl.int64) * BLOCK_SIZE)
    column = tl.load(positions + place, mask=is_owned, other=0).to(tl.int64)
    if HAS_COLUMNS:
        column = tl.load(columns + pair * num_tokens + column, mask=is_owned, other=0)
    page = tl.load(tables + pair * width + column // BLOCK_SIZE, mask=is_owned, other=0)
    slot = page.to(slots.dtype.element_ty) * BLOCK_SIZE + column % BLOCK_SIZE
    tl.store(slots + place, tl.where(is_owned, slot, 0), mask=exists)


def locate(
    tables: Tensor,
    lengths: Tensor,
    region_positions: Tensor,
    first_tail: Tensor,
    num_tokens: int,
    num_columns: int,
    found: Tensor,
    by_column: bool,
) -> None:
    """Write positions by column, `[M, C]`, or columns by position, `[M, n]`.

    See `kernels.ragged.column_positions` and `position_columns`. Positions without a key keep what
    `found` has, which has to be n.
    """
    _columns_kernel[(len(tables), triton.cdiv(num_columns, _COLUMNS_PER_PROGRAM))](
        tables.contiguous(),
        lengths.contiguous(),
        region_positions,
        first_tail,
        found,
        num_tokens,
        num_columns,
        tables.shape[1],
        BY_COLUMN=by_column,
        BLOCK_SIZE=region_positions.shape[1],
        TILE=_COLUMNS_PER_PROGRAM,
        num_warps=4,
    )


def kept_slots(
    positions: Tensor, offsets: Tensor, tables: Tensor, columns: Tensor | None, slots: Tensor
) -> None:
    """Write `slots`; see `kernels.ragged.kept_slots`."""
    num_pages, block_size = positions.shape
    num_pairs = len(tables)
    if num_pages == 0:
        return
    _slots_kernel[(num_pages,)](
        positions.contiguous(),
        offsets.contiguous(),
        tables.contiguous(),
        tables if columns is None else columns,
        slots,
        0 if columns is None else columns.shape[1],
        tables.shape[1],
        NUM_PAIRS=num_pairs,
        STEPS=num_pairs.bit_length(),
        HAS_COLUMNS=columns is not None,
        BLOCK_SIZE=block_size,
        SLOTS=triton.next_power_of_2(block_size),
        num_warps=1,
    )


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    for num_pairs, block_size in ((288, 16), (28, 128), (7, 48)):
        tables = torch.empty(num_pairs, 4, dtype=torch.int32)
        positions, columns = (tables.new_empty(num_pairs, 4 * block_size) for _ in range(2))
        pool = tables.new_empty(num_pairs, block_size)
        row = tables, tables[:, 0], pool, tables[0, :1]
        for found, by_column in ((positions, True), (columns, False)):
            call = partial(locate, *row, 4 * block_size, 4 * block_size, found, by_column)
            yield from launches(__name__, f"columns M{num_pairs} N{block_size}", call)
        region = positions.view(-1, block_size), tables.new_empty(num_pairs + 1), tables
        for known, dtype in ((None, torch.int32), (columns, torch.int32), (columns, torch.int64)):
            slots = torch.empty_like(region[0], dtype=dtype)
            name = f"{'ragged' if known is not None else 'whole'} M{num_pairs} N{block_size}"
            call = partial(kept_slots, *region, known, slots)
            yield from launches(__name__, f"{name} {8 * dtype.itemsize} bits", call)
