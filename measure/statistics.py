# SPDX-License-Identifier: Apache-2.0
"""Intervals of differences, and the correction of several tests; more in `judge.statistics`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tgvkv.judge.statistics import Estimate

LEVEL = 0.05
"""Corrected p-values below this support a claim."""

RESAMPLES = 10_000
SEED = 0


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family of claims, corrected by Holm's method, in their order."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(1.0, largest)
    return corrected
