# SPDX-License-Identifier: Apache-2.0
"""Reach: keep what comes after the places that the newest tokens look at.

SnapKV's retention with three changes of our own (no paper): the first tokens of the answer vote
alone where eviction waits for them; a token counts as much as the one row that looks at it most;
and a score counts for the tokens after its own, half as much with every `HALVE` of them. Chosen
on the training questions of docs/evaluation.
"""

from __future__ import annotations

from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.policies.registry import POLICIES, POOLINGS, Recipe

HALVE = 64
"""Tokens after which a score counts half: a sentence or two."""
FORWARD = 4 * HALVE
"""Tokens after its own for which a score counts at most."""

POOLINGS.add("reach", Pooling("sequence", forward=FORWARD, back=1, halve=HALVE))
POLICIES.add(
    "reach",
    Recipe(
        "snapkv",
        "uniform",
        "window",
        granularity="head",
        pooling=POOLINGS["reach"],
        rows="latest",
        reduce="max",
        budget=0.2,
        defer=4,
        when="pressure",
    ),
)
