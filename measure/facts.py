# SPDX-License-Identifier: Apache-2.0
"""Facts about how a record was made: command, versions, revision and machine."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the command that ran `module`, as a user would type it."""
    return shlex.join(["python", "-m", module, *arguments])


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package, or `not installed`."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def revision() -> str | None:
    """Return the commit of this checkout, with `-dirty` if it was changed; None outside Git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def machine() -> dict[str, Any]:
    """Return the processor, memory, load and Python of this Linux machine.

    A load average above zero before a measurement means that the machine is shared.
    """
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
