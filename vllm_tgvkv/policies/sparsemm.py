# SPDX-License-Identifier: Apache-2.0
"""SparseMM: heads that look at what the model reads get most pages, by scores from a file.

Source: Wang et al., "SparseMM: Head Sparsity Emerges from Visual Concept Responses in MLLMs", ICCV
2025, arXiv 2506.05344, with the details of its code (github.com/CR400AF-A/SparseMM).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation
from vllm_tgvkv.policies.head_scores import HeadScores
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING
from vllm_tgvkv.shared.prompt import WINDOW

UNIFORM = 0.1
"""rho, the part of the budget that all heads share equally."""


@ALLOCATIONS.register("sparsemm")
class VisualHeadAllocation(Allocation):
    """Share of head h: `w + rho b + (1 - rho) b n s[h] / sum(s)`, the tokens that it keeps.

    w are the candidates in the window of the last `WINDOW` tokens, which each head keeps; b is
    the mean budget without them, n the number of heads, and s the scores of the file. At
    granularity `layer`, s is the sum over the heads of a layer, and n the number of layers.
    Ranks distribute the pages of their own heads, and a pipeline stage those in its own layers,
    by the same scores.
    """

    needs_head_scores = True
    needs_all_heads = False

    def __init__(self, head_scores: HeadScores | None = None) -> None:
        super().__init__(head_scores)
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        """Scores of the KV heads, float64 `[L, H]`, and the host's copy of them."""

    def shares(self, layers: AllLayers) -> Tensor:
        num_layers, num_sets, _ = layers.scores.shape
        scores = self._scores(layers.scores.device)[layers.depth.first_layer :][:num_layers]
        if num_sets == 1:
            scores = scores.sum(dim=1, keepdim=True)
        prompt = layers.prompt
        num_recent = max(0, WINDOW - (prompt.num_tokens - prompt.num_candidates))
        window = layers.num_kept.clamp(max=num_recent).double()
        budget = layers.num_kept - window
        # A stage whose heads all score 0 shares equally.
        total = scores.sum()
        part = torch.where(total > 0, scores * scores.numel() / total, 1.0)
        shares = window + budget * (UNIFORM + (1 - UNIFORM) * part)
        return shares[:, layers.first_head : layers.first_head + num_sets]

    def _scores(self, device: torch.device) -> Tensor:
        """Return the scores of the model's KV heads on a device, without waiting for it."""
        if device not in self._on_device:
            assert self.head_scores is not None, "build_policy gives them"
            host = torch.tensor(self.head_scores.of_kv_heads, dtype=torch.float64)
            if device.type == "cuda":
                host = host.pin_memory()
            self._on_device[device] = (host.to(device, non_blocking=True), host)
        return self._on_device[device][0]


POLICIES.add("sparsemm", Recipe("snapkv", "sparsemm", "window", "head", POOLING))
