# SPDX-License-Identifier: Apache-2.0
"""The page of the papers' experiments, and pictures of statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from evaluation.attention import STATISTICS, Measured
from evaluation.papers import EXPERIMENTS, Claim
from evaluation.plots import draw
from evaluation.results import FILE, PartResult
from measure.document import Block, Code, Heading, Plot, Table, Text, write_markdown
from measure.plots import colour, marker, save
from measure.statistics import LEVEL
from vllm_tgvkv.judge.statistics import Estimate

INTRODUCTION = """\
# The papers' own experiments at our size

What five papers measured on models of 1 to 34 billion parameters, asked of SmolLM2-135M-Instruct
with real weights: alone, or behind [a tower](../../page_model.md) that reads pages and mixes no
patches. **Their figures may hold for their models; ours say whether they carry over to this one.**

Each claim is a difference that is above 0 if the claim holds, or within 0.1 of 0 (10 points; our
bound) if the paper calls it small; figures without a verdict only stand beside the paper's. *n* are
questions that the full cache answers right, asked of both arms, or prompts with the right answer
behind them. Intervals are 95 %, bootstrapped over them; with fewer than 20, they are too narrow.
**Agrees** and **opposite**: for answers by McNemar's test, corrected over the table by Holm's
method; for statistics by the interval, not corrected. *Before a mistake* is the difference in the
share of an answer before its first mistake; beside *answers* stand the questions that only the
first and only the second arm answers right.
"""

SPEED = """\
VL-Cache's table 3 and AirCache's tables 3 and 9 vary batch and prompt length on A100s. The cells
that fit a CPU are [lines s](../../benchmarks.md#batch-and-length), with `tgv`: decoding at 10 % is
2.3 to 6.1 times as fast as stock for batches of 1 and 4 with 2k and 8k tokens (VL-Cache 1.2 to
3.2), and the first token takes 5 % longer at 2k tokens (VL-Cache 4 %; at 8k between 15 % longer and
43 % faster). For 8 prompts of 16k [line b](../../benchmarks.md#costs-and-gains) has 7.43
[7.22, 7.93] times, AirCache 2.1. More needs a GPU."""


def verdict(claim: Claim, here: Estimate, p: float | None = None) -> str:
    """Return what a difference says of a claim."""
    if not claim.judged:
        return ""
    low, high = here.low, here.high
    if claim.near is not None:
        if max(abs(low), abs(high)) <= claim.near:
            return "agrees"
        return "**opposite**" if min(high, -low) < -claim.near else "not told apart"
    told = p < LEVEL if p is not None else low > 0 or high < 0
    if not told:
        return "not told apart"
    return "agrees" if here.mean > 0 else "**opposite**"


def write_papers_report(found: Mapping[str, PartResult | Measured], folder: Path) -> None:
    """Write `README.md`, and a picture for each experiment that was run."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks: list[Block] = [Text(INTRODUCTION.rstrip())]
    for name, result in found.items():
        experiment, file = EXPERIMENTS[name], f"{name}.png"
        blocks += [Heading(experiment.title), Text(experiment.text)]
        if isinstance(result, PartResult):
            draw(result, folder / file, experiment.counts_all)
            blocks.append(_answers(experiment.claims, result))
        else:
            _draw_curves(result, STATISTICS[name].axis, folder / file)
            blocks.append(_numbers(experiment.claims, result))
        blocks.append(Plot(file, experiment.title))
    blocks += [Heading("Speed"), Text(SPEED), Heading("Run it"), *_circumstances(found)]
    write_markdown(blocks, folder)


def _answers(claims: Sequence[Claim], result: PartResult) -> Table:
    pairs = {(each.first, each.second): each for each in result.comparisons}
    rows = []
    for claim in claims:
        if claim.pair is None:
            continue
        here = pairs[claim.pair[0].key, claim.pair[1].key]
        rows.append(
            [
                claim.text,
                claim.printed,
                f"{_number(here.difference, sign=True)} ({here.first_only}:{here.second_only})",
                _number(here.share, sign=True),
                str(here.questions),
                verdict(claim, here.difference, here.p_holm),
            ]
        )
    header = ["claim", "paper", "answers, points", "before a mistake", "n", "verdict"]
    return Table(header, rows, words=True)


def _numbers(claims: Sequence[Claim], result: Measured) -> Table:
    numbers = {each.name: each for each in result.numbers}
    rows = []
    for claim in claims:
        each = numbers[claim.number]
        is_difference = claim.judged and claim.near is None
        here = _number(each.mean, is_difference, claim.percent, digits=1)
        said = verdict(claim, each.mean)
        rows.append([claim.text, claim.printed, here, str(each.prompts), said])
    return Table(["claim", "paper", "here", "n", "verdict"], rows, words=True)


def _number(value: Estimate, sign: bool = False, percent: bool = True, digits: int = 0) -> str:
    factor, digits = (100, digits) if percent else (1, 2)
    mean, low, high = (
        f"{factor * each:{'+' if sign else ''}.{digits}f}"
        for each in (value.mean, value.low, value.high)
    )
    return f"{mean} [{low}, {high}]"


def _circumstances(found: Mapping[str, PartResult | Measured]) -> Iterator[Block]:
    yield Code("python -m evaluation papers --parts NAME")
    yield Text(f"NAME, in the order of this page: {', '.join(f'`{name}`' for name in found)}.")
    newest = max(found.values(), key=lambda result: str(result.facts["day"])).facts
    made = sorted(
        {f"{each.facts['day']}, revision `{each.facts['revision']}`" for each in found.values()}
    )
    versions, machine = (
        ", ".join(f"{key} {value}" for key, value in newest[group].items())
        for group in ("versions", "machine")
    )
    yield Text(
        "By their CPU time, about 40 minutes, all together fit into an hour on two cores; the "
        "gates of DBTrimKV are [trained](../../gates.md#what-was-measured) before. "
        f"Made {'; '.join(made)}. "
        f"{versions}. Machine: {machine}. Written from [{FILE}]({FILE}) by "
        "`python -m evaluation papers --report`."
    )


def _draw_curves(result: Measured, axis: str, path: Path) -> None:
    """Draw a diagram for each panel, with a line and its interval for each curve."""
    panels = list(dict.fromkeys(point.panel for point in result.points))
    size = (4.6 * len(panels) + 2, 2.9)
    figure, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, panel in zip(grid[0], panels, strict=True):
        mine = [point for point in result.points if point.panel == panel]
        for number, curve in enumerate(dict.fromkeys(point.curve for point in mine)):
            points = sorted((p for p in mine if p.curve == curve), key=lambda point: point.x)
            xs = [point.x for point in points]
            style = {"color": colour(number), "marker": marker(number), "markersize": 3}
            axes.plot(xs, [p.y.mean for p in points], label=curve, linewidth=1, **style)
            lows, highs = [p.y.low for p in points], [p.y.high for p in points]
            axes.fill_between(xs, lows, highs, color=colour(number), alpha=0.2, linewidth=0)
        axes.set_title(panel)
        axes.set_xlabel(axis)
        axes.set_ylim(bottom=0)
        if axis != "layer":
            axes.set_xscale("log", base=2)
            places = sorted({point.x for point in mine})
            axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
