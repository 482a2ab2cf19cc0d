# SPDX-License-Identifier: Apache-2.0
"""Which tokens are kept first. Sinks, the first tokens of the prompt, always come before all."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Prompt, Retention
from vllm_tgvkv.policies.registry import RETENTIONS


@RETENTIONS.register("text_first")
class TextFirst(Retention):
    """Text before vision: TGV-KV's text-prioritised retention (TPR), exactly.

    A budget beyond the text is filled up with the best vision tokens; a smaller one holds the best
    text tokens and no vision.
    """

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, ~prompt.is_vision)


@RETENTIONS.register("vision_first")
class VisionFirst(Retention):
    """Vision before text: the ablation of TPR."""

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, prompt.is_vision)


@RETENTIONS.register("by_score")
class ByScore(Retention):
    """No kind of token first: the score alone decides."""

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        return sinks_above(prompt, torch.zeros_like(prompt.is_vision))


class Recent(Retention):
    """The most recent tokens first, a fraction of what a (layer, head) keeps of the prompt.

    The tail counts on both sides: it is kept, and the most recent.
    """

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        """The fraction is 1 / divisor; whole numbers round the same everywhere."""

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        num_tail = prompt.num_tokens - prompt.num_candidates
        num_recent = (num_kept + num_tail).div(self.divisor, rounding_mode="floor")
        positions = torch.arange(prompt.num_tokens, device=num_kept.device)
        return sinks_above(prompt, positions >= prompt.num_tokens - num_recent.unsqueeze(-1))


RETENTIONS.add("recent_half", lambda: Recent(2))
RETENTIONS.add("recent_tenth", lambda: Recent(10))


def sinks_above(prompt: Prompt, preferred: Tensor) -> Tensor:
    """0, or 1 where ``preferred`` (bool ``[..., P]``), and 2 for the sinks; int32 ``[..., P]``."""
    tiers = preferred.to(torch.int32)
    tiers[..., : prompt.sinks] = 2
    return tiers
