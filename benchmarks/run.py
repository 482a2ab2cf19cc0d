# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.run`: measure everything, print a table, keep a JSON."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.comparison import FULL, PARTS, QUICK, Comparison

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the benchmarks; 0 if all of them ran, whether or not targets were met."""
    options = parse()
    start = time.monotonic()
    circumstances = report.machine()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(
            scale=QUICK if options.quick else FULL,
            root=scratch,
            block_size=options.block_size,
            eager=options.eager,
            say=say,
        )
        comparison.run(options.only)
    result = report.record(comparison.lines, comparison.facts, time.monotonic() - start)
    result["load_average_at_start"] = circumstances["load_average"]
    result["failures"] = comparison.failures
    path = report.write(result, options.results)
    print(report.table(comparison.lines))
    if options.markdown:
        print(report.markdown(comparison.lines))
    say(f"written to {path}")
    return 1 if comparison.failures else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter prompts")
    parser.add_argument("--only", nargs="+", default=(), choices=PARTS, help="parts to run")
    parser.add_argument(
        "--block-size", type=int, default=128, help="of ours and of constrained (default: 128)"
    )
    parser.add_argument("--eager", action="store_true", help="all arms without torch.compile")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table as well")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
