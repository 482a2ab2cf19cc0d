# SPDX-License-Identifier: Apache-2.0
"""Exchange of a region's tokens: the ones that come take the slots of the ones that go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import INTEGERS, check
from vllm_tgvkv.kernels.copy import as_integers


class Moves(NamedTuple):
    """Tokens that come into slots, one by one."""

    sources: Tensor
    """Slots of the tier, (block * M + pair) * N + slot, int64 [n]."""
    targets: Tensor
    """Slots of the pool, page * N + slot, int64 [n]."""
    positions: Tensor
    """int32 [n]."""


@dataclass(frozen=True)
class Exchange:
    """The tokens in the slots of a region, before an exchange and after it."""

    before: Tensor
    """Positions of tokens, int32 [R, N], pages in (layer, head) order."""
    after: Tensor
    """Likewise; all are positions in `tier_blocks`."""
    offsets: Tensor
    """int32 [M + 1], see `page_offsets`; the last one is R."""
    blocks: Tensor
    """Blocks of the pool that hold the region, int64 [R / M]."""
    tier_blocks: Tensor
    """Blocks of the tier that hold the whole prompt, int64 [t]."""

    @property
    def num_moved(self) -> Tensor:
        """Tokens that come, int64 scalar."""
        return (self.before != self.after).sum()

    def moves(self) -> Moves:
        """Return the tokens that come. How many is known from the data only: this is for CPUs."""
        size, num_pairs = self.after.shape[1], len(self.offsets) - 1
        moved = (self.after != self.before).flatten().nonzero().squeeze(1)
        row, positions = moved // size, self.after.flatten()[moved]
        pairs = torch.searchsorted(self.offsets, row, right=True) - 1
        blocks = self.tier_blocks[positions // size]
        pages = self.blocks[row // num_pairs] * num_pairs + row % num_pairs
        return Moves(
            (blocks * num_pairs + pairs) * size + positions % size,
            pages * size + moved % size,
            positions,
        )


def exchange(current: Tensor, wanted: Tensor, offsets: Tensor, num_candidates: int) -> Tensor:
    """Return the tokens of a region's slots after an exchange.

    Every pair has as many tokens before and after it. A token that stays keeps its slot; in each
    pair, the first one that comes takes the first slot that is left, and so on. No shape depends
    on data, so that nothing waits for a GPU.

    Args:
        current: positions of the tokens in the slots of the region's pages, int32 `[R, N]`, in any
            order within a pair.
        wanted: the tokens that the pairs shall have, int32 `[R, N]`, on the same pages.
        offsets: int32 or int64 `[M + 1]`, see `page_offsets`; the last one is R.
        num_candidates: C; all positions are below it.

    Returns:
        int32 `[R, N]`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    check("current", current, ("R", "N"), (torch.int32,))
    check("wanted", wanted, tuple(current.shape), (torch.int32,))
    check("offsets", offsets, ("M + 1",), INTEGERS)
    num_pairs = len(offsets) - 1
    page = torch.arange(len(current), device=current.device)
    pair = torch.searchsorted(offsets, page, right=True).sub_(1).clamp_(max=num_pairs - 1)
    first = pair.mul_(num_candidates)[:, None]
    held, asked = current.long().add_(first).flatten(), wanted.long().add_(first).flatten()
    is_held, is_asked = (
        torch.zeros(num_pairs * num_candidates, dtype=torch.bool, device=page.device).index_fill_(
            0, tokens, True
        )
        for tokens in (held, asked)
    )
    comes, goes = is_asked & ~is_held, ~is_asked[held]
    # Pairs are in the same order among tokens and slots, and each has as many of both.
    number = torch.where(comes, comes.cumsum(0), 0)
    position = torch.arange(num_candidates, dtype=torch.int32, device=page.device)
    coming = current.new_zeros(current.numel() + 1)
    coming.scatter_(0, number, position.repeat(num_pairs))
    return torch.where(goes, coming[goes.cumsum(0)], current.flatten()).view_as(current)


def fetch_tokens(
    tier: Tensor, key_pages: Tensor, value_pages: Tensor, stored: Tensor, exchange: Exchange
) -> None:
    """Copy the tokens that come from the tier to their slots of the pool.

    Bits are copied unchanged, for any dtype. Nothing else changes. On CUDA it is one launch if each
    value follows its key, as in pages `[N, 2D]`, with no scratch memory and no synchronisation.

    Args:
        tier: integers of the pool's element size, `[num_tier_blocks, M * N, 2 * D]`, contiguous: of
            each slot the key, then the value. On CUDA it may be a view of pinned host memory.
        key_pages: `[num_pages, N, D]`, logical view of the whole pool; any strides.
        value_pages: likewise.
        stored: positions of the tokens in the pool's slots, int32 `[num_pages, N]`, contiguous;
            they follow.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    check("key_pages", key_pages, ("num_pages", "N", "D"))
    num_pages, size, width = key_pages.shape
    check("value_pages", value_pages, tuple(key_pages.shape))
    num_pairs = len(exchange.offsets) - 1
    has_size = tier.element_size() == key_pages.element_size() and tier.is_contiguous()
    check("tier", tier, ("blocks", num_pairs * size, 2 * width), fits=has_size)
    check("stored", stored, (num_pages, size), (torch.int32,), stored.is_contiguous())
    if gpu.runs(key_pages):
        from vllm_tgvkv.kernels.gpu import exchange as triton_exchange

        triton_exchange.fetch_tokens(tier, key_pages, value_pages, stored, exchange)
        return
    moves = exchange.moves()
    tokens = tier.view(-1, 2 * width).index_select(0, moves.sources)
    put_tokens(tokens, key_pages, value_pages, stored, moves)


def put_tokens(
    tokens: Tensor, key_pages: Tensor, value_pages: Tensor, stored: Tensor, moves: Moves
) -> None:
    """Write tokens `[n, 2 * D]`, integers, to the slots that they come to; see `fetch_tokens`."""
    size, width = key_pages.shape[1:]
    place = moves.targets // size, moves.targets % size
    as_integers(key_pages)[place] = tokens[:, :width]
    as_integers(value_pages)[place] = tokens[:, width:]
    stored[place] = moves.positions
