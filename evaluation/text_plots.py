# SPDX-License-Identifier: Apache-2.0
"""The pictures of the evaluation on texts, drawn from its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.text_arms import MIXES, POOLINGS, SCHEDULE, VOTES
from evaluation.text_results import PartResult, TaskResult, TextCell
from measure.document import percent
from measure.plots import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    colour,
    marker,
    save,
)
from measure.statistics import Estimate

ONE_ROW = 4
"""Most diagrams side by side."""
MOST_LINES = 8
"""More arms than these cannot be told apart as lines; they get a row each."""
RIGHT = "right (passages, copies: before the first mistake)"


def draw_budgets(result: PartResult, path: Path) -> None:
    """Draw a diagram for each task: right answers by budget, or the share of passages."""
    labels = list(dict.fromkeys(cell.label for cell in result.cells))
    tasks = [task for task in result.tasks if any(c.task == task.task for c in result.cells)]
    if len(labels) > MOST_LINES:
        _draw_rows(result.cells, labels, tasks, path)
        return
    styles = _styles(labels)
    width = min(len(tasks), ONE_ROW)
    height = -(-len(tasks) // width)
    figure, axes = plt.subplots(
        height,
        width,
        figsize=(1.5 + 3.4 * width, 4.2 * height),
        squeeze=False,
        sharey=True,
    )
    for place, task in zip(axes.flat, tasks, strict=False):
        cells = [cell for cell in result.cells if cell.task == task.task]
        budgets = sorted({cell.budget for cell in cells}, reverse=True)
        for label in labels:
            mine = [cell for cell in cells if cell.label == label]
            shift = 0.5 * (labels.index(label) / max(len(labels) - 1, 1) - 0.5)
            _draw_line(place, mine, budgets, task.kind, label, styles[label], shift)
        place.set_title(task.title.replace(", ", ",\n"))
        place.set_xticks(range(len(budgets)), [percent(budget) for budget in budgets])
        place.set_xlim(-0.5, len(budgets) - 0.5)
        place.set_ylim(-0.03, 1.03)
        place.set_xlabel("budget")
    for place in axes.flat[len(tasks) :]:
        place.set_visible(False)
    for row in axes:
        row[0].set_ylabel(RIGHT)
    _save_with_legend(figure, path)


def _draw_rows(
    cells: Sequence[TextCell], labels: Sequence[str], tasks: Sequence[TaskResult], path: Path
) -> None:
    """Draw a row for each arm, a diagram for each task, and a colour for each budget."""
    budgets = sorted({cell.budget for cell in cells}, reverse=True)
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
            mine = [cell for cell in cells if cell.task == task.task and cell.budget == budget]
            values = [_value(cell, task.kind) for cell in mine]
            shift = 0.5 * ((number + 0.5) / len(budgets) - 0.5)
            place.errorbar(
                [value.mean for value in values],
                [labels.index(cell.label) + shift for cell in mine],
                xerr=_whiskers(values),
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
    figure.supxlabel(RIGHT, fontsize="medium")
    _save_with_legend(figure, path)


def _save_with_legend(figure: Figure, path: Path) -> None:
    shown: dict[str, Any] = {}
    for place in figure.axes:
        handles, names = place.get_legend_handles_labels()
        shown |= zip(names, handles, strict=True)
    figure.legend(shown.values(), shown.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    save(figure, path)


def _draw_line(
    axes: Axes,
    cells: Sequence[TextCell],
    budgets: Sequence[float],
    kind: str,
    label: str,
    style: tuple[str, str],
    shift: float,
) -> None:
    if not cells:
        return
    values = [_value(cell, kind) for cell in cells]
    places = [budgets.index(cell.budget) + shift for cell in cells]
    axes.errorbar(
        places,
        [value.mean for value in values],
        yerr=_whiskers(values),
        label=label,
        color=style[0],
        marker=style[1],
        linewidth=0.8,
        markersize=4.5,
        elinewidth=0.7,
    )


def _styles(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour for each method and a marker for each variant of it.

    If that gives two arms the same, colours and markers have no meaning, and no two are the same.
    """
    bases = list(dict.fromkeys(_base(label) for label in labels))
    variants = list(dict.fromkeys(_variant(label) for label in labels))
    styles = {
        label: (colour(bases.index(_base(label)) + 1), marker(variants.index(_variant(label))))
        for label in labels
    }
    if len(set(styles.values())) < len(labels):
        styles = {
            label: (colour(number), marker(number // len(COLOURS)))
            for number, label in enumerate(labels)
        }
    return styles


def _value(cell: TextCell, kind: str) -> Estimate:
    """Return what is drawn of an arm: whole answers, or the share of a passage."""
    return cell.share if kind in ("passage", "copy") else cell.right


def _whiskers(values: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the lower and the upper half of intervals."""
    return [
        [max(value.mean - value.low, 0.0) for value in values],
        [max(value.high - value.mean, 0.0) for value in values],
    ]


def _base(label: str) -> str:
    method = label.partition(",")[0]
    base: str = MIXES.get(method, {}).get("base", method)
    return base


def _variant(label: str) -> str:
    return label.removeprefix(_base(label))


# -- by memory ------------------------------------------------------------------------------


def draw_memory(result: PartResult, path: Path) -> None:
    """Draw what is right before the first mistake by the mean memory while decoding.

    A column for each task; a row for each pooling, which is the part of a mix that is no vote.
    Arms with the same times of eviction have one colour.
    """
    cells = [cell for cell in result.cells if cell.decoding_held is not None]
    times = list(dict.fromkeys(_time(cell) for cell in cells))
    steps = [time for time in times if SCHEDULE in time]
    poolings = list(dict.fromkeys(_pooling(cell) for cell in cells))
    figure, axes = plt.subplots(
        len(poolings),
        len(result.tasks),
        figsize=(1.5 + 4.6 * len(result.tasks), 0.6 + 3.6 * len(poolings)),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for row, pooling in zip(axes, poolings, strict=True):
        for place, task in zip(row, result.tasks, strict=True):
            mine = [c for c in cells if c.task == task.task and _pooling(c) == pooling]
            for label in dict.fromkeys(cell.label for cell in mine):
                points = [cell for cell in mine if cell.label == label]
                time = _time(points[0])
                paint = STEPS[steps.index(time) % len(STEPS)] if time in steps else ONCE.get(time)
                _draw_points(place, points, paint or PURPLE, time in steps)
            place.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--", label="the full cache")
            place.set_title(f"{task.title}\n{pooling or 'the pooling of the method'}")
            place.set_ylim(-0.03, 1.03)
            place.set_xlim(left=0.0)
    for row in axes:
        row[0].set_ylabel("right before the first mistake")
    for place in axes[-1]:
        place.set_xlabel("blocks held while decoding, % of the full cache's")
    _save_with_legend(figure, path)


ONCE = {"": GREY, "defer=4": SKY, "defer=8": BLUE}
STEPS = (VERMILION, ORANGE, GREEN, PURPLE, "#000000")


def _draw_points(axes: Axes, cells: Sequence[TextCell], paint: str, is_schedule: bool) -> None:
    """Draw one arm at all of its budgets; hollow if the answer's rows alone vote."""
    ordered = sorted(cells, key=lambda cell: cell.decoding_held or 0.0)
    method, time = ordered[0].label.partition(",")[0], _time(ordered[0])
    votes = next((name for name in VOTES if f"_{name}" in method), "")
    when = time.replace("defer=", "after ") + (" tokens" if "defer" in time else "")
    axes.errorbar(
        [100 * (cell.decoding_held or 0.0) for cell in ordered],
        [cell.share.mean for cell in ordered],
        yerr=_whiskers([cell.share for cell in ordered]),
        label=f"{when.replace(SCHEDULE + '=', '') or 'at the end of the prompt'}, {WHO[votes]}",
        color=paint,
        marker="D" if is_schedule else "o" if votes else "X",
        markerfacecolor="white" if votes == "answer" else paint,
        linestyle=":" if votes == "answer" else "-",
        linewidth=1.0,
        markersize=5.5,
        elinewidth=0.6,
    )


WHO = {"": "sum of all rows", "max": "largest of all rows", "answer": "largest of the answer's"}


def _time(cell: TextCell) -> str:
    """Return when an arm evicts: its options."""
    return cell.label.partition(",")[2]


def _pooling(cell: TextCell) -> str:
    method = cell.label.partition(",")[0]
    return next((name for name in POOLINGS if method.endswith(f"_{name}")), "")
