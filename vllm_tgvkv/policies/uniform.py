# SPDX-License-Identifier: Apache-2.0
"""The same budget for every layer and head."""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import Budget, Looks
from vllm_tgvkv.policies.registry import BUDGETS


@BUDGETS.register("uniform")
class UniformBudget(Budget):
    """Equal shares."""

    def shares(self, looks: Looks) -> Tensor:
        return looks.scores.new_ones(looks.scores.shape[:2])
