# SPDX-License-Identifier: Apache-2.0
"""Exchange of a region's tokens: the ones that come take the slots of the ones that go."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels.checks import INTEGERS, check


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
