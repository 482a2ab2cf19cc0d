# SPDX-License-Identifier: Apache-2.0
"""Intervals of shares and differences, and the test of paired answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE_Z = 1.959963984540054
"""Quantile of the normal distribution for two-sided 95 %."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; all 0 where nothing was counted."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.0f} % [{100 * self.low:.0f}, {100 * self.high:.0f}]"

    @property
    def points(self) -> str:
        """A difference of shares in percentage points."""
        mean, low, high = (round(100 * each) for each in (self.mean, self.low, self.high))
        return f"{mean} points [{low}, {high}]"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def wilson(successes: int, total: int) -> Estimate:
    """Return the share of successes with Wilson's score interval."""
    if total == 0:
        return Estimate(0.0, 0.0, 0.0)
    share, z2 = successes / total, CONFIDENCE_Z**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) * CONFIDENCE_Z
    half /= 1 + z2 / total
    # At the ends the formula is exact and rounding is not.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return Estimate(share, low, high)


def paired_difference(both: int, first_only: int, second_only: int, neither: int) -> Estimate:
    """Return the share of the first less that of the second, with Newcombe's score interval.

    The arguments count the questions by who answered them right. Method 10 of Newcombe (Statistics
    in Medicine 17, 1998, pages 2635 to 2650) joins the two Wilson intervals by the correlation of
    the answers. So the interval has a width also where no two answers differ.
    """
    total = both + first_only + second_only + neither
    if total == 0:
        return Estimate(0.0, 0.0, 0.0)
    first, second = wilson(both + first_only, total), wilson(both + second_only, total)
    margins = (both + first_only) * (second_only + neither)
    margins *= (both + second_only) * (first_only + neither)
    determinant: float = both * neither - first_only * second_only
    if determinant > 0:  # corrected for continuity
        determinant = max(determinant - total / 2, 0.0)
    correlation = determinant / math.sqrt(margins) if margins else 0.0

    def joined(one: float, other: float) -> float:
        return math.sqrt(one**2 - 2 * correlation * one * other + other**2)

    difference = (first_only - second_only) / total
    return Estimate(
        difference,
        difference - joined(first.mean - first.low, second.high - second.mean),
        difference + joined(first.high - first.mean, second.mean - second.low),
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided exact p-value of McNemar's test.

    The arguments count the questions that only the first or only the second answered right. If
    both are equally good, each such question is a toss of a fair coin.
    """
    total, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << total))
