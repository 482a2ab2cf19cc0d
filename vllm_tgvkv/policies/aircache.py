# SPDX-License-Identifier: Apache-2.0
"""AirCache: the instruction's key tokens vote; layers share pages by strength and skewness.

Source: Huang et al., "AirCache: Activating Inter-modal Relevancy KV Cache Compression for Efficient
Large Vision-Language Model Inference", 2025.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from vllm_tgvkv.policies.base import (
    AllLayers,
    Allocation,
    Attention,
    LayerView,
    Prompt,
    Score,
)
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe

ELITE = 0.9
"""Least attention of an elite token, as a fraction of the greatest attention."""


@SCORES.register("aircache")
class EliteScore(Score):
    """Attention of the elite text tokens to the vision tokens.

    T' is the text after the last vision token. The elite E are the tokens of T' that get at least
    `ELITE` of the greatest attention in the last token's softmax over T' alone. A vision token's
    score is the mean over E of the softmax over vision and E alone.

    The method evicts no text. Where a budget cannot hold all text, the last token's ordinary
    attention ranks it, **a choice**.
    """

    rows = "after_vision"
    cuts_again = False
    threshold: ClassVar[float] = ELITE

    def __call__(self, view: LayerView) -> Tensor:
        prompt, attention = view.prompt, view.attention
        everything = torch.ones_like(prompt.is_vision)[None]
        last = _last_row(attention)
        text = attention.renormalised_column_sums(everything, last, last_row_only=True)
        return torch.where(prompt.is_vision, self._of_vision(prompt, attention), text)

    def _of_vision(self, prompt: Prompt, attention: Attention) -> Tensor:
        """Return the scores of the vision tokens, float32 `[S, P]`."""
        is_vision, rows, last = prompt.is_vision, attention.row_positions, _last_row(attention)
        instruction = torch.zeros_like(is_vision).index_fill(0, rows, True)
        votes = attention.renormalised_column_sums(instruction[None], last, last_row_only=True)
        votes = votes.index_select(-1, rows)  # [S, O]
        elite = votes >= self.threshold * votes.amax(dim=-1, keepdim=True)
        seen = is_vision.expand(len(votes), -1).index_copy(
            1, rows, elite | is_vision.index_select(0, rows)
        )
        mean = elite / elite.sum(dim=-1, keepdim=True)
        return attention.renormalised_column_sums(seen, mean)


@SCORES.register("aircache_query_heads")
class EliteOfQueryHeadsScore(EliteScore):
    """The same with an elite for each query head, as the equations may be read.

    A token's score is the mean over the query heads of the token set.
    """

    by_query_head = True

    def _of_vision(self, prompt: Prompt, attention: Attention) -> Tensor:
        return attention.mean_of_query_heads(partial(super()._of_vision, prompt))


def _last_row(attention: Attention) -> Tensor:
    """Return weights of the rows, float32 `[1, O]`: 1 for the last one."""
    rows = attention.row_positions
    last = torch.zeros(1, len(rows), device=rows.device)
    last[:, -1] = 1
    return last


@ALLOCATIONS.register("aircache")
class StrengthAndSkewnessAllocation(Allocation):
    """All text in every token set; the rest by strength and skewness of the vision scores.

    With the policy's scores s of the vision tokens: strength `S = sum s`, skewness
    `K = mean(((s - mu) / sigma)^3)`, at least 0. A set's fraction of the kept vision tokens is
    `(S / sum S + K / sum K) / 2`.
    """

    needs_vision = True
    adds_scores = True
    cuts_again = False

    def strength(self, view: LayerView, scores: Tensor) -> Tensor:
        is_vision = view.prompt.is_vision
        vision = torch.where(is_vision, scores.double(), 0.0)
        count = is_vision.sum()
        mean = vision.sum(dim=-1, keepdim=True) / count
        centred = torch.where(is_vision, vision - mean, 0.0)
        deviation = (centred.square().sum(dim=-1) / count).sqrt()
        skewness = centred.pow(3).sum(dim=-1) / count / deviation.pow(3)
        # Equal scores, or none, have no skewness.
        skewness = torch.where(deviation > 0, skewness, 0.0).clamp(min=0)
        return torch.stack((vision.sum(dim=-1), skewness), dim=-1)

    def shares(self, layers: AllLayers) -> Tensor:
        totals = layers.strengths.sum(dim=(0, 1))
        part = self._part(*(layers.strengths / totals).unbind(-1))
        prompt = layers.prompt
        num_text = (~prompt.is_vision[: prompt.num_candidates]).sum()
        for_vision = (layers.num_kept - num_text).clamp(min=0)
        return num_text + part * part.numel() * for_vision

    def _part(self, strength: Tensor, skewness: Tensor) -> Tensor:
        """Return each set's fraction of the vision tokens, `[L, S]`, from two such fractions.

        If no layer is skewed, the second are NaN, and only the strength counts.
        """
        return torch.where(skewness.isnan(), strength, (strength + skewness) / 2)


@ALLOCATIONS.register("aircache_strength")
class StrengthAllocation(StrengthAndSkewnessAllocation):
    """The paper's ablation: the vision tokens by strength alone."""

    def _part(self, strength: Tensor, skewness: Tensor) -> Tensor:
        return strength


@ALLOCATIONS.register("aircache_skewness")
class SkewnessAllocation(StrengthAndSkewnessAllocation):
    """The paper's ablation: the vision tokens by skewness alone; equal if no layer is skewed."""

    def _part(self, strength: Tensor, skewness: Tensor) -> Tensor:
        return skewness


POLICIES.add("aircache", Recipe("aircache", "aircache", "text_first"))
