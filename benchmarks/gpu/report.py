# SPDX-License-Identifier: Apache-2.0
"""The record of a run on a GPU as JSON, and its table as Markdown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import OURS
from benchmarks.measurement import Target
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

    def cells(self) -> list[str]:
        """Return its cells as text."""
        verdict = ""
        if self.target is not None:
            met = "met" if self.target.met else "**missed**"
            verdict = f"{self.target.text}: {self.target.value:.3g} {met}"
        return [
            self.measure,
            self.ours,
            self.production,
            self.constrained,
            self.roofline,
            verdict,
            self.note,
        ]


class Report:
    """Writes both files; they are replaced each time."""

    def __init__(self, folder: Path, scale: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.scale = scale
        self.begin = time.monotonic()
        stem = f"{self.date.replace(':', '')}-gpu" + ("-smoke" if scale == "smoke" else "")
        self.json_path = folder / f"{stem}.json"
        self.markdown_path = folder / f"{stem}.md"
        self.circumstances = {**machine(), **_device()}
        self.command = command_line("benchmarks.gpu", sys.argv[1:])

    def write(self, entries: Sequence[Entry], parts: dict[str, str]) -> None:
        """Write what is known so far; `parts` tells how each part of the run ended."""
        rows = table(entries)
        record = {
            "notice": SMOKE_NOTICE if self.scale == "smoke" else None,
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
        self.json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        self.markdown_path.write_text(self.markdown(rows, parts), encoding="utf-8")

    def markdown(self, rows: Iterable[Row], parts: dict[str, str]) -> str:
        """Return the table, and how each part ended."""
        header = ["measure", "ours", *STOCK, "of copy bandwidth", "target", "note"]
        text = markdown(
            [
                Text(f"{self.circumstances['device']}, {self.date}, `{self.command}`"),
                Table(header, [row.cells() for row in rows], words=True),
                Items([f"{name}: {end}" for name, end in parts.items()]),
            ]
        )
        return f"{SMOKE_NOTICE}\n\n{text}\n" if self.scale == "smoke" else f"{text}\n"


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
    rows += [_failure(entry) for entry in entries if "failed" in entry]
    return rows


# -- kernels ----------------------------------------------------------------------------


def _kernel_rows(entries: Sequence[Entry]) -> Iterable[Row]:
    kernels = {entry["name"]: entry for entry in entries if entry.get("part") == "kernels"}
    bandwidth = kernels.pop("copy bandwidth", None)
    if bandwidth is None:
        return
    yield Row("copy bandwidth, read and written bytes", f"{bandwidth['bandwidth'] / 1e9:,.0f} GB/s")
    own = min((e["seconds"] for n, e in kernels.items() if _OWN in n), default=None)
    for name, entry in kernels.items():
        target = None
        if name in _judged("ragged"):
            target = Target(">= 0.85 of copy bandwidth", entry["share"], 0.85)
        elif name in _judged("uniform") and own is not None:
            ratio = entry["seconds"] / own
            target = Target("<= 1.05 x FlashAttention's own time", ratio, 1.05, "lower")
        notes = [
            f"{entry['bytes'] / 2**20:,.2f} MiB",
            f"error {entry['error']:.1e}" if entry["error"] is not None else "",
            entry["note"],
        ]
        note = "; ".join(filter(None, notes))
        # Also true for NaN.
        wrong = entry["error"] is not None and not entry["error"] < _MOST_ERROR
        time = f"{entry['seconds'] * 1e6:,.1f} us" + (", **WRONG RESULT**" if wrong else "")
        roofline = f"{entry['share']:.1%}"
        yield Row(f"kernel: {name}", time, roofline=roofline, target=target, note=note)


_MOST_ERROR = 0.02
"""Relative error of attention in bfloat16 against float32; a wrong page gives about 1."""
_OWN = "FlashAttention stock cache"


def _judged(kind: str) -> tuple[str, str]:
    """Return the names of both ways to decode, as the attention backend launches them."""
    name = f"decode attention, {kind}"
    return f"{name}, FlashAttention over pages", f"{name}, our kernel"


# -- engines ----------------------------------------------------------------------------

_Values = dict[tuple[str, str], Entry]


def _engine_rows(shape: str, values: _Values, ours: str, has_targets: bool) -> Iterable[Row]:
    title = shape if ours == "ours" else f"{shape}, decode_kernel {ours}"

    def get(arm: str, phase: str, field: str) -> float | None:
        entry = values.get((arm, phase))
        return entry["values"].get(field) if entry else None

    def row(
        measure: str,
        phase: str,
        field: str,
        limit: float | None = None,
        unit: str = "",
        stock_phase: str | None = None,
        lower: bool = False,
    ) -> Iterable[Row]:
        """Yield a row that compares a field of all arms, if ours has it."""
        value = get(ours, phase, field)
        if value is None:
            return
        stock = {
            arm: get(arm, stock_phase or phase, field) for arm in ("production", "constrained")
        }
        target, reference = None, stock["production"]
        if limit is not None and has_targets and reference:
            sign = "<=" if lower else ">="
            text = f"{sign} {limit:g} x production"
            target = Target(text, value / reference, limit, "lower" if lower else "higher")
        shown = {arm: _amount(of_arm, unit) if of_arm else "" for arm, of_arm in stock.items()}
        ratios = [f"{value / of_arm:.3f} x {arm}" for arm, of_arm in stock.items() if of_arm]
        note = ", ".join(ratios)
        yield Row(f"{title}: {measure}", _amount(value, unit), **shown, target=target, note=note)

    rate, unit = "output_tokens_per_second", "tokens/s"
    yield from row("output at 10 %, memory scarce", "scarce", rate, 3.0, unit)
    yield from row("peak running at 10 %, memory scarce", "scarce", "peak_running", 7.0)
    yield from row("output at 10 %, memory ample", "ample", rate, 1.3, unit)
    yield from row("output at 100 %, memory ample", "full budget", rate, 0.97, unit, "ample")
    yield from row("output, text only", "text", rate, 0.97, unit)
    if (ours, "decode") in values:
        batch = values[ours, "decode"]["arguments"]["batch"]
        name = f"decode step, batch {batch} at 10 %"
        yield from row(f"{name}, host's work", "decode", "host_seconds", 1.05, "s", lower=True)
        yield from row(f"{name}, from step to step", "decode", "step_seconds", unit="s")
    for phase in sorted({p for _, p in values if p.startswith("prefill ")}, key=len):
        tokens = phase.split()[1]
        measure = f"time to first token, {tokens} tokens"
        yield from row(measure, phase, "seconds", unit="s")
        share = get(ours, phase, "eviction_share")
        if share is not None:
            target = Target("<= 0.015 of prefill", share, 0.015, "lower") if has_targets else None
            name = f"{title}: statistics, selection and copy, {tokens} tokens"
            seconds = get(ours, phase, "eviction_seconds") or 0.0
            yield Row(name, _amount(seconds, "s"), target=target, note=f"{share:.2%}")
    evicted = {p: int(e["values"].get("evicted", 0)) for (a, p), e in values.items() if a == ours}
    if evicted:
        counts = ", ".join(f"{phase} {number}" for phase, number in evicted.items() if number)
        yield Row(f"{title}: requests evicted", str(sum(evicted.values())), note=counts)


def _amount(value: float, unit: str) -> str:
    """Return a value with its unit, seconds as milliseconds."""
    if unit == "s":
        return f"{1e3 * value:,.2f} ms"
    return f"{value:,.4g} {unit}".strip() if value < 1e4 else f"{value:,.0f} {unit}".strip()


def _failure(entry: Entry) -> Row:
    name = entry.get("name") or f"{entry['part']}: {entry.get('phase', '')}"
    return Row(name, "FAILED", note=str(entry["failed"]).strip().splitlines()[-1].replace("|", "/"))


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
