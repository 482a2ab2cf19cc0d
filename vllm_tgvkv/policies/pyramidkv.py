# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: SnapKV's scores, and budgets that fall with depth.

Sources: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", 2024, arXiv 2406.02069, and github.com/Zefan-Cai/PyramidKV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import AllLayers, Allocation
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING
from vllm_tgvkv.shared.prompt import WINDOW

SLOPE = 20
"""The last layer gets 1 / SLOPE of the mean budget beside the window."""


@ALLOCATIONS.register("pyramid")
class PyramidAllocation(Allocation):
    """Share of a layer: the window, and a part that is linear in depth.

    Every layer keeps the w candidates in the window of the last `WINDOW` tokens. b is the mean
    budget without them. Beside the window the first layer keeps `f = (2 - 1 / SLOPE) b` tokens, but
    at most the C - w others, and the last layer `2 b - f`. The authors' code rounds the step from
    layer to layer down, which exceeds the budget, and keeps b tokens in every layer of a prompt
    shorter than 2 b; neither is done here, **a choice**.
    """

    needs_all_heads = False

    def shares(self, layers: AllLayers) -> Tensor:
        num_sets = layers.scores.shape[1]
        tokens, parts = pyramid_budgets(layers)
        return (tokens.double() / parts)[:, None].expand(-1, num_sets)


def pyramid_budgets(layers: AllLayers) -> tuple[Tensor, int]:
    """Return the tokens that a head of each layer keeps, as int64 `[L]` and their common divisor.

    Integers are exact: layers at equal distance from the middle have equal remainders.
    """
    num_sharing = layers.scores.shape[0]
    num_steps = (layers.depth.num_layers or num_sharing) - 1
    if num_steps == 0:
        return layers.num_kept[None], 1
    prompt = layers.prompt
    num_recent = max(0, WINDOW - (prompt.num_tokens - prompt.num_candidates))
    window = layers.num_kept.clamp(max=num_recent)
    budget = layers.num_kept - window
    first = torch.minimum((2 * SLOPE - 1) * budget, SLOPE * (prompt.num_candidates - window))
    depth = torch.arange(num_sharing, device=layers.scores.device) + layers.depth.first_layer
    falling = first * num_steps - depth * 2 * (first - SLOPE * budget)
    parts = SLOPE * num_steps
    return window * parts + falling, parts


POLICIES.add("pyramidkv", Recipe("snapkv", "pyramid", "window", "head", POOLING))
