# SPDX-License-Identifier: Apache-2.0
"""How answers to the same prompts differ between two arms where the model ends them."""

from __future__ import annotations

from dataclasses import dataclass

from evaluation.statistics import Estimate, bootstrap, wilson
from loadtests.record import Record, Run


@dataclass(frozen=True)
class Drift:
    """The answers of an arm beside those of the reference, prompt by prompt."""

    workload: str
    rate: float
    reference: str
    arm: str
    lengths: list[tuple[int, int]]
    """Tokens of each answer: the reference's, the arm's. Failed requests are left out."""
    same_texts: int
    limit: int
    """`output_tokens` of the workload: answers of that length may have been cut."""

    @property
    def difference(self) -> Estimate:
        """Tokens that the arm's answers are longer by, mean with its bootstrap interval."""
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
        """How many answers of either arm reached the limit."""
        return (
            sum(reference >= self.limit for reference, _ in self.lengths),
            sum(its >= self.limit for _, its in self.lengths),
        )


def drifts(record: Record) -> list[Drift]:
    """One for each load with natural ends and each arm but the first."""
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
