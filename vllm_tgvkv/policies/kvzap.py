# SPDX-License-Identifier: Apache-2.0
"""KVzap: a small network predicts what a second look at the whole text would attend to.

Source: Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2026, arXiv
2601.07891, and its code in github.com/NVIDIA/kvpress.
"""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe


@SCORES.register("kvzap")
class PredictedScore(Score):
    """`s[j]`, the gate's output: the predicted logarithm of the attention that a key will get."""

    rows = "none"
    other_rows = ()
    granularities = ("head",)
    is_signed = True
    gates = "kvzap"

    def __call__(self, view: LayerView) -> Tensor:
        return view.gates


POLICIES.add("kvzap", Recipe("kvzap", "global", "window", granularity="head"))
