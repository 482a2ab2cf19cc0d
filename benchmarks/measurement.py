# SPDX-License-Identifier: Apache-2.0
"""Measured values, and what they amount to beside those of stock vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Better = Literal["higher", "lower"]

LEAST_ROUNDS = 20
"""Fewer values say too little about how far their median may be off."""


def interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float] | None:
    """Where the median lies with 95 % confidence (bootstrap); None below `LEAST_ROUNDS`."""
    if len(values) < LEAST_ROUNDS:
        return None
    drawn = np.random.default_rng(0).choice(np.asarray(values), (resamples, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class Ratio:
    """Ours against one stock arm: above 1 is better than stock, whatever the unit.

    The median of the rounds' own ratios, each between neighbours in time, and their extremes.
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
        return f"{self.median:.3f} [{self.low:.3f} .. {self.high:.3f}]"


@dataclass(frozen=True)
class Target:
    """What a value has to reach; `value` is None where nothing was asked for."""

    text: str
    value: float
    limit: float
    better: Better = "higher"

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.better == "higher" else self.value <= self.limit


@dataclass
class Line:
    """One line of the report: a value of every arm, one a round, and the ratios to stock."""

    measure: str
    unit: str
    better: Better
    rounds: dict[str, list[float]]
    ours: str = "ours"
    targets: list[Target] = field(default_factory=list)
    notes: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    against: tuple[str, ...] = ("production", "constrained")
    """The arms that ours is compared with."""
    neighbours: dict[str, list[float]] = field(default_factory=dict)
    """Values that were taken right after one another, where there are any: ratios are theirs, and
    what slows a whole round down falls out of them. Only their number is kept."""

    @property
    def stock(self) -> list[str]:
        return [name for name in self.against if name in self.rounds]

    def median(self, arm: str) -> float:
        return statistics.median(self.rounds[arm])

    def ratio(self, against: str) -> Ratio:
        values = self.neighbours or self.rounds
        return Ratio.of(against, values[self.ours], values[against], self.better)

    def ratios(self) -> list[Ratio]:
        return [self.ratio(name) for name in self.stock] if self.ours in self.rounds else []

    def require(self, limit: float, what: str = "of stock") -> None:
        """Ask for a ratio of at least `limit` against each stock arm."""
        for ratio in self.ratios():
            text = f">= {limit:g} {what}, {ratio.against}"
            self.targets.append(Target(text, ratio.median, limit))

    def require_surely(self, limit: float, what: str) -> None:
        """The same of the lower end of the ratio's interval; without one nothing is met."""
        for ratio in self.ratios():
            low, high = ratio.interval or (0.0, 1.0)
            text = f">= {limit:g} {what}, with 95 % confidence"
            if low < limit <= high:
                text += " (too few rounds to tell)"
            self.targets.append(Target(text, low, limit))


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes a decode step has to read: every weight once, every cached key and value once."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache

    def ideal_speed_up(self, after: DecodeBytes) -> float:
        """The speed-up if time were proportional to the bytes."""
        return self.total / after.total
