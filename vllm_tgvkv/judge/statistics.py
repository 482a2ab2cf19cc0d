# SPDX-License-Identifier: Apache-2.0
"""Intervals of shares and differences, and the test of paired answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE_Z = 1.959963984540054
"""Quantile of the normal distribution for two-sided 95 %."""

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; all 0 where nothing was counted."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.0f} % [{100 * self.low:.0f}, {100 * self.high:.0f}]"

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


def bootstrap(values: Sequence[float], seed: int = SEED, resamples: int = RESAMPLES) -> Estimate:
    """Return the mean with the percentile interval of its bootstrap.

    For a paired comparison the values are the differences, question by question.
    """
    if len(values) == 0:
        return Estimate(0.0, 0.0, 0.0)
    distinct, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    total = int(counts.sum())
    # Drawing values with replacement draws how often each distinct one occurs.
    draws = np.random.default_rng(seed).multinomial(total, counts / total, size=resamples)
    means = draws @ distinct / total
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(distinct @ counts / total), float(low), float(high))


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided exact p-value of McNemar's test.

    The arguments count the questions that only the first or only the second answered right. If
    both are equally good, each such question is a toss of a fair coin.
    """
    total, fewer = first_only + second_only, min(first_only, second_only)
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << total))
