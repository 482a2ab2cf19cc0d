# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a row are: the columns of a compressed one, and the slots of kept tokens.

A head's keys are *columns*, in the order of its pages: first its region, whose positions have gaps,
then the tail. In a row that was never cut, column and position are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import INTEGERS, check


def whole_tables(blocks: Tensor, num_pairs: int) -> Tensor:
    """Return the pages of a row that was never cut, int32 `[M, W]`, for its blocks, int32 `[W]`."""
    pairs = torch.arange(num_pairs, dtype=torch.int32, device=blocks.device)
    return torch.add(pairs[:, None], blocks, alpha=num_pairs)


def column_positions(
    tables: Tensor,
    lengths: Tensor,
    region_positions: Tensor,
    first_tail: Tensor,
    num_tokens: int,
    num_columns: int,
) -> Tensor:
    """Return the position of each column, int32 `[M, C]`; n after a pair's last key.

    With n tokens and C columns:

    Args:
        tables: pages of some pairs of a layer and a head, int32 `[M, W]` with N * W >= C.
        lengths: keys of these, int32 `[M]`, at most C.
        region_positions: of the tokens in all pages of the pool, int32 `[num_pool_pages, N]`.
        first_tail: position of the tail's first token, the same in every head, int32 `[1]`. Its
            last one is n - 1.
        num_tokens: n.
        num_columns: C.
    """
    _check(tables, lengths, region_positions, first_tail)
    if gpu.runs(tables):
        from vllm_tgvkv.kernels.gpu import ragged as triton_ragged

        positions = tables.new_empty(len(tables), num_columns)
        row = tables, lengths, region_positions, first_tail
        triton_ragged.locate(*row, num_tokens, num_columns, positions, by_column=True)
        return positions
    own = torch.arange(num_columns, dtype=torch.int32)
    in_region = region_positions[tables].view(len(tables), -1)[:, :num_columns]
    in_tail = own - lengths[:, None] + num_tokens
    positions = torch.where(in_tail >= first_tail, in_tail, in_region)
    return positions.masked_fill_(own >= lengths[:, None], num_tokens)


def position_columns(
    tables: Tensor,
    lengths: Tensor,
    region_positions: Tensor,
    first_tail: Tensor,
    num_tokens: int,
    num_columns: int,
) -> Tensor:
    """Return the column of each position, int32 `[M, n]`; n where a position has no key.

    Arguments as in `column_positions`.
    """
    row = tables, lengths, region_positions, first_tail
    if gpu.runs(tables):
        from vllm_tgvkv.kernels.gpu import ragged as triton_ragged

        _check(*row)
        columns = tables.new_full((len(tables), num_tokens), num_tokens)
        triton_ragged.locate(*row, num_tokens, num_columns, columns, by_column=False)
        return columns
    positions = column_positions(*row, num_tokens, num_columns)
    # Columns without a key are written behind the last position.
    columns = tables.new_full((len(tables), num_tokens + 1), num_tokens)
    own = torch.arange(num_columns, dtype=torch.int32)
    columns.scatter_(1, positions.long(), own.expand_as(positions))
    return columns[:, :num_tokens]


def _check(tables: Tensor, lengths: Tensor, region_positions: Tensor, first_tail: Tensor) -> None:
    check("tables", tables, ("M", "W"), (torch.int32,))
    check("lengths", lengths, (len(tables),), (torch.int32,))
    check("region_positions", region_positions, ("num_pool_pages", "N"), (torch.int32,))
    check("first_tail", first_tail, (1,), (torch.int32,))


def kept_slots(
    positions: Tensor, offsets: Tensor, tables: Tensor, columns: Tensor | None, num_slots: int
) -> Tensor:
    """Return where the tokens of a new region lie: the sources of `copy_kept`.

    The token at position j of pair p is in page `tables[p, c // N]`, slot `c % N`, if c is its
    column.

    Args:
        positions: int32 `[R, N]`, from `select_tokens`.
        offsets: int32 `[M + 1]`; pair p has rows `offsets[p] .. offsets[p + 1] - 1` of `positions`.
            Later rows have no pair, and get slots without meaning, which exist.
        tables: pages of every (layer, head), int32 `[M, W]`.
        columns: of the positions, int32 `[M, n]`; None in a row that was never cut.
        num_slots: slots of the pool in all its pages.

    Returns:
        page * N + slot, `[R, N]`: int32, or int64 if the pool is too large for that.
    """
    check("positions", positions, ("R", "N"), INTEGERS)
    check("tables", tables, ("M", "W"), (torch.int32,))
    num_pairs, block_size = len(tables), positions.shape[1]
    check("offsets", offsets, (num_pairs + 1,), INTEGERS)
    dtype = torch.int32 if num_slots <= torch.iinfo(torch.int32).max else torch.int64
    if gpu.runs(positions):
        from vllm_tgvkv.kernels.gpu import ragged as triton_ragged

        found = torch.empty_like(positions, dtype=dtype)
        triton_ragged.kept_slots(positions, offsets, tables, columns, found)
        return found
    rows = torch.arange(len(positions))
    pair = torch.searchsorted(offsets, rows, right=True).sub_(1).clamp_(max=num_pairs - 1)
    pair = pair[:, None]
    # Rows of no pair may have tokens that the last pair lacks.
    most = tables.shape[1] * block_size - 1
    own = positions if columns is None else columns[pair, positions]
    own = own.clamp(max=most)
    pages = tables[pair, own // block_size].to(dtype)
    return pages.mul_(block_size).add_(own % block_size)
