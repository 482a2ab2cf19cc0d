# SPDX-License-Identifier: Apache-2.0
"""AdaKV: the heads of a layer compete for its pages.

Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
Efficient LLM Inference", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels.select import key_slices, ranking_keys, thresholds
from vllm_tgvkv.policies.base import AllLayers, Allocation
from vllm_tgvkv.policies.pyramidkv import pyramid_budgets
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING

SAFEGUARD = 5
"""Every head is guaranteed 1 / SAFEGUARD of the mean number of kept tokens."""

_SAFE = 1 << 62
"""Number above every ranking key."""


@ALLOCATIONS.register("adakv")
class AdaAllocation(Allocation):
    """Share of a head: how many of the layer's best b * H tokens belong to it.

    The best b / SAFEGUARD tokens of each head always count among them. Works with any score. b is
    the same for all layers.
    """

    granularities = ("head",)

    def shares(self, layers: AllLayers) -> Tensor:
        # Layers do not compete, so any division into slices gives the same shares.
        slices, budgets = key_slices(layers.scores), self._budgets(layers)
        return torch.cat([self._of_heads(layers, part, budgets[part]) for part in slices])

    def _budgets(self, layers: AllLayers) -> Tensor:
        """Return b of each layer, the tokens that its heads keep on average, int64 `[L]`."""
        return layers.num_kept.expand(layers.scores.shape[0])

    def _of_heads(self, layers: AllLayers, part: slice, budgets: Tensor) -> Tensor:
        """Return the shares of some of the layers."""
        scores, tiers = layers.scores[part], layers.tiers
        num_heads = scores.shape[1]
        keys = ranking_keys(scores, tiers if tiers.dim() == 1 else tiers[part])
        guaranteed = budgets.div(SAFEGUARD, rounding_mode="floor")[:, None]
        safe = keys >= thresholds(keys, guaranteed.expand(keys.shape[:2])).unsqueeze(-1)
        keys = keys + safe * _SAFE
        # If two heads have equal keys, both count, and the shares are one token too large.
        wanted = budgets * num_heads
        least = thresholds(keys.flatten(1), wanted, num_bits=63)
        return (keys >= least[:, None, None]).sum(dim=-1).double()


@ALLOCATIONS.register("ada_pyramid")
class AdaPyramidAllocation(AdaAllocation):
    """PyramidKV's budgets of the layers, rounded down, for whose tokens the heads compete.

    It is Ada-Pyramid-KV, with SnapKV's score and the retention `window`.
    """

    def _budgets(self, layers: AllLayers) -> Tensor:
        tokens, parts = pyramid_budgets(layers)
        return tokens.div(parts, rounding_mode="floor")


POLICIES.add("adakv", Recipe("snapkv", "adakv", "window", "head", POOLING))
