# SPDX-License-Identifier: Apache-2.0
"""Differences in length and text between two arms' answers to the same prompts."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.record import Record, Run
from measure.statistics import Estimate, bootstrap, wilson


@dataclass(frozen=True)
class Drift:
    """Answers of an arm compared with those of the reference, prompt by prompt."""

    workload: str
    rate: float
    reference: str
    arm: str
    lengths: list[tuple[int, int]]
    """Tokens of each answer: the reference's, the arm's; failed requests are left out."""
    same_texts: int
    limit: int
    """`output_tokens` of the workload; answers of that length may have been cut."""

    @property
    def difference(self) -> Estimate:
        """Return how many tokens longer the arm's answers are, with its bootstrap interval."""
        return bootstrap([its - reference for reference, its in self.lengths])

    @property
    def means(self) -> tuple[float, float]:
        count = max(1, len(self.lengths))
        return (
            sum(reference for reference, _ in self.lengths) / count,
            sum(its for _, its in self.lengths) / count,
        )

    @property
    def same_length(self) -> Estimate:
        return wilson(sum(r == its for r, its in self.lengths), len(self.lengths))

    @property
    def same_text(self) -> Estimate:
        return wilson(self.same_texts, len(self.lengths))

    @property
    def cut(self) -> tuple[int, int]:
        """Return how many answers of each arm reached the limit."""
        return (
            sum(reference >= self.limit for reference, _ in self.lengths),
            sum(its >= self.limit for _, its in self.lengths),
        )


def drifts(record: Record) -> list[Drift]:
    """Return the drift of each arm but the first, for each load with natural ends."""
    reference, *others = record.arms
    found = []
    for name, workload in record.profile["workloads"].items():
        if not workload.get("natural_end", False):
            continue
        for first in record.of(reference, name):
            for arm in others:
                found += [
                    _drift(first, run, workload["output_tokens"])
                    for run in record.of(arm, name)
                    if run.rate == first.rate
                ]
    return found


def _drift(first: Run, second: Run, limit: int) -> Drift:
    lengths, same = [], 0
    for index, errors in enumerate(zip(first.bench["errors"], second.bench["errors"], strict=True)):
        if any(errors):
            continue
        lengths.append((first.bench["output_lens"][index], second.bench["output_lens"][index]))
        same += first.bench["texts"][index] == second.bench["texts"][index]
    return Drift(first.workload, first.rate, first.arm, second.arm, lengths, same, limit)
