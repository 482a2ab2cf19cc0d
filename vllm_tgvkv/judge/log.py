# SPDX-License-Identifier: Apache-2.0
"""Logs of JSON lines, to which an interrupted run is added when it continues."""

from __future__ import annotations

import os
from pathlib import Path


def whole_lines(log: Path) -> list[bytes]:
    """Return the lines of a log; an incomplete last line is cut off, also in the file."""
    if not log.exists():
        return []
    whole, newline, rest = log.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(log, len(whole) + len(newline))
    return whole.splitlines()
