# SPDX-License-Identifier: Apache-2.0
"""An engine of several workers on model runner V2; every worker imports this module first.

    python -m tests.engine.split_on_runner_v2 FOLDER GATES SPLIT KIND

See `runner_v2.py` for what is pretended, and `test_split_cuts.serve` for the arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.engine import runner_v2

runner_v2.prepare()


def main(folder: str, gates: str, name: str, kind: str) -> None:
    from tests.engine.test_split_cuts import serve

    runner_v2.pretend_gpu_worker()
    serve(Path(folder), Path(gates), name, kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
