# SPDX-License-Identifier: Apache-2.0
"""A short hash of everything that may change an answer, so that old answers are not reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def fingerprint(facts: Sequence[Any], files: Iterable[Path]) -> str:
    """Return a hash of the plugin's sources, further files below `ROOT`, and facts for JSON."""
    plugin = (p for folder in ("vllm_tgvkv", "kernels") for p in (ROOT / folder).rglob("*.py"))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for path in sorted({*plugin, *files}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
