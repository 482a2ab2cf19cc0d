# SPDX-License-Identifier: Apache-2.0
"""PrefixKV: every layer keeps the same fraction of its total importance.

Source: Wang et al., "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models
Need for Efficient Generation", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels.select import key_slices
from vllm_tgvkv.policies.base import AllLayers, Allocation, VoteScore
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe

_STEPS = 30
"""Bisections of [0, 1]; a difference of 1e-9 separates any two tokens that matter."""


@SCORES.register("text_rows")
class TextRowsScore(VoteScore):
    """`s[j]` = sum of A[i, j] over the observation rows."""

    rows = "text"


@ALLOCATIONS.register("prefixkv")
class PrefixAllocation(Allocation):
    """Share: length of the shortest prefix of the sorted scores that holds a fraction of their sum.

    The fraction is the same everywhere. Bisection finds the one at which prefixes have the mean
    length b.
    """

    adds_scores = True
    bytes_per_score = 9  # float64, and whether it is below the fraction

    def shares(self, layers: AllLayers) -> Tensor:
        held = torch.empty_like(layers.scores, dtype=torch.float64)
        for part in key_slices(layers.scores):
            descending = layers.scores[part].double().sort(dim=-1, descending=True).values
            sums = descending.cumsum(dim=-1)
            held[part] = sums / sums[..., -1:].clamp(min=torch.finfo(sums.dtype).tiny)
        low, high = held.new_zeros(()), held.new_ones(())
        for _ in range(_STEPS):
            middle = (low + high) / 2
            too_short = _prefix_lengths(held, middle).mean() < layers.num_kept
            low, high = torch.where(too_short, middle, low), torch.where(too_short, high, middle)
        return _prefix_lengths(held, high)


def _prefix_lengths(held: Tensor, fraction: Tensor) -> Tensor:
    """Return the tokens that hold `fraction`, float64 `[L, S]`; `held` is `[L, S, C]`."""
    return (held < fraction).sum(dim=-1).add(1).clamp(max=held.shape[-1]).double()


POLICIES.add("prefixkv", Recipe("text_rows", "prefixkv", "by_score"))
