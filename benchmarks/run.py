# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.run`: compare with stock vLLM, print the tables, keep a JSON."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.bench import Bench, Part
from benchmarks.costs import costs, methods, scheduler, steps
from benchmarks.cuts import cuts
from benchmarks.drafts import drafts
from benchmarks.gain import gain, grid, recall
from benchmarks.handover import handover
from benchmarks.ranks import ranks
from benchmarks.remote import FOLDER
from benchmarks.scale import SCALES
from benchmarks.switched import metrics, waiting
from measure.facts import command_line

PARTS: dict[str, Part] = {
    "costs": costs,
    "gain": gain,
    "grid": grid,
    "recall": recall,
    "drafts": drafts,
    "scheduler": scheduler,
    "steps": steps,
    "methods": methods,
    "metrics": metrics,
    "waiting": waiting,
    "cuts": cuts,
    "ranks": ranks,
    "handover": handover,
}


def main() -> int:
    """Run the benchmarks; 0 unless a part failed. A missed target fails nothing."""
    options = parse()
    scale = SCALES["smoke" if options.smoke else "quick" if options.quick else "full"]
    load = os.getloadavg()
    begin = time.monotonic()
    minutes = scale.minutes if options.minutes is None else options.minutes

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(scale, scratch, options.block_size, options.eager, say, begin + 60 * minutes)
        bench.run(PARTS, options.only)
    command = command_line("benchmarks.run", sys.argv[1:])
    result = report.record(bench, command, time.monotonic() - begin, load)
    path = report.write(result, options.results)
    print(report.tables(result))
    for name, ending in bench.endings.items():
        say(f"part `{name}`: {ending}")
    say(f"written to {path}")
    return 1 if bench.failed else 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="three parts, short prompts, at most 10 minutes"
    )
    parser.add_argument("--smoke", action="store_true", help="run all code on tiny sizes")
    parser.add_argument(
        "--minutes", type=float, help="end the run after this time (default: quick 10, else none)"
    )
    parser.add_argument("--only", nargs="+", default=(), choices=PARTS, help="parts to run")
    parser.add_argument(
        "--block-size", type=int, default=128, help="of all arms but production (default: 128)"
    )
    parser.add_argument("--eager", action="store_true", help="all arms without torch.compile")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
