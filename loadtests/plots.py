# SPDX-License-Identifier: Apache-2.0
"""The plots of the report, as SVG files drawn from the record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from loadtests.drift import Drift
from loadtests.load import PERCENTILES
from loadtests.record import Record, Run
from loadtests.verdict import ANSWERED, STRETCHES, Soak
from measure.plots import VERMILION, colour, marker, save

DASHES = ("-", "--", ":")
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
            for percentile, dashes in zip((50, 99), DASHES, strict=False):
                latency = [run.bench[f"p{percentile}_e2el_ms"] / 1000 for run in runs]
                axes.plot(
                    tokens,
                    latency,
                    linestyle=dashes,
                    marker=marker(number),
                    color=colour(number),
                    label=f"{arm}, p{percentile}",
                )
            for run, x in zip(runs, tokens, strict=True):
                axes.annotate(
                    f"{run.rate:g}/s",
                    (x, run.bench["p50_e2el_ms"] / 1000),
                    xytext=(-6, 5) if number else (6, -11),
                    textcoords="offset points",
                    ha="right" if number else "left",
                    color=colour(number),
                    fontsize=8,
                )
        axes.set_title(workload)
        axes.set_xlabel("tokens generated a second")
        axes.set_ylabel("seconds from request to last token")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.legend(frameon=False)
    save(figure, path)


def draw_percentiles(record: Record, workloads: Sequence[str], path: Path) -> None:
    """Draw percentiles of time to first token and inter-token latency against the rate."""
    measures = {"ttft": "time to first token, ms", "itl": "inter-token latency, ms"}
    figure, grid = plt.subplots(
        len(workloads),
        len(measures),
        figsize=(WIDTH, 3.6 * len(workloads)),
        squeeze=False,
        layout="constrained",
    )
    for row, workload in zip(grid, workloads, strict=True):
        for axes, (measure, label) in zip(row, measures.items(), strict=True):
            for number, arm in enumerate(record.arms):
                runs = record.of(arm, workload)
                for percentile, dashes in zip(PERCENTILES, DASHES, strict=True):
                    axes.plot(
                        [run.rate for run in runs],
                        [run.bench[f"p{percentile}_{measure}_ms"] for run in runs],
                        linestyle=dashes,
                        marker=marker(number),
                        color=colour(number),
                        label=f"{arm}, p{percentile}",
                    )
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
            rates = record.profile["workloads"][workload]["rates"]
            if max(rates) > 8 * min(rates):
                axes.set_xscale("log")
                axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.set_title(workload)
            axes.set_xlabel("requests asked for a second")
            axes.set_ylabel(label)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(record.arms) * len(PERCENTILES),
        frameon=False,
    )
    save(figure, path)


def draw_running(record: Record, path: Path) -> None:
    """Draw the peaks of running and waiting requests for each load."""
    loads = list(dict.fromkeys((run.workload, run.rate) for run in record.runs))
    figure, grid = plt.subplots(
        2, 1, figsize=(WIDTH, 4.6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    width = 0.8 / len(record.arms)
    for axes, measure in zip(grid, ("running", "waiting"), strict=True):
        for number, arm in enumerate(record.arms):
            runs = {(run.workload, run.rate): run for run in record.of(arm)}
            shift = (number - (len(record.arms) - 1) / 2) * width
            places = [place for place, load in enumerate(loads) if load in runs]
            bars = axes.bar(
                [place + shift for place in places],
                [max(getattr(runs[loads[place]], measure)) for place in places],
                width * 0.92,
                color=colour(number),
                label=arm,
            )
            axes.bar_label(bars, fmt="%.0f", padding=1)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, max(1, axes.get_ylim()[1]) * 1.08)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(f"most requests {measure}")
    grid[0].legend(frameon=False)
    grid[1].set_xticks(range(len(loads)), [f"{workload}\n{rate:g}/s" for workload, rate in loads])
    save(figure, path)


def draw_usage(record: Record, path: Path) -> None:
    """Draw the share of the pool in use over time, a diagram for each load."""
    loads = list(dict.fromkeys((run.workload, run.rate) for run in record.runs))
    columns = min(3, len(loads))
    rows = -(-len(loads) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(WIDTH, 2.5 * rows + 0.3),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axes, (workload, rate) in zip(grid.flat, loads, strict=False):
        for number, arm in enumerate(record.arms):
            for run in record.of(arm, workload):
                if run.rate == rate:
                    times, usage = _under_load(run, run.kv_usage)
                    axes.step(
                        times, usage, where="post", color=colour(number), label=arm, linewidth=1.3
                    )
        axes.set_title(f"{workload}, {rate:g}/s")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in grid.flat[len(loads) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("KV blocks in use")
    grid.flat[0].legend(frameon=False)
    figure.supxlabel("seconds since the first request", fontsize=9)
    save(figure, path)


def draw_drift(drifts: Sequence[Drift], path: Path) -> None:
    """Draw the lengths of the same answers in both arms; a dot's area is their number."""
    figure, grid = plt.subplots(
        1,
        len(drifts),
        figsize=(min(WIDTH, 4.2 * len(drifts)), 4.2),
        squeeze=False,
        layout="compressed",
    )
    for axes, drift in zip(grid.flat, drifts, strict=True):
        pairs, counts = np.unique(np.array(drift.lengths), axis=0, return_counts=True)
        most = max(10, int(pairs.max()) + 1)
        axes.plot((0, most), (0, most), color="#bbbbbb", linewidth=1, zorder=1)
        axes.scatter(
            pairs[:, 0],
            pairs[:, 1],
            s=18 * counts,
            color=VERMILION,
            alpha=0.55,
            linewidths=0,
            zorder=2,
        )
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.set_aspect("equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.set_title(f"{drift.workload}, {drift.rate:g}/s")
        axes.set_xlabel(f"tokens generated, {drift.reference}")
        axes.set_ylabel(f"tokens generated, {drift.arm}")
    save(figure, path)


def draw_soak(record: Record, path: Path) -> None:
    """Draw memory, blocks in use and running requests over time for each arm."""
    has_memory = any(value is not None for run in record.runs for value in run.memory_mib)
    figure, grid = plt.subplots(
        2 + has_memory,
        1,
        figsize=(WIDTH, 2.2 * (2 + has_memory)),
        sharex=True,
        layout="constrained",
    )
    for number, arm in enumerate(record.arms):
        runs = record.of(arm)
        times = [time / 60 for run in runs for time in run.times]
        usage = [value for run in runs for value in run.kv_usage]
        running = [value for run in runs for value in run.running]
        grid[0].plot(times, usage, color=colour(number), linewidth=0.8, label=arm)
        grid[1].plot(times, running, color=colour(number), linewidth=0.8)
        ends = [run.times[-1] / 60 for run in runs]
        left = [run.kv_usage[-1] for run in runs]
        grid[0].plot(
            ends,
            left,
            linestyle="none",
            marker="o",
            markersize=4,
            color="black",
            label=None if number else "after each run",
            zorder=3,
            clip_on=False,
        )
        if has_memory:
            memory = [v for run in runs for v in run.memory_mib]
            grid[2].plot(times, memory, color=colour(number), linewidth=1)
    grid[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    grid[0].set_ylabel("KV blocks in use")
    grid[0].set_ylim(bottom=0)
    grid[0].legend(frameon=False)
    grid[1].set_ylabel("running requests")
    grid[1].set_ylim(bottom=0)
    if has_memory:
        grid[2].set_ylabel("server's memory, MiB")
        grid[2].set_ylim(bottom=0)
    grid[-1].set_xlabel("minutes")
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
        for quantile, dashes in zip((0.5, 0.9), DASHES, strict=False):
            heights = [np.quantile(part, quantile) if len(part) else np.nan for part in parts]
            middles = (edges[:-1] + edges[1:]) / 120
            label = f"{name}, p{100 * quantile:.0f}"
            grid[2].plot(middles, heights, linestyle=dashes, color=its_colour, label=label)
    grid[0].set_ylabel("server's memory, MiB")
    grid[0].set_ylim(bottom=0)
    grid[0].legend(frameon=False)
    grid[1].set_ylabel("KV blocks in use")
    grid[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    grid[1].set_ylim(bottom=0)
    grid[2].set_ylabel("seconds to the last token")
    grid[2].set_ylim(bottom=0)
    grid[2].legend(frameon=False)
    grid[2].set_xlabel("minutes")
    save(figure, path)


def _under_load(run: Run, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return times since the run's first request, and the values at them."""
    begin = run.begin
    return [time - run.times[begin] for time in run.times[begin:]], list(values[begin:])
