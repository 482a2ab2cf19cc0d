# SPDX-License-Identifier: Apache-2.0
"""The pictures of the pages.

Of a part: a row for each arm, a diagram for each task, a colour for each budget. Of load: a row for
each kind of questions, a diagram for each figure, a colour for each arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from evaluation.load_results import Summary
from evaluation.results import PartResult
from measure.document import percent
from measure.plots import GREY, colour, marker, save


def draw(result: PartResult, path: Path, has_full: bool = False) -> None:
    """Draw the shares of right answers with their intervals, and a line for the full cache's."""
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
        if has_full:
            place.axvline(task.right.mean, color=GREY, linestyle="--", label="full cache")
        place.set_title(task.title.replace(", ", ",\n"))
        place.set_yticks(range(len(labels)), labels)
        place.set_ylim(len(labels) - 0.5, -0.5)
        place.set_xlim(-0.03, 1.03)
    figure.supxlabel("right", fontsize="medium")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    save(figure, path)


_FIGURES: dict[str, Callable[[Summary], float]] = {
    "right answers": lambda point: point.num_right / point.questions,
    "tokens per CPU second": lambda point: point.tokens_per_cpu_second,
    "time to first token, median, s": lambda point: point.ttft_median,
    "preemptions": lambda point: point.preemptions,
}


def draw_load(results: Mapping[str, Sequence[Summary]], path: Path) -> None:
    """Draw the figures of each kind of questions over the load."""
    figure, grid = plt.subplots(
        len(results),
        len(_FIGURES),
        figsize=(12, 0.6 + 2.4 * len(results)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for row, (title, points) in zip(grid, results.items(), strict=True):
        loads = sorted({point.load for point in points})
        for axes, (name, value) in zip(row, _FIGURES.items(), strict=True):
            for number, arm in enumerate(dict.fromkeys(point.arm for point in points)):
                mine = sorted((p.load, value(p)) for p in points if p.arm == arm)
                xs, ys = zip(*mine, strict=True)
                axes.plot(xs, ys, f"{marker(number)}-", color=colour(number), label=arm)
            axes.set_xscale("log", base=2)
            axes.set_xticks(loads, [f"{load:g}" for load in loads])
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
            axes.set_title(name)
        row[0].set_ylabel(title, fontsize="large")
    figure.supxlabel("requests in flight, times what the pool of stock holds", fontsize="medium")
    grid[0][0].legend(frameon=False, loc="lower left")
    save(figure, path)
