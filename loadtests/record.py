# SPDX-License-Identifier: Apache-2.0
"""`results.json`: all measurements, from which the report is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.load import Load
from measure.samples import Sample

FILE = "results.json"
COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "image_hits", "finished")


@dataclass(frozen=True)
class Run:
    """One load on one arm, with a sample list for each metric."""

    arm: str
    workload: str
    rate: float
    bench: dict[str, Any]
    """Result of `vllm bench serve`, see `read_result`."""
    times: list[float]
    """Seconds since the arm was ready, of every sample of its `/metrics`."""
    running: list[float]
    waiting: list[float]
    kv_usage: list[float]
    memory_mib: list[float | None]
    counts: dict[str, float]
    """Increase of vLLM's counters during the run."""
    eviction: dict[str, float]
    """Increase of the plugin's counters."""
    drain_seconds: float
    idle: bool
    """Whether nothing ran or waited and no block was in use at the end."""
    left: dict[str, float]
    """Running and waiting requests and blocks in use at the end."""

    @classmethod
    def of(
        cls,
        arm: str,
        load: Load,
        bench: dict[str, Any],
        samples: Sequence[Sample],
        drained: tuple[float, Sample],
        ready: float,
    ) -> Run:
        """Build a run from samples under load and `drained`, the result of `drain`."""
        first, (seconds, last) = samples[0], drained
        every = [*samples, last]
        return cls(
            arm=arm,
            workload=load.workload,
            rate=load.rate,
            bench=bench,
            times=[round(s.time - ready, 2) for s in every],
            running=[s.running for s in every],
            waiting=[s.waiting for s in every],
            kv_usage=[round(s.kv_usage, 4) for s in every],
            memory_mib=[s.memory_mib and round(s.memory_mib, 1) for s in every],
            counts={name: getattr(last, name) - getattr(first, name) for name in COUNTERS},
            eviction={n: v - first.eviction.get(n, 0.0) for n, v in last.eviction.items()},
            drain_seconds=round(seconds, 2),
            idle=last.idle,
            left=last.left,
        )

    @property
    def begin(self) -> int:
        """Return the sample before the first request: `vllm bench serve` takes time to start."""
        seen = [i for i, (r, w) in enumerate(zip(self.running, self.waiting, strict=True)) if r + w]
        return max(0, seen[0] - 1) if seen else 0

    @property
    def prefix_hit_share(self) -> float:
        queries = self.counts["prefix_queries"]
        return self.counts["prefix_hits"] / queries if queries else 0.0


@dataclass
class Record:
    """A load test, complete or interrupted."""

    profile: dict[str, Any]
    facts: dict[str, Any]
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By arm: command, pool, seconds to start, load of the machine before."""
    runs: list[Run] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), separators=(",", ":"))
        # One line per run: short, and diffs are readable.
        text = text.replace('{"arm":', '\n{"arm":')
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Record:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        values["runs"] = [Run(**run) for run in values["runs"]]
        return cls(**values)

    def of(self, arm: str | None = None, workload: str | None = None) -> list[Run]:
        """Return the runs of an arm and a workload, in order."""
        return [
            run for run in self.runs if arm in (None, run.arm) and workload in (None, run.workload)
        ]
