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
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING

SAFEGUARD = 5
"""Every head is guaranteed 1 / SAFEGUARD of the mean number of kept tokens."""

_SAFE = 1 << 62
"""Number above every ranking key."""


@ALLOCATIONS.register("adakv")
class AdaAllocation(Allocation):
    """Share of a head: how many of the layer's best b * H tokens belong to it.

    The best b / SAFEGUARD tokens of each head always count among them. Works with any score. All
    layers get the same number of pages.
    """

    granularities = ("head",)

    def shares(self, layers: AllLayers) -> Tensor:
        # Layers do not compete, so any division into slices gives the same shares.
        slices = key_slices(layers.scores)
        return torch.cat([self._of_heads(layers, part) for part in slices])

    def _of_heads(self, layers: AllLayers, part: slice) -> Tensor:
        """Return the shares of some of the layers."""
        scores, tiers = layers.scores[part], layers.tiers
        num_heads = scores.shape[1]
        keys = ranking_keys(scores, tiers if tiers.dim() == 1 else tiers[part])
        guaranteed = layers.num_kept.div(SAFEGUARD, rounding_mode="floor")
        safe = keys >= thresholds(keys, guaranteed.expand(keys.shape[:2])).unsqueeze(-1)
        keys = keys + safe * _SAFE
        # If two heads have equal keys, both count, and the shares are one token too large.
        wanted = (layers.num_kept * num_heads).expand(keys.shape[0])
        least = thresholds(keys.flatten(1), wanted, num_bits=63)
        return (keys >= least[:, None, None]).sum(dim=-1).double()


POLICIES.add("adakv", Recipe("snapkv", "adakv", "window", "head", POOLING))
