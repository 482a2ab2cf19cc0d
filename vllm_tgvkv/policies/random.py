# SPDX-License-Identifier: Apache-2.0
"""Random tokens: the baseline that every method has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe

_MASK = 2**32 - 1


@SCORES.register("random")
class RandomScore(Score):
    """Hash of layer, head and position, in [0, 1).

    Unlike a generator, a hash has no state, so the same prompt always keeps the same tokens.
    """

    rows = "none"
    other_rows = ()

    def __call__(self, view: LayerView) -> Tensor:
        device = view.prompt.is_vision.device
        positions = torch.arange(view.prompt.num_tokens, device=device)
        token_set = view.first_set + torch.arange(view.num_sets, device=device)[:, None]
        mixed = _mix(_mix(_mix(positions) + token_set) + view.layer)
        # The upper 24 bits, which a float32 holds exactly.
        return (mixed >> 8).float() / 2**24


POLICIES.add("random", Recipe("random", "uniform", "by_score"))


def _mix(values: Tensor) -> Tensor:
    """Scramble 32-bit integers, held in int64, by a bijection.

    This is the finaliser of MurmurHash3 (A. Appleby, public domain).
    """
    values = values & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        # The product of two 32-bit numbers may overflow 63 bits; the mask removes the excess.
        values = ((values ^ (values >> shift)) * factor) & _MASK
    return values ^ (values >> 16)
