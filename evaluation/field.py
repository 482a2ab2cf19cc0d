# SPDX-License-Identifier: Apache-2.0
"""A field of the evaluation: its questions, its engine and its page, and a run of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from evaluation import results
from evaluation.answers import Answer, AnswerLog, Key
from evaluation.arms import FULL, Arm, by_gates, check, identity
from evaluation.engine import Settings
from evaluation.fingerprint import fingerprint
from evaluation.parts import Part, Task
from evaluation.results import PartResult
from measure.facts import machine, revision, versions
from measure.text_words import python_prose

CACHE_SHARE = 0.6
"""Questions are asked in groups whose prompts fill this part of the cache, so that the arms of a
question find its prefix, and their regions have room."""


class Engine(Protocol):
    """An engine that answers for all arms."""

    def answers(self, work: Sequence[tuple[Any, Arm]]) -> Iterator[Answer]:
        """Yield the answers in the order in which they finish."""

    def close(self) -> None:
        """Free what the engine held."""


@dataclass(frozen=True)
class Field:
    """A field of the evaluation."""

    name: str
    """On the command line, and of its folders."""
    introduction: str
    """Beginning of its page."""
    parts: Mapping[str, Part]
    settings: Settings
    engine: Callable[[Settings, Sequence[Arm]], Engine]
    """Starts an engine for some arms."""
    question: Callable[[Any, int], Any]
    """Makes a question of a task and a number."""
    prompt_seconds: tuple[float, float]
    """Time for a prompt on two cores, measured once: by token, and by its square."""
    packages: tuple[str, ...]
    """Packages that may change an answer."""
    sources: tuple[Path, ...]
    """Files outside the evaluation that may change a question or an answer."""
    has_images: bool = False

    @property
    def fingerprint(self) -> str:
        """Return a hash of all that may change an answer: old ones with another are not used."""
        facts = [
            asdict(self.settings),
            versions(self.packages),
            machine()["python"],
            python_prose(),
        ]
        mine = [Path(__file__).with_name(f"{name}.py") for name in ("ablations", "engine")]
        return fingerprint(facts, [*mine, *self.sources])

    def facts(self, command: str, limit: int | None, first: int) -> dict[str, Any]:
        """Return how a run is made, for its results."""
        return {
            "command": command,
            "day": date.today().isoformat(),
            "revision": revision(),
            "fingerprint": self.fingerprint,
            "settings": asdict(self.settings),
            "versions": versions(self.packages),
            "machine": {name: value for name, value in machine().items() if name != "load_average"},
            "limit": limit,
            "first": first,
        }


class Run:
    """One run: parts, their answers, and an engine that starts when it is first needed."""

    def __init__(
        self, field: Field, parts: Mapping[str, Part], limit: int | None, log: AnswerLog, first: int
    ) -> None:
        """Ask nothing yet.

        Args:
            limit: on the questions of a task.
            first: number of the first question.

        Raises:
            EvictionConfigError: if this version of the plugin does not know an arm.
        """
        self.field = field
        self.parts = parts
        self.limit = limit
        self.log = log
        self.first = first
        self.engines = by_gates(arm for part in parts.values() for arm in part.arms)
        """Arms of each engine, by its folder of gates."""
        for arms in self.engines.values():
            check(arms, field.has_images)
        self._engine: Engine | None = None
        self._arms: tuple[Arm, ...] = ()

    def results(self, facts: dict[str, Any]) -> Iterator[tuple[str, PartResult]]:
        """Answer part by part, and yield the name and the result of each."""
        try:
            for name, part in self.parts.items():
                self.answer(part)
                yield (
                    name,
                    results.part_result(part, self.log, facts, self.limit, self.first),
                )
        finally:
            self.close()

    def answer(self, part: Part) -> None:
        """Have the engines answer what the log lacks, task by task; first the one that runs."""
        for engine in sorted(self.engines.values(), key=lambda arms: arms != self._arms):
            for task, questions, arms in part.work:
                most = questions if self.limit is None else min(questions, self.limit)
                self._answer(part, task, most, [arm for arm in arms if arm in engine], engine)

    def _answer(
        self, part: Part, task: Task, questions: int, arms: Sequence[Arm], engine: tuple[Arm, ...]
    ) -> None:
        """Have one engine answer questions of a task: first the full cache, then the arms."""
        began, before = time.monotonic(), len(self.log)
        for numbers in self._groups(task, questions):
            self._ask(task, [(n, FULL) for n in numbers], engine)
            counted = results.counted(part, self.log, task, numbers)
            self._ask(
                task,
                [
                    (n, arm)
                    for n in counted
                    for arm in arms
                    if arm != FULL and n - self.first < part.asked(task, arm)
                ],
                engine,
            )
        if new := len(self.log) - before:
            seconds = time.monotonic() - began
            print(f"{task.name}: {new} answers in {seconds:.0f} s", flush=True)

    def _groups(self, task: Task, questions: int) -> Iterator[range]:
        size = max(1, int(CACHE_SHARE * self.field.settings.cache_tokens / task.tokens))
        last = self.first + questions
        for start in range(self.first, last, size):
            yield range(start, min(start + size, last))

    def _ask(self, task: Task, wanted: Sequence[tuple[int, Arm]], engine: tuple[Arm, ...]) -> None:
        missing = [
            (self.field.question(task, number), arm)
            for number, arm in wanted
            if _key(task, number, arm) not in self.log
        ]
        if not missing:
            return
        started = self._started(engine)
        with tqdm(total=len(missing), desc=task.name, unit="answer", leave=False) as bar:
            for answer in started.answers(missing):
                self.log.add(answer)
                bar.update()

    def _started(self, arms: tuple[Arm, ...]) -> Engine:
        """Return the engine of some arms; another one that runs is closed before."""
        if arms != self._arms:
            self.close()
        if self._engine is None:
            self._engine, self._arms = self.field.engine(self.field.settings, arms), arms
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _key(task: Task, number: int, arm: Arm) -> Key:
    return task.name, number, identity(arm)


# -- what a run takes -----------------------------------------------------------------------

_ANSWER_SECONDS = {"passage": 0.35, "copy": 2.0}
"""Seconds that an answer takes longer than a number, by kind of task, about, on two cores."""


def plan(field: Field, parts: Mapping[str, Part], limit: int | None) -> Iterator[str]:
    """Yield a line for each task, with the time that it takes if the full cache answers it all."""
    total = 0.0
    linear, square = field.prompt_seconds
    for name, part in parts.items():
        yield f"{name}: {part.title}"
        for task, questions, arms in part.work:
            most = questions if limit is None else min(questions, limit)
            answers = sum(min(part.asked(task, arm), most) for arm in arms)
            each = 0.2 + 1e-5 * task.tokens + _ANSWER_SECONDS.get(task.kind, 0.0)
            seconds = most * task.tokens * (linear + square * task.tokens) + answers * each
            total += seconds
            yield f"  {task.name}: {most} questions, {answers} answers, {_minutes(seconds)}"
    yield f"At most about {_minutes(total)} on two cores."


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
