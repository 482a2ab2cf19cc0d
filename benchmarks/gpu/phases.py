# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.phases RESULTS SCALE NUMBER`: run the phases of one engine.

In a separate process its memory is free when it ends, and it can be killed when it hangs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import SCALES, engine_plans


def main() -> int:
    """Measure phase after phase; one that fails ends the engine, which may be damaged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("number", type=int, help="of the engine, in the order of the plan")
    parser.add_argument("--until", type=float, default=float("inf"), help="end as time.time()")
    options = parser.parse_args()
    plan = list(engine_plans(SCALES[options.scale]))[options.number]
    journal = Journal(options.results, part=plan.title, shape=plan.shape.name, arm=plan.name)

    from benchmarks.gpu.engine import GpuEngine

    with tempfile.TemporaryDirectory() as scratch:
        engine = GpuEngine(plan.shape, Path(scratch, "model"), plan.pool_tokens, plan.engine_args())
        journal.write(phase="start", engine=engine.describe())
        for phase in plan.phases():
            if time.time() > options.until:
                journal.write(phase=phase.name, skipped="time is up")
                continue
            begin = time.perf_counter()
            try:
                values = getattr(engine, phase.method)(**phase.arguments)
            except Exception:
                journal.write(phase=phase.name, failed=traceback.format_exc())
                return 1
            took = round(time.perf_counter() - begin, 1)
            journal.write(phase=phase.name, values=values, arguments=phase.arguments, took=took)
    return 0


if __name__ == "__main__":
    sys.exit(main())
