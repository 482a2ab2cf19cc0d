# SPDX-License-Identifier: Apache-2.0
"""VL-Cache: layers share pages by their density; the text after the images votes.

Source: Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language
Model Inference Acceleration", 2024.
"""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation, LayerView, VoteScore
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe

LEAST_SHARE = 0.01
"""Least fraction of its tokens that a layer keeps."""


@SCORES.register("vlcache")
class PostVisionScore(VoteScore):
    """`s[j]` = sum of A[i, j] over the text rows after the last vision token."""

    rows = "after_vision"


@ALLOCATIONS.register("vlcache")
class SparsityAllocation(Allocation):
    """Share of layer l: its density `1 - gamma[l]` over the sum of all densities.

    gamma is the fraction of the rows' entries that are below 1 % of their row's maximum, counted
    for each query head and then averaged. A layer keeps between 1 % and all of its tokens.
    """

    rows = "after_vision"
    statistics = frozenset({"share_below"})
    cuts_again = False

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return 1 - view.attention.share_below.unsqueeze(-1)

    def shares(self, layers: AllLayers) -> Tensor:
        density = layers.strengths[..., 0]
        fraction = layers.num_kept / layers.prompt.num_candidates
        return (density / density.mean() * fraction).clamp(LEAST_SHARE, 1)


POLICIES.add("vlcache", Recipe("vlcache", "vlcache", "recent_tenth"))
