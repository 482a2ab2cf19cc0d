# SPDX-License-Identifier: Apache-2.0
"""RetentiveKV: attention mixed with entropy ranks tokens, and summaries are kept of the rest.

Source: Liu, "RetentiveKV: State-Space Memory for Uncertainty-Aware Multimodal KV Cache Eviction",
Findings of ACL 2026, arXiv 2605.04075. Its description has
`R = lambda * alpha + (1 - lambda) * H` with the attention alpha and the entropy H of the text's
attention to vision, and gives neither lambda nor the entropy of a single token. The two readings
here are ours. Neither is over vision alone: docs/methods.md says why.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe
from vllm_tgvkv.summaries.options import Summaries

MIX = 0.5
"""lambda, the weight of the attention."""


class RetentiveScore(Score):
    """`s[j] = MIX * c[j] / max c + (1 - MIX) * H[j]`, both terms between 0 and 1.

    c is the sum of A over the rows, and its maximum is taken over the tokens after the sinks, whose
    attention is far above all others. Sinks count as 1 at most.
    """

    def __call__(self, view: LayerView) -> Tensor:
        sums = view.attention.column_sums
        others = sums[:, view.prompt.sinks :]
        if others.shape[1] == 0:
            others = sums
        most = others.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(sums.dtype).tiny)
        return MIX * (sums / most).clamp(max=1) + (1 - MIX) * self.entropies(view, sums)

    def entropies(self, view: LayerView, sums: Tensor) -> Tensor:
        """Return H of each token, float32 `[S, P]`, between 0 and 1; 0 without attention.

        Args:
            sums: c, float32 `[S, P]`.
        """
        raise NotImplementedError


@SCORES.register("retentive_rows")
class RowEntropyScore(RetentiveScore):
    """H of a token is the mean entropy of the rows that look at it, weighted by their attention.

    A row that looks at all its n keys alike has entropy log n, and counts as 1.
    """

    statistics = frozenset({"row_entropies"})

    def entropies(self, view: LayerView, sums: Tensor) -> Tensor:
        attention = view.attention
        num_seen = attention.is_seen.cumsum(dim=-1)[:, attention.row_positions]
        # A row that sees one key is decided: its entropy is 0.
        most = num_seen.clamp(min=2).log()
        undecided = attention.weighted_column_sums(attention.row_entropies / most)
        return torch.where(sums > 0, undecided / sums, 0).clamp(0, 1)


@SCORES.register("retentive_spread")
class SpreadScore(RetentiveScore):
    """H of a token is the min-entropy of its attention over the rows: `log(c / max A) / log O`.

    It is 1 where all O rows look at the token alike, and 0 where only one does.
    """

    statistics = frozenset({"column_maxima"})

    def entropies(self, view: LayerView, sums: Tensor) -> Tensor:
        maxima = view.attention.column_maxima
        num_rows = len(view.attention.row_positions)
        spread = torch.where(maxima > 0, (sums / maxima).log(), 0)
        return (spread / math.log(max(num_rows, 2))).clamp(0, 1)


POLICIES.add(
    "retentivekv",
    Recipe("retentive_rows", "uniform", "window", granularity="head", summaries=Summaries()),
)
