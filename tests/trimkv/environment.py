# SPDX-License-Identifier: Apache-2.0
"""The authors' trimkv, in a folder of its own on top of kvpress's environment, which has torch."""

from __future__ import annotations

from pathlib import Path

from tests.kvpress.environment import PIP, install, kvpress_python, run_isolated

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1] / "build" / "trimkv"
REQUIREMENTS = HERE / "requirements.txt"


def run_script(name: str, folder: Path) -> None:
    """Run a script of this folder with trimkv, after installing `requirements.txt` if it changed.

    Raises:
        RuntimeError: if the installation or the script fails, with its output and a way out.
    """
    python = kvpress_python()
    pip = (python, *PIP, "--no-deps", "--target", PACKAGES, "-r", REQUIREMENTS)
    install(PACKAGES, REQUIREMENTS, pip)
    run_isolated(python, HERE / name, PACKAGES, folder)
