# SPDX-License-Identifier: Apache-2.0
"""Page tables of the decode step: one virtual sequence per (request, KV head), in every layer.

A compressed request owns k fresh blocks, whose k*L*H pages are dealt to the (layer, head) pairs in
prefix-sum order, and an ordinary tail from prompt block t0 on. All other requests have k = t0 = 0.

Region state covers the whole pool. It is looked up on the device by the first block id of a
request's row in the block table. Block 0 is vLLM's null block, where no region starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import check


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
    """Fill `tables` with the pool pages that each (layer, request, head) attends to, in order.

    These are the n[l, h] = `offsets[b, p + 1] - offsets[b, p]` pages of the compressed region (b
    is the first block of the request's row, p = l*H + h), then head h's page of layer l in each
    tail block t0, t0 + 1, ... up to the one that holds the current token. Later entries are 0 on
    CPU, which is a valid page; on CUDA they are not written.

    A table changes only when its request's row does, every N-th token. While rows are unchanged,
    `write_lengths` is enough.

    Args:
        block_table: int32 `[B, W]`; a compressed request's row is
            `[k fresh ids | zeros | tail ids from column t0 on]`.
        seq_lens: int32 `[B]`, tokens including the current one and evicted ones. A row with 0
            tokens has no pages, and its block ids are not read.
        num_token_blocks: int32 `[num_blocks]`, blocks of tokens in the region that starts with a
            block, k without summaries; 0 elsewhere.
        replaced: int32 `[num_blocks]`, t0 of that region; 0 elsewhere.
        offsets: int32 `[num_blocks, L*H + 1]`; undefined where k is 0.
        block_size: N.
        first_layer: layer of `tables[0]`.
        tables: int32 `[l, B, H, W_out]`, written: the tables of l layers. W_out must be at least
            the number of pages of the longest virtual sequence. The counts n are on the device, but
            n <= min(t0, k*L*H), so the largest ceil(seq_len / N) of the requests is enough, and so
            is W.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check(block_table, seq_lens, num_token_blocks, replaced, offsets)
    check("tables", tables, ("l", len(seq_lens), "H", "W_out"), (torch.int32,))
    layers, requests, heads, width = tables.shape
    pairs = offsets.shape[1] - 1
    if not heads or pairs % heads:
        raise ValueError(f"tables must have H heads, a divisor of L*H = {pairs}, got {heads}")
    if not 0 <= first_layer <= pairs // heads - layers:
        raise ValueError(
            f"first_layer must be such that tables of {layers} layers end within "
            f"{pairs // heads}, got {first_layer}"
        )
    if gpu.runs(tables):
        from vllm_tgvkv.kernels.gpu import page_tables as triton_page_tables

        triton_page_tables.write_page_tables(
            block_table,
            seq_lens,
            num_token_blocks,
            replaced,
            offsets,
            block_size,
            first_layer,
            tables,
        )
        return
    device = tables.device
    first_pair, end_pair = first_layer * heads, (first_layer + layers) * heads
    per_request = (1, requests, 1, 1)
    first_blocks = _first_blocks(block_table, seq_lens)
    start = replaced.index_select(0, first_blocks).view(per_request)
    first, counts = _regions(
        first_blocks, num_token_blocks, offsets[:, first_pair : end_pair + 1], layers, heads
    )
    first, counts = first.unsqueeze(-1), counts.unsqueeze(-1)  # [l, B, H, 1]
    column = torch.arange(width, dtype=torch.int32, device=device)
    pair = torch.arange(first_pair, end_pair, dtype=torch.int32, device=device)
    pair = pair.view(layers, 1, heads, 1)

    region_page = first + column
    region_column = torch.div(region_page, pairs, rounding_mode="floor")
    in_block = region_page.sub_(region_column * pairs)
    in_region = column < counts
    table_column = torch.where(in_region, region_column, (start - counts) + column)
    # Columns after the last page would point outside the row; their entries are zeroed below.
    table_column.clamp_(0, block_table.shape[1] - 1)
    row = torch.arange(requests, dtype=torch.int32, device=device) * block_table.shape[1]
    table_column += row.view(per_request)
    block = block_table.reshape(-1).index_select(0, table_column.reshape(-1)).view_as(tables)

    torch.where(in_region, in_block, pair, out=tables)
    tables.add_(block, alpha=pairs)
    num_blocks = torch.div(seq_lens + (block_size - 1), block_size, rounding_mode="floor")
    needed = counts + (num_blocks.view(per_request) - start)
    tables.masked_fill_(column >= needed, 0)


def write_lengths(
    block_table: Tensor,
    seq_lens: Tensor,
    num_token_blocks: Tensor,
    replaced: Tensor,
    offsets: Tensor,
    block_size: int,
    lengths: Tensor,
) -> None:
    """Fill `lengths` with the number of tokens that each (layer, request, head) attends to.

    These are n*N tokens of the region and `seq_len - t0*N` of the tail; 0 in rows without tokens.

    Args:
        lengths: int32 `[L, B, H]`, written. Other arguments as in `write_page_tables`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check(block_table, seq_lens, num_token_blocks, replaced, offsets)
    check("lengths", lengths, ("L", len(seq_lens), "H"), (torch.int32,))
    layers, requests, heads = lengths.shape
    if layers * heads != offsets.shape[1] - 1:
        raise ValueError(
            f"lengths must be of all layers, L*H = {offsets.shape[1] - 1}, got "
            f"{list(lengths.shape)}"
        )
    if gpu.runs(lengths):
        from vllm_tgvkv.kernels.gpu import page_tables as triton_page_tables

        triton_page_tables.write_lengths(
            block_table, seq_lens, num_token_blocks, replaced, offsets, block_size, lengths
        )
        return
    first_blocks = _first_blocks(block_table, seq_lens)
    _, counts = _regions(first_blocks, num_token_blocks, offsets, layers, heads)
    start = replaced.index_select(0, first_blocks)
    tail = torch.sub(seq_lens, start, alpha=block_size).view(1, requests, 1)
    torch.add(tail, counts, alpha=block_size, out=lengths)


def _first_blocks(block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """Return the first block of every row, int32 `[B]`; rows without tokens: the null block."""
    return block_table[:, 0].masked_fill(seq_lens <= 0, 0)


def _regions(
    first_blocks: Tensor, num_token_blocks: Tensor, offsets: Tensor, layers: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Return first region page and number of region pages, int32 `[l, B, H]`; 0 where k is 0."""
    requests = len(first_blocks)
    has_no_region = num_token_blocks.index_select(0, first_blocks).unsqueeze(-1) <= 0
    offsets = offsets.index_select(0, first_blocks).masked_fill_(has_no_region, 0)
    first = offsets[:, :-1].view(requests, layers, heads).transpose(0, 1)
    counts = offsets.diff(dim=-1).view(requests, layers, heads).transpose(0, 1)
    return first, counts


def _check(
    block_table: Tensor,
    seq_lens: Tensor,
    num_token_blocks: Tensor,
    replaced: Tensor,
    offsets: Tensor,
) -> None:
    int32 = (torch.int32,)
    check("seq_lens", seq_lens, ("B",), int32)
    check("block_table", block_table, (len(seq_lens), "W"), int32)
    check("num_token_blocks", num_token_blocks, ("num_blocks",), int32)
    num_blocks = len(num_token_blocks)
    check("replaced", replaced, (num_blocks,), int32)
    check("offsets", offsets, (num_blocks, "L*H + 1"), int32)
