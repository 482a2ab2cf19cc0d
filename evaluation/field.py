# SPDX-License-Identifier: Apache-2.0
"""A field of the evaluation: its questions, its engine and its page, and a run of its parts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation import results
from evaluation.answers import AnswerLog
from evaluation.arms import FULL, ROOT, Arm, by_engine, check
from evaluation.engine import Settings
from evaluation.parts import Part, Task
from evaluation.results import PartResult
from measure.facts import machine, revision, versions
from measure.text_words import python_prose

CACHE_SHARE = 0.6
"""Questions are asked in groups whose prompts fill this part of the cache, so that the arms of a
question find its prefix, and their regions have room."""


@dataclass(frozen=True)
class Field:
    """A field of the evaluation."""

    name: str
    """On the command line, and of its folders."""
    introduction: str
    """Beginning of its page."""
    parts: Mapping[str, Part]
    settings: Settings
    engine: Callable[[Settings, Sequence[Arm]], Any]
    """Starts an engine for some arms, which has `answers` and `close`."""
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
        """Return a hash of all that may change an answer: old ones with another are not used.

        The plugin's sources, the engine of the evaluation, `sources`, packages and settings.
        """
        python, prose = machine()["python"], python_prose()
        facts = [asdict(self.settings), versions(self.packages), python, prose]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        plugin = (p for folder in ("vllm_tgvkv", "kernels") for p in (ROOT / folder).rglob("*.py"))
        names = ("ablations", "eager", "engine", "states")
        mine = [Path(__file__).with_name(f"{name}.py") for name in names]
        for path in sorted({*plugin, *mine, *self.sources}):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
        return digest.hexdigest()[:12]

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
        self, field: Field, parts: Mapping[str, Part], log: AnswerLog, first: int = 0
    ) -> None:
        """Ask nothing yet; `first` is the number of the first question.

        Raises:
            EvictionConfigError: if this version of the plugin does not know an arm.
        """
        self.field, self.parts, self.log, self.first = field, parts, log, first
        self.engines = by_engine(arm for part in parts.values() for arm in part.arms)
        """Arms of each engine."""
        for arms in self.engines:
            check(arms, field.has_images)
        self._engine: Any = None
        self._arms: tuple[Arm, ...] = ()

    def results(self, facts: dict[str, Any]) -> Iterator[tuple[str, PartResult]]:
        """Answer part by part, and yield the name and the result of each."""
        try:
            for name, part in self.parts.items():
                self.answer(part)
                yield name, results.part_result(part, self.log, facts, self.first)
        finally:
            self.close()

    def answer(self, part: Part) -> None:
        """Have the engines answer what the log lacks, task by task; first the one that runs.

        Of each group of questions the full cache comes first, then the arms.
        """
        for engine in sorted(self.engines, key=lambda arms: arms != self._arms):
            for task, questions, arms in part.work:
                began, before = time.monotonic(), len(self.log)
                size = max(1, int(CACHE_SHARE * self.field.settings.cache_tokens / task.tokens))
                for start in range(0, questions, size):
                    group = range(start, min(start + size, questions))
                    numbers = [self.first + n for n in group]
                    self._ask(task, [(n, FULL) for n in numbers], engine)
                    wanted = [
                        (n, arm)
                        for n in results.counted(part, self.log, task, numbers)
                        for arm in arms[1:]
                        if arm in engine and n - self.first < part.asked(task, arm)
                    ]
                    self._ask(task, wanted, engine)
                if new := len(self.log) - before:
                    seconds = time.monotonic() - began
                    print(f"{task.name}: {new} answers in {seconds:.0f} s", flush=True)

    def _ask(self, task: Task, wanted: Sequence[tuple[int, Arm]], engine: tuple[Arm, ...]) -> None:
        missing = [
            (self.field.question(task, number), arm)
            for number, arm in wanted
            if (task.name, number, arm) not in self.log
        ]
        if not missing:
            return
        if engine != self._arms:
            self.close()
        if self._engine is None:
            self._engine, self._arms = self.field.engine(self.field.settings, engine), engine
        with tqdm(total=len(missing), desc=task.name, unit="answer", leave=False) as bar:
            for answer in self._engine.answers(missing):
                self.log.add(answer)
                bar.update()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


# -- what a run takes -----------------------------------------------------------------------

_ANSWER_SECONDS = {"passage": 0.35, "copy": 2.0}
"""Seconds that an answer takes longer than a number, by kind of task, about, on two cores."""


def plan(field: Field, parts: Mapping[str, Part]) -> Iterator[str]:
    """Yield a line for each task, with the time that it takes if the full cache answers it all."""
    total = 0.0
    linear, square = field.prompt_seconds
    for name, part in parts.items():
        yield f"{name}: {part.title}"
        for task, questions, arms in part.work:
            answers = sum(part.asked(task, arm) for arm in arms)
            each = 0.2 + 1e-5 * task.tokens + _ANSWER_SECONDS.get(task.kind, 0.0)
            seconds = questions * task.tokens * (linear + square * task.tokens) + answers * each
            total += seconds
            yield f"  {task.name}: {questions} questions, {answers} answers, {_minutes(seconds)}"
    yield f"At most about {_minutes(total)} on two cores."


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
