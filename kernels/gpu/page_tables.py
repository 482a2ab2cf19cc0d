# SPDX-License-Identifier: Apache-2.0
"""Page tables and lengths of all layers' virtual sequences, one launch each.

The grids depend only on buffer sizes and nothing is allocated, so both launches can be captured in
a CUDA graph and replayed with other contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_PAIRS_PER_PROGRAM = 256
_COLUMNS_PER_TILE = 128


@triton.jit
def _region_of_row(block_table, seq_lens, num_token_blocks, replaced, row, table_stride):
    """Tokens, first block, k > 0 and t0 of a row; a row without tokens is not read."""
    seq_len = tl.load(seq_lens + row)
    has_tokens = seq_len > 0
    first_block = tl.load(block_table + row * table_stride, mask=has_tokens, other=0).to(tl.int64)
    has_region = tl.load(num_token_blocks + first_block, mask=has_tokens, other=0) > 0
    start = tl.load(replaced + first_block, mask=has_tokens, other=0)
    return seq_len, first_block, has_region, start


@triton.jit
def page_at(ids, index, exists, first, count, start, pair, NUM_PAIRS: tl.constexpr):
    """Page `index` of a sequence: of its `count` region pages from `first` on, then of its tail."""
    in_region = index < count
    region_page = first + index
    column = tl.where(in_region, region_page // NUM_PAIRS, index - count + start)
    in_block = tl.where(in_region, region_page % NUM_PAIRS, pair)
    return tl.load(ids + column, mask=exists, other=0) * NUM_PAIRS + in_block


@triton.jit(do_not_specialize=["layer_stride", "row_stride"])
def _lengths_kernel(
    block_table,
    seq_lens,
    num_token_blocks,
    replaced,
    offsets,
    lengths,
    table_stride,
    offsets_stride,
    layer_stride,
    row_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Lengths of TILE (layer, head) pairs of one row."""
    row = tl.program_id(0).to(tl.int64)
    seq_len, first_block, has_region, start = _region_of_row(
        block_table, seq_lens, num_token_blocks, replaced, row, table_stride
    )
    pair = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = pair < NUM_PAIRS
    # Offsets are undefined where no region starts, but always readable.
    offset = offsets + first_block * offsets_stride + pair
    first = tl.load(offset, mask=exists, other=0)
    end = tl.load(offset + 1, mask=exists, other=0)
    count = tl.where(has_region, end - first, 0)
    length = count * BLOCK_SIZE + (seq_len - start * BLOCK_SIZE)
    layer, head = (pair // NUM_HEADS).to(tl.int64), pair % NUM_HEADS
    tl.store(lengths + layer * layer_stride + row * row_stride + head, length, mask=exists)


@triton.jit(
    do_not_specialize=["first_layer", "num_rows", "width"],
    do_not_specialize_on_alignment=["block_table", "seq_lens"],
)
def _page_tables_kernel(
    block_table,
    seq_lens,
    num_token_blocks,
    replaced,
    offsets,
    tables,
    first_layer,
    num_rows,
    width,
    table_stride,
    offsets_stride,
    layer_stride,
    row_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The pages of one (layer, row, head), TILE at a time."""
    sequence = tl.program_id(0)
    head = sequence % NUM_HEADS
    row = (sequence // NUM_HEADS % num_rows).to(tl.int64)
    layer = sequence // NUM_HEADS // num_rows
    pair = (first_layer + layer) * NUM_HEADS + head
    seq_len, first_block, has_region, start = _region_of_row(
        block_table, seq_lens, num_token_blocks, replaced, row, table_stride
    )
    offset = offsets + first_block * offsets_stride + pair
    first, end = tl.load(offset), tl.load(offset + 1)
    count = tl.where(has_region, end - first, 0)
    needed = count + (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE - start
    needed = tl.minimum(needed, width)
    block_ids = block_table + row * table_stride
    table = tables + layer.to(tl.int64) * layer_stride + row * row_stride + head * head_stride
    for tile in range(0, needed, TILE):
        column = tile + tl.arange(0, TILE)
        exists = column < needed
        page = page_at(block_ids, column, exists, first, count, start, pair, NUM_PAIRS)
        tl.store(table + column, page, mask=exists)


def write_lengths(
    block_table: Tensor,
    seq_lens: Tensor,
    num_token_blocks: Tensor,
    replaced: Tensor,
    offsets: Tensor,
    block_size: int,
    lengths: Tensor,
) -> None:
    """Write the lengths of all layers in one launch; see `kernels.page_tables`.

    Exact. Rows of `block_table` and `offsets`, layers and rows of `lengths` may have any
    strides; the last dimensions, `seq_lens`, `num_token_blocks` and `replaced` must be contiguous.
    """
    _, num_rows, num_heads = lengths.shape
    num_pairs = offsets.shape[1] - 1
    if num_rows == 0:
        return
    _lengths_kernel[(num_rows, triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM))](
        block_table,
        seq_lens,
        num_token_blocks,
        replaced,
        offsets,
        lengths,
        block_table.stride(0),
        offsets.stride(0),
        lengths.stride(0),
        lengths.stride(1),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_PAIRS=num_pairs,
        TILE=_PAIRS_PER_PROGRAM,
        num_warps=4,
    )


def write_page_tables(
    block_table: Tensor,
    seq_lens: Tensor,
    num_token_blocks: Tensor,
    replaced: Tensor,
    offsets: Tensor,
    block_size: int,
    first_layer: int,
    tables: Tensor,
) -> None:
    """Write the tables of l layers in one launch; see `kernels.page_tables`.

    Exact. Entries after a sequence's last page are not written: attention does not read them. One
    program runs for each (layer, row, head), so wider tables cost nothing. All but the last
    dimension of the tensors may have any strides.
    """
    num_layers, num_rows, num_heads, width = tables.shape
    if tables.numel() == 0:
        return
    _page_tables_kernel[(num_layers * num_rows * num_heads,)](
        block_table,
        seq_lens,
        num_token_blocks,
        replaced,
        offsets,
        tables,
        first_layer,
        num_rows,
        width,
        block_table.stride(0),
        offsets.stride(0),
        *tables.stride()[:3],
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_PAIRS=offsets.shape[1] - 1,
        TILE=_COLUMNS_PER_TILE,
        num_warps=1,
    )


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    empty = partial(torch.empty, dtype=torch.int32, device="meta")
    for block_size, heads, layers in ((16, 8, 32), (48, 1, 28)):
        of_blocks = empty(1000), empty(1000), empty(1000, layers * heads + 1)
        state = empty(9, 1001), empty(9), *of_blocks, block_size
        lengths, tables = empty(layers, 9, heads), empty(layers, 9, heads, 1001)
        for call in (
            partial(write_lengths, *state, lengths),
            partial(write_page_tables, *state, 0, tables),
        ):
            yield from launches(__name__, f"N{block_size} H{heads} L{layers}", call)
