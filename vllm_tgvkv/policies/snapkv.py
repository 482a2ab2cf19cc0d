# SPDX-License-Identifier: Apache-2.0
"""SnapKV: the last tokens of the prompt vote, and are always kept.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Prompt, Retention, VoteScore
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import POLICIES, POOLINGS, RETENTIONS, SCORES, Recipe
from vllm_tgvkv.policies.retention import sinks_above
from vllm_tgvkv.shared.prompt import WINDOW

POOLING = Pooling("sequence", kernel=7, reduce="max")

POOLINGS.add("snapkv", POOLING)


@SCORES.register("snapkv")
class SnapScore(VoteScore):
    """`s[j]` = sum of A[i, j] over the last `WINDOW` rows, pooled over 7 positions."""

    rows = "window"


@RETENTIONS.register("window")
class WindowFirst(Retention):
    """The last tokens, by default the rows of the window, before all other tokens."""

    preferred = "recent"
    is_by_number = False

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        """Number of these tokens."""

    def tiers(self, prompt: Prompt, num_kept: Tensor) -> Tensor:
        positions = torch.arange(prompt.num_tokens, device=prompt.is_vision.device)
        return sinks_above(prompt, positions >= prompt.num_tokens - self.size)


POLICIES.add("snapkv", Recipe("snapkv", "uniform", "window", granularity="head", pooling=POOLING))
