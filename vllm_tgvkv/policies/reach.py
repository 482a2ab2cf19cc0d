# SPDX-License-Identifier: Apache-2.0
"""Reach: keep what comes after the places that the last tokens look at.

SnapKV's rows and retention, with two changes of our own (no paper): a token counts as much as the
one row that looks at it most, and a score counts for the next ``FORWARD`` tokens, or for fewer
where few tokens are kept. Chosen on the training questions of docs/evaluation.
"""

from __future__ import annotations

from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import POLICIES, Recipe

FORWARD = 48
"""Tokens after its own for which a score counts at most: a sentence or two."""
SHARE = 0.25
"""Bound of the same, as a share of the tokens that a head keeps."""

POLICIES.add(
    "reach",
    Recipe(
        "snapkv",
        "uniform",
        "window",
        granularity="head",
        pooling=Pooling("sequence", forward=FORWARD, back=1, forward_share=SHARE),
        reduce="max",
        budget=0.2,
        defer=4,
    ),
)
