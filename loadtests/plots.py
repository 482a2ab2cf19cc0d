# SPDX-License-Identifier: Apache-2.0
"""The plots of both reports, as SVG files drawn from the records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import PercentFormatter

from loadtests.record import Record
from loadtests.verdict import ANSWERED, STRETCHES, Soak
from measure.plots import colour, marker, save

DASHES = ("-", "--")
WIDTH = 10.0


def draw_throughput(record: Record, workloads: Sequence[str], path: Path) -> None:
    """Draw the latency of whole requests against tokens generated, a point for each rate."""
    figure, grid = plt.subplots(
        1, len(workloads), figsize=(WIDTH, 4.2), squeeze=False, layout="constrained"
    )
    for axes, workload in zip(grid.flat, workloads, strict=True):
        for number, arm in enumerate(record.arms):
            runs = record.of(arm, workload)
            tokens = [run.bench["output_throughput"] for run in runs]
            for percentile, dashes in zip((50, 99), DASHES, strict=True):
                latency = [run.bench[f"p{percentile}_e2el_ms"] / 1000 for run in runs]
                line = f"{marker(number)}{dashes}"
                name = f"{arm}, p{percentile}"
                axes.plot(tokens, latency, line, color=colour(number), label=name)
            for run, x in zip(runs, tokens, strict=True):
                place = (x, run.bench["p50_e2el_ms"] / 1000)
                axes.annotate(f"{run.rate:g}/s", place, color=colour(number), fontsize=8)
        axes.set_title(workload)
        axes.set_xlabel("tokens generated a second")
        axes.set_ylabel("seconds from request to last token")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.legend(frameon=False)
    save(figure, path)


def draw_usage(record: Record, path: Path) -> None:
    """Draw running and waiting requests and blocks in use over time, a column for each load."""
    loads = list(dict.fromkeys((run.workload, run.rate) for run in record.runs))
    figure, grid = plt.subplots(
        3, len(loads), figsize=(WIDTH, 5.4), squeeze=False, sharey="row", layout="constrained"
    )
    for column, (workload, rate) in zip(grid.T, loads, strict=True):
        for number, arm in enumerate(record.arms):
            for run in (run for run in record.of(arm, workload) if run.rate == rate):
                times = [time - run.times[run.begin] for time in run.times[run.begin :]]
                series = (run.kv_usage, run.running, run.waiting)
                for axes, values in zip(column, series, strict=True):
                    drawn = values[run.begin :]
                    axes.step(times, drawn, where="post", color=colour(number), label=arm)
        column[0].set_title(f"{workload}, {rate:g}/s")
        column[0].set_ylim(0, 1.03)
        column[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes, name in zip(grid[:, 0], ("KV blocks in use", "running", "waiting"), strict=True):
        axes.set_ylabel(name)
    grid[0][0].legend(frameon=False)
    figure.supxlabel("seconds since the first request", fontsize=9)
    save(figure, path)


def draw_watched(soak: Soak, path: Path) -> None:
    """Draw memory, blocks in use and latency of a soak with checked answers."""
    figure, grid = plt.subplots(3, 1, figsize=(WIDTH, 6.6), sharex=True, layout="constrained")
    for number, (name, arm) in enumerate(soak.arms.items()):
        its_colour = colour(number if soak.control else 1)
        times = [moment.time / 60 for moment in arm.moments]
        memory = [moment.memory_mib for moment in arm.moments]
        grid[0].plot(times, memory, color=its_colour, label=name)
        usage = [moment.kv_usage for moment in arm.moments]
        grid[1].plot(times, usage, color=its_colour, linewidth=0.6)
        begins = np.array([visit.begin for visit in arm.ended(ANSWERED)])
        seconds = np.array([visit.seconds for visit in arm.ended(ANSWERED)])
        edges = np.linspace(0, arm.seconds, 3 * STRETCHES + 1)
        parts = [seconds[(begins >= a) & (begins < b)] for a, b in pairwise(edges)]
        for quantile, dashes in zip((0.5, 0.9), DASHES, strict=True):
            heights = [np.quantile(part, quantile) if len(part) else np.nan for part in parts]
            middles = (edges[:-1] + edges[1:]) / 120
            label = f"{name}, p{100 * quantile:.0f}"
            grid[2].plot(middles, heights, linestyle=dashes, color=its_colour, label=label)
    names = ("server's memory, MiB", "KV blocks in use", "seconds to the last token")
    for axes, text in zip(grid, names, strict=True):
        axes.set_ylabel(text)
        axes.set_ylim(bottom=0)
    grid[0].legend(frameon=False)
    grid[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    grid[2].legend(frameon=False)
    grid[2].set_xlabel("minutes")
    save(figure, path)
