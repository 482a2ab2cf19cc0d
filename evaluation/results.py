# SPDX-License-Identifier: Apache-2.0
"""Results of a field, and the file that its page is written from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from evaluation.answers import Answer, Key
from evaluation.arms import FULL, Arm, identity
from evaluation.memory import mean_held, planned_cuts
from evaluation.parts import Part, Task
from measure.statistics import Estimate, bootstrap, holm, mcnemar, wilson
from measure.text_tasks import split_of

FILE = "results.json"
ALL_TASKS = "all tasks"
"""Stands for the task in a comparison on all of them together."""


class Answers(Protocol):
    """Answers by their keys, such as a log."""

    def __getitem__(self, key: Key, /) -> Answer: ...


class ResultsError(ValueError):
    """A file of results cannot be read; the message names it and the way out."""


@dataclass(frozen=True)
class TaskResult:
    """Answers of the full cache to a task."""

    task: str
    title: str
    kind: str
    questions: int
    right: Estimate
    share: Estimate
    """Of an answer before the first mistake."""
    prompt_tokens: float
    """Mean over the questions."""
    answer_tokens: float
    """Tokens of the truth, or items of a list; mean over the questions, without an end token."""
    split: str = "test"
    """Of the questions; see `text_tasks.TRAINING`."""


@dataclass(frozen=True)
class Cell:
    """One arm's answers to those questions of a task that the full cache answers right."""

    task: str
    label: str
    """Name of the arm without its budget."""
    budget: float
    questions: int
    """That were counted."""
    num_right: int
    num_complete: int
    """Answers of which every token is right, whatever follows: what RULER counts."""
    right: Estimate
    share: Estimate
    """Of an answer before the first mistake."""
    blocks_held: float
    """Share of the prompt's blocks held after the eviction, mean over the answers."""
    decoding_held: float | None = None
    """Blocks held while a right answer is decoded, as a share of the full cache's; mean over the
    answers. None if it was not recorded; see `memory`."""


@dataclass(frozen=True)
class Comparison:
    """Two arms on the same counted questions."""

    task: str
    first: str
    second: str
    questions: int
    first_only: int
    second_only: int
    difference: Estimate
    """Share of right answers of `first` minus that of `second`."""
    share: Estimate
    """The same for the part that is right before the first mistake."""
    p: float
    """McNemar's exact test, not corrected."""
    p_holm: float
    """Corrected by Holm's method over all comparisons of the part."""


@dataclass(frozen=True)
class PartResult:
    """The results of one part, and the facts of how they were made."""

    facts: dict[str, Any]
    tasks: list[TaskResult]
    cells: list[Cell]
    comparisons: list[Comparison]


def counted(part: Part, log: Answers, task: Task, numbers: Iterable[int]) -> list[int]:
    """Return the numbers of the questions that the full cache answers right, or of all."""
    return [n for n in numbers if part.counts_all or log[task.name, n, identity(FULL)].is_exact]


def part_result(
    part: Part, log: Answers, facts: dict[str, Any], limit: int | None = None, first: int = 0
) -> PartResult:
    """Return the results of a part whose answers are all in the log.

    Args:
        limit: on the questions of a task.
        first: number of the first question.
    """
    tasks, cells = [], []
    for task, questions, arms in part.work:
        most = questions if limit is None else min(questions, limit)
        full = [log[task.name, n, identity(FULL)] for n in range(first, first + most)]
        tasks.append(_task_result(task, full, first))
        for arm in arms:
            if arm != FULL:
                numbers = _counted_of(part, log, task, (arm,), limit, first)
                answers = [log[task.name, number, identity(arm)] for number in numbers]
                cells.append(_cell(task, arm, answers, facts))
    return PartResult(facts, tasks, cells, _comparisons(part, log, limit, first))


def _counted_of(
    part: Part, log: Answers, task: Task, arms: Sequence[Arm], limit: int | None, first: int
) -> list[int]:
    """Return the numbers of the counted questions of a task that all of these arms were asked."""
    asked = min(part.asked(task, arm) for arm in arms)
    most = asked if limit is None else min(asked, limit)
    return counted(part, log, task, range(first, first + most))


def _task_result(task: Task, answers: Sequence[Answer], first: int) -> TaskResult:
    return TaskResult(
        task=task.name,
        title=task.title,
        kind=task.kind,
        questions=len(answers),
        right=wilson(sum(answer.is_exact for answer in answers), len(answers)),
        share=bootstrap([answer.share for answer in answers]),
        prompt_tokens=_mean([answer.prompt_tokens for answer in answers]),
        answer_tokens=_mean([len(answer.hits) - 1 for answer in answers]),
        split=split_of(first),
    )


def _cell(task: Task, arm: Arm, answers: Sequence[Answer], facts: dict[str, Any]) -> Cell:
    num_right = sum(answer.is_exact for answer in answers)
    return Cell(
        task=task.name,
        label=arm.label,
        budget=float(arm.budget or 1.0),
        questions=len(answers),
        num_right=num_right,
        num_complete=sum(answer.share == 1.0 for answer in answers),
        right=wilson(num_right, len(answers)),
        share=bootstrap([answer.share for answer in answers]),
        blocks_held=_mean([answer.blocks_held for answer in answers]),
        decoding_held=_decoding_held(arm, answers, facts["settings"]["block_size"]),
    )


def _decoding_held(arm: Arm, answers: Sequence[Answer], block_size: int) -> float | None:
    """Return `Cell.decoding_held`; None under a ceiling, whose evictions the answer decides."""
    if not answers or arm.has_ceiling or any(answer.right_tokens == 0 for answer in answers):
        return None
    shares = []
    for answer in answers:
        tokens = answer.prompt_tokens
        planned = planned_cuts(tokens, tuple(arm.steps), block_size)
        # A wrong answer may have ended before the last of them.
        cuts = [*answer.cuts, *planned[len(answer.cuts) :]]
        shares.append(mean_held(tokens, answer.right_tokens, cuts, block_size))
    return _mean(shares)


def _comparisons(part: Part, log: Answers, limit: int | None, start: int) -> list[Comparison]:
    """Return the part's comparisons, each on all tasks that both arms were asked."""
    found = []
    for first, second in part.pairs:
        places = [
            (task.name, number)
            for task, _, arms in part.work
            if {first, second} <= set(arms)
            for number in _counted_of(part, log, task, (first, second), limit, start)
        ]
        if places:
            found.append(_compared(first, second, log, places))
    corrected = holm([claim.p for claim in found])
    return [replace(claim, p_holm=p) for claim, p in zip(found, corrected, strict=True)]


def _compared(
    first: Arm, second: Arm, log: Answers, places: Sequence[tuple[str, int]]
) -> Comparison:
    """Return a comparison on questions, which are given by task and number."""
    ours, theirs = ([log[*place, identity(arm)] for place in places] for arm in (first, second))
    pairs = list(zip(ours, theirs, strict=True))
    right = [int(one.is_exact) - int(other.is_exact) for one, other in pairs]
    p = mcnemar(right.count(1), right.count(-1))
    return Comparison(
        task=ALL_TASKS,
        first=first.key,
        second=second.key,
        questions=len(places),
        first_only=right.count(1),
        second_only=right.count(-1),
        difference=bootstrap(right),
        share=bootstrap([one.share - other.share for one, other in pairs]),
        p=p,
        p_holm=p,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


# -- the file -------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, PartResult]:
    """Return the results in a folder by part; none if it has no file.

    Raises:
        ResultsError: if another version wrote the file.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        return {
            name: PartResult(
                part["facts"],
                [TaskResult(**_estimates(task)) for task in part["tasks"]],
                [Cell(**_estimates(cell)) for cell in part["cells"]],
                [Comparison(**_estimates(claim)) for claim in part["comparisons"]],
            )
            for name, part in json.loads(path.read_text(encoding="utf-8")).items()
        }
    except (TypeError, KeyError) as error:
        raise ResultsError(
            f"{path} was written by another version of this program ({error}): remove it, or name "
            "another folder with --output"
        ) from error


def write(parts: dict[str, PartResult], folder: Path) -> None:
    """Write the file with one line for each task, cell and comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items())
    (folder / FILE).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(part: PartResult) -> str:
    values = asdict(part)
    fields = [f'"facts": {json.dumps(values.pop("facts"))}']
    for name, items in values.items():
        rows = ",\n".join(json.dumps(_rounded(item)) for item in items)
        fields.append(f'"{name}": [\n{rows}\n]' if rows else f'"{name}": []')
    return "{\n" + ",\n".join(fields) + "\n}"


def _rounded(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with floats of five digits; an estimate becomes a list of three."""
    short: dict[str, Any] = {}
    for name, value in item.items():
        if isinstance(value, dict):
            short[name] = [float(f"{number:.5g}") for number in value.values()]
        else:
            short[name] = float(f"{value:.5g}") if isinstance(value, float) else value
    return short


def _estimates(item: dict[str, Any]) -> dict[str, Any]:
    return {n: Estimate(*value) if isinstance(value, list) else value for n, value in item.items()}
