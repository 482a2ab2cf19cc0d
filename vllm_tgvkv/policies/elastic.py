# SPDX-License-Identifier: Apache-2.0
"""Elastic Cache: attention sums, and evicted tokens merged into their nearest kept neighbours.

Source: Liu et al., "Efficient Inference of Vision Instruction-Following Models with Elastic Cache",
2024. With `merge: false` in a mix, evicted tokens are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView
from vllm_tgvkv.policies.prefixkv import TextRowsScore
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe

NEWEST = 25
"""Tokens of a head behind the place at which later cuts evict, as in the authors' code."""


@SCORES.register("fixed_place")
class FixedPlaceScore(TextRowsScore):
    """The attention sums at the first cut; later cuts evict at one place, whatever the attention.

    The place is before the `NEWEST` last of the tokens that are left. So the first tokens that were
    kept stay, and the next ones go, the oldest first.
    """

    cuts_by_place = True

    def __call__(self, view: LayerView) -> Tensor:
        if not view.prompt.was_cut:
            return super().__call__(view)
        is_left, num_tokens = view.attention.is_seen, view.prompt.num_tokens
        from_end = is_left.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        ages = torch.arange(num_tokens, 0, -1, device=is_left.device)
        scores = torch.where(from_end <= NEWEST, num_tokens + 1, ages)
        return scores.float().expand(view.num_sets, -1)


POLICIES.add("elastic", Recipe("text_rows", "uniform", "by_score", merge=True))
