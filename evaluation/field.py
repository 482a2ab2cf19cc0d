# SPDX-License-Identifier: Apache-2.0
"""A field of the evaluation on SmolLM2: questions, engine and page, and the program that runs it.

Asks the model questions through the vLLM engine, with the full cache and with every arm, and writes
tables and pictures. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from evaluation import text_results
from evaluation.answers import Answer, AnswerLog, read_answers, write_answers
from evaluation.fingerprint import ROOT
from evaluation.text_arms import FULL, Part, Task, TextArm, by_gates, check, eviction_settings
from evaluation.text_engine import TextSettings
from evaluation.text_report import write_report
from measure.facts import command_line, machine, revision
from measure.smollm import WeightsMissingError, find_weights
from measure.text_tasks import FRESH, TRAINING
from vllm_tgvkv.shared.errors import EvictionConfigError

DOCS = ROOT / "docs" / "evaluation"
BUILD = ROOT / "build" / "evaluation"
REPORT = "report"
RECOUNT = "recount"

TEST = "test"
TRAIN = "training"
SPLITS = {TEST: 0, "fresh": FRESH, TRAIN: TRAINING}
"""Numbers of their first questions. `fresh` are test questions too, see `text_tasks.FRESH`."""

CACHE_SHARE = 0.6
"""Questions are asked in groups whose prompts fill this part of the cache, so that the arms of a
question find its prefix, and their regions have room."""


class Engine(Protocol):
    """An engine that answers for all arms."""

    def answers(self, work: Sequence[tuple[Any, TextArm]]) -> Iterator[Answer]:
        """Yield the answers in the order in which they finish."""

    def close(self) -> None:
        """Free what the engine held."""


@dataclass(frozen=True)
class Field:
    """A field of the evaluation: its questions, its engine and its page."""

    name: str
    """Of the module with its program, and of its folders."""
    description: str
    introduction: str
    """Beginning of the page, with `{commands}` in it."""
    parts: Mapping[str, Part]
    settings: Callable[[], TextSettings]
    engine: Callable[[Any, Sequence[TextArm]], Engine]
    """Starts an engine with such settings for some arms."""
    question: Callable[[Any, int], Any]
    """Makes a question of a task and a number."""
    prompt_seconds: Callable[[int], float]
    """Time for a prompt of some tokens, for plans."""
    has_images: bool = False

    @property
    def program(self) -> str:
        return f"evaluation.{self.name}"

    @property
    def output(self) -> Path:
        """Return the folder of the published page."""
        return DOCS / self.name

    @property
    def logs(self) -> Path:
        """Return the folder of the answers."""
        return BUILD / self.name

    def write(self, results: dict[str, text_results.PartResult], folder: Path) -> None:
        """Write the page."""
        write_report(results, folder, self.parts, self.introduction, self.program)


class Run:
    """One run: parts, their answers, and an engine that starts when it is first needed."""

    def __init__(
        self,
        field: Field,
        parts: dict[str, Part],
        limit: int | None,
        log: AnswerLog,
        settings: TextSettings | None = None,
        first: int = 0,
    ) -> None:
        """Ask nothing yet.

        Args:
            limit: on the questions of a task.
            first: number of the first question.
        """
        self.field = field
        self.parts = parts
        self.limit = limit
        self.log = log
        self.first = first
        self.settings = settings or field.settings()
        self._engine: Engine | None = None
        self._arms: tuple[TextArm, ...] = ()

    @property
    def engines(self) -> dict[str, tuple[TextArm, ...]]:
        """Return the arms of each engine, by its folder of gates."""
        return by_gates(
            arm for part in self.parts.values() for _, _, arms in part.work for arm in arms
        )

    def answer(self, part: Part) -> None:
        """Have the engines answer what the log lacks, task by task; first the one that runs."""
        for engine in sorted(self.engines.values(), key=lambda arms: arms != self._arms):
            self._answer(part, engine)

    def _answer(self, part: Part, engine: tuple[TextArm, ...]) -> None:
        """Have one engine answer what the log lacks of its arms."""
        for task, questions, all_arms in part.work:
            arms = [arm for arm in all_arms if arm in engine]
            most = questions if self.limit is None else min(questions, self.limit)
            began, before = time.monotonic(), len(self.log)
            for numbers in self._groups(task, most):
                self._ask(task, [(n, FULL) for n in numbers], engine)
                self._ask(
                    task,
                    [
                        (n, arm)
                        for n in text_results.counted(part, self.log, task, numbers)
                        for arm in arms
                        if arm != FULL and n - self.first < part.asked(task, arm)
                    ],
                    engine,
                )
            if new := len(self.log) - before:
                seconds = time.monotonic() - began
                print(f"{task.name}: {new} answers in {seconds:.0f} s", flush=True)

    def _groups(self, task: Task, questions: int) -> Iterator[range]:
        size = max(1, int(CACHE_SHARE * self.settings.cache_tokens / task.tokens))
        last = self.first + questions
        for start in range(self.first, last, size):
            yield range(start, min(start + size, last))

    def _ask(
        self, task: Task, wanted: Sequence[tuple[int, TextArm]], arms: tuple[TextArm, ...]
    ) -> None:
        missing = [
            (self.field.question(task, number), arm)
            for number, arm in wanted
            if _key(task, number, arm) not in self.log
        ]
        if not missing:
            return
        engine = self._started(arms)
        with tqdm(total=len(missing), desc=task.name, unit="answer", leave=False) as bar:
            for answer in engine.answers(missing):
                self.log.add(answer)
                bar.update()

    def _started(self, arms: tuple[TextArm, ...]) -> Engine:
        """Return the engine of some arms; another one that runs is closed before."""
        if arms != self._arms:
            self.close()
        if self._engine is None:
            self._engine, self._arms = self.field.engine(self.settings, arms), arms
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _key(task: Task, number: int, arm: TextArm) -> tuple[str, int, str]:
    return task.name, number, arm.identity


# -- what a run takes -----------------------------------------------------------------------


LONG_ANSWERS = {"passage": 0.35, "numbers": 0.35, "names": 0.35, "fact": 0.1, "words": 0.1}
"""Seconds that an answer takes longer than a number, by kind of task."""


def answer_seconds(task: Task) -> float:
    """Return the same for a further answer to a prompt that the prefix cache holds."""
    return 0.2 + 1e-5 * task.tokens + LONG_ANSWERS.get(task.kind, 0.0)


def print_plan(field: Field, parts: dict[str, Part], limit: int | None) -> None:
    """Print every cell with its questions, and what it takes if the full cache answers them all."""
    total = 0.0
    for name, part in parts.items():
        print(f"{name}: {part.title}")
        for task, questions, arms in part.work:
            most = questions if limit is None else min(questions, limit)
            first = most * (field.prompt_seconds(task.tokens) + answer_seconds(task))
            asked = {arm: min(part.asked(task, arm), most) for arm in arms if arm != FULL}
            seconds = {arm: number * answer_seconds(task) for arm, number in asked.items()}
            task_total = first + sum(seconds.values())
            total += task_total
            print(f"  {task.name}: {most} questions, about {_minutes(task_total)}")
            print(f"    {FULL.key:<44} {most:>4} questions {_minutes(first):>9}")
            for arm, number in asked.items():
                print(f"    {arm.key:<44} {number:>4} questions {_minutes(seconds[arm]):>9}")
    print(f"At most about {_minutes(total)} on two cores.", flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# -- command line ---------------------------------------------------------------------------


class UsageError(ValueError):
    """A flag is wrong; the message names it, its value and the way out."""


def run(field: Field, arguments: Sequence[str] | None = None) -> int:
    """Run a field's evaluation by its command line and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser(field)
    options = parser.parse_args(given)
    if options.output is None:
        is_whole = options.tasks is None and options.questions is None
        for_test = options.split != TRAIN
        options.output = (
            field.output
            if is_whole and for_test
            else field.logs / ("some" if for_test else options.split)
        )
    try:
        if options.only in ([REPORT], [RECOUNT]):
            results = text_results.read(options.output)
            if not results:
                raise UsageError(f"--output {options.output}: holds no results; run a part first")
            if options.only == [RECOUNT]:
                results = _recounted(field, results, options.output)
        else:
            parts = _parts(field, options)
            print_plan(field, parts, options.questions)
            if options.plan:
                return 0
            results = _run(field, parts, options, given)
    except (
        UsageError,
        EvictionConfigError,
        WeightsMissingError,
        text_results.ResultsError,
    ) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted; the same command continues from here.", file=sys.stderr)
        return 130
    field.write(results, options.output)
    print(f"Written: {options.output / 'README.md'}")
    return 0


def _run(
    field: Field, parts: dict[str, Part], options: argparse.Namespace, given: Sequence[str]
) -> dict[str, text_results.PartResult]:
    """Answer part by part, and write answers and results after each one."""
    if find_weights() is None:
        raise WeightsMissingError
    settings = field.settings()
    results = text_results.read(options.output)
    with AnswerLog(options.log, settings.fingerprint, options.fresh) as log:
        first = SPLITS[options.split]
        current = Run(field, parts, options.questions, log, first=first)
        for arms in current.engines.values():
            check(arms, eviction_settings(arms), field.has_images)
        facts = {
            "command": command_line(field.program, given),
            "day": date.today().isoformat(),
            "revision": revision(),
            "fingerprint": settings.fingerprint,
            "settings": asdict(settings),
            "versions": settings.versions,
            "machine": {name: value for name, value in machine().items() if name != "load_average"},
            "limit": options.questions,
            "first": first,
            "tasks": options.tasks,
        }
        try:
            for name, part in parts.items():
                current.answer(part)
                results[name] = text_results.part_result(part, log, facts, options.questions, first)
                results = {name: results[name] for name in field.parts if name in results}
                text_results.write(results, options.output)
                answers = text_results.answers_of(part, log, options.questions, first)
                write_answers(answers, options.output / _archive(name))
        finally:
            current.close()
    return results


def _archive(part: str) -> str:
    """Return the name of the file with a part's answers."""
    return f"answers-{part}.jsonl.gz"


def _recounted(
    field: Field, results: dict[str, text_results.PartResult], folder: Path
) -> dict[str, text_results.PartResult]:
    """Return the results with those parts counted again whose answers are kept in the folder."""
    for name, result in results.items():
        if (path := folder / _archive(name)).exists():
            facts, part = result.facts, field.parts[name]
            if facts["tasks"] is not None:
                part = _with_tasks(part, facts["tasks"])
            answers = read_answers(path)
            results[name] = text_results.part_result(
                part, answers, facts, facts["limit"], facts["first"]
            )
            print(f"{name}: {len(answers)} answers counted again")
    text_results.write(results, folder)
    return results


def _parser(field: Field) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {field.program}", description=field.description
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*field.parts, REPORT, RECOUNT),
        metavar="PART",
        help=f"of {', '.join(field.parts)}; {REPORT} alone rewrites the page of an earlier run, "
        f"{RECOUNT} alone its tables from the answers that were kept with it",
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="default: all of each part")
    parser.add_argument("--questions", type=int, metavar="N", help="at most this many of each task")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default=TEST,
        help="questions to report on, or others to choose by (default: test)",
    )
    parser.add_argument("--plan", action="store_true", help="print cells and times, and end")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"folder of the page (default: docs/evaluation/{field.name}; with --tasks or "
        f"--questions build/evaluation/{field.name}/some, with --split training .../training)",
    )
    parser.add_argument(
        "--log", type=Path, default=field.logs, help="folder of the answers (below build/)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the answers of earlier runs")
    return parser


def _parts(field: Field, options: argparse.Namespace) -> dict[str, Part]:
    """Return the chosen parts with the chosen tasks.

    Raises:
        UsageError: naming the flag, its value and what it may be.
    """
    for_test = options.split != TRAIN
    all_parts = [name for name, part in field.parts.items() if not (for_test and part.chooses)]
    names = options.only or all_parts
    for name in names:
        if name in field.parts and name not in all_parts:
            raise UsageError(f"--only {name}: a choice is made on it, so give it --split training")
    for word in {REPORT, RECOUNT} & set(names):
        raise UsageError(f"--only {' '.join(names)}: {word} stands alone, give it no other part")
    if options.questions is not None and options.questions < 1:
        raise UsageError(f"--questions {options.questions}: give a whole number of at least 1")
    parts = {name: part for name, part in field.parts.items() if name in names}
    known = {task.name for part in parts.values() for task, _, _ in part.work}
    if options.tasks is None:
        return parts
    if wrong := [name for name in options.tasks if name not in known]:
        raise UsageError(f"--tasks {' '.join(wrong)}: choose from {' '.join(sorted(known))}")
    chosen = {name: _with_tasks(part, options.tasks) for name, part in parts.items()}
    return {name: part for name, part in chosen.items() if part.cells}


def _with_tasks(part: Part, names: Sequence[str]) -> Part:
    cells = [
        replace(cells, tasks=tuple(task for task in cells.tasks if task.name in names))
        for cells in part.cells
    ]
    return replace(part, cells=tuple(c for c in cells if c.tasks))
