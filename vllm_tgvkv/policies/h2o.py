# SPDX-License-Identifier: Apache-2.0
"""H2O: heavy hitters, the tokens that get most attention, and the most recent tokens.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", 2023.
"""

from __future__ import annotations

from vllm_tgvkv.policies.base import VoteScore
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe


@SCORES.register("h2o")
class HeavyHitterScore(VoteScore):
    """`s[j]` = sum of A[i, j] over all rows of the prompt.

    Recomputes the attention of the whole prefill, so no part of the prompt can come from the prefix
    cache.
    """

    rows = "all"


POLICIES.add("h2o", Recipe("h2o", "uniform", "recent_half", granularity="head"))
