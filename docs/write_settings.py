# SPDX-License-Identifier: Apache-2.0
"""Write the tables of `docs/settings.md` from the declarations in `vllm_tgvkv/config/server.py`.

Usage: python -m docs.write_settings
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vllm_tgvkv.config.server import DebugOptions, DecodeOptions, EvictionConfig
from vllm_tgvkv.config.settings import settings_of, table

PAGE = Path(__file__).with_name("settings.md")
TABLES = {"settings": EvictionConfig, "decode": DecodeOptions, "debug": DebugOptions}


def filled(text: str, rows: Mapping[str, str]) -> str:
    """Return a page with new rows below the head of each table that `<!-- table: ... -->` names."""
    marked = r"(<!-- table: (.+) -->\n\|.*\n\|.*\n)(?:\|.*\n)*"
    return re.sub(marked, lambda found: f"{found[1]}{rows[found[2]]}\n", text)


def page() -> str:
    """Return the page's text."""
    rows = {name: table(settings_of(kind)).split("\n", 2)[2] for name, kind in TABLES.items()}
    return filled(PAGE.read_text(), rows)


if __name__ == "__main__":
    PAGE.write_text(page())
