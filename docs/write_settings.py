# SPDX-License-Identifier: Apache-2.0
"""Write `docs/settings.md` from the declarations in `vllm_tgvkv/config/server.py`.

Usage: python -m docs.write_settings
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_tgvkv.config.server import DebugOptions, DecodeOptions, EvictionConfig
from vllm_tgvkv.config.settings import Setting, settings_of

PAGE = Path(__file__).with_name("settings.md")
TEXT = """\
# Settings

`python -m docs.write_settings` writes this page from `vllm_tgvkv/config/server.py`. `vllm serve
--help=KVEviction` prints the same.

`policy`, `budget` and `gates` have flags: `--kv-eviction`, `--kv-eviction-budget` and
`--kv-eviction-gates`. `--kv-eviction-config` takes all settings, as a YAML or JSON file or inline
JSON; a flag wins over the same field there. In Python they are
`LLM(..., additional_config={{"kv_eviction": {{"policy": "tgv", "sinks": 8}}}})`.

{settings}

More on [methods and mixes](methods.md), [traces and the defaults file](http.md),
[when to change what](tuning.md), and [options of a request](requests.md).

## Evictions while the answer grows

`decode` is a mapping with one of `schedule`, `max_tokens` and `on_request`.

{decode}

## For tests

`debug` is a mapping of switches. Each costs time, and none changes what is kept.

{debug}
"""


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
    settings, decode = settings_of(EvictionConfig), settings_of(DecodeOptions)
    return TEXT.format(
        settings=table(settings), decode=table(decode), debug=table(settings_of(DebugOptions))
    )


if __name__ == "__main__":
    PAGE.write_text(page())
