# SPDX-License-Identifier: Apache-2.0
"""The questions of an evaluation: tasks of demo/tasks.py on pages of the test split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demo.tasks import TASKS, Example, make_example

SPLIT = "test"


@dataclass(frozen=True)
class Question:
    """Question `number` of `task`. No two questions share a page, so all are independent."""

    task: str
    number: int

    @property
    def index(self) -> int:
        """Return the index of the page and example in the test split."""
        return self.number * len(TASKS) + TASKS.index(self.task)

    def example(self) -> Example:
        return make_example(self.task, SPLIT, self.index)


def questions(tasks: Sequence[str], count: int) -> list[Question]:
    """Return `count` questions of each task, the tasks in turn."""
    return [Question(task, number) for number in range(count) for task in tasks]
