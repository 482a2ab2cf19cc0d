# SPDX-License-Identifier: Apache-2.0
"""The papers' own experiments at our size, as data: what is asked or measured, and what they claim.

Sources: TGV-KV (arXiv 2606.03075), AirCache (2503.23956), VL-Cache (2410.23317), "Make Each Token
Count" (2605.09649, DBTrimKV) and RetentiveKV (2605.04075).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evaluation import pages, texts
from evaluation.arms import AIRCACHE, FULL, STATES, Arm, arm, crossed
from evaluation.field import Field
from evaluation.parts import Cells, Part, Task

NUMBERS = pages.NUMBERS[:2]
"""A number on a page of prose, and on one of noise."""


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the difference here that is above 0 if it holds."""

    text: str
    printed: str = ""
    """The paper's figures."""
    pair: tuple[Arm, ...] = ()
    """Arms of which the first is to keep more answers."""
    value: str = ""
    """Name of a number of each prompt; see `attention`."""
    near: float | None = None
    """The number is to be this near to 0, in place of above it."""
    judged: bool = True
    """False for a figure that only stands beside the paper's."""


@dataclass(frozen=True)
class Experiment:
    """One of a paper's tables or figures."""

    title: str
    text: str
    claims: Sequence[Claim]
    field: Field | None = None
    """Where questions are asked; None for a statistic of attention."""
    cells: Sequence[Cells] = ()
    counts_all: bool = False
    tasks: Sequence[Task] = ()
    """Prompts of a statistic."""
    prompts: int = 0
    """Of each task."""

    @property
    def part(self) -> Part:
        """Return what is asked."""
        pairs = [claim.pair for claim in self.claims]
        return Part(self.title, self.text, self.cells, pairs, self.counts_all, True)
