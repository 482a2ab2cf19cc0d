# SPDX-License-Identifier: Apache-2.0
"""Write the tables of `docs/settings.md` from the declarations in `vllm_tgvkv/config/server.py`.

Usage: python -m docs.write_settings
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_tgvkv.config.recall import RecallOptions
from vllm_tgvkv.config.server import DebugOptions, DecodeOptions, EvictionConfig
from vllm_tgvkv.config.settings import Setting, settings_of

PAGE = Path(__file__).with_name("settings.md")
TABLES = {
    "settings": EvictionConfig,
    "decode": DecodeOptions,
    "recall": RecallOptions,
    "debug": DebugOptions,
}


def filled(text: str, by_table: Mapping[str, str]) -> str:
    """Return a page with new rows below the head of each table that `<!-- table: ... -->` names."""
    marked = r"(<!-- table: (.+) -->\n\|.*\n\|.*\n)(?:\|.*\n)*"
    return re.sub(marked, lambda found: f"{found[1]}{by_table[found[2]]}\n", text)


def table(settings: Iterable[Setting]) -> str:
    """Return a Markdown table of settings."""
    rows = [
        f"| `{found.name}` | {found.help} | {found.values} | {found.default_text} |"
        for found in settings
        if not found.for_tests
    ]
    return "\n".join(("| field | meaning | values | default |", "|---|---|---|---|", *rows))


def page() -> str:
    """Return the page's text."""
    rows = {name: table(settings_of(kind)).split("\n", 2)[2] for name, kind in TABLES.items()}
    return filled(PAGE.read_text(), rows)


if __name__ == "__main__":
    PAGE.write_text(page())
