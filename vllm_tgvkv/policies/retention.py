# SPDX-License-Identifier: Apache-2.0
"""Retention: tokens that are kept first. Sinks, the prompt's first tokens, precede all others."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Prompt, Retention
from vllm_tgvkv.policies.registry import RETENTIONS


@RETENTIONS.register("text_first")
class TextFirst(Retention):
    """Text before vision: TGV-KV's text-prioritised retention (TPR).

    A budget larger than the text holds all text and the best vision tokens; a smaller one holds the
    best text tokens and no vision.
    """

    preferred = "text"
    is_by_number = False

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, ~prompt.is_vision)


@RETENTIONS.register("vision_first")
class VisionFirst(Retention):
    """Vision before text: the ablation of TPR."""

    preferred = "vision"
    is_by_number = False

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, prompt.is_vision)


@RETENTIONS.register("by_score")
class ByScore(Retention):
    """No modality first: the score alone decides."""

    is_by_number = False

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, torch.zeros_like(prompt.is_vision))


class Recent(Retention):
    """The most recent tokens first, as a fraction of the prompt tokens that a (layer, head) keeps.

    The tail counts among the kept and among the recent tokens.
    """

    preferred = "recent"

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        """The fraction is 1 / divisor; integers round the same on every device."""

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        num_tail = prompt.num_tokens - prompt.num_candidates
        num_recent = (num_kept + num_tail).div(self.divisor, rounding_mode="floor")
        positions = torch.arange(prompt.num_tokens, device=num_kept.device)
        return sinks_above(prompt, positions >= prompt.num_tokens - num_recent.unsqueeze(-1))


RETENTIONS.add("recent_half", lambda: Recent(2))
RETENTIONS.add("recent_tenth", lambda: Recent(10))


def sinks_above(prompt: Prompt, preferred: Tensor) -> Tensor:
    """Return tiers int32 `[..., P]`: 2 for sinks, 1 where `preferred` (bool), 0 elsewhere."""
    tiers = preferred.to(torch.int32)
    tiers[..., : prompt.sinks].fill_(2)
    return tiers
