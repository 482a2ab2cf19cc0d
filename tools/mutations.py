# SPDX-License-Identifier: Apache-2.0
"""Plant defects in core modules, one at a time, and see whether the usual tests catch each.

    python -m tools.mutations [WORD]     only those whose description has this word

`mutations.toml` lists them. Each is planted in a temporary copy of the tree, where only the tests
that should catch it run. The result is 1 if one was missed, or if a text to replace is not there
once: then the code has moved.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Defect:
    """In `file`, which has `old` once, it becomes `new`; pytest's `tests` should fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


def is_caught(defect: Defect, tree: Path) -> bool | None:
    """Plant a defect in a copy of the tree; return whether tests fail, None if it has no place."""
    file = tree / defect.file
    text = file.read_text()
    if text.count(defect.old) != 1:
        return None
    file.write_text(text.replace(defect.old, defect.new))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not apparatus and not nightly"]
    command = [sys.executable, "-m", "pytest", *options, *defect.tests.split()]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False)
    finally:
        file.write_text(text)
    if ended.returncode not in (0, 1):  # 1: tests failed
        raise RuntimeError(ended.stdout.decode()[-2000:] + ended.stderr.decode()[-2000:])
    return ended.returncode == 1


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    said = {True: "caught", False: "MISSED", None: "NO PLACE"}
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["defect"]
    defects = [Defect(**values) for values in listed]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        left_out = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
        for defect in defects:
            if word in defect.what:
                results.append(is_caught(defect, tree))
                print(f"{said[results[-1]]:8}  {defect.what} ({defect.tests})", flush=True)
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
