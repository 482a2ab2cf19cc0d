# SPDX-License-Identifier: Apache-2.0
"""Speed and memory on a GPU against stock vLLM, within a time limit.

Each part runs in its own process. Parts are ordered by importance. When the time is up, the running
part is killed and those after it are listed as skipped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.plan import SCALES, EnginePlan, build_engine, engine_plans
from benchmarks.gpu.report import Entry, Report
from benchmarks.remote import FOLDER, Remote, RemoteError, TimeUpError

_LEAST_SECONDS = {"full": 75.0, "quick": 60.0, "first": 60.0}
"""An engine needs this time to reach its first measurement, of a tiny model 1 s."""
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """A process that is asked for one measurement after the other."""

    name: str
    most_seconds: float
    least_seconds: float
    build: Callable[..., Any]
    """Makes the object that measures."""
    arguments: tuple[Any, ...]
    entries: Callable[[Remote], Iterator[Entry]]
    """Yields what is measured."""


def main() -> int:
    """Run all parts; 0 unless one failed. A missed target fails nothing."""
    options = parse()
    scale = "first" if options.first else "quick" if options.quick else "full"
    if options.smoke:
        scale = "first-smoke" if options.first else "smoke"
    if not options.smoke and not torch.cuda.is_available():
        print("No CUDA device: nothing can be measured here (--smoke runs the code).")
        return 1
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    report = Report(options.results, scale)
    text, entries, ends = "", [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts(scale, scratch):
            if options.only and not any(word in part.name for word in options.only):
                continue
            left = 60 * options.minutes - (time.monotonic() - begin) - _GRACE_SECONDS
            if left < part.least_seconds:
                ends[part.name] = "SKIPPED, the time is up"
            else:
                say(part.name)
                ends[part.name] = run(part, min(left, part.most_seconds), entries)
            say(f"{part.name}: {ends[part.name]}")
            text = report.write(entries, ends)
    print(text)
    say(f"written to {report.json_path} and {report.markdown_path.name}")
    return 1 if any("failed" in entry for entry in entries) else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument("--quick", action="store_true", help="one model, fewer and shorter outputs")
    brief = "one model against stock: decoding, requests at once, eviction's share of prefill"
    parser.add_argument("--first", action="store_true", help=brief)
    parser.add_argument("--smoke", action="store_true", help="tiny, without a GPU: no measurement")
    parser.add_argument("--only", nargs="+", help="parts whose name contains one of these words")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of both files")
    return parser.parse_args()


def parts(scale: str, scratch: str) -> Iterator[Part]:
    """Yield all parts by importance."""
    sizes = kernels.SMOKE if scale == "smoke" else kernels.FULL
    if not SCALES[scale].is_brief:
        yield Part("kernels", 90.0, 0.0, kernels.Kernels, (sizes,), kernel_entries)
    least = _LEAST_SECONDS.get(scale, 1.0)
    for plan in engine_plans(SCALES[scale]):
        entries = partial(engine_entries, plan)
        yield Part(plan.title, 200.0, least, build_engine, (plan, scratch), entries)


def kernel_entries(remote: Remote) -> Iterator[Entry]:
    """Measure the kernels, group by group."""
    for group in remote.ask("groups"):
        for entry in remote.ask("measure", group=group):
            yield {"part": "kernels", **entry}


def engine_entries(plan: EnginePlan, remote: Remote) -> Iterator[Entry]:
    """Measure phase after phase; one that fails ends the engine, which may be damaged."""
    common = {"part": plan.title, "shape": plan.shape.name, "arm": plan.name}
    yield {**common, "phase": "start", "engine": remote.ask("describe")}
    for phase in plan.phases():
        entry = {**common, "phase": phase.name, "arguments": phase.arguments}
        begin = time.monotonic()
        try:
            values = remote.ask(phase.method, **phase.arguments)
        except RemoteError as error:
            yield {**entry, "failed": str(error)}
            return
        yield {**entry, "values": values, "took": round(time.monotonic() - begin, 1)}


def run(part: Part, seconds: float, entries: list[Entry]) -> str:
    """Run a part for at most `seconds`, add what it measures, and return how it ended."""
    begin = time.monotonic()
    remote = Remote(part.name, part.build, *part.arguments, deadline=begin + seconds)
    try:
        remote.wait_until_built()
        entries.extend(part.entries(remote))  # also what precedes an error
    except TimeUpError:
        return f"ENDED after {seconds:.0f} s, what it had measured is kept"
    except RemoteError as error:
        entries.append({"part": part.name, "failed": str(error)})
    finally:
        remote.close()
    end = "FAILED after" if "failed" in entries[-1] else "done in"
    return f"{end} {time.monotonic() - begin:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
