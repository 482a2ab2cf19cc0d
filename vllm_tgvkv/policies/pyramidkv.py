# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: SnapKV's scores, and shares that fall with depth.

Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING

SLOPE = 20
"""The last layer gets 1 / SLOPE of the mean share."""


@ALLOCATIONS.register("pyramid")
class PyramidAllocation(Allocation):
    """Share: linear in depth, from 2 - 1 / SLOPE of the mean at the first layer to 1 / SLOPE."""

    needs_all_heads = False

    def shares(self, layers: AllLayers) -> Tensor:
        num_sharing, num_sets, _ = layers.scores.shape
        num_layers = layers.depth.num_layers or num_sharing
        if num_layers == 1:
            return layers.scores.new_ones(1, num_sets)
        least = 1 / SLOPE
        # In float64: layers at equal distance from the middle have equal remainders.
        falling = torch.linspace(
            2 - least, least, num_layers, dtype=torch.float64, device=layers.scores.device
        )
        falling = falling[layers.depth.first_layer :][:num_sharing]
        return falling[:, None].expand(-1, num_sets)


POLICIES.add("pyramidkv", Recipe("snapkv", "pyramid", "window", "head", POOLING))
