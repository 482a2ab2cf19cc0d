# SPDX-License-Identifier: Apache-2.0
"""Lines of a report: measured values, their ratios to stock vLLM, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Better = Literal["higher", "lower"]

LEAST_ROUNDS = 20
"""Fewer values give no useful interval of their median."""


def interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float] | None:
    """Return the 95 % interval of the median (bootstrap); None below `LEAST_ROUNDS` values."""
    if len(values) < LEAST_ROUNDS:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values), (resamples, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    """Our speed over that of another arm: above 1 is faster, for any unit.

    The median, and the extremes if they differ, of the rounds' ratios between neighbours in time.
    """

    against: str
    median: float
    low: float
    high: float
    interval: tuple[float, float] | None = None
    """Of the median, see `interval`."""

    @classmethod
    def of(cls, against: str, ours: list[float], stock: list[float], better: Better) -> Ratio:
        pairs = list(zip(ours, stock, strict=True))
        ratios = [o / s if better == "higher" else s / o for o, s in pairs]
        middle = statistics.median(ratios)
        return cls(against, middle, min(ratios), max(ratios), interval(ratios))

    def __str__(self) -> str:
        if self.interval:
            low, high = self.interval
            return f"{self.median:.4f} (95 %: {low:.4f} .. {high:.4f})"
        spread = f" [{self.low:.3f} .. {self.high:.3f}]" if self.low < self.high else ""
        return f"{self.median:.3f}{spread}"


@dataclass(frozen=True)
class Target:
    """A measured value and the limit that it has to reach."""

    text: str
    value: float
    limit: float
    better: Better = "higher"

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.better == "higher" else self.value <= self.limit

    def __str__(self) -> str:
        return f"{self.text}: {number(self.value)} {'met' if self.met else '**missed**'}"


@dataclass
class Line:
    """One line of the report: a value of every arm and round, and the ratios of ours to others."""

    measure: str
    unit: str
    better: Better
    rounds: dict[str, list[float]]
    ours: str = "ours"
    targets: list[Target] = field(default_factory=list)
    notes: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    against: tuple[str, ...] = ("production", "constrained")
    """Names of the arms that ours is compared with."""
    neighbours: dict[str, list[float]] = field(default_factory=dict)
    """Values that were taken right after one another. If there are any, ratios are formed from
    them, so that what slows a whole round down cancels. Only their number is recorded."""
    part: str = ""
    """Name of the part that gave this line."""

    @property
    def others(self) -> list[str]:
        return [name for name in self.against if name in self.rounds]

    def median(self, arm: str) -> float:
        return statistics.median(self.rounds[arm])

    def ratio(self, against: str) -> Ratio:
        values = self.neighbours or self.rounds
        return Ratio.of(against, values[self.ours], values[against], self.better)

    def ratios(self) -> list[Ratio]:
        return [self.ratio(name) for name in self.others] if self.ours in self.rounds else []

    def require(self, limit: float, what: str = "of stock") -> None:
        """Add the target of a ratio of at least `limit` to each other arm."""
        for ratio in self.ratios():
            text = f">= {limit:g} {what}, {ratio.against}"
            self.targets.append(Target(text, ratio.median, limit))

    def require_surely(self, limit: float, what: str) -> None:
        """Add the same target for the lower end of the interval; without one it is missed."""
        for ratio in self.ratios():
            low, high = ratio.interval or (0.0, 1.0)
            text = f">= {limit:g} {what}, with 95 % confidence"
            if low < limit <= high:
                text += " (too few rounds to tell)"
            self.targets.append(Target(text, low, limit))


def number(value: float) -> str:
    """Return a number with four digits, or a large one with all."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
