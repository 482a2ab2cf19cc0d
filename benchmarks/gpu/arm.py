# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.arm RESULTS SCALE NUMBER`: run the phases of one arm.

A process of its own for each: its memory is free when it ends, and it can be ended when it hangs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import SCALES, arms
from benchmarks.gpu.traffic import Traffic


def main() -> int:
    """Measure phase after phase; one that fails ends the arm, as the engine may be damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("number", type=int, help="of the arm, in the order of the plan")
    parser.add_argument("--until", type=float, default=float("inf"), help="time.time() of the end")
    options = parser.parse_args()
    arm = list(arms(SCALES[options.scale]))[options.number]
    journal = Journal(options.results, part=arm.title, shape=arm.shape.name, arm=arm.name)

    from benchmarks.gpu.engine import Engine

    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(arm.shape, Path(scratch, "model"), arm.pool_tokens, arm.engine_args())
        journal.write(phase="start", engine=engine.describe())
        for phase in arm.phases():
            if time.time() > options.until:
                journal.write(phase=phase.name, skipped="time is up")
                continue
            arguments = dict(phase.arguments)
            if "traffic" in arguments:
                arguments["traffic"] = Traffic(**arguments["traffic"])
            begin = time.perf_counter()
            try:
                values = getattr(engine, phase.method)(**arguments)
            except Exception:
                journal.write(phase=phase.name, failed=traceback.format_exc())
                return 1
            journal.write(
                phase=phase.name,
                values=values,
                arguments=phase.arguments,
                took=round(time.perf_counter() - begin, 1),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
