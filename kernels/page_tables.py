# SPDX-License-Identifier: Apache-2.0
"""Page tables of the decode step: one virtual sequence per (request, KV head), in every layer.

A compressed request owns k fresh blocks, whose k*L*H pages are dealt to the (layer, head) pairs in
prefix-sum order, and an ordinary tail from prompt block t0 on. Everything else is k = t0 = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_page_tables(
    block_table: Tensor,
    seq_lens: Tensor,
    region_blocks: Tensor,
    region_start: Tensor,
    offsets: Tensor,
    block_size: int,
    tables: Tensor,
) -> None:
    """Fills ``tables`` with the pool pages that each (layer, request, head) attends to, in order.

    First the n[l, h] = ``offsets[b, p + 1] - offsets[b, p]`` pages of the compressed region (p =
    l*H + h), then head h's page of layer l in each tail block t0, t0 + 1, ... up to the one that
    holds the current token. The entries behind are 0, which is a valid page.

    A table changes only when its request's row does, that is every N-th token: with unchanged rows
    :func:`write_lengths` alone is enough.

    Args:
        block_table: int32 ``[B, W]``; a compressed request's row is
            ``[k fresh ids | zeros | tail ids from column t0 on]``.
        seq_lens: int32 ``[B]``, tokens including the current one, evicted ones counted.
        region_blocks: int32 ``[B]``, k; 0 for an ordinary request.
        region_start: int32 ``[B]``, t0; 0 for an ordinary request.
        offsets: int32 ``[B, L*H + 1]``; anything where k is 0.
        block_size: N.
        tables: int32 ``[L, B, H, W_out]``, written. W_out must be at least the number of pages of
            the longest virtual sequence. The counts n are on the device, but since n <= min(t0,
            k*L*H), the largest ceil(seq_len / N) over the requests is always enough, and so is W.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check(block_table, seq_lens, region_blocks, region_start, offsets)
    _check_output("tables", tables, 4, offsets, seq_lens)
    layers, requests, heads, width = tables.shape
    pairs = layers * heads
    device = tables.device
    per_request = (1, requests, 1, 1)
    first, counts = _regions(region_blocks, offsets, layers, heads)  # [L, B, H]
    first, counts = first.unsqueeze(-1), counts.unsqueeze(-1)
    column = torch.arange(width, dtype=torch.int32, device=device)
    pair = torch.arange(pairs, dtype=torch.int32, device=device).view(layers, 1, heads, 1)

    region_page = first + column
    region_column = torch.div(region_page, pairs, rounding_mode="floor")
    in_block = region_page.sub_(region_column * pairs)
    in_region = column < counts
    start = region_start.view(per_request)
    table_column = torch.where(in_region, region_column, (start - counts) + column)
    # Columns behind the last page would point outside the row; what they fetch is zeroed below.
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
    seq_lens: Tensor,
    region_blocks: Tensor,
    region_start: Tensor,
    offsets: Tensor,
    block_size: int,
    lengths: Tensor,
) -> None:
    """Fills ``lengths`` with the tokens that each (layer, request, head) attends to.

    n*N tokens of the region and ``seq_len - t0*N`` of the tail.

    Args:
        lengths: int32 ``[L, B, H]``, written. The rest as in :func:`write_page_tables`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check(None, seq_lens, region_blocks, region_start, offsets)
    _check_output("lengths", lengths, 3, offsets, seq_lens)
    layers, requests, heads = lengths.shape
    _, counts = _regions(region_blocks, offsets, layers, heads)
    tail = (seq_lens - region_start * block_size).view(1, requests, 1)
    torch.add(tail, counts, alpha=block_size, out=lengths)


def _regions(
    region_blocks: Tensor, offsets: Tensor, layers: int, heads: int
) -> tuple[Tensor, Tensor]:
    """First region page and number of region pages, int32 ``[L, B, H]``; zeros where k is 0."""
    requests = offsets.shape[0]
    offsets = offsets.masked_fill(region_blocks.unsqueeze(-1) <= 0, 0)
    first = offsets[:, :-1].view(requests, layers, heads).transpose(0, 1)
    counts = offsets.diff(dim=-1).view(requests, layers, heads).transpose(0, 1)
    return first, counts


def _check(
    block_table: Tensor | None,
    seq_lens: Tensor,
    region_blocks: Tensor,
    region_start: Tensor,
    offsets: Tensor,
) -> None:
    requests = seq_lens.numel()
    named = {
        "block_table": (block_table, 2),
        "seq_lens": (seq_lens, 1),
        "region_blocks": (region_blocks, 1),
        "region_start": (region_start, 1),
        "offsets": (offsets, 2),
    }
    for name, (tensor, dims) in named.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.int32 or tensor.dim() != dims or tensor.shape[0] != requests:
            shape = f"[{requests}]" if dims == 1 else f"[{requests}, ...]"
            raise ValueError(
                f"{name} must be int32 {shape}, got {tensor.dtype} {list(tensor.shape)}"
            )


def _check_output(name: str, out: Tensor, dims: int, offsets: Tensor, seq_lens: Tensor) -> None:
    if (
        out.dtype != torch.int32
        or out.dim() != dims
        or out.shape[1] != seq_lens.numel()
        or out.shape[0] * out.shape[2] != offsets.shape[1] - 1
    ):
        shape = "[L, B, H, W_out]" if dims == 4 else "[L, B, H]"
        raise ValueError(
            f"{name} must be int32 {shape} with B = {seq_lens.numel()} and "
            f"L*H = {offsets.shape[1] - 1}, got {out.dtype} {list(out.shape)}"
        )
