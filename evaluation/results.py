# SPDX-License-Identifier: Apache-2.0
"""Results of a field, and the file that its page is written from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from evaluation.answers import Answer, AnswerLog
from evaluation.arms import FULL, Arm
from evaluation.memory import mean_held, planned_cuts
from evaluation.parts import Part, Task
from measure.statistics import bootstrap, holm
from measure.text_tasks import split_of
from vllm_tgvkv.judge.statistics import Estimate, mcnemar, wilson

FILE = "results.json"
ALL_TASKS = "all tasks"
"""Stands for the task in a comparison, which is on all of them together."""


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
    split: str
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
    decoding_held: float | None
    """Blocks held while a right answer is decoded, as a share of the full cache's; mean over the
    answers. None if it was not recorded; see `memory`."""
    said: Estimate | None = None
    """Where the answers were forced: of the tokens that the full cache says, the share that the arm
    says. Then all questions count, and `share` is of no use."""
    sketch_held: float = 0.0
    """Part of `blocks_held` that holds sketches."""
    recalled: float = 0.0
    """Share of the prompt that a choice brings back, mean over choices and answers."""
    tokens_per_step: Estimate | None = None
    """Tokens of an answer that a step gave, without the first; None without drafts."""


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


def counted(part: Part, log: AnswerLog, task: Task, numbers: Sequence[int]) -> list[int]:
    """Return the numbers of the questions that the full cache answers right, or of all."""
    counts_all = part.counts_all or task.forced
    return [n for n in numbers if counts_all or log[task.name, n, FULL].is_exact]


def part_result(part: Part, log: AnswerLog, facts: dict[str, Any], first: int = 0) -> PartResult:
    """Return the results of a part whose answers, from question `first` on, are all in the log."""

    def numbers(task: Task, *arms: Arm) -> list[int]:
        """Return the counted questions of a task that all of these arms were asked."""
        asked = min(part.asked(task, arm) for arm in arms)
        return counted(part, log, task, range(first, first + asked))

    tasks, cells, comparisons = [], [], []
    for task, questions, arms in part.work:
        full = [log[task.name, n, FULL] for n in range(first, first + questions)]
        tasks.append(_task_result(task, full, split_of(first)))
        for arm in arms[1:]:
            asked = numbers(task, arm)
            answers = [log[task.name, n, arm] for n in asked]
            cell = _cell(task, arm, answers, facts["settings"]["block_size"])
            if task.forced:
                full_ones = [log[task.name, n, FULL] for n in asked]
                cell = replace(cell, said=_said(answers, full_ones))
            cells.append(cell)
    for pair in part.pairs:
        answered = [
            tuple(log[task.name, n, arm] for arm in pair)
            for task, _, arms in part.work
            if set(pair) <= set(arms)
            for n in numbers(task, *pair)
        ]
        if answered:
            comparisons.append(_comparison(*pair, answered))
    corrected = holm([claim.p for claim in comparisons])
    comparisons = [replace(c, p_holm=p) for c, p in zip(comparisons, corrected, strict=True)]
    return PartResult(facts, tasks, cells, comparisons)


def _task_result(task: Task, answers: Sequence[Answer], split: str) -> TaskResult:
    return TaskResult(
        task=task.name,
        title=task.title,
        kind=task.kind,
        questions=len(answers),
        right=wilson(sum(answer.is_exact for answer in answers), len(answers)),
        share=bootstrap([answer.share for answer in answers]),
        prompt_tokens=_mean([answer.prompt_tokens for answer in answers]),
        answer_tokens=_mean([len(answer.hits) - 1 for answer in answers]),
        split=split,
    )


def _cell(task: Task, arm: Arm, answers: Sequence[Answer], block_size: int) -> Cell:
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
        decoding_held=_decoding_held(arm, answers, block_size),
        sketch_held=_mean([answer.sketch_blocks / answer.blocks_before for answer in answers]),
        recalled=_mean([n / each.prompt_tokens for each in answers for n in each.recalled]),
        tokens_per_step=bootstrap([answer.tokens_per_step for answer in answers])
        if arm.drafts
        else None,
    )


def _said(answers: Sequence[Answer], full: Sequence[Answer]) -> Estimate:
    return bootstrap([one.said_of(other) for one, other in zip(answers, full, strict=True)])


def _decoding_held(arm: Arm, answers: Sequence[Answer], block_size: int) -> float | None:
    """Return `Cell.decoding_held`; None under a ceiling, whose evictions the answer decides."""
    if not answers or arm.has_ceiling or any(answer.right_tokens == 0 for answer in answers):
        return None
    shares = []
    for answer in answers:
        planned = planned_cuts(answer.prompt_tokens, tuple(arm.steps), block_size)
        # A wrong answer may have ended before the last of them.
        cuts = [*answer.cuts, *planned[len(answer.cuts) :]]
        shares.append(mean_held(answer.prompt_tokens, answer.right_tokens, cuts, block_size))
    return _mean(shares)


def _comparison(first: Arm, second: Arm, answered: Sequence[tuple[Answer, ...]]) -> Comparison:
    """Return the comparison of two arms' answers to the same questions, p not corrected."""
    right = [int(one.is_exact) - int(other.is_exact) for one, other in answered]
    p = mcnemar(right.count(1), right.count(-1))
    return Comparison(
        task=ALL_TASKS,
        first=first.key,
        second=second.key,
        questions=len(answered),
        first_only=right.count(1),
        second_only=right.count(-1),
        difference=bootstrap(right),
        share=bootstrap([one.share - other.share for one, other in answered]),
        p=p,
        p_holm=p,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


# -- the file -------------------------------------------------------------------------------


T = TypeVar("T")


def read_part(part: dict[str, Any]) -> PartResult:
    """Return a part as the file has it."""
    return PartResult(
        part["facts"],
        [TaskResult(**estimates(task)) for task in part["tasks"]],
        [Cell(**estimates(cell)) for cell in part["cells"]],
        [Comparison(**estimates(claim)) for claim in part["comparisons"]],
    )


def read(folder: Path, part: Callable[[dict[str, Any]], T]) -> dict[str, T]:
    """Return the results in a folder by part; none if it has no file.

    Args:
        part: makes one of them.

    Raises:
        ResultsError: if another version wrote the file.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {name: part(value) for name, value in values.items()}
    except (TypeError, KeyError) as error:
        raise ResultsError(
            f"{path} was written by another version of this program ({error}): remove it, or name "
            "another folder with --output"
        ) from error


def write(parts: Mapping[str, Any], folder: Path) -> None:
    """Write the file: facts, and one line for each item of the results' lists."""
    folder.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items())
    (folder / FILE).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(part: Any) -> str:
    values = asdict(part)
    fields = [f'"facts": {json.dumps(values.pop("facts"))}']
    for name, items in values.items():
        rows = ",\n".join(json.dumps({k: _short(v) for k, v in item.items()}) for item in items)
        fields.append(f'"{name}": [\n{rows}\n]' if rows else f'"{name}": []')
    return "{\n" + ",\n".join(fields) + "\n}"


def _short(value: Any) -> Any:
    """Return a float with five digits; an estimate becomes a list of three."""
    if isinstance(value, dict):
        short = {name: _short(each) for name, each in value.items()}
        return list(short.values()) if short.keys() == {"mean", "low", "high"} else short
    return float(f"{value:.5g}") if isinstance(value, float) else value


def estimates(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a file with its lists of three as estimates."""
    return {n: Estimate(*value) if isinstance(value, list) else value for n, value in item.items()}
