# SPDX-License-Identifier: Apache-2.0
"""Random tokens: what every method has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe

_MASK = 2**32 - 1


@SCORES.register("random")
class RandomScore(Score):
    """A hash of layer, head and position in [0, 1): the same prompt always keeps the same tokens.

    A hash rather than a generator, since it has no state to carry from request to request.
    """

    rows = "none"

    def __call__(self, view: LayerView) -> Tensor:
        device = view.prompt.is_vision.device
        positions = torch.arange(view.prompt.num_tokens, device=device)
        token_set = view.first_set + torch.arange(view.num_sets, device=device)[:, None]
        mixed = _mix(_mix(_mix(positions) + token_set) + view.layer)
        # The upper 24 bits: as many as a float32 holds exactly.
        return (mixed >> 8).float() / 2**24


POLICIES.add("random", Recipe("random", "uniform", "by_score"))


def _mix(values: Tensor) -> Tensor:
    """A bijection of the 32-bit integers that looks random; int64 in and out.

    The finaliser of MurmurHash3 (A. Appleby, public domain).
    """
    values = values & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        # The product of two 32-bit numbers may overflow 63 bits; what wraps around is masked off.
        values = ((values ^ (values >> shift)) * factor) & _MASK
    return values ^ (values >> 16)
