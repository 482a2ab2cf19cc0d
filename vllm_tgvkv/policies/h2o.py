# SPDX-License-Identifier: Apache-2.0
"""H2O: heavy hitters, the tokens that get most attention, and the most recent tokens.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", 2023.
"""

from __future__ import annotations

from torch import Tensor

from vllm_tgvkv.policies.base import LayerView, Score, VoteScore
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe


@SCORES.register("h2o")
class HeavyHitterScore(VoteScore):
    """`s[j]` = sum of A[i, j] over all rows of the prompt.

    Recomputes the attention of the whole prefill, so no part of the prompt can come from the prefix
    cache.
    """

    rows = "all"


@SCORES.register("h2o_accumulated")
class AccumulatedScore(Score):
    """The same, to which each later cut adds the rows that vote there, over the keys that are left.

    So a token's score is the attention that it has got from the prompt and from the answer.
    """

    rows = "all"
    other_rows = ()
    granularities = ("head",)
    accumulates = True

    def __call__(self, view: LayerView) -> Tensor:
        return view.votes if view.carried is None else view.votes + view.carried


POLICIES.add("h2o", Recipe("h2o", "uniform", "recent_half", granularity="head"))
