# SPDX-License-Identifier: Apache-2.0
"""The picture of a part: a row for each arm, a diagram for each task, a colour for each budget."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from evaluation.results import PartResult
from measure.document import percent
from measure.plots import colour, marker, save


def draw(result: PartResult, path: Path) -> None:
    """Draw the shares of right answers with their intervals."""
    labels = list(dict.fromkeys(cell.label for cell in result.cells))
    tasks = [task for task in result.tasks if any(c.task == task.task for c in result.cells)]
    budgets = sorted({cell.budget for cell in result.cells}, reverse=True)
    figure, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(3 + 2.6 * len(tasks), 1.2 + 0.32 * len(labels)),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for place, task in zip(axes[0], tasks, strict=True):
        for number, budget in enumerate(budgets):
            mine = [c for c in result.cells if (c.task, c.budget) == (task.task, budget)]
            values = [cell.right for cell in mine]
            shift = 0.5 * ((number + 0.5) / len(budgets) - 0.5)
            place.errorbar(
                [value.mean for value in values],
                [labels.index(cell.label) + shift for cell in mine],
                xerr=[
                    [max(value.mean - value.low, 0.0) for value in values],
                    [max(value.high - value.mean, 0.0) for value in values],
                ],
                label=percent(budget),
                color=colour(number + 1),
                marker=marker(number),
                linewidth=0,
                markersize=5,
                elinewidth=0.9,
            )
        place.set_title(task.title.replace(", ", ",\n"))
        place.set_yticks(range(len(labels)), labels)
        place.set_ylim(len(labels) - 0.5, -0.5)
        place.set_xlim(-0.03, 1.03)
    figure.supxlabel("right", fontsize="medium")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    save(figure, path)
