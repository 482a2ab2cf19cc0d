# SPDX-License-Identifier: Apache-2.0
"""The page of a field, written from its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evaluation.field import Field
from evaluation.plots import draw
from evaluation.results import FILE, Cell, Comparison, PartResult
from measure.document import (
    Block,
    Heading,
    Items,
    Plot,
    Table,
    Text,
    percent,
    write_markdown,
)
from measure.statistics import LEVEL
from vllm_tgvkv.judge.statistics import Estimate, wilson


def write_report(field: Field, results: Mapping[str, PartResult], folder: Path) -> None:
    """Write `README.md`, and a picture for each part that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    reading = (
        "[How to read the figures](../README.md#how-to-read-the-figures). Arms that are no "
        "method's name are entries of the setting `methods`: `MIXES` in "
        "[evaluation/arms.py](../../../evaluation/arms.py)."
    )
    blocks: list[Block] = [Text(field.introduction), Text(reading)]
    for name, result in results.items():
        part = field.parts[name]
        blocks += [Heading(part.title), Text(part.text)]
        if part.has_picture:
            draw(result, folder / f"{name}.png")
            blocks.append(Plot(f"{name}.png", f"{part.title}: right answers by budget"))
        blocks += _part(result)
    blocks += [Heading("How it was made"), *_circumstances(field, results)]
    write_markdown(blocks, folder)


def _part(result: PartResult) -> Iterator[Block]:
    asked = {cell.task for cell in result.cells}
    tasks = [task for task in result.tasks if not result.cells or task.task in asked]
    letters = {task.task: chr(ord("A") + number) for number, task in enumerate(tasks)}
    forced = [cell for cell in result.cells if cell.said is not None]
    yield Items(
        [
            f"**{letters[task.task]}**: {task.title}; "
            + (
                f"{task.questions} questions"
                if forced
                else f"right with the full cache: {round(task.right.mean * task.questions)} of "
                f"{task.questions}"
            )
            for task in tasks
        ]
    )
    if not result.cells:
        return
    if forced:
        yield _forced_table(forced, letters)
        return
    yield _cells_table(result.cells, letters)
    told = [claim for claim in result.comparisons if claim.p_holm < LEVEL]
    others = len(result.comparisons) - len(told)
    if told:
        yield _comparison_table(told)
    if others:
        count = f"{others} of {len(result.comparisons)}" if told else str(others)
        yield Text(f"Not told apart: {count} comparisons.")


def _cells_table(cells: Sequence[Cell], letters: Mapping[str, str]) -> Table:
    """Return a row for each arm and budget, with a column for all tasks and each of several."""
    rows = []
    has_drafts = any(cell.tokens_per_step for cell in cells)
    columns = letters if len(letters) > 1 else {}
    for label, budget in dict.fromkeys((cell.label, cell.budget) for cell in cells):
        mine = {c.task: c for c in cells if (c.label, c.budget) == (label, budget)}
        questions = sum(cell.questions for cell in mine.values())
        num_right = sum(cell.num_right for cell in mine.values())
        held = [(cell.questions, cell.blocks_held) for cell in mine.values()]
        decoding = [(c.questions, c.decoding_held) for c in mine.values()]
        before = [(cell.questions, cell.share.mean) for cell in mine.values()]
        is_recorded = questions > 0 and all(share is not None for _, share in decoding)
        rows.append(
            [
                f"`{label}`",
                percent(budget),
                percent(_mean(held)),
                percent(_mean(decoding)) if is_recorded else "",
                *(f"{mine[t].num_right}/{mine[t].questions}" if t in mine else "" for t in columns),
                f"{num_right}/{questions}: {wilson(num_right, questions)}",
                f"{100 * _mean(before):.0f} %",
            ]
        )
        if has_drafts:
            steps = (mine[t].tokens_per_step if t in mine else None for t in letters)
            rows[-1] += ["" if each is None else _with_interval(each) for each in steps]
    header = ["arm", "budget", "held", "decoding", *columns.values(), "all", "before a mistake"]
    header += [f"tokens a step, {letter}" for letter in letters.values() if has_drafts]
    return Table(header, rows)


def _with_interval(found: Estimate) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _forced_table(cells: Sequence[Cell], letters: Mapping[str, str]) -> Table:
    """Return a row for each arm and budget: the share of the full cache's tokens by task."""
    rows = []
    for label, budget in dict.fromkeys((cell.label, cell.budget) for cell in cells):
        mine = {c.task: c for c in cells if (c.label, c.budget) == (label, budget)}
        held, sketch, recalled = (
            _mean([(cell.questions, getattr(cell, name)) for cell in mine.values()])
            for name in ("blocks_held", "sketch_held", "recalled")
        )
        shares = [mine[task].said if task in mine else None for task in letters]
        rows.append(
            [
                f"`{label}`",
                percent(budget),
                percent(held),
                percent(sketch) if sketch else "",
                f"{100 * recalled:.1f} %" if recalled else "",
                *("" if share is None else f"{100 * share.mean:.0f} %" for share in shares),
                percent(
                    _mean([(c.questions, c.said.mean if c.said else None) for c in mine.values()])
                ),
            ]
        )
    header = ["arm", "budget", "held", "sketch", "come back", *letters.values(), "all"]
    return Table(header, rows)


def _mean(shares: Sequence[tuple[int, float | None]]) -> float:
    """Return the mean over the answers of shares that are means of as many."""
    total = sum(number for number, _ in shares)
    return sum(number * (share or 0.0) for number, share in shares) / max(total, 1)


def _comparison_table(claims: Sequence[Comparison]) -> Table:
    rows = [
        [
            f"`{claim.first}`",
            f"`{claim.second}`",
            str(claim.questions),
            _points(claim.difference),
            f"{claim.first_only}:{claim.second_only}",
            f"{claim.p_holm:.2g}" if claim.p_holm >= 0.0001 else "< 0.0001",
        ]
        for claim in claims
    ]
    header = ["first", "second", "questions", "difference", "only one right", "p, Holm"]
    return Table(header, rows)


def _points(points: Estimate) -> str:
    return f"{100 * points.mean:+.0f} [{100 * points.low:+.0f}, {100 * points.high:+.0f}]"


def _circumstances(field: Field, results: Mapping[str, PartResult]) -> Iterator[Block]:
    items = []
    for name, result in results.items():
        facts = result.facts
        split = ", ".join(dict.fromkeys(task.split for task in result.tasks))
        made = f"{split} questions, {facts['day']}, revision `{facts['revision']}`."
        items.append(f"{field.parts[name].title}: {made}")
    newest = max(results.values(), key=lambda result: str(result.facts["day"])).facts
    settings, versions, machine = (
        ", ".join(f"{key} {value}" for key, value in newest[group].items())
        for group in ("settings", "versions", "machine")
    )
    yield Items(items)
    yield Text(
        f"A part stays as it was measured until it is asked again; its command is in "
        f"[{FILE}]({FILE})."
    )
    yield Text(
        f"Engine: {settings}; eager, prefix caching. {versions}. Machine: {machine}. Written from "
        f"[{FILE}]({FILE}) by `python -m evaluation {field.name} --report`."
    )
