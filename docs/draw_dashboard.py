# SPDX-License-Identifier: Apache-2.0
"""Draw docs/dashboard/*.png: the panels of the Grafana dashboard, filled by a real server.

Serves the model that reads pages with eviction and a small pool and sends it mixed traffic for four
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
import io
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
from matplotlib.ticker import FuncFormatter, MultipleLocator
from PIL import Image

from demo.asking import MODEL_NAME, PLUGINS
from demo.reading import TASK, serve_arguments
from measure.facts import versions
from measure.messages import image_part, png_url, text_part
from measure.serving import free_port, serving
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion
from reader.vocabulary import Vocabulary

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "configs/grafana/dashboards/kv-eviction.json"
PROMETHEUS = ROOT / "configs/prometheus"
FOLDER = Path(__file__).with_name("dashboard")
RESULTS = FOLDER / "results.json"

SCRAPE_SECONDS = 4
START_SECONDS = 60
POOL = ("--num-gpu-blocks-override", "320", "--max-num-seqs", "32")
"""A small pool that fills up: four uncompressed prompts of one page."""


# Traffic

PHASES = ((60, 2), (60, 6), (60, 12), (60, 4))
"""Seconds and number of clients; each client sends one request after the other."""


@dataclass(frozen=True)
class Kind:
    """A kind of request."""

    of_forty: int
    """Requests of this kind among 40."""
    xargs: Mapping[str, Any] = field(default_factory=dict)
    pages: int = 1
    """0 is text without an image."""
    repeat: int = 1
    """Repetitions of a text without an image."""
    max_tokens: int = 140
    """Answers have between half of this and this many tokens; the end token is ignored."""


KINDS = (
    Kind(11),
    Kind(5, {"kv_eviction_budget": 0.2}),
    Kind(6, {"kv_eviction": "snapkv", "kv_eviction_budget": 0.5}),
    Kind(4, {"kv_eviction": "aircache", "kv_eviction_budget": 0.2}, pages=2),
    Kind(5, {"kv_eviction": "tgv", "kv_eviction_budget": "auto:0.8"}),
    # Every skip reason that a correct client can meet. The last does not fit the pool.
    Kind(2, {"kv_eviction": "none"}),
    Kind(1, {"kv_eviction_budget": 4000}),
    Kind(1, max_tokens=1),
    Kind(2, pages=0, repeat=20, max_tokens=40),
    Kind(2, pages=0, max_tokens=40),
    Kind(1, {"kv_eviction_budget": 0.6}, pages=3, max_tokens=40),
)


class Clients:
    """Clients whose every request shows a new page."""

    def __init__(self, url: str, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
        )
        self._random = random.Random(0)
        self._deck: list[Kind] = []
        self._asked = 0
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
            model=MODEL_NAME,
            messages=self._messages(kind),
            temperature=0,
            max_tokens=self._random.randint((kind.max_tokens + 1) // 2, kind.max_tokens),
            extra_body={"vllm_xargs": dict(kind.xargs), "ignore_eos": True},
        )
        self.answers += 1

    def _messages(self, kind: Kind) -> list[Any]:
        if not kind.pages:
            return [{"role": "user", "content": "What does A say? " * kind.repeat}]
        content: list[dict[str, Any]] = []
        for _ in range(kind.pages):
            self._asked += 1
            example = PageQuestion(TASK, self._asked).example(self._vocabulary)
            content += [image_part(png_url(page)) for page in example.pages]
        return [{"role": "user", "content": [*content, text_part(example.question)]}]


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
    folder = page_model_folder()
    arguments = [*serve_arguments(folder, "layer"), *POOL]
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(arguments, Path(scratch, "server.log"), environment=PLUGINS) as server,
        prometheus(server.url.removeprefix("http://")) as source,
    ):
        seconds = sum(seconds for seconds, _ in PHASES)
        print(f"serving at {server.url}; sending traffic for {seconds} s", flush=True)
        clients = Clients(server.url, load_vocabulary(folder))
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

WIDTH, LINE = 16.0, 0.55
"""Width of a picture and height of one of the dashboard's lines, in inches."""
COLOURS = ("#2f7d5b", "#e0a83c", "#3b75af", "#d9622b", "#8a5fa8", "#4fb0c6", "#b03a48", "#7d8590")
NAMED = {"green": "#2f7d5b", "orange": "#d9822b", "red": "#c0392b", "blue": "#3b75af"}

matplotlib.rcParams.update({"font.size": 7.6, "axes.titlesize": 8.6, "axes.titleweight": "bold"})

Panel = dict[str, Any]
Series = list[dict[str, Any]]


def draw(results: dict[str, Any]) -> None:
    """Write one picture per row of the dashboard, and one of all rows."""
    rows: list[list[Panel]] = []
    for panel in panels():
        if panel["type"] == "row":
            rows.append([panel])
        else:
            rows[-1].append(panel)
    pictures = []
    for title, *row in rows:
        name = re.sub(r"\W+", "-", title["title"].split("(")[0].lower()).strip("-")
        figure = draw_panels(row, results)
        figure.suptitle(title["title"], x=0.005, ha="left", weight="bold")
        figure.savefig(scratch := io.BytesIO(), dpi=108)
        plt.close(figure)
        pictures.append(Image.open(scratch).convert("RGB"))
        save(pictures[-1], FOLDER / f"{name}.png")
    every = Image.new("RGB", (pictures[0].width, sum(picture.height for picture in pictures)))
    top = 0
    for picture in pictures:
        every.paste(picture, (0, top))
        top += picture.height
    save(every, FOLDER / "dashboard.png")


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG with a palette, which is a third as large."""
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


def draw_panels(row: Sequence[Panel], results: dict[str, Any]) -> Figure:
    """Draw panels in their places in Grafana's grid of 24 columns."""
    top = min(panel["gridPos"]["y"] for panel in row)
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row) - top
    figure = plt.figure(figsize=(WIDTH, LINE * lines), layout="constrained")
    grid = figure.add_gridspec(lines, 24)
    for panel in row:
        place = panel["gridPos"]
        y, x = place["y"] - top, place["x"]
        axes = figure.add_subplot(grid[y : y + place["h"], x : x + place["w"]])
        axes.set_title(panel["title"], loc="left")
        answers = results["panels"][str(panel["id"])]
        DRAWN_AS[panel["type"]](axes, panel, [one for a in answers for one in a["series"]])
    return figure


def draw_stat(axes: Axes, panel: Panel, series: Series) -> None:
    """Draw one number in the colour of the threshold it exceeds."""
    defaults = panel["fieldConfig"]["defaults"]
    ((_, value),) = series[0]["points"]
    passed = [s for s in defaults["thresholds"]["steps"] if (s["value"] or 0) <= value]
    text = written(value, defaults["unit"], defaults.get("decimals"))
    style = {"size": 18, "ha": "center", "va": "center", "weight": "bold"}
    axes.text(0.5, 0.5, text, color=NAMED[passed[-1]["color"]], **style)
    axes.axis("off")


def draw_bars(axes: Axes, panel: Panel, series: Series) -> None:
    """Draw horizontal bars with names and values."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [one["points"][0][1] for one in series]
    names = [one["name"] for one in series]
    bars = axes.barh(names, values, color=NAMED[defaults["color"]["fixedColor"]])
    texts = [written(value, defaults["unit"], defaults.get("decimals")) for value in values]
    axes.bar_label(bars, texts, padding=3)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.margins(x=0.15)
    axes.spines[:].set_visible(False)


def draw_heatmap(axes: Axes, panel: Panel, series: Series) -> None:
    """Draw a histogram's buckets over time; Prometheus' bucket counts are cumulative."""
    series = sorted(series, key=lambda one: float(one["name"].replace("+Inf", "inf")))
    times = sorted({t for one in series for t, _ in one["points"]})
    counts = np.zeros((len(series), len(times)))
    for number, one in enumerate(series):
        for t, value in one["points"]:
            counts[number, times.index(t)] = value or 0
    counts = np.diff(counts, axis=0, prepend=0)[:-1]
    options = panel["options"]["color"]
    mesh = axes.pcolormesh(
        times,
        range(len(series) - 1),
        np.ma.masked_less(counts, 0.01),
        cmap=options["scheme"],
        norm=PowerNorm(options["exponent"], 0, counts.max()),
        shading="nearest",
    )
    unit = panel["options"]["yAxis"]["unit"]
    bounds = [written(float(one["name"]), unit) for one in series[:-1]]
    axes.set_yticks(np.arange(len(bounds)) + 0.5, bounds)
    over_time(axes, times[-1])
    axes.grid(visible=False)
    axes.figure.colorbar(mesh, ax=axes)


def draw_lines(axes: Axes, panel: Panel, series: Series) -> None:
    """Draw lines or stacked areas, with mean and maximum of each in the legend."""
    defaults = panel["fieldConfig"]["defaults"]
    unit, custom = defaults["unit"], defaults["custom"]
    times = sorted({t for one in series for t, _ in one["points"]})
    below = np.zeros(len(times))
    for number, one in enumerate(series):
        known = dict(one["points"])
        values = np.array([np.nan if known.get(t) is None else known[t] for t in times], float)
        stacked = "stacking" in custom
        upper = below + np.nan_to_num(values) if stacked else values
        colour = COLOURS[number % len(COLOURS)]
        mean, most = (
            written(found, unit, short=True) for found in (np.nanmean(values), np.nanmax(values))
        )
        alpha = custom["fillOpacity"] / 100
        axes.fill_between(times, below if stacked else 0, upper, color=colour, alpha=alpha, lw=0)
        axes.plot(times, upper, color=colour, lw=1.2, label=f"{one['name']}: {mean}, max {most}")
        if stacked:
            below = upper
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    if custom.get("thresholdsStyle"):
        for step in defaults["thresholds"]["steps"][1:]:
            axes.axhline(step["value"], color=NAMED[step["color"]], lw=0.9, alpha=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: written(v, unit, short=True)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=7, frameon=False)
    over_time(axes, times[-1])


def over_time(axes: Axes, seconds: float) -> None:
    """Label the time axis with minutes and seconds since the traffic began."""
    axes.set_xlim(0, seconds)
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{int(t) // 60}:{int(t) % 60:02}"))
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(lw=0.5)


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
