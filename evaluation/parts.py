# SPDX-License-Identifier: Apache-2.0
"""Poolings and summaries that only the evaluation has, by the names that its mixes give them.

Engines that answer for such mixes run in the process that imports this module.
"""

from __future__ import annotations

from typing import Literal

from vllm_tgvkv.policies import Pooling, Summaries
from vllm_tgvkv.policies.registry import POOLINGS, SUMMARIES

UNREAD, WEIGHTED = "unread", "weighted"
"""Summaries that take their blocks and are hidden, and summaries that weigh tokens by scores."""

SUMMARIES.add(UNREAD, Summaries(gate=0))
SUMMARIES.add(WEIGHTED, Summaries(weight="score"))


def reaching(forward: int, back: int, kind: Literal["sequence", "grid"] = "sequence") -> str:
    """Return the name of a pooling over the next and the last tokens, by their maximum."""
    name = f"{kind}_{forward}_{back}"
    if name not in POOLINGS.names:
        POOLINGS.add(name, Pooling(kind, forward=forward, back=back))
    return name
