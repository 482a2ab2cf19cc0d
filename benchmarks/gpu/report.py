# SPDX-License-Identifier: Apache-2.0
"""The table of a run on a GPU: what was measured, compared with stock and with the targets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import OURS
from benchmarks.measurement import Better, Target
from measure.document import Items, Table, Text, markdown
from measure.facts import command_line, machine, revision, versions

STOCK = ("production", "constrained")
SMOKE_NOTICE = "smoke: no measurement"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    measure: str
    ours: str
    production: str = ""
    constrained: str = ""
    roofline: str = ""
    """The bytes that had to move by the time, as a share of the copy bandwidth."""
    target: Target | None = None
    note: str = ""


class Report:
    """Writes both files; they are replaced each time."""

    def __init__(self, folder: Path, scale: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.scale = scale
        self.begin = time.monotonic()
        self.is_smoke = scale.endswith("smoke")
        stem = f"{self.date.replace(':', '')}-gpu" + ("-smoke" if self.is_smoke else "")
        self.json_path = folder / f"{stem}.json"
        self.markdown_path = folder / f"{stem}.md"
        self.circumstances = {**machine(), **_device()}
        self.command = command_line("benchmarks.gpu", sys.argv[1:])

    def write(self, entries: Sequence[Entry], parts: dict[str, str]) -> str:
        """Write what is known so far, and return the table.

        Args:
            parts: how each part of the run ended.
        """
        rows = table(entries)
        record = {
            "notice": SMOKE_NOTICE if self.is_smoke else None,
            "command": self.command,
            "date": self.date,
            "seconds": round(time.monotonic() - self.begin, 1),
            "scale": self.scale,
            "revision": revision(),
            "versions": versions(("vllm", "torch", "triton", "vllm-tgvkv")),
            "machine": self.circumstances,
            "parts": parts,
            "rows": [{**asdict(row), "met": row.target and row.target.met} for row in rows],
            "entries": list(entries),
        }
        self.json_path.write_text(
            json.dumps(record, indent=1, default=vars) + "\n", encoding="utf-8"
        )
        header = ["measure", "ours", *STOCK, "of copy bandwidth", "target", "note"]
        cells = [[str(getattr(r, f) or "") for f in Row.__dataclass_fields__] for r in rows]
        blocks = [
            Text(f"{self.circumstances['device']}, {self.date}, `{self.command}`"),
            Table(header, cells, words=True),
            Items([f"{name}: {end}" for name, end in parts.items()]),
        ]
        notice = [Text(SMOKE_NOTICE)] if self.is_smoke else []
        text = markdown([*notice, *blocks]) + "\n"
        self.markdown_path.write_text(text, encoding="utf-8")
        return text


def table(entries: Sequence[Entry]) -> list[Row]:
    """Return a row for everything that was measured or failed."""
    measured = [entry for entry in entries if "failed" not in entry and "skipped" not in entry]
    rows = [*_kernel_rows(measured)]
    shapes = list(dict.fromkeys(entry["shape"] for entry in measured if "shape" in entry))
    for number, shape in enumerate(shapes):
        values = {
            (entry["arm"], entry["phase"]): entry
            for entry in measured
            if entry.get("shape") == shape and "values" in entry
        }
        for arm in OURS:
            rows += _engine_rows(shape, values, arm, has_targets=number == 0)
    for entry in entries:
        if "failed" in entry:
            name = entry.get("name") or f"{entry['part']}: {entry.get('phase', '')}"
            last = str(entry["failed"]).strip().splitlines()[-1]
            rows.append(Row(name, "FAILED", note=last.replace("|", "/")))
    return rows


# -- kernels ----------------------------------------------------------------------------

_MOST_ERROR = 0.02
"""Relative error of attention in bfloat16 against float32; a wrong page gives about 1."""
_WAYS = ("FlashAttention over pages", "our kernel")
"""Both ways to decode, as the attention backend launches them."""


def _kernel_rows(entries: Sequence[Entry]) -> Iterator[Row]:
    kernels = {entry["name"]: entry for entry in entries if entry.get("part") == "kernels"}
    bandwidth = kernels.pop("copy bandwidth", None)
    if bandwidth is None:
        return
    yield Row("copy bandwidth, read and written bytes", f"{bandwidth['bandwidth'] / 1e9:,.0f} GB/s")
    stock = [e["seconds"] for n, e in kernels.items() if "FlashAttention stock cache" in n]
    for name, entry in kernels.items():
        target = None
        if name in [f"decode attention, ragged, {way}" for way in _WAYS]:
            target = Target(">= 0.85 of copy bandwidth", entry["share"], 0.85)
        elif name in [f"decode attention, uniform, {way}" for way in _WAYS] and stock:
            ratio = entry["seconds"] / min(stock)
            target = Target("<= 1.05 x FlashAttention's own time", ratio, 1.05, "lower")
        error = entry["error"]
        note = f"{entry['bytes'] / 2**20:,.2f} MiB"
        note += f"; error {error:.1e}" if error is not None else ""
        note += f"; {entry['note']}" if entry["note"] else ""
        took = f"{entry['seconds'] * 1e6:,.1f} us"
        if error is not None and not error < _MOST_ERROR:  # also true for NaN
            took += ", **WRONG RESULT**"
        roofline = f"{entry['share']:.1%}"
        yield Row(f"kernel: {name}", took, roofline=roofline, target=target, note=note)


# -- engines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A figure of `GpuEngine` that is compared with stock."""

    name: str
    phase: str
    field: str
    limit: float | None = None
    """Of the ratio to the arm `production`."""
    unit: str = ""
    stock_phase: str = ""
    better: Better = "higher"


def _measures(phases: Sequence[str], batch: int, ideal: float) -> Iterator[Measure]:
    rate, unit = "output_tokens_per_second", "tokens/s"
    decode = "decode_tokens_per_second"
    yield Measure("decode at 10 %, memory ample", "ample", decode, round(0.85 * ideal, 2), unit)
    yield Measure("output at 10 %, memory scarce", "scarce", rate, 3.0, unit)
    yield Measure("peak running at 10 %, memory scarce", "scarce", "peak_running", 7.0)
    yield Measure("output at 10 %, memory ample", "ample", rate, 1.3, unit)
    yield Measure("output at 100 %, memory ample", "full budget", rate, 0.97, unit, "ample")
    yield Measure("output, text only", "text", rate, 0.97, unit)
    step = f"decode step, batch {batch} at 10 %"
    yield Measure(f"{step}, host's work", "decode", "host_seconds", 1.05, "s", better="lower")
    yield Measure(f"{step}, from step to step", "decode", "step_seconds", unit="s")
    for phase in phases:
        if phase.startswith("prefill "):
            what = f"time to first token, {phase.split()[1]} tokens"
            yield Measure(what, phase, "seconds", unit="s")


def _engine_rows(
    shape: str, values: dict[tuple[str, str], Entry], ours: str, has_targets: bool
) -> Iterator[Row]:
    title = shape if ours == "ours" else f"{shape}, decode_kernel {ours}"
    mine = {phase: entry["values"] for (arm, phase), entry in values.items() if arm == ours}
    decode = values.get((ours, "decode"), {"arguments": {"batch": 0}})
    ideal = mine.get("ample", {}).get("ideal", 0.0)
    for measure in _measures(sorted(mine, key=len), decode["arguments"]["batch"], ideal):
        value = mine.get(measure.phase, {}).get(measure.field)
        if value is None:
            continue
        phase, stock = measure.stock_phase or measure.phase, {}
        for arm in STOCK:
            found = values.get((arm, phase), {}).get("values", {}).get(measure.field)
            if found:
                stock[arm] = found
        target = None
        if measure.limit is not None and has_targets and "production" in stock:
            sign = "<=" if measure.better == "lower" else ">="
            text = f"{sign} {measure.limit:g} x production"
            target = Target(text, value / stock["production"], measure.limit, measure.better)
        shown = {arm: _amount(found, measure.unit) for arm, found in stock.items()}
        note = ", ".join(f"{value / found:.3f} x {arm}" for arm, found in stock.items())
        amount = _amount(value, measure.unit)
        yield Row(f"{title}: {measure.name}", amount, **shown, target=target, note=note)
    for phase, found in mine.items():
        if "eviction_share" in found:
            share = found["eviction_share"]
            target = Target("<= 1.5 %", share, 0.015, "lower") if has_targets else None
            name = f"{title}: eviction's share of prefill, {phase.split()[1]} tokens"
            both = (_amount(found[field], "s") for field in ("eviction_seconds", "seconds"))
            yield Row(name, f"{share:.2%}", target=target, note=" of ".join(both))
    if mine:
        evicted = {phase: int(found.get("evicted", 0)) for phase, found in mine.items()}
        counts = ", ".join(f"{phase} {number}" for phase, number in evicted.items() if number)
        yield Row(f"{title}: requests evicted", str(sum(evicted.values())), note=counts)


def _amount(value: float, unit: str) -> str:
    """Return a value with its unit, seconds as milliseconds."""
    if unit == "s":
        return f"{1e3 * value:,.2f} ms"
    return f"{value:,.4g} {unit}".strip() if value < 1e4 else f"{value:,.0f} {unit}".strip()


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": "no GPU"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
