# SPDX-License-Identifier: Apache-2.0
"""What is asked, as data: tasks, the arms that answer them, and comparisons chosen before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from evaluation.arms import FULL, Arm, Pair, crossed
from measure.text_tasks import TextTask
from reader.tasks import PageTask

Task = TextTask | PageTask
"""A kind of question about a text, written or drawn."""


@dataclass(frozen=True)
class Cells:
    """Arms that answer the same questions of some tasks."""

    tasks: Sequence[Task]
    arms: Sequence[Arm]
    questions: int
    """Of each task."""


@dataclass(frozen=True)
class Part:
    """Cells that are reported together, and the comparisons that were chosen before."""

    title: str
    text: str
    cells: Sequence[Cells]
    pairs: Sequence[Pair] = ()
    """Compared on all tasks together that both arms answer."""
    counts_all: bool = False
    """Whether questions count that the full cache answers wrong, too."""
    has_picture: bool = False

    @property
    def work(self) -> Iterator[tuple[Task, int, tuple[Arm, ...]]]:
        """Yield each task once, with the largest number of questions and all its arms."""
        for task in dict.fromkeys(task for cells in self.cells for task in cells.tasks):
            mine = [cells for cells in self.cells if task in cells.tasks]
            arms = dict.fromkeys([FULL, *(arm for cells in mine for arm in cells.arms)])
            yield task, max(cells.questions for cells in mine), tuple(arms)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Return all arms, the full cache first."""
        return tuple(dict.fromkeys(arm for _, _, arms in self.work for arm in arms))

    def asked(self, task: Task, arm: Arm) -> int:
        """Return the number of questions of a task for an arm; 0 if it has none."""
        mine = [cells for cells in self.cells if task in cells.tasks]
        return max((c.questions for c in mine if arm == FULL or arm in c.arms), default=0)

    def limited(self, questions: int | None, names: Sequence[str] | None = None) -> Part:
        """Return the part limited to a number of questions of each task, and to the named tasks."""
        chosen = [
            Cells(
                [task for task in cells.tasks if names is None or task.name in names],
                cells.arms,
                min(cells.questions, questions or cells.questions),
            )
            for cells in self.cells
        ]
        return replace(self, cells=[cells for cells in chosen if cells.tasks])


def replacing(
    title: str, text: str, tasks: Sequence[Task], base: str, names: Iterable[str], budget: float
) -> Part:
    """Return the part that compares a method with those in which one part is replaced."""
    (own,), others = crossed((base,), (budget,)), crossed(names, (budget,))
    cells = (Cells(tasks, (own, *others), 20),)
    return Part(title, text, cells, [(own, other) for other in others])
