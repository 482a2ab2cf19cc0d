# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu`: measure against stock vLLM on this GPU, print and keep the table.

Each part runs in its own process. Parts are ordered by importance. When the time is up, the running
part is killed and those after it are listed as skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu import journal
from benchmarks.gpu.plan import SCALES, engine_plans
from benchmarks.gpu.report import SMOKE_NOTICE, Report

RESULTS = Path(__file__).parents[1] / "results"
_MIN_SECONDS = {"full": 75.0, "quick": 60.0, "smoke": 1.0}
"""An engine needs this time to reach its first measurement."""
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """A process that appends to a journal."""

    name: str
    command: list[str]
    max_seconds: float
    min_seconds: float = 0.0


def main() -> int:
    """Run all parts; 0 unless one failed. A missed target fails nothing."""
    options = parse()
    scale = "smoke" if options.smoke else "quick" if options.quick else "full"
    if not options.smoke and not torch.cuda.is_available():
        print("No CUDA device: nothing can be measured here (--smoke runs the code).")
        return 1
    if options.smoke:
        print(SMOKE_NOTICE)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    report = Report(options.results, scale)
    text, entries = "", []
    ends: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "entries.jsonl")
        for part in parts(scale, results):
            if options.only and not any(word in part.name for word in options.only):
                continue
            left = 60 * options.minutes - (time.monotonic() - begin)
            if left < part.min_seconds + _GRACE_SECONDS:
                ends[part.name] = "SKIPPED, the time is up"
            else:
                say(part.name)
                ends[part.name] = run(part, min(left - _GRACE_SECONDS, part.max_seconds))
            say(f"{part.name}: {ends[part.name]}")
            entries = journal.read(results)
            text = report.write(entries, ends)
    print(text)
    say(f"written to {report.json_path} and {report.markdown_path.name}")
    broken = any("failed" in entry for entry in entries)
    return 1 if broken or any(end.startswith("FAILED") for end in ends.values()) else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument("--quick", action="store_true", help="one model, fewer and shorter outputs")
    parser.add_argument("--smoke", action="store_true", help="tiny, without a GPU: no measurement")
    parser.add_argument("--only", nargs="+", help="parts whose name contains one of these words")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of both files")
    return parser.parse_args()


def parts(scale: str, results: Path) -> Iterator[Part]:
    """Yield all parts by importance."""
    python = [sys.executable, "-m"]
    smoke = ["--smoke"] if scale == "smoke" else []
    kernels = [*python, "benchmarks.gpu.kernels", str(results), *smoke]
    yield Part("kernels", kernels, 90.0)
    for number, plan in enumerate(engine_plans(SCALES[scale])):
        command = [*python, "benchmarks.gpu.phases", str(results), scale, str(number)]
        yield Part(plan.title, command, 200.0, _MIN_SECONDS[scale])


def run(part: Part, seconds: float) -> str:
    """Run a part for at most `seconds`, and return how it ended."""
    begin = time.monotonic()
    command = [*part.command, "--until", str(time.time() + seconds)]
    # In its own session, so that all its processes end with it.
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        code = process.wait(seconds + _GRACE_SECONDS / 2)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    took = f"{time.monotonic() - begin:.0f} s"
    if code is None:
        return f"ENDED after {took}, what it had measured is kept"
    return f"done in {took}" if code == 0 else f"FAILED with exit code {code} after {took}"


if __name__ == "__main__":
    sys.exit(main())
