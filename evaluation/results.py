# SPDX-License-Identifier: Apache-2.0
"""Cells of the result tables, and comparisons between arms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from evaluation.answers import Answer, AnswerLog
from evaluation.arms import ABLATIONS, FULL, OTHER_GRANULARITY, EvaluatedArm
from evaluation.questions import Question
from measure.statistics import Estimate, bootstrap, holm, mcnemar, wilson

ALL = "all"
"""The pooled questions of all tasks."""


@dataclass(frozen=True)
class Cell:
    """The results of one arm on one task, or on all tasks."""

    block_size: int
    """Tokens of a page."""
    emulated: bool
    """Whether Hugging Face answered instead of the engine."""
    method: str
    budget: float | str
    task: str
    questions: int
    exact: Estimate
    """Answers that are right to the last character."""
    first: Estimate
    """Answers whose first token is right, which is computed from the full cache."""
    later: Estimate
    """Share of right tokens among all later ones, mean over the answers."""
    later_after_first: Estimate
    """The same over answers whose first token is right."""
    blocks_held: float
    """Share of the prompt's blocks held while decoding, mean over the answers."""
    tokens_held: float
    """Share of the prompt's tokens kept, mean over layers, heads and answers."""


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same questions, at the same budget."""

    budget: float | str
    first: str
    second: str
    questions: int
    first_only: int
    """Questions that only `first` answered right."""
    second_only: int
    difference: Estimate
    """Accuracy of `first` minus that of `second`, with its bootstrap interval."""
    p: float
    """McNemar's exact test, not corrected."""
    p_holm: float
    """Corrected by Holm's method over the family named with the table."""


Answers = Sequence[Answer]


def collect(log: AnswerLog, arm: EvaluatedArm, questions: Iterable[Question]) -> list[Answer]:
    """Return the answers of an arm, in the order of the questions."""
    return [log[question.task, question.number, arm.key] for question in questions]


def cells(
    log: AnswerLog,
    arms: Iterable[EvaluatedArm],
    questions: Sequence[Question],
    block_size: int,
    emulated: bool = False,
) -> list[Cell]:
    """Return a cell for each arm and task, and one per arm for all tasks."""
    tasks = list(dict.fromkeys(question.task for question in questions))
    result = []
    for arm in arms:
        answers = collect(log, arm, questions)
        for task in (ALL, *tasks):
            mine = [answer for answer in answers if task in (ALL, answer.task)]
            result.append(cell(arm, task, mine, block_size, emulated))
    return result


def cell(
    arm: EvaluatedArm, task: str, answers: Answers, block_size: int, emulated: bool = False
) -> Cell:
    """Return the cell of one arm's answers."""
    return Cell(
        block_size=block_size,
        emulated=emulated,
        method=arm.method,
        budget=arm.budget,
        task=task,
        questions=len(answers),
        exact=wilson(sum(answer.is_exact for answer in answers), len(answers)),
        first=wilson(sum(answer.first for answer in answers), len(answers)),
        later=bootstrap([answer.later for answer in answers]),
        later_after_first=bootstrap([answer.later for answer in answers if answer.first]),
        blocks_held=float(np.mean([answer.blocks_held for answer in answers])),
        tokens_held=float(np.mean([answer.tokens_held for answer in answers])),
    )


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its name, and its answers in the order of the questions."""

    name: str
    answers: Answers


def compare_pairs(pairs: Sequence[tuple[float | str, Side, Side]]) -> list[Comparison]:
    """Compare the sides of each pair, given with its budget; all pairs are one family of claims."""
    counts, differences = [], []
    for _, first, second in pairs:
        assert [a.key[:2] for a in first.answers] == [a.key[:2] for a in second.answers]
        ours = np.array([a.is_exact for a in first.answers], dtype=int)
        theirs = np.array([a.is_exact for a in second.answers], dtype=int)
        counts.append((int((ours > theirs).sum()), int((ours < theirs).sum())))
        differences.append(bootstrap((ours - theirs).tolist()))
    p_values = [mcnemar(*count) for count in counts]
    return [
        Comparison(
            budget=budget,
            first=first.name,
            second=second.name,
            questions=len(first.answers),
            first_only=first_only,
            second_only=second_only,
            difference=difference,
            p=p,
            p_holm=corrected,
        )
        for (budget, first, second), (first_only, second_only), difference, p, corrected in zip(
            pairs, counts, differences, p_values, holm(p_values), strict=True
        )
    ]


def compare_arms(
    log: AnswerLog,
    pairs: Iterable[tuple[EvaluatedArm, EvaluatedArm]],
    questions: Sequence[Question],
) -> list[Comparison]:
    """Compare pairs of arms of one budget each."""

    def side(arm: EvaluatedArm) -> Side:
        return Side(arm.method, collect(log, arm, questions))

    return compare_pairs([(first.budget, side(first), side(second)) for first, second in pairs])


def compare_methods(
    log: AnswerLog, arms: Sequence[EvaluatedArm], questions: Sequence[Question]
) -> list[Comparison]:
    """Compare all pairs of methods at each budget, the better one first.

    The family is all pairs of a budget: which of them is the best is read off the same answers.
    """
    result = []
    for budget in dict.fromkeys(arm.budget for arm in arms if arm != FULL):
        mine = [arm for arm in arms if arm.budget == budget]
        right = {
            arm: sum(answer.is_exact for answer in collect(log, arm, questions)) for arm in mine
        }
        ranked = sorted(mine, key=lambda arm: -right[arm])
        result += compare_arms(log, combinations(ranked, 2), questions)
    return result


def compare_ablations(
    log: AnswerLog, budgets: Sequence[float], questions: Sequence[Question]
) -> list[Comparison]:
    """Compare TGV-KV with itself, one part replaced; all replacements are one family."""
    pairs = [
        (EvaluatedArm("tgv", budget), EvaluatedArm(part.method(value), budget))
        for budget in budgets
        for part in ABLATIONS
        for value in part.others
    ]
    return compare_arms(log, pairs, questions)


def compare_granularities(
    log: AnswerLog, arms: Iterable[EvaluatedArm], questions: Sequence[Question]
) -> list[Comparison]:
    """Compare methods with themselves at their other granularity; all are one family."""
    pairs = [(EvaluatedArm(OTHER_GRANULARITY[arm.method]["base"], arm.budget), arm) for arm in arms]
    return compare_arms(log, pairs, questions)


def first_token_changes(
    log: AnswerLog, arms: Iterable[EvaluatedArm], questions: Sequence[Question]
) -> tuple[int, int]:
    """Return the number of answers that begin differently than with the full cache, and of all.

    The first token is computed before anything is evicted: only rounding can change it, which
    depends on the rest of the batch.
    """
    full = {(a.task, a.number): a.text[:1] for a in collect(log, FULL, questions)}
    others = [a for arm in arms if arm != FULL for a in collect(log, arm, questions)]
    return sum(a.text[:1] != full[a.task, a.number] for a in others), len(others)


def same_texts(first: Answers, second: Answers) -> tuple[int, int]:
    """Return the number of equal texts among answers to the same questions, and of all."""
    equal = sum(a.text == b.text for a, b in zip(first, second, strict=True))
    return equal, len(first)
