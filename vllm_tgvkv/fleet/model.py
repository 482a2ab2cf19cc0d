# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that a fleet depends on, from its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_tgvkv.gain import LayerKind

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Model:
    """A model that was built without weights."""

    architecture: str
    kinds: Sequence[LayerKind]
    block_size: int
    weight_bytes: int
    """Of all weights."""
    read_bytes: int
    """Of the weights that a step of the language model reads."""
    active_values: float
    """Weights that a token is multiplied with: of experts, only those that it is sent to."""
    query_width: int
    """Query heads of a layer times their size."""
    num_kv_heads: int
    context: int
    """Most tokens of a request."""
    vision_values: int = 0
    """Weights outside the language model."""
    patches_per_token: int = 1
    """Patches in the vision tower for each visual token."""
    refusals: Sequence[str] = ()
    """Why eviction does not serve it."""


def read_model(name: str, **given: Any) -> Model:
    """Build a model as `vllm_tgvkv.gain` does, which imports vLLM and takes some seconds.

    Args:
        given: fields of vLLM's `EngineArgs`.
    """
    from vllm_tgvkv.engine.compatibility import refused_properties
    from vllm_tgvkv.gain import block_size_with, build, configure, layer_kinds, specs_of_layers

    vllm_config = configure(name, **given)
    built = build(vllm_config)
    specs = specs_of_layers(vllm_config)
    model = vllm_config.model_config
    text, vision = model.hf_text_config, getattr(model.hf_config, "vision_config", None)
    of_images = getattr(built, "get_language_model", None)
    language = built if of_images is None else of_images()
    values, num_bytes = _sizes(language)
    embedding, head = "embed_tokens", "lm_head"
    # Rows of an embedding are looked up, not multiplied with, unless it is the head as well.
    read = sum(num_bytes.values()) - (num_bytes[embedding] if num_bytes[head] else 0)
    all_values, all_bytes = (sum(sizes.values()) for sizes in _sizes(built))
    merge = int(getattr(vision, "spatial_merge_size", 1) or 1)
    return Model(
        architecture=model.architecture,
        kinds=layer_kinds(specs, vllm_config),
        block_size=block_size_with(vllm_config, specs, given.get("block_size")),
        weight_bytes=all_bytes,
        read_bytes=read,
        active_values=values["layers"] + values[_EXPERTS] * _share_of_experts(text),
        query_width=model.get_num_attention_heads(vllm_config.parallel_config)
        * model.get_head_size(),
        num_kv_heads=model.get_total_num_kv_heads(),
        context=model.max_model_len,
        vision_values=all_values - sum(values.values()),
        patches_per_token=merge**2,
        refusals=refused_properties(model),
    )


_EXPERTS = ".experts."


def _sizes(module: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """Return the weights of a module and their bytes: of embedding, head, experts and layers."""
    values: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for name, weight in module.named_parameters():
        kind = next((k for k in ("embed_tokens", "lm_head", _EXPERTS) if k in name), "layers")
        values[kind] += weight.numel()
        num_bytes[kind] += weight.numel() * weight.element_size()
    return values, num_bytes


def _share_of_experts(text: Any) -> float:
    """Return the share of a layer's experts that a token is sent to."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = next((n for name in names if (n := getattr(text, name, None))), None)
    return getattr(text, "num_experts_per_tok", num_experts) / num_experts if num_experts else 1.0
