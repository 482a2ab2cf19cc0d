# SPDX-License-Identifier: Apache-2.0
"""The authors' trimkv, in a folder of its own on top of kvpress's environment, which has torch."""

from __future__ import annotations

import fcntl
import shutil
import sys
from pathlib import Path

from tests.kvpress.environment import kvpress_python, run_isolated

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1] / "build" / "trimkv"
REQUIREMENTS = HERE / "requirements.txt"


def run_script(name: str, folder: Path) -> None:
    """Run a script of this folder with trimkv, after installing `requirements.txt` if it changed.

    Raises:
        RuntimeError: if the installation or the script fails, with its output and a way out.
    """
    python = kvpress_python()
    stamp = PACKAGES / "installed.txt"
    wanted = f"{sys.version}\n{REQUIREMENTS.read_text()}"
    with PACKAGES.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes installs
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(PACKAGES, ignore_errors=True)
            pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps")
            run_isolated(*pip, "--target", PACKAGES, "-r", REQUIREMENTS)
            stamp.write_text(wanted)
    run_isolated(python, HERE / name, PACKAGES, folder)
