# SPDX-License-Identifier: Apache-2.0
"""Draw docs/dashboard/*.png: the panels of the Grafana dashboard, filled by a real server.

Serves the demonstration model with eviction and a small pool and sends it mixed traffic for four
minutes. A real Prometheus (Debian package `prometheus`) scrapes it with configs/prometheus. Every
query of configs/grafana/dashboards/kv-eviction.json is sent to Prometheus, and Matplotlib draws the
answers in the dashboard's layout. Grafana itself is not involved.

Usage: python -m docs.draw_dashboard            (about six minutes on two cores)
       python -m docs.draw_dashboard --redraw   (the same pictures from docs/dashboard/results.json)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import openai
import yaml
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from demo.run import demo_server
from demo.tasks import make_example
from measure.facts import versions
from measure.messages import image_part, png_url
from measure.serving import free_port

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "configs/grafana/dashboards/kv-eviction.json"
PROMETHEUS = ROOT / "configs/prometheus"
FOLDER = Path(__file__).with_name("dashboard")
RESULTS = FOLDER / "results.json"

SCRAPE_SECONDS = 4
START_SECONDS = 60
POOL = ("--num-gpu-blocks-override", "160", "--max-model-len", "2048", "--max-num-seqs", "32")
"""A small pool that fills up: four uncompressed prompts of one page."""


# Traffic

PHASES = ((60, 2), (60, 6), (60, 12), (60, 4))
"""Seconds and number of clients; each client sends one request after the other."""


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    of_forty: int
    """Requests of this kind among 40."""
    task: str | None = "value"
    """Task of demo/tasks.py; None is text without an image."""
    xargs: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 1
    """Number of pages, or repetitions of the text."""
    max_tokens: int = 140
    """Answers have between half of this and this many tokens; the end token is ignored."""


KINDS = (
    Kind(11),
    Kind(5, "row", {"kv_eviction_budget": 0.2}),
    Kind(6, "value", {"kv_eviction": "snapkv", "kv_eviction_budget": 0.5}),
    Kind(4, "two_images", {"kv_eviction": "aircache", "kv_eviction_budget": 0.2}),
    Kind(5, "compare", {"kv_eviction_budget": "auto:0.8"}),
    # Every skip reason that a correct client can meet. The last does not fit the pool.
    Kind(2, "value", {"kv_eviction": "none"}),
    Kind(1, "value", {"kv_eviction_budget": 4000}),
    Kind(1, max_tokens=1),
    Kind(2, None, repeat=20, max_tokens=40),
    Kind(2, None, max_tokens=40),
    Kind(1, "value", {"kv_eviction_budget": 0.6}, repeat=3, max_tokens=40),
)


class Clients:
    """Clients whose every request shows a new page."""

    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
        )
        self._random = random.Random(0)
        self._deck: list[Kind] = []
        self._pages = 0
        self._wanted = 0
        self.answers = 0

    async def run(self) -> None:
        """Run all phases and wait for the last answers."""
        running: set[asyncio.Task[None]] = set()
        for seconds, self._wanted in PHASES:
            for number in range(len(running), self._wanted):
                running.add(asyncio.create_task(self._ask_while_wanted(number)))
            await asyncio.sleep(seconds)
            done = {task for task in running if task.done()}
            running -= done
            await asyncio.gather(*done)  # raises their errors
        self._wanted = 0
        await asyncio.gather(*running)

    async def _ask_while_wanted(self, number: int) -> None:
        while number < self._wanted:
            if not self._deck:
                self._deck = [kind for kind in KINDS for _ in range(kind.of_forty)]
                self._random.shuffle(self._deck)
            await self._send(self._deck.pop())

    async def _send(self, kind: Kind) -> None:
        await self._client.chat.completions.create(
            model="demo",
            messages=self._messages(kind),
            temperature=0,
            max_tokens=self._random.randint((kind.max_tokens + 1) // 2, kind.max_tokens),
            extra_body={"vllm_xargs": dict(kind.xargs), "ignore_eos": True},
        )
        self.answers += 1

    def _messages(self, kind: Kind) -> list[Any]:
        if kind.task is None:
            return [{"role": "user", "content": "What does A say? " * kind.repeat}]
        content: list[dict[str, Any]] = []
        for _ in range(kind.repeat):
            self._pages += 1
            example = make_example(kind.task, "test", self._pages)
            (message,) = example.messages(lambda image: image_part(png_url(image)))
            content += message["content"]
        return [{"role": "user", "content": content}]


# Server and Prometheus


def set_environment() -> None:
    """Set the variables of a small CPU machine, except those that are set already."""
    text = (ROOT / "tools/cpu/environment.mk").read_text()
    for name, value in re.findall(r"^(\w+) \?= (.*)$", text, flags=re.MULTILINE):
        os.environ.setdefault(name, value)


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: Any) -> Any:
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as response:
            return json.load(response)["data"]

    def wait_until_scraping(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if self.get("query", query="vllm:num_requests_running")["result"]:
                    return
            if time.monotonic() > deadline:
                raise SystemExit("Prometheus has not scraped the server")
            time.sleep(0.5)


@contextmanager
def prometheus(target: str) -> Iterator[Prometheus]:
    """Run a Prometheus with our configuration, except addresses and interval."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise SystemExit("prometheus is not installed: Debian has it in its package prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], f"{SCRAPE_SECONDS}s")
    config["rule_files"] = [str(PROMETHEUS / "rules" / Path(p).name) for p in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prometheus.yml")
        file.write_text(yaml.safe_dump(config))
        command = [binary, f"--config.file={file}", "--log.level=error"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen(command)
        try:
            found = Prometheus(f"http://{address}")
            found.wait_until_scraping()
            yield found
        finally:
            process.terminate()
            process.wait(START_SECONDS)


# Queries of the dashboard


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def ask(source: Prometheus, start: float, end: float) -> dict[str, list[dict[str, Any]]]:
    """Return the answers to every query, by the panel's id.

    Variables are filled in as Grafana does: all models, engines and policies.
    """
    variables = {
        "__rate_interval": f"{4 * SCRAPE_SECONDS}s",
        "__range": f"{end - start:.0f}s",
        **dict.fromkeys(("model_name", "engine", "policy"), ".*"),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in panels():
        for target in panel.get("targets", []):
            query = re.sub(r"\$(\w+)", lambda match: variables[match[1]], target["expr"])
            if target.get("instant"):
                series = source.get("query", query=query, time=end)["result"]
                rows = [(s["metric"], [s["value"]]) for s in series]
            else:
                times = {"start": start, "end": end, "step": SCRAPE_SECONDS}
                series = source.get("query_range", query=query, **times)["result"]
                rows = [(s["metric"], s["values"]) for s in series]
            answer = {"expr": target["expr"], "series": []}
            for labels, values in rows:
                points = [[round(t - start, 1), rounded(v)] for t, v in values]
                name = named(target["legendFormat"], labels)
                answer["series"].append({"name": name, "points": points})
            found.setdefault(str(panel["id"]), []).append(answer)
    return found


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return a series' name in the legend; raise KeyError if it lacks a label."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels[match[1]], legend)


def rounded(value: str) -> float | None:
    """Return a value with five digits; None if it is not finite."""
    number = float(value)
    return float(f"{number:.5g}") if math.isfinite(number) else None


def record() -> dict[str, Any]:
    """Serve, ask, and return the data that the pictures are drawn from."""
    set_environment()
    with (
        demo_server("layer", POOL) as server,
        prometheus(server.url.removeprefix("http://")) as source,
    ):
        seconds = sum(seconds for seconds, _ in PHASES)
        print(f"serving at {server.url}; sending traffic for {seconds} s", flush=True)
        clients = Clients(server.url)
        start = time.time()
        end = start + seconds
        asyncio.run(clients.run())
        time.sleep(2 * SCRAPE_SECONDS)
        answers = ask(source, start, end)
    return {
        "made": {
            "day": datetime.date.today().isoformat(),
            "server": server.command,
            **versions(("vllm", "vllm-tgvkv")),
            "prometheus": subprocess.check_output(["prometheus", "--version"], text=True).split()[
                2
            ],
            "requests": clients.answers,
            "phases": PHASES,
            "scrape_seconds": SCRAPE_SECONDS,
        },
        "seconds": end - start,
        "panels": answers,
    }


# Drawing

COLUMN, LINE, GAP, TITLE = 50, 38, 8, 34
"""Pixels of one of the 24 columns, a line, the gap between panels and a section's title."""
SCALE = 1.5
INK, MUTED, PAPER, GROUND, GRID = "#24292f", "#6e7781", "#ffffff", "#f0f2f5", "#e6e8eb"
COLOURS = ("#2f7d5b", "#e0a83c", "#3b75af", "#d9622b", "#8a5fa8", "#4fb0c6", "#b03a48", "#7d8590")
NAMED = {"green": "#2f7d5b", "orange": "#d9822b", "red": "#c0392b", "blue": "#3b75af"}

matplotlib.rcParams.update({"font.size": 7.6, "text.color": INK, "axes.edgecolor": GRID})


def draw(results: dict[str, Any]) -> None:
    """Write one picture per row of the dashboard, and one of all rows."""
    rows: list[list[dict[str, Any]]] = []
    for panel in panels():
        if panel["type"] == "row":
            rows.append([panel])
        else:
            rows[-1].append(panel)
    for row in rows:
        name = re.sub(r"\W+", "-", row[0]["title"].split("(")[0].lower()).strip("-")
        save(draw_rows([row], results), FOLDER / f"{name}.png")
    save(draw_rows(rows, results), FOLDER / "dashboard.png")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG with a palette, which is a third as large."""
    figure.savefig(path, dpi=72 * SCALE, facecolor=GROUND)
    plt.close(figure)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


class Canvas:
    """A figure in pixel coordinates from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = plt.figure(figsize=(width / 72, height / 72))

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        style.setdefault("va", "center")
        self.figure.text(x / self.width, 1 - y / self.height, text, **style)

    def box(self, x: float, y: float, width: float, height: float, **style: Any) -> None:
        corner = (x / self.width, 1 - (y + height) / self.height)
        size = (width / self.width, height / self.height)
        style = {"linewidth": 0, "zorder": -1, **style}
        self.figure.add_artist(Rectangle(corner, *size, transform=self.figure.transFigure, **style))

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        bounds = (x / self.width, 1 - (y + height) / self.height)
        return self.figure.add_axes((*bounds, width / self.width, height / self.height))


def draw_rows(rows: Sequence[list[dict[str, Any]]], results: dict[str, Any]) -> Figure:
    heights = [
        max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in row[1:]) - row[1]["gridPos"]["y"]
        for row in rows
    ]
    canvas = Canvas(24 * COLUMN + GAP, sum(TITLE + LINE * h for h in heights) + GAP)
    top = 0.0
    for row, height in zip(rows, heights, strict=True):
        canvas.text(GAP + 2, top + TITLE / 2 + 4, row[0]["title"], size=10.5, weight="bold")
        top += TITLE
        for panel in row[1:]:
            place = panel["gridPos"]
            x = GAP + place["x"] * COLUMN
            y = top + (place["y"] - row[1]["gridPos"]["y"]) * LINE
            width, tall = place["w"] * COLUMN - GAP, place["h"] * LINE - GAP
            canvas.box(x, y, width, tall, facecolor=PAPER, zorder=-2)
            canvas.text(x + 10, y + 16, panel["title"], size=8.6, weight="bold")
            answers = results["panels"][str(panel["id"])]
            series = [one for answer in answers for one in answer["series"]]
            DRAWN_AS[panel["type"]](canvas, panel, series, (x, y + 28, width, tall - 28))
        top += LINE * height
    return canvas.figure


Bounds = tuple[float, float, float, float]
Series = list[dict[str, Any]]


def draw_stat(canvas: Canvas, panel: dict[str, Any], series: Series, bounds: Bounds) -> None:
    """Draw one number in the colour of the threshold it exceeds."""
    x, y, width, height = bounds
    defaults = panel["fieldConfig"]["defaults"]
    ((_, value),) = series[0]["points"]
    passed = [s for s in defaults["thresholds"]["steps"] if (s["value"] or 0) <= value]
    canvas.text(
        x + width / 2,
        y + height / 2 - 6,
        written(value, defaults["unit"], defaults.get("decimals")),
        size=21,
        ha="center",
        weight="bold",
        color=NAMED[passed[-1]["color"]],
    )


def draw_bars(canvas: Canvas, panel: dict[str, Any], series: Series, bounds: Bounds) -> None:
    """Draw horizontal bars with names and values."""
    x, y, width, height = bounds
    field = panel["fieldConfig"]
    values = [one["points"][0][1] for one in series]
    slot = min(height / len(series), 44)
    left, room = x + 118, width - 118 - 46
    for number, (one, value) in enumerate(zip(series, values, strict=True)):
        colour = field["defaults"]["color"]["fixedColor"]
        for override in field["overrides"]:
            if re.fullmatch(override["matcher"]["options"], one["name"]):
                colour = override["properties"][0]["value"]["fixedColor"]
        middle = y + slot * (number + 0.5)
        canvas.text(left - 8, middle, one["name"], ha="right")
        canvas.box(left, middle - slot * 0.3, room, slot * 0.6, facecolor=GROUND)
        share = value / max(values)
        canvas.box(left, middle - slot * 0.3, room * share, slot * 0.6, facecolor=NAMED[colour])
        text = written(value, field["defaults"]["unit"], field["defaults"].get("decimals"))
        canvas.text(left + room + 8, middle, text, weight="bold")


def draw_heatmap(canvas: Canvas, panel: dict[str, Any], series: Series, bounds: Bounds) -> None:
    """Draw a histogram's buckets over time; Prometheus' bucket counts are cumulative."""
    x, y, width, height = bounds
    unit = panel["options"]["yAxis"]["unit"]
    series = sorted(series, key=lambda one: float(one["name"].replace("+Inf", "inf")))
    times = sorted({t for one in series for t, _ in one["points"]})
    counts = np.zeros((len(series), len(times)))
    for number, one in enumerate(series):
        for t, value in one["points"]:
            counts[number, times.index(t)] = value or 0
    counts = np.diff(counts, axis=0, prepend=0)[:-1]
    axes = canvas.axes(x + 46, y + 6, width - 62, height - 58)
    options = panel["options"]["color"]
    mesh = axes.pcolormesh(
        times,
        range(len(series) - 1),
        np.ma.masked_less(counts, 0.01),
        cmap=options["scheme"],
        norm=PowerNorm(options["exponent"], 0, counts.max()),
        shading="nearest",
    )
    bounds_of = [written(float(one["name"]), unit) for one in series[:-1]]
    axes.set_yticks(np.arange(len(bounds_of)) + 0.5, bounds_of)
    axes.set_ylim(-0.5, len(bounds_of) - 0.5)
    over_time(axes, times[-1])
    axes.grid(visible=False)
    bar = canvas.axes(x + 46, y + height - 22, width - 62, 6)
    ticks = MaxNLocator(4, integer=True).tick_values(0, counts.max())
    canvas.figure.colorbar(
        mesh, cax=bar, orientation="horizontal", ticks=ticks[ticks <= counts.max()]
    )
    bar.tick_params(length=0, labelsize=6.5, colors=MUTED, pad=1)
    bar.spines[:].set_visible(False)


def draw_lines(canvas: Canvas, panel: dict[str, Any], series: Series, bounds: Bounds) -> None:
    """Draw lines or stacked areas above a table of means and maxima."""
    x, y, width, height = bounds
    defaults = panel["fieldConfig"]["defaults"]
    unit, custom = defaults["unit"], defaults["custom"]
    zero = [s["name"] for s in series if not any(value for _, value in s["points"])]
    if len(zero) < 3:  # show a few lines at zero
        zero = []
    notes = textwrap.wrap("always 0: " + ", ".join(zero), int(width / 5)) if zero else []
    table = 26 + 14 * (len(series) - len(zero)) + 12 * len(notes)
    axes = canvas.axes(x + 52, y + 6, width - 66, height - table - 28)
    times = sorted({t for one in series for t, _ in one["points"]})
    below = np.zeros(len(times))
    stacked = "stacking" in custom
    line = y + height - table + 9
    for place, head in ((82, "mean"), (12, "max")):
        canvas.text(x + width - place, line, head, size=7, ha="right", color=MUTED)
    for number, one in enumerate(one for one in series if one["name"] not in zero):
        colour = COLOURS[number % len(COLOURS)]
        known = dict(one["points"])
        values = np.array([np.nan if known.get(t) is None else known[t] for t in times], float)
        upper = below + np.nan_to_num(values) if stacked else values
        alpha = custom["fillOpacity"] / 100
        axes.fill_between(times, below if stacked else 0, upper, color=colour, alpha=alpha, lw=0)
        axes.plot(times, upper, color=colour, linewidth=1.2, solid_joinstyle="round")
        if stacked:
            below = upper
        line += 14
        canvas.box(x + 12, line - 1.5, 12, 3, facecolor=colour)
        canvas.text(x + 30, line, one["name"], size=7.2)
        for place, value in ((82, np.nanmean(values)), (12, np.nanmax(values))):
            text = written(value, unit, short=True)
            canvas.text(x + width - place, line, text, size=7.2, ha="right")
    for number, note in enumerate(notes):
        canvas.text(x + 12, line + 14 + 12 * number, note, size=6.6, color=MUTED)
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    if custom.get("thresholdsStyle"):
        for step in defaults["thresholds"]["steps"][1:]:
            axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=0.9, alpha=0.8)
    whole = unit.startswith("suffix:") and not unit.endswith("/s")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: written(v, unit, short=True)))
    over_time(axes, times[-1])


def over_time(axes: Axes, seconds: float) -> None:
    """Return minutes and seconds since the traffic began."""
    axes.set_xlim(0, seconds)
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{int(t) // 60}:{int(t) % 60:02}"))
    axes.tick_params(length=0, labelsize=7, colors=MUTED)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


DRAWN_AS = {
    "stat": draw_stat,
    "bargauge": draw_bars,
    "heatmap": draw_heatmap,
    "timeseries": draw_lines,
}


def written(value: float, unit: str, decimals: int | None = None, short: bool = False) -> str:
    """Return a number with its unit, roughly as Grafana formats it."""
    if unit == "percentunit":
        return f"{100 * value:.{0 if decimals is None and value in (0, 1) else 1}f}%".replace(
            ".0%", "%"
        )
    if unit == "s":
        for name, size in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
            if value >= size or name == "µs":
                return "0 s" if value == 0 else f"{value / size:.3g} {name}"
    if decimals is None:
        decimals = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
        decimals += 0 < value < 0.01
    number = f"{value:.{decimals}f}"
    suffix = {"reqps": "req/s", "short": ""}.get(unit, unit.removeprefix("suffix: "))
    if short:
        suffix = "/s" if suffix.endswith("/s") else ""
    return f"{number} {suffix}".strip()


def main() -> None:
    """Write the results and the pictures."""
    parser = argparse.ArgumentParser(description="Draw the dashboard's panels.")
    parser.add_argument("--redraw", action="store_true", help="from the results of the last run")
    FOLDER.mkdir(exist_ok=True)
    if not parser.parse_args().redraw:
        RESULTS.write_text(json.dumps(record(), separators=(",", ":")) + "\n")
    results = json.loads(RESULTS.read_text())
    empty = [
        answer["expr"] for p in results["panels"].values() for answer in p if not answer["series"]
    ]
    if empty:
        sys.exit("no data for:\n" + textwrap.indent("\n".join(empty), "  "))
    draw(results)


if __name__ == "__main__":
    main()
