# SPDX-License-Identifier: Apache-2.0
"""The pictures of the report, drawn from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from demo.pages import PATCH
from evaluation.questions import Question
from evaluation.record import Pictures, ResultTable
from evaluation.results import ALL, Cell
from measure.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, save
from measure.statistics import Estimate

INK, FAINT = "#222222", "#c9c9c9"
TICKS = (0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
FEW_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Style:
    """The style of one method's line in all pictures."""

    colour: str
    dashes: Any = "-"
    marker: str = "o"


# Where two methods share a colour, their dashes differ.
STYLES = {
    "tgv": Style(VERMILION),
    "auto": Style(VERMILION, (0, (4, 1.5)), "*"),
    "vlcache": Style(ORANGE, "-", "s"),
    "aircache": Style(PURPLE, "-", "D"),
    "prefixkv": Style(PURPLE, (0, (4, 1.5)), "P"),
    "snapkv": Style(BLUE, "-", "^"),
    "pyramidkv": Style(BLUE, (0, (4, 1.5)), "v"),
    "adakv": Style(SKY, "-", "<"),
    "h2o": Style(GREEN, "-", "h"),
    "elastic": Style(GREEN, (0, (4, 1.5)), "X"),
    "streaming": Style(GREY, "-", "|"),
    "random": Style(GREY, (0, (1, 1.2)), "x"),
}
OTHER = Style("#000000", (0, (1, 1.2)), "d")


def style(method: str) -> Style:
    return STYLES.get(method, OTHER)


@dataclass(frozen=True)
class Line:
    """A method's points, ordered by memory."""

    name: str
    held: list[float]
    values: list[Estimate]

    @classmethod
    def of(cls, name: str, cells: Sequence[Cell], measure: str) -> Line:
        ordered = sorted(cells, key=lambda cell: cell.blocks_held)
        return cls(
            name,
            [cell.blocks_held for cell in ordered],
            [getattr(cell, measure) for cell in ordered],
        )


def lines(table: ResultTable, measure: str) -> list[Line]:
    """Return a line for each method, and one for budgets that follow the attention."""
    pooled = [cell for cell in table.cells if cell.task == ALL]
    fixed = [cell for cell in pooled if isinstance(cell.budget, float) and cell.budget < 1]
    methods = dict.fromkeys(cell.method for cell in fixed)
    result = [Line.of(m, [c for c in fixed if c.method == m], measure) for m in methods]
    auto = [cell for cell in pooled if isinstance(cell.budget, str)]
    return [*result, Line.of("auto", auto, measure)] if auto else result


def full(table: ResultTable, measure: str) -> Estimate | None:
    """Return the measure with the full cache, if it was measured."""
    found = [getattr(c, measure) for c in table.cells if c.task == ALL and c.budget == 1.0]
    return found[0] if found else None


def draw_accuracy(table: ResultTable, path: Path) -> None:
    """Draw accuracy against memory for all methods in one diagram."""
    figure, axes = plt.subplots(figsize=(10, 6.2))
    drawn = lines(table, "exact")
    for line in drawn:
        _draw_line(axes, line, band=0.08)
    _draw_full(axes, full(table, "exact"), label=True)
    _set_axes(axes, drawn, "answers right to the last character")
    _label_ends(axes, drawn)
    _save(figure, path)


def draw_methods(table: ResultTable, path: Path) -> None:
    """Draw a diagram for each method, with the others in grey behind it."""
    drawn = lines(table, "exact")
    columns = 4
    rows = math.ceil(len(drawn) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(11, 2.35 * rows + 0.5), sharex=True, sharey=True, squeeze=False
    )
    for axes, line in zip(grid.flat, drawn, strict=False):
        for other in drawn:
            means = [value.mean for value in other.values]
            axes.plot(other.held, means, color=FAINT, linewidth=0.8, zorder=1)
        _draw_line(axes, line, band=0.3)
        _draw_full(axes, full(table, "exact"), label=False)
        _set_axes(axes, drawn, "", FEW_TICKS)
        title = "tgv, budget auto" if line.name == "auto" else line.name
        axes.set_title(title, color=style(line.name).colour, fontweight="bold", fontsize=10)
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    for axes in grid.flat:
        axes.set_xlabel("")
    # Below the last diagram of each column; the last row may be shorter than the others.
    for axes in grid.flat[len(drawn) - columns : len(drawn)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("KV blocks of the prompt held while decoding", fontsize=10)
    figure.supylabel("answers right to the last character", fontsize=10)
    _save(figure, path)


def draw_tokens(table: ResultTable, path: Path) -> None:
    """Draw first token and later tokens side by side."""
    figure, grid = plt.subplots(1, 2, figsize=(12, 5.2), sharey=True)
    for axes, measure, title in zip(
        grid,
        ("first", "later"),
        ("first token (computed from the full cache)", "later tokens (computed from what is kept)"),
        strict=True,
    ):
        drawn = lines(table, measure)
        for line in drawn:
            _draw_line(axes, line, band=0.08 if measure == "later" else 0)
        _draw_full(axes, full(table, measure), label=False)
        _set_axes(axes, drawn, "right tokens" if measure == "first" else "")
        axes.set_title(title, fontsize=11)
        if measure == "later":
            _label_ends(axes, drawn)
    _save(figure, path)


def draw_blocks(table: ResultTable, path: Path) -> None:
    """Draw a diagram for each method with a line for each block size."""
    pooled = [cell for cell in table.cells if cell.task == ALL]
    methods = list(dict.fromkeys(cell.method for cell in pooled))
    kinds = sorted({(cell.block_size, cell.emulated) for cell in pooled})
    # Emulated sizes that the engine has too only show how good the emulation is.
    kinds = [(size, emulated) for size, emulated in kinds if not emulated or size == 1]
    figure, grid = plt.subplots(
        1, len(methods), figsize=(3.9 * len(methods) + 0.4, 4.1), sharey=True, squeeze=False
    )
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(kinds)))
    for axes, method in zip(grid.flat, methods, strict=True):
        drawn = []
        for (size, emulated), shade, marker in zip(kinds, shades, "*os^dv", strict=False):
            mine = [
                c
                for c in pooled
                if (c.method, c.block_size, c.emulated) == (method, size, emulated)
            ]
            line = Line.of("exact, emulated" if emulated else f"blocks of {size}", mine, "exact")
            its_style = Style(colour=to_hex(shade), dashes=":" if emulated else "-", marker=marker)
            _draw_line(axes, line, band=0.12, drawn_as=its_style)
            drawn.append(line)
        _set_axes(
            axes, drawn, "answers right to the last character" if method == methods[0] else ""
        )
        axes.set_title(method, fontsize=10)
    grid.flat[0].legend(fontsize=8, frameon=False, loc="upper left")
    _save(figure, path)


def draw_pages(pictures: Pictures, path: Path) -> None:
    """Draw the pages of every layer and head, a small table for each method."""
    methods = list(pictures.pages)
    layers, heads = np.shape(pictures.pages[methods[0]])
    columns = min(6, len(methods))
    rows = math.ceil(len(methods) / columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(1.75 * columns + 0.6, rows * (0.42 * layers + 0.75) + 0.4),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    most = max(np.max(pages) for pages in pictures.pages.values())
    for axes, method in zip(grid.flat, methods, strict=False):
        pages = np.asarray(pictures.pages[method])
        axes.imshow(pages, cmap="cividis", vmin=0, vmax=most, aspect="auto")
        for layer in range(layers):
            for head in range(heads):
                value = pages[layer, head]
                axes.text(
                    head,
                    layer,
                    f"{value:.1f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if value < most / 2 else "black",
                )
        axes.set_title(method, fontsize=10)
        axes.set_xticks(range(heads), [f"head {head}" for head in range(heads)], fontsize=8)
        axes.set_yticks(range(layers), [f"layer {layer}" for layer in range(layers)], fontsize=8)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
    for axes in grid.flat[len(methods) :]:
        axes.set_visible(False)
    _save(figure, path)


def draw_patches(pictures: Pictures, methods: Sequence[str], path: Path) -> None:
    """Draw the page of one question and what each method kept of it, with the source boxed."""
    patches = pictures.patches
    example = Question(patches.task, patches.number).example()
    image = np.asarray(example.pages[0].image)
    shown = [method for method in methods if method in patches.kept]
    columns = 4
    rows = math.ceil((len(shown) + 1) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(12, 3.3 * rows + 0.3), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, method in zip(grid.flat, ["", *shown], strict=False):
        axes.imshow(image)
        for source in example.sources:
            left, top, right, bottom = np.array(source.entry.boxes).T
            corner, far = (left.min() - 4, top.min() - 4), (right.max() + 4, bottom.max() + 4)
            axes.add_patch(
                Rectangle(
                    corner,
                    far[0] - corner[0],
                    far[1] - corner[1],
                    fill=False,
                    edgecolor=VERMILION,
                    linewidth=2,
                )
            )
        if not method:
            axes.set_title(f"{example.question}\ntruth: {example.answer}", fontsize=10)
            continue
        _shade(axes, np.asarray(patches.kept[method]), patches.pairs)
        text = patches.answers[method]
        mark = "right" if text == example.answer else "wrong"
        axes.set_title(f"{method}\n{text} ({mark})", fontsize=10)
    _save(figure, path)


def _shade(axes: Axes, kept: np.ndarray, pairs: int) -> None:
    """Cover dropped patches; the fewer pairs keep a patch, the darker it is."""
    cover = np.zeros((*kept.shape, 4))
    cover[..., 2] = 0.25
    cover[..., 3] = 0.82 * (1 - np.sqrt(kept / pairs))
    size = PATCH * np.array(kept.shape[::-1])
    axes.imshow(cover, extent=(-0.5, size[0] - 0.5, size[1] - 0.5, -0.5), interpolation="nearest")


def _draw_line(axes: Axes, line: Line, band: float, drawn_as: Style | None = None) -> None:
    its_style = drawn_as or style(line.name)
    axes.plot(
        line.held,
        [value.mean for value in line.values],
        color=its_style.colour,
        linestyle=its_style.dashes,
        marker=its_style.marker,
        markersize=5,
        linewidth=1.7,
        zorder=3,
        label=line.name,
    )
    if band:
        axes.fill_between(
            line.held,
            [value.low for value in line.values],
            [value.high for value in line.values],
            color=its_style.colour,
            alpha=band,
            linewidth=0,
            zorder=2,
        )


def _draw_full(axes: Axes, value: Estimate | None, label: bool) -> None:
    if value is None:
        return
    axes.axhspan(value.low, value.high, color=INK, alpha=0.08, linewidth=0)
    axes.axhline(value.mean, color=INK, linewidth=1, linestyle=(0, (1, 1)))
    if label:
        axes.annotate(
            f"full cache, {100 * value.mean:.0f} %",
            (0.01, value.mean),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color=INK,
        )


def _set_axes(
    axes: Axes, drawn: Sequence[Line], label: str, ticks: Sequence[float] = TICKS
) -> None:
    held = [value for line in drawn for value in line.held]
    axes.set_xscale("log")
    axes.set_xlim(min(held) / 1.1, max(held) * 1.1)
    axes.set_ylim(-0.02, 1.03)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    percent = FuncFormatter(lambda value, _: f"{100 * value:g} %")
    axes.xaxis.set_major_formatter(percent)
    axes.yaxis.set_major_formatter(percent)
    axes.set_xlabel("KV blocks of the prompt held while decoding")
    axes.set_ylabel(label)


def _label_ends(axes: Axes, drawn: Sequence[Line], gap: float = 0.047) -> None:
    """Write each line's name right of the diagram and connect it with the last point."""
    right = axes.get_xlim()[1]
    ends = sorted(drawn, key=lambda line: line.values[-1].mean)
    places = spread([line.values[-1].mean for line in ends], gap)
    for line, place in zip(ends, places, strict=True):
        its_style = style(line.name)
        end = (line.held[-1], line.values[-1].mean)
        axes.plot(
            [end[0], right * 1.05],
            [end[1], place],
            color=its_style.colour,
            linewidth=0.7,
            alpha=0.7,
            clip_on=False,
            zorder=1,
        )
        axes.plot(
            [right * 1.06, right * 1.2],
            [place, place],
            color=its_style.colour,
            linestyle=its_style.dashes,
            linewidth=1.7,
            marker=its_style.marker,
            markersize=5,
            markevery=[1],
            clip_on=False,
        )
        axes.text(
            right * 1.24,
            place,
            "tgv, auto" if line.name == "auto" else line.name,
            color=its_style.colour,
            va="center",
            fontsize=9,
            fontweight="bold" if line.name in ("tgv", "auto") else "normal",
        )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return ascending values moved as little as possible so that neighbours are `gap` apart.

    Values that are too close form a block around their mean, within 0..1.
    """
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            last = blocks.pop()
            blocks[-1] += last
    places = [
        _bottom(block, gap) + gap * position for block in blocks for position in range(len(block))
    ]
    for index, place in enumerate(places):
        above = len(places) - 1 - index
        places[index] = max(min(place, 1 - gap * above), gap * index)
    return places


def _bottom(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def _top(block: Sequence[float], gap: float) -> float:
    return _bottom(block, gap) + gap * (len(block) - 1)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    save(figure, path)
