# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens, the fourth part of a policy: RetentiveKV's states in a safe form.

Source: Liu, "RetentiveKV: State-Space Memory for Uncertainty-Aware Multimodal KV Cache Eviction",
Findings of ACL 2026, arXiv 2605.04075, which calls them visual-dominant and recall-oriented state.
They are made here of virtual tokens, means of keys and values, a choice: docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["vision", "text", "all"]
"""Tokens that one summary absorbs."""

_Of = Literal["both", "all", "vision", "text", "none"]
_Weight = Literal["tokens", "score"]

KINDS: tuple[_Of, ...] = get_args(_Of)
"""Names of summaries by the tokens that they absorb."""


@dataclass(frozen=True)
class Summaries:
    """Treatment of evicted tokens: some blocks of a region hold summaries of them.

    Raises:
        ValueError: for an unknown `of` or `weight`, or a number outside of its bounds.
    """

    of: _Of = "both"
    """`both`: a block of summaries of vision, and one of text. `all`: one block for both.
    `vision` or `text`: one block, and the other tokens are dropped. `none`: all are."""
    weight: _Weight = "tokens"
    """`tokens`: each token weighs 1, so that a row's mass is their number. `score`: its score,
    divided by the mean score of the tokens that the summary absorbs."""
    decay: float = 0.9
    """Factor of a vision token's weight for each step away from its root."""
    gate: float = 1.0
    """Factor of all masses, from 0, which hides the summaries, to 1."""

    def __post_init__(self) -> None:
        choices = (("of", self.of, KINDS), ("weight", self.weight, get_args(_Weight)))
        for name, given, known in choices:
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        for name, number, is_low in (("decay", self.decay, False), ("gate", self.gate, True)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not (is_number and (number >= 0 if is_low else number > 0) and number <= 1):
                least = "from 0" if is_low else "above 0"
                raise ValueError(f"{name} must be a number {least} and at most 1, got {number!r}")

    def kinds(self, num_blocks: int, num_replaced: int, has_vision: bool) -> tuple[Kind, ...]:
        """Return the kinds of the summaries that a cut leaves, one block each.

        With fewer blocks there are the first of these kinds. One of the blocks at least holds
        tokens, and where all tokens find room, all blocks do.

        Args:
            num_blocks: blocks that the cut leaves.
            num_replaced: full blocks of the row that they replace.
        """
        if self.of == "none" or num_blocks >= num_replaced:
            return ()
        kinds: tuple[Kind, ...] = ("vision", "text") if self.of == "both" else (self.of,)
        kinds = tuple(kind for kind in kinds if kind != "vision" or has_vision)
        return kinds[: num_blocks - 1]

    def weights(self, scores: Tensor, is_absorbed: Tensor) -> Tensor:
        """Return the weights before decay, float32 `[M, n]`, 0 where not absorbed.

        Args:
            scores: float32 `[M, n]`, not negative with `score`.
            is_absorbed: bool `[M, n]`.
        """
        weights = is_absorbed.float()
        if self.weight == "tokens":
            return weights * self.gate
        scores = scores * weights
        means = scores.sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True).clamp(min=1)
        tiny = torch.finfo(scores.dtype).tiny
        return torch.where(means > tiny, scores / means.clamp(min=tiny), weights) * self.gate
