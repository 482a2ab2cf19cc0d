# SPDX-License-Identifier: Apache-2.0
"""A separate virtual environment for kvpress, created on first use in `build/`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / "build" / "kvpress"
REQUIREMENTS = HERE / "requirements.txt"
INSTALL_SECONDS = 1200
PIP = ("-m", "pip", "install", "--quiet", "--no-compile")
"""Compiling modules that are never imported would take longer than the rest."""


def install(target: Path, requirements: Path, *commands: tuple[Path | str, ...]) -> None:
    """Run commands that fill a folder, unless it was filled for these requirements.

    Raises:
        RuntimeError: if a command fails, with its output and a way out.
    """
    stamp = target / "installed.txt"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes installs
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(target, ignore_errors=True)
            for command in commands:
                run_isolated(*command)
            stamp.write_text(wanted)


def kvpress_python() -> Path:
    """Return the environment's interpreter, after installing `requirements.txt` if it changed."""
    python = ENVIRONMENT / "bin" / "python"
    venv = (sys.executable, "-m", "venv", ENVIRONMENT)
    install(ENVIRONMENT, REQUIREMENTS, venv, (python, *PIP, "-r", REQUIREMENTS))
    return python


def run_script(name: str, *arguments: Path) -> None:
    """Run a script of this folder in the environment; see `run_isolated`."""
    run_isolated(kvpress_python(), HERE / name, *arguments)


def run_isolated(*command: Path | str) -> None:
    """Run a command without this project's environment variables for Python.

    Raises:
        RuntimeError: if it fails, with its output.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        what = " ".join(str(part) for part in command[1:])
        raise RuntimeError(
            f"a peer's environment: `{what}` ended with {done.returncode}. It needs pip with an "
            "index that has kvpress, trimkv and torch's CPU build (PIP_EXTRA_INDEX_URL).\n"
            + "\n".join(done.stdout.splitlines()[-30:])
        )
