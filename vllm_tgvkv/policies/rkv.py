# SPDX-License-Identifier: Apache-2.0
"""R-KV: keys that the last tokens look at, and that are not like other keys.

Source: Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", 2025, as its
code has it (github.com/Zefan-Cai/R-KV).
"""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.kernels.importance import WINDOW
from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, RETENTIONS, SCORES, Recipe
from vllm_tgvkv.policies.snapkv import WindowFirst

MIX = 0.1
"""lambda, the weight of the importance."""


@SCORES.register("rkv")
class RedundancyScore(Score):
    """`s[j] = MIX * I[j] - (1 - MIX) * R[j]`, importance and redundancy of the head's keys.

    The importance of the last `WINDOW` tokens is zero; the retention keeps them.
    """

    rows = "window"
    other_rows = ()
    granularities = ("head",)
    is_signed = True
    statistics = frozenset({"past_importance", "key_redundancy"})

    def __call__(self, view: LayerView) -> Tensor:
        important, redundant = view.attention.past_importance, view.attention.key_redundancy
        return MIX * important - (1 - MIX) * redundant


RETENTIONS.add("recent_8", lambda: WindowFirst(WINDOW))

POLICIES.add("rkv", Recipe("rkv", "uniform", "recent_8", granularity="head"))
