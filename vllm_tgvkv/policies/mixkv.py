# SPDX-License-Identifier: Apache-2.0
"""MixKV: keys that matter, mixed with keys unlike the others, as much as the head repeats itself.

Source: Liu et al., "Mixing Importance with Diversity: Joint Optimization for KV Cache Compression
in Large Vision-Language Models", ICLR 2026, arXiv 2510.20707, with the details of its code
(github.com/xuyang-liu16/MixKV).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe
from vllm_tgvkv.policies.snapkv import POOLING


@SCORES.register("mixkv")
class MixedScore(Score):
    """`s[j] = (1 - w) (A[j] + V[j]) + w K[j]` for each KV head.

    A is SnapKV's score, pooled over 7 positions. V is the norm of the value, and K the difference
    of a key from the others, `-mean over i of cos(k[i], k[j])`. Both are mapped to 0 .. 1 by
    their least and greatest value, and then scaled to the mean of A. w is how much the head repeats
    itself: the mean cosine of its different keys. The importance A + V ranks in a head of diverse
    keys, the diversity K in a head of similar ones.

    Least, greatest and mean are taken over the keys before the window, as in the code. The keys of
    the window are always kept there; here they get scores of the same formula, with V and K bounded
    by 0 and 1, **a choice**. So are a V or K of zero where all values are equal (0 / 0 in the
    paper), and a w of at least 0, which makes all scores positive.
    """

    rows = "window"
    other_rows = ("answer",)
    granularities = ("head",)
    statistics = frozenset({"mean_cosines", "value_norms"})

    def __call__(self, view: LayerView) -> Tensor:
        attention, prompt = view.attention, view.prompt
        positions = torch.arange(prompt.num_tokens, device=prompt.is_vision.device)
        seen = attention.is_seen
        past = seen & (positions < attention.row_columns[:, :1])
        # Evicted keys get no attention, so they do not change a maximum.
        attended = prompt.pooler(POOLING)(attention.column_sums)
        total = torch.where(past, attended, 0).sum(dim=-1, keepdim=True)
        cosines = attention.mean_cosines
        repeats = (cosines.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)).clamp(0, 1)
        importance = attended + _scaled(attention.value_norms, past, total)
        return (1 - repeats) * importance + repeats * _scaled(-cosines, past, total)


def _scaled(values: Tensor, past: Tensor, total: Tensor) -> Tensor:
    """Map values `[S, P]` to 0 .. 1, and scale them to a sum of `total` over the past.

    `past` is bool `[S or 1, P]`, `total` float32 `[S, 1]`.
    """
    infinity = float("inf")
    least = values.masked_fill(~past, infinity).amin(dim=-1, keepdim=True)
    span = values.masked_fill(~past, -infinity).amax(dim=-1, keepdim=True) - least
    # Without a past the span is -inf.
    unit = torch.where(span > 0, (values - least) / span, 0).clamp(0, 1)
    sums = torch.where(past, unit, 0).sum(dim=-1, keepdim=True)
    return unit * torch.where(sums > 0, total / sums, 0)


POLICIES.add("mixkv", Recipe("mixkv", "uniform", "window", granularity="head"))
