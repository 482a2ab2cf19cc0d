# SPDX-License-Identifier: Apache-2.0
"""Questions and engines of the evaluation of summaries, which asks three models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evaluation.answers import Answer
from evaluation.engine import MODEL, Settings, rendered
from evaluation.fingerprint import fingerprint
from evaluation.pages_engine import PageEngine, PageSettings
from evaluation.questions import Question
from evaluation.text_arms import Task, TextArm
from evaluation.text_engine import LanguageEngine, TextEngine, TextSettings
from measure.text_tasks import TextExample, TextQuestion, TextTask
from reader.tasks import PageQuestion, PageTask


@dataclass(frozen=True)
class DemoTask:
    """A task of the demonstration model."""

    name: str
    title: str
    tokens: int = 600

    @property
    def kind(self) -> str:
        return self.name


@dataclass(frozen=True)
class DemoQuestion:
    """Question `number` of a task of the demonstration model."""

    task: DemoTask
    number: int


class DemoExample(TextExample):
    """A question of which the whole answer counts."""

    def found(self, text: str) -> str:
        return text


class DemoEngine(LanguageEngine[DemoQuestion]):
    """The demonstration model, in the numbers that it was trained in."""

    def __init__(self, settings: TextSettings, arms: Sequence[TextArm]) -> None:
        small = replace(settings, dtype="bfloat16", max_model_len=2048)
        super().__init__(MODEL, small, arms, limit_mm_per_prompt={"image": 2})

    def _example(self, question: DemoQuestion) -> TextExample:
        example = Question(question.task.name, question.number).example()
        return DemoExample(example.question, "", example.answer, "passage")

    def _prompt(self, question: DemoQuestion) -> Any:
        example = Question(question.task.name, question.number).example()
        return rendered(self.llm.renderer, example)


@dataclass(frozen=True)
class RetentiveSettings(PageSettings):
    """Settings of the engines that may change their answers."""

    max_num_seqs: int = 32

    @property
    def fingerprint(self) -> str:
        """Return a hash of these settings, of all models, versions, tasks and questions."""
        facts = [asdict(self), super().fingerprint, Settings().fingerprint]
        return fingerprint(facts, [Path(__file__)])


_KINDS: dict[type, tuple[Any, Any]] = {
    DemoTask: (DemoQuestion, DemoEngine),
    TextTask: (TextQuestion, TextEngine),
    PageTask: (PageQuestion, PageEngine),
}
"""Questions and engines by the type of their task."""


def question_of(task: Task, number: int) -> Any:
    """Return question `number` of a task of any model."""
    return _KINDS[type(task)][0](task, number)


class EngineOfTask:
    """The engine of the model that a task is for; there is one at a time."""

    def __init__(self, settings: RetentiveSettings, arms: Sequence[TextArm]) -> None:
        """Start nothing yet."""
        self._start = lambda kind: _KINDS[kind][1](settings, arms)
        self._kind: type | None = None
        self._engine: LanguageEngine[Any] | None = None

    def answers(self, work: Sequence[tuple[Any, TextArm]]) -> Iterator[Answer]:
        """Yield the answers to questions of one model in the order in which they finish."""
        kind = type(work[0][0].task)
        if self._engine is None or kind is not self._kind:
            self.close()
            self._kind, self._engine = kind, self._start(kind)
        yield from self._engine.answers(work)

    def close(self) -> None:
        """Free what the engine held."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
