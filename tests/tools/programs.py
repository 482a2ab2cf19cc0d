# SPDX-License-Identifier: Apache-2.0
"""Programs that some tests need."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def program(name: str, package: str) -> str:
    """Return the path of a program in this environment or on the machine, or skip the test."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed ({package})")
    return path
