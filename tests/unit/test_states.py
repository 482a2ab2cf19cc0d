# SPDX-License-Identifier: Apache-2.0
"""Blocks of published models with several kinds of layers, as each tensor-parallel rank has them.

`page_pool` needs one group of layers with full attention whose pages fill a block. vLLM groups
layers by the sizes of their pages, which change with the heads of a rank.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout, KVCacheSpec, MambaSpec

from vllm_tgvkv.blocks.manager import DraftSpec, EvictingSpec, WindowSpec
from vllm_tgvkv.blocks.states import (
    packed_block_size,
    with_draft_specs,
    with_plain_specs,
    with_state_specs,
)
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

BLOCK_SIZE = 16
DRAFTS = {
    "EAGLE for Qwen3-VL 8B": ((36, 8, 128), (1, 8, 128), 36),
    "EAGLE for Llama 3.1 8B": ((32, 8, 128), (1, 8, 128), 32),
    "Qwen3 0.6B for Qwen3 8B": ((36, 8, 128), (28, 8, 128), 1),
    "Qwen3 0.6B for Qwen3 32B": ((64, 8, 128), (28, 8, 128), 2),
    "SmolLM2 135M for SmolLM2 1.7B": ((24, 32, 64), (30, 3, 64), 8),
    "SmolLM2 135M for itself": ((30, 3, 64), (30, 3, 64), 1),
}
"""Layers, KV heads and their size, of the model and of the draft model; tokens in the latter's
blocks, as a multiple."""
WINDOWS = {
    "Gemma 3 4B": (34, 6, (4, 256), (4, 256)),
    "Gemma 3 27B": (62, 6, (16, 128), (16, 128)),
    "Gemma 4 26B-A4B": (30, 6, (8, 256), (2, 512)),
    "Gemma 4 31B": (60, 6, (16, 256), (4, 512)),
    "Command A Vision": (64, 4, (8, 128), (8, 128)),
}
"""Number of layers; n, if every n-th has full attention; KV heads and their size with a window; the
same in full attention."""
STATES = {
    "Qwen3.5-9B": (32, 4, (16, 32), 96),
    "Qwen3.6-27B": (64, 4, (16, 48), 64),
    "Qwen3.6-35B-A3B": (40, 2, (16, 32), 128),
}
"""Number of layers, of KV heads, of a delta net's heads of keys and of values; tokens of a block on
one rank."""


def grouped(specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """Return vLLM's cache of these layers, with 100 blocks."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        num_gpu_blocks_override=100,
        prefix_cache_retention_interval=None,
    )
    config: Any = SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(config, specs)
    return with_plain_specs(get_kv_cache_config_from_groups(config, groups, 1 << 40))


def assert_full_attention_fills_blocks(config: KVCacheConfig, num_layers: int) -> None:
    (evicted,) = (g for g in config.kv_cache_groups if isinstance(g.kv_cache_spec, EvictingSpec))
    assert len(evicted.layer_names) == num_layers
    (tensor,) = (t for t in config.kv_cache_tensors if t.layers == evicted.layer_names)
    assert tensor.offset == 0
    assert tensor.layer_stride == evicted.kv_cache_spec.page_size_bytes
    assert tensor.block_stride == num_layers * tensor.layer_stride


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", WINDOWS)
def test_full_attention_fills_blocks_next_to_windows(model: str, ranks: int) -> None:
    layers, every, *kinds = WINDOWS[model]
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(layers):
        is_full = (layer + 1) % every == 0
        heads, size = kinds[is_full]
        kv_heads = max(1, heads // ranks)
        sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": kv_heads, "head_size": size}
        sizes["dtype"] = torch.bfloat16
        spec = EvictingSpec(**sizes) if is_full else WindowSpec(**sizes, sliding_window=1024)
        specs[f"model.layers.{layer}.attn"] = spec
    assert_full_attention_fills_blocks(grouped(specs), layers // every)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", STATES)
def test_full_attention_fills_blocks_that_hold_states(model: str, ranks: int) -> None:
    """Blocks are as long as on one rank, or shorter where several ranks hold a KV head."""
    layers, kv_heads, (key_heads, value_heads), on_one_rank = STATES[model]
    size = 128
    channels = (2 * key_heads + value_heads) * size
    shapes = (channels // ranks, 3), (value_heads // ranks, size, size)

    def specs(block_size: int) -> dict[str, KVCacheSpec]:
        sizes = {"block_size": block_size, "num_kv_heads": max(1, kv_heads // ranks)}
        full = EvictingSpec(**sizes, head_size=256, dtype=torch.bfloat16)
        dtypes = (torch.bfloat16, torch.float32)
        state = MambaSpec(
            block_size=block_size, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"
        )
        return {
            f"model.layers.{layer}": full if layer % 4 == 3 else state for layer in range(layers)
        }

    block_size = packed_block_size(specs(4096), BLOCK_SIZE)
    assert block_size is not None
    assert block_size <= on_one_rank
    assert block_size == on_one_rank or ranks > kv_heads
    assert_full_attention_fills_blocks(grouped(with_state_specs(specs(block_size))), layers // 4)


def full_attention(prefix: str, layers: int, heads: int, size: int) -> dict[str, KVCacheSpec]:
    shape = {"num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    spec = EvictingSpec(block_size=BLOCK_SIZE, **shape)
    return {f"{prefix}.layers.{layer}.attn": spec for layer in range(layers)}


@pytest.mark.parametrize("models", DRAFTS)
def test_a_draft_model_has_one_group_in_the_models_blocks(models: str) -> None:
    """The first one, with as many tokens in a block as fit."""
    model, draft, times = DRAFTS[models]
    own = full_attention("draft_model", *draft)
    specs = {**full_attention("model", *model), **own}
    assert [*with_draft_specs(specs, own.keys(), last=True)] == [*specs]
    config = grouped(with_draft_specs(specs, own.keys()))
    assert_full_attention_fills_blocks(config, model[0])
    group, _ = config.kv_cache_groups
    assert group.layer_names == list(own)
    assert type(group.kv_cache_spec) is DraftSpec
    assert group.kv_cache_spec.block_size == times * BLOCK_SIZE
    (size,) = {tensor.block_stride for tensor in config.kv_cache_tensors}
    assert size == 4 * BLOCK_SIZE * model[0] * model[1] * model[2]


WINDOW = WindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=9
)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            full_attention("draft_model", 5, 2, 64),
            "a larger cache than the model itself (40960 bytes for 24576) yet: use a smaller",
        ),
        (
            full_attention("draft_model", 4, 1, 64),
            "4 layers for 6 of the same size yet: use a draft model with at most 3 layers or more "
            "than 4,",
        ),
        ({"draft_model.attn": WINDOW}, "layers without full attention yet: use another"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(own: Any, said: str) -> None:
    model = full_attention("model", 6, 1, 64)
    with pytest.raises(
        UnsupportedByEvictionError, match=f"a draft model .* that has {re.escape(said)}"
    ):
        with_draft_specs({**model, **own}, own.keys())
    assert with_draft_specs(model, set()) == model
