# SPDX-License-Identifier: Apache-2.0
"""TGV-KV: text-vision budgeting (TVB), text-weighted ranking (TWR), text-prioritised retention.

All sums run over the observation rows O, the text positions after the first vision token; with
`rows: all_text`, the score's run over all text, as printed. Retention (TPR) is `text_first`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import Allocation, LayerView, Score
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe


@SCORES.register("tgv")
class TgvScore(Score):
    """Text-weighted ranking.

    The weight of row j is the mean attention it receives from the rows of O at or after it,
    normalised to sum 1::

        w[j] = sum_{i in O, i >= j} A[i, j] / (|O| - rank(j) + 1),   rank(j) = 1 .. |O|

    A vision token's score is its weighted column sum, `s[j] = sum_{i in O} w[i] A[i, j]`; a text
    token's score is its plain one, `s[j] = sum_{i in O, i >= j} A[i, j]`. The paper sums over all
    text rows. Those before the first vision token do not see vision, so they add only to the scores
    of text before it, which rank only where a budget cannot hold all text. They are not in O, **a
    choice**: a prefix-cache hit, which computes no queries, then changes nothing if it ends before
    the first of these rows. With `rows: all_text` they vote too.

    The two scales differ, which matters only to a retention that mixes text and vision.
    """

    rows = "text"
    statistics = frozenset({"row_averages"})

    def __call__(self, view: LayerView) -> Tensor:
        attention = view.attention
        text = attention.column_sums
        vision = attention.weighted_column_sums(_row_weights(text, attention.row_positions))
        return torch.where(view.prompt.is_vision, vision, text)


@ALLOCATIONS.register("tgv")
class TgvAllocation(Allocation):
    """Text-vision budgeting: share `t[l]` = sum of A[l] over rows O and vision columns."""

    rows = "text"
    needs_vision = True

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        return mass(view.attention.column_sums, view.prompt.is_vision)


POLICIES.add("tgv", Recipe(score="tgv", allocation="tgv", retain="text_first"))


def mass(column_sums: Tensor, columns: Tensor) -> Tensor:
    """Return the total of the columns (bool `[P]`) of the sums `[S, P]`: float32 `[S, 1]`."""
    return torch.where(columns, column_sums, 0.0).sum(dim=-1, keepdim=True)


def _row_weights(column_sums: Tensor, rows: Tensor) -> Tensor:
    """Return w of `TgvScore`: float32 `[S, O]`, sum 1 per set, from sums `[S, P]`."""
    # Column j of A is zero in the rows before j, so the column sum is the sum over i >= j.
    received = column_sums.index_select(-1, rows)
    num_later = torch.arange(rows.shape[0], 0, -1, device=rows.device)
    weights = received / num_later
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.clamp(min=torch.finfo(total.dtype).tiny)
