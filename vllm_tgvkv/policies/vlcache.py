# SPDX-License-Identifier: Apache-2.0
"""VL-Cache: layers get what their sparsity leaves to be kept; the text after the images votes.

Source: Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language
Model Inference Acceleration", 2024.
"""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation, LayerView, Score
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe

LEAST_SHARE = 0.01
"""Least part of its own tokens that a layer keeps."""


@SCORES.register("vlcache")
class PostVisionScore(Score):
    """``s[j]`` = sum of A[i, j] over the text rows after the last vision token."""

    rows = "after_vision"

    def __call__(self, view: LayerView) -> Tensor:
        return view.attention.column_sums


@ALLOCATIONS.register("vlcache")
class SparsityAllocation(Allocation):
    """Share of layer l: its density ``1 - gamma[l]`` over their sum, times the total.

    gamma is the part of the entries of those rows that are below 1 % of their row's maximum, for
    each query head by itself, then averaged. A layer keeps between 1 % and all of its tokens.
    """

    rows = "after_vision"
    statistics = frozenset({"share_below"})

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return 1 - view.attention.share_below.unsqueeze(-1)

    def shares(self, layers: AllLayers) -> Tensor:
        density = layers.strengths[..., 0]
        fraction = layers.num_kept / layers.prompt.num_candidates
        return (density / density.mean() * fraction).clamp(LEAST_SHARE, 1)


POLICIES.add("vlcache", Recipe("vlcache", "vlcache", "recent_tenth"))
