# SPDX-License-Identifier: Apache-2.0
"""The page of load, written from its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evaluation.load import CROWDS, HELD, MAX_TOKENS
from evaluation.load_results import LoadResult, Summary
from evaluation.plots import draw_load
from evaluation.results import FILE
from measure.document import Block, Code, Heading, Items, Plot, Table, Text, percent, write_markdown

PICTURE = "load.png"

COUNTED = {
    "requests": "cut",
    "cuts": "cuts",
    "restored_requests": "restored",
    "whole_requests": "whole",
}
"""The plugin's counters that the table shows, where one has counted, and their columns."""

INTRODUCTION = """\
# What is answered, and how fast, under load

While more requests are in flight than the pool holds with their full caches. SmolLM2-135M-Instruct
with real weights, alone and behind [the tower that reads pages](../../page_model.md), is served by
`vllm serve` and asked over HTTP. **It says how the arms compare for this small model on two CPU
cores; measure yours.**"""

READING = f"""\
- **Load** is the number of requests in flight, divided by the {HELD} whole requests, prompt and
  answer, that the pool of the full cache holds. All servers have the same pool. Each client asks
  its next question when its last is answered, so that equally many are always in flight.
- **Questions** are the same at every load: one of four numbers, a passage, and three numbers, which
  stand in three places. Decoding is greedy; the model ends an answer, or the limit of {MAX_TOKENS}
  tokens. **Right** is an answer with the whole number or passage, or with all three numbers.
- **Same** is the share of answers that are letter by letter what stock answers at the smallest
  load. In batches of other sizes rounding differs: stock's own rows say how much that changes.
- **Tokens/s** count prompts and answers until the last question is asked: until then all
  places are taken. **Tokens/CPU s** are all tokens over the processor time of the server's
  processes. Each is followed by its quotient to stock at the same load.
- The servers of all arms are alive together and asked in turn, in an order that rotates."""


def write_load_report(results: Mapping[str, LoadResult], folder: Path) -> None:
    """Write `README.md` and its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = {name: CROWDS[name].title for name in results}
    draw_load({titles[name]: result.points for name, result in results.items()}, folder / PICTURE)
    caption = "Right answers, throughput, time to first token and preemptions over load"
    blocks: list[Block] = [Text(INTRODUCTION), Plot(PICTURE, caption)]
    blocks += [Heading("How to read it"), Text(READING)]
    for name, result in results.items():
        blocks += [Heading(titles[name]), *_part(name, result)]
    write_markdown(blocks, folder)


def _part(name: str, result: LoadResult) -> Iterator[Block]:
    letters = {task.name: chr(ord("A") + n) for n, task in enumerate(CROWDS[name].tasks)}
    yield Items([f"**{letters[task.name]}**: {task.title}" for task in CROWDS[name].tasks])
    arms = list(dict.fromkeys(point.arm for point in result.points))
    points = sorted(result.points, key=lambda point: (point.load, arms.index(point.arm)))
    yield _answers(points, letters)
    yield _speeds(points)
    facts = result.facts
    versions, machine = (
        ", ".join(f"{key} {value}" for key, value in facts[group].items())
        for group in ("versions", "machine")
    )
    yield Text(
        f"{facts['day']}, revision `{facts['revision']}`. {versions}. Machine: {machine}. Written "
        f"from [{FILE}]({FILE}) by `python -m evaluation load --report`. The servers:"
    )
    if note := facts.get("note"):
        yield Text(note)
    first, *others = facts["commands"].items()
    lines = [f"{arm}: {command.replace(first[1], '(the same)')}" for arm, command in others]
    yield Code("\n".join((": ".join(first), *lines)))


def _answers(points: Sequence[Summary], letters: Mapping[str, str]) -> Table:
    shown = [name for name in COUNTED if any(name in point.counts for point in points)]
    header = ["load", "arm", *letters.values(), "right", "same", "ended", "tokens of an answer"]
    return Table(
        [*header, *(COUNTED[name] for name in shown)],
        [
            [
                f"{point.load:g}",
                point.arm,
                *(str(point.right.get(task, "")) for task in letters),
                f"{point.num_right}/{point.questions}",
                percent(point.same),
                percent(point.ended),
                f"{point.answer_tokens:.1f}",
                *(f"{point.counts.get(name, 0):.0f}" for name in shown),
            ]
            for point in points
        ],
    )


def _speeds(points: Sequence[Summary]) -> Table:
    stock = {point.load: point for point in reversed(points) if point.arm == points[0].arm}
    return Table(
        [
            *("load", "arm", "in flight", "tokens/s", "to stock", "tokens/CPU s", "to stock"),
            *("requests/s", "TTFT, median", "TTFT, p95", "preemptions"),
        ],
        [
            [
                f"{point.load:g}",
                point.arm,
                str(point.in_flight),
                f"{point.tokens_per_second:.0f}",
                f"{point.tokens_per_second / stock[point.load].tokens_per_second:.2f}",
                f"{point.tokens_per_cpu_second:.0f}",
                f"{point.tokens_per_cpu_second / stock[point.load].tokens_per_cpu_second:.2f}",
                f"{point.requests_per_second:.2f}",
                f"{point.ttft_median:.1f} s",
                f"{point.ttft_p95:.1f} s",
                f"{point.preemptions:.0f}",
            ]
            for point in points
        ],
    )
