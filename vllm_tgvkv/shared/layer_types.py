# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers that a model's configuration lists: full attention, windows, delta nets.

Eviction works in the layers with full attention. Those with a sliding window or with a state keep
vLLM's own behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_SERVED = {"full_attention", "attention", "mlp", "moe"}
"""Kinds of layers, as configurations name them, that have full attention or none."""

_SLIDING = "sliding"
"""Part of the names of layers that attend over a window."""

_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of language models with gated delta nets (`linear_attention`) and full attention."""


def has_delta_nets(model: ModelConfig) -> bool:
    """Return whether some layers are gated delta nets, and the others full attention."""
    return model.is_hybrid and model.hf_text_config.model_type in _DELTA_NETS


def has_windows(text_config: Any) -> bool:
    """Return whether some layers attend over a window, and others have full attention."""
    return bool(sliding_layers(text_config)) and "full_attention" in text_config.layer_types


def sliding_layers(text_config: Any) -> list[int]:
    """Return the layers that attend over a window only, as the configuration lists them."""
    kinds = getattr(text_config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds) if _SLIDING in kind]


def evicted_kv_heads(model: ModelConfig) -> int:
    """Return the KV heads of a layer with full attention, of all ranks together."""
    return model.model_arch_config[_full_layer(model)].total_num_kv_heads


def evicted_head_size(model: ModelConfig) -> int:
    """Return the values of a head of a layer with full attention."""
    return model.model_arch_config[_full_layer(model)].head_size


def evicted_layers(model: ModelConfig) -> int:
    """Return the number of layers with full attention and a cache of their own."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    num_layers = model.get_total_num_hidden_layers()
    num_owners = num_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    full = [kind in _SERVED for kind in kinds[:num_owners]]
    return sum(full) or num_owners


def _full_layer(model: ModelConfig) -> int:
    """Return the index of a layer with full attention, or 0 if none has a window.

    In Gemma 4 these layers have fewer and larger heads than those with a window.
    """
    text = model.hf_text_config
    return text.layer_types.index("full_attention") if has_windows(text) else 0


def other_layers(text_config: Any) -> list[str]:
    """Return the kinds of layers in a configuration that are not served, by its names."""
    names = ("layer_types", "layers_block_type")
    kinds = next(filter(None, (getattr(text_config, name, None) for name in names)), ())
    found = {str(kind) for kind in kinds} - _SERVED
    if getattr(text_config, "model_type", None) in _DELTA_NETS:
        found.discard("linear_attention")
    return sorted(kind for kind in found if _SLIDING not in kind)


def text_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as `0-4, 6`."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
