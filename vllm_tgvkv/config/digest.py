# SPDX-License-Identifier: Apache-2.0
"""The settings that have to be the same wherever a prompt's cache goes, as text and as a digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

from vllm_tgvkv.config.server import config_of
from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.shared.budget import Budget

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OF_ONE_NODE = frozenset({"defaults_file", "folder", "file", "path"})
"""Fields with paths: a node may have the same content elsewhere."""

_MOST_SHOWN = 200
"""Characters of a value; a longer one is shown by its beginning and a digest."""


def settings_of_worker(vllm_config: VllmConfig) -> dict[str, str]:
    """Return everything that has to be the same on all workers, as text by name."""
    cache = vllm_config.cache_config
    return {
        "vLLM": vllm.__version__,
        "vllm-tgvkv": version("vllm-tgvkv"),
        "--block-size": str(cache.block_size),
        "--kv-cache-dtype": str(cache.cache_dtype),
        **dict(_flat("kv_eviction", config_of(vllm_config))),
    }


def digest(settings: Mapping[str, str]) -> str:
    """Return a short text that is the same for the same settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a setting and of the settings in it."""
    if isinstance(value, Budget):
        yield name, str(value.value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _OF_ONE_NODE:
                yield from _flat(f"{name}.{field.name}", getattr(value, field.name))
        if isinstance(value, Gates):
            with Path(value.folder, value.file).open("rb") as weights:
                yield f"{name}.weights", hashlib.file_digest(weights, "sha256").hexdigest()[:12]
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _flat(f"{name}.{key}", value[key])
    else:
        text = value if isinstance(value, str) else repr(value)
        if len(text) > _MOST_SHOWN:
            text = f"{text[:_MOST_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
        yield name, text
