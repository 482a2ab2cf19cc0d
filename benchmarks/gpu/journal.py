# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines, written at once so that a killed process loses none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Appends entries with some fields in common to a file."""

    def __init__(self, path: Path, **common: Any) -> None:
        self.path = path
        self.common = common

    def write(self, **entry: Any) -> None:
        """Append one entry."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.common, **entry}) + "\n")
