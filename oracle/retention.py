# SPDX-License-Identifier: Apache-2.0
"""Retention: the tier of each position. Positions of a higher tier are kept first."""

from __future__ import annotations

from oracle import decoding
from oracle.token_sets import WINDOW, Case


def tiers(retain: str, case: Case, count: int, text_above: bool = False) -> list[int]:
    """Return the tier of every position, for a token set that keeps `count` candidates.

    Positions of a higher tier are kept first.

    Args:
        retain: name of the retention.
        text_above: whether text precedes everything but sinks, as guarded budgets require.
    """
    length, vision = case.layout.length, case.layout.vision
    tail = length - case.candidates
    recent = {
        "window": WINDOW,
        "recent_8": decoding.WINDOW,
        "recent_half": (count + tail) // 2,
        "recent_tenth": (count + tail) // 10,
    }
    kinds = {"text_first": [not v for v in vision], "vision_first": vision}
    kinds["by_score"] = [False] * length

    def prefers(j: int) -> bool:
        return j >= length - recent[retain] if retain in recent else kinds[retain][j]

    return [
        9 if j < case.sinks else prefers(j) + (2 if text_above and not vision[j] else 0)
        for j in range(length)
    ]
