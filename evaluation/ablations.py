# SPDX-License-Identifier: Apache-2.0
"""Scores and layer budgets that belong to no method, to compare the methods' own parts with.

Importing this module registers them, for engines of this process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Allocation, LayerView, Score
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import ALLOCATIONS, POOLINGS, SCORES
from vllm_tgvkv.policies.tgv import mass


@SCORES.register("vv_tt")
class OwnModalityScore(Score):
    """Column sums over the rows of a token's own modality: vision over vision, text over text."""

    rows = "all"
    other_rows = ()
    cuts_again = False

    def __call__(self, view: LayerView) -> Tensor:
        attention = view.attention
        return torch.where(
            view.prompt.is_vision, attention.vision_column_sums, attention.text_column_sums
        )


@ALLOCATIONS.register("vv")
class VisionVisionAllocation(Allocation):
    """Share: sum of A over vision rows and vision columns."""

    rows = "all"
    needs_vision = True
    cuts_again = False

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return mass(view.attention.vision_column_sums, view.prompt.is_vision)


@ALLOCATIONS.register("tt")
class TextTextAllocation(Allocation):
    """Share: sum of A over the observation rows and text columns."""

    rows = "text"

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return mass(view.attention.column_sums, ~view.prompt.is_vision)


@ALLOCATIONS.register("entropy")
class EntropyAllocation(Allocation):
    """Share: exp of the observation rows' mean entropy, their effective number of keys."""

    rows = "text"
    statistics = frozenset({"row_entropies"})

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return view.attention.row_entropies.mean(dim=-1, keepdim=True).exp()


for _forward in (16, 40):
    POOLINGS.add(f"sequence_forward{_forward}", Pooling("sequence", forward=_forward, back=1))
    POOLINGS.add(f"grid_forward{_forward}", Pooling("grid", forward=_forward, back=1))
