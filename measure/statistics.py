# SPDX-License-Identifier: Apache-2.0
"""Intervals of shares and differences, tests of paired answers, and their correction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tgvkv.judge.statistics import (
    CONFIDENCE_Z,
    RESAMPLES,
    SEED,
    Estimate,
    bootstrap,
    mcnemar,
    wilson,
)

__all__ = (
    "CONFIDENCE_Z",
    "LEVEL",
    "RESAMPLES",
    "SEED",
    "Estimate",
    "bootstrap",
    "holm",
    "mcnemar",
    "wilson",
)

LEVEL = 0.05
"""Corrected p-values below this support a claim."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of a family of claims, corrected by Holm's method, in their order."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        corrected[index] = min(1.0, largest)
    return corrected
