# SPDX-License-Identifier: Apache-2.0
"""TrimKV and DBTrimKV: trained gates say how fast each token is forgotten.

Sources: Bui et al., "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs", ICLR
2026, arXiv 2512.03324; "Make Each Token Count: Towards Improving Long-Context Performance with KV
Cache Eviction", arXiv 2605.09649; and their code (github.com/ngocbh/trimkv).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vllm_tgvkv.kernels.select import key_bits, key_slices, ranking_keys, thresholds
from vllm_tgvkv.policies.base import (
    FEW_ROWS,
    AllLayers,
    Allocation,
    LayerView,
    Reduction,
    Score,
)
from vllm_tgvkv.policies.registry import ALLOCATIONS, POLICIES, SCORES, Recipe
from vllm_tgvkv.shared.prompt import RowSet

EPSILON = 1e-6
"""Attention that every token is taken to have at least."""

_LEAST, _MOST = -1e30, -float(torch.finfo(torch.float32).tiny)
"""Bounds of log beta, so that logarithms stay finite."""


@SCORES.register("trimkv")
class RetentionScore(Score):
    """`s[j] = log(mean of beta[j] ** (P - j + m) over m = 0 .. n - 1)`, the retention to come.

    beta is the gate's output for token j, P - j its age, 1 for the newest token, and n is 2. The
    papers add up where the mean is taken here, which ranks the same. Their code counts ages from 2,
    or 3 with n > 1; `Gates` can say so.
    """

    rows: RowSet = "none"
    other_rows: ClassVar[tuple[RowSet, ...]] = ()
    reductions: ClassVar[tuple[Reduction, ...]] = ("mean",)
    granularities = ("head",)
    is_signed = True
    gates = "trimkv"
    lookahead: ClassVar[int | None] = None
    """n; None if the gates say it."""

    def __call__(self, view: LayerView) -> Tensor:
        assert self.gates_in_use is not None, "build_policy gives them"
        lookahead = self.lookahead or self.gates_in_use.lookahead
        age_offset = self.gates_in_use.age_offset
        log_betas = view.gates.double().clamp_(_LEAST, _MOST)
        num_tokens = view.prompt.num_tokens
        ages = torch.arange(num_tokens, 0, -1, device=log_betas.device) + age_offset
        scores = log_betas * ages
        if lookahead > 1:
            # (1 - beta^n) / (1 - beta) / n, exact near beta = 1, where the first two are tiny.
            mean = (log_betas * lookahead).expm1_().div_(log_betas.expm1_()).div_(lookahead)
            scores += mean.log_()
        return scores.float()


@SCORES.register("trimkv_next")
class NextRetentionScore(RetentionScore):
    """The score `trimkv` with n = 1, the retention at the next token: TrimKV's own paper has it."""

    lookahead = 1


@SCORES.register("trimkv_votes")
class AttendedRetentionScore(RetentionScore):
    """The score `trimkv` plus `log(EPSILON + a[j])`, a being the rows' mean attention.

    A gate reads an image before the question is known. This is **our own** combination.
    """

    rows = "text"
    other_rows = FEW_ROWS
    reductions = ("mean", "max")

    def __call__(self, view: LayerView) -> Tensor:
        attended = view.votes
        if view.reduction == "mean":
            attended = attended / len(view.attention.row_positions)
        return super().__call__(view) + (attended + EPSILON).log()


@ALLOCATIONS.register("global")
class GlobalAllocation(Allocation):
    """Share of a token set: how many of the best b * L * S tokens of all sets belong to it.

    It works with any score whose values mean the same in all layers and heads. Ranks compare the
    tokens of all heads, and pipeline stages the tokens of their own layers.
    """

    bytes_per_score = 9  # a ranking key, and whether it is above the threshold

    def shares(self, layers: AllLayers) -> Tensor:
        scores, tiers = layers.scores, layers.tiers
        keys = torch.empty_like(scores, dtype=torch.int64)
        for part in key_slices(scores):
            keys[part] = ranking_keys(scores[part], tiers if tiers.dim() == 1 else tiers[part])
        wanted = layers.num_kept * (scores.shape[0] * scores.shape[1])
        # Equal keys of two sets both count; the shares are then some tokens too large.
        num_bits = key_bits(scores.shape[-1])
        least = thresholds(keys.flatten(), wanted, num_bits)
        return (keys >= least).sum(dim=-1).double()


POLICIES.add("trimkv", Recipe("trimkv", "uniform", "by_score", granularity="head"))
POLICIES.add("dbtrimkv", Recipe("trimkv", "global", "by_score", granularity="head"))
