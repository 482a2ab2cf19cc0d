# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: the first and the last tokens.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe


@SCORES.register("recency")
class RecencyScore(Score):
    """`s[j] = j`."""

    rows = "none"
    other_rows = ()

    def __call__(self, view: LayerView) -> Tensor:
        prompt = view.prompt
        positions = torch.arange(prompt.num_tokens, device=prompt.is_vision.device)
        return positions.float().expand(view.num_sets, -1)


POLICIES.add("streaming", Recipe("recency", "uniform", "by_score"))
