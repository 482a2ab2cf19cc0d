# SPDX-License-Identifier: Apache-2.0
"""Names of settings and request options that no longer exist, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_tgvkv.shared.errors import EvictionConfigError

REMOVED = {
    "granularity": "set it in a mix, such as methods: {mine: {base: tgv, granularity: head}}, and "
    "name the mix as the method",
    "pooling": "set it in a mix, such as methods: {mine: {base: tgv, pooling: grid}}, and name the "
    "mix as the method",
    "prefix_reuse": "remove it; a prefix-cache hit always ends before the first token that votes",
    "query_rows": "remove it; there is room for the queries of 8 requests that wait",
    "max_trace_mib": "remove it; all traces together take at most 64 MiB",
    "metrics": "remove it; --disable-log-stats switches all metrics off",
    "decode.buffer": "remove it; a cache grows by a quarter of max_tokens between evictions",
    "decode.rows": "remove it; the last 32 tokens of the answer vote",
    "gates.lookahead": "give the folder alone; the retention of 2 tokens is averaged",
    "gates.age_offset": "give the folder alone; the newest token has age 1, as in the paper",
    "methods.budget": "name it allocation",
    "vllm_xargs.kv_eviction_buffer": "remove it; a cache grows by a quarter of "
    "kv_eviction_max_tokens between evictions",
}
"""By section and name; the sections of `--kv-eviction-config`, and `vllm_xargs`."""


def refuse_removed(names: Iterable[object], source: str) -> None:
    """Raise an error if one of the names in `source`, such as `kv_eviction.decode`, was removed.

    Raises:
        EvictionConfigError: naming it, and what to do instead.
    """
    section = ".".join(source.removeprefix("kv_eviction").lstrip(".").split(".")[:1])
    for name in names:
        key = f"{section}.{name}" if section else str(name)
        if key in REMOVED:
            raise EvictionConfigError(f"{source} has {name}, which was removed: {REMOVED[key]}")
