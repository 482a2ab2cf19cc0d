# SPDX-License-Identifier: Apache-2.0
"""Which modality is kept first. Sinks, the first tokens of the prompt, always come before all."""

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

    def tiers(self, prompt: Prompt) -> Tensor:
        return _sinks_above(prompt, ~prompt.is_vision)


@RETENTIONS.register("vision_first")
class VisionFirst(Retention):
    """Vision before text: the ablation of TPR."""

    def tiers(self, prompt: Prompt) -> Tensor:
        return _sinks_above(prompt, prompt.is_vision)


@RETENTIONS.register("by_score")
class ByScore(Retention):
    """No modality first: the score alone decides."""

    def tiers(self, prompt: Prompt) -> Tensor:
        return _sinks_above(prompt, torch.zeros_like(prompt.is_vision))


def _sinks_above(prompt: Prompt, preferred: Tensor) -> Tensor:
    """0, or 1 where ``preferred`` (bool ``[P]``), and 2 for the sinks; int32 ``[P]``."""
    tiers = preferred.to(torch.int32)
    tiers[: prompt.sinks] = 2
    return tiers
