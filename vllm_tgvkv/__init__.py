# SPDX-License-Identifier: Apache-2.0
"""KV-cache eviction for vision-language models in stock vLLM, per layer and per head.

The names of `vllm_tgvkv.api` can be imported from here; docs/python.md shows how to use them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_tgvkv.api import (
        CutReport,
        EvictionConfigError,
        EvictionOptions,
        EvictionReport,
        KeptTokens,
        MemoryReport,
        UnsupportedByEvictionError,
        kept_tokens,
        method_names,
        report_of,
    )

__all__ = (
    "CutReport",
    "EvictionConfigError",
    "EvictionOptions",
    "EvictionReport",
    "KeptTokens",
    "MemoryReport",
    "UnsupportedByEvictionError",
    "kept_tokens",
    "method_names",
    "report_of",
)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: every vLLM process imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_tgvkv import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
