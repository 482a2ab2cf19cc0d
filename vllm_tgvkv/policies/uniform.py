# SPDX-License-Identifier: Apache-2.0
"""The same budget for every layer and head."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Attention, Budget, Granularity, Prompt
from vllm_tgvkv.policies.registry import BUDGETS


@BUDGETS.register("uniform")
class UniformBudget(Budget):
    """Equal shares."""

    def strength(self, attention: Attention, prompt: Prompt, granularity: Granularity) -> Tensor:
        heads = 1 if granularity == "layer" else attention.column_sums.shape[0]
        return attention.column_sums.new_ones(heads)

    def shares(self, strengths: Tensor) -> Tensor:
        return torch.ones_like(strengths)
