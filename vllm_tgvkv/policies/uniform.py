# SPDX-License-Identifier: Apache-2.0
"""The same number of pages for every layer and head."""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation
from vllm_tgvkv.policies.registry import ALLOCATIONS


@ALLOCATIONS.register("uniform")
class UniformAllocation(Allocation):
    """Equal shares."""

    needs_all_heads = False

    def shares(self, layers: AllLayers) -> Tensor:
        return layers.scores.new_ones(layers.scores.shape[:2])
