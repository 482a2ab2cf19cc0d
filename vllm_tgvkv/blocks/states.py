# SPDX-License-Identifier: Apache-2.0
"""Blocks of models in which not all layers hold the same: keys and values, windows, or states.

vLLM gives all layers one page size. A state of linear attention is as large as the keys and values
of some 500 tokens, so its blocks have 528 tokens and more, and a head could keep only so much or
nothing. But a block holds pages of all full-attention layers: one state fits in it when their pages
together are as large. Groups of one or a few states then share the pool with blocks of, for
example, 64 tokens. The same holds for the few layers of a draft model, which keep all tokens: in a
block they have as many tokens as fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NoReturn

from vllm.utils.math_utils import round_up
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)

from vllm_tgvkv.blocks.manager import DraftSpec, EvictingSpec, StateSpec
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

_ALIGNMENT = 32
"""Block sizes are multiples of it, which vLLM's CPU and CUDA kernels like best."""


def packed_block_size(specs: Mapping[str, KVCacheSpec], least: int) -> int | None:
    """Return the smallest block size of at least `least` tokens that wastes no memory.

    It is the smallest for some number of states in a block. None is returned if that is no less
    than vLLM's own, or if no layer has a state.

    Args:
        specs: of all layers by name, with vLLM's own block size.
    """
    full = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    if not full or not states:
        return None
    token_bytes = sum(spec.page_size_bytes // spec.block_size for spec in full)
    state_bytes = max(spec.state_content_size_bytes for spec in states)
    for num_states in range(1, len(states) + 1):
        size = round_up(-(-num_states * state_bytes // token_bytes), _ALIGNMENT)
        if size >= least:
            return size if size < full[0].block_size else None
    return None


def with_state_specs(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the specs that make vLLM use `StateManager` for the blocks of states."""
    return {
        name: replace_as(spec, StateSpec) if isinstance(spec, MambaSpec) else spec
        for name, spec in specs.items()
    }


def with_draft_specs(
    specs: Mapping[str, KVCacheSpec], drafts: Set[str], *, last: bool = False
) -> dict[str, KVCacheSpec]:
    """Return the specs that give the layers of a draft model blocks of their own, in one group.

    It is the first one: vLLM's model runner V1 gives draft models the first group's block table.

    Args:
        specs: of all layers by name.
        drafts: names of the draft model's.
        last: whether it is the last group, where vLLM looks for the layers of MTP.

    Raises:
        UnsupportedByEvictionError: if the draft model's layers have no full attention, or do not
            fit in blocks of the model's.
    """
    if not drafts:
        return dict(specs)
    own = {name: spec for name, spec in specs.items() if name in drafts}
    others = {name: spec for name, spec in specs.items() if name not in drafts}
    evicted = evicted_specs(others).values()
    if any(not isinstance(spec, EvictingSpec) for spec in own.values()):
        _refuse_drafts("layers without full attention", "use another draft model")
    times = draft_block_factor(
        *([spec.page_size_bytes for spec in some] for some in (own.values(), evicted))
    )
    own = {
        name: replace(replace_as(spec, DraftSpec), block_size=times * spec.block_size)
        for name, spec in own.items()
    }
    return {**others, **own} if last else {**own, **others}


def draft_block_factor(own: Sequence[int], evicted: Sequence[int]) -> int:
    """Return how many blocks' tokens of a model a block of its draft model has.

    Args:
        own: bytes of a page, or of a token, of each layer of the draft model.
        evicted: the same of the model's layers with full attention.

    Raises:
        UnsupportedByEvictionError: if the draft model's layers do not fit in the model's blocks.
    """
    times = sum(evicted) // sum(own)
    if times == 0:
        _refuse_drafts(
            f"a larger cache than the model itself ({sum(own)} bytes for {sum(evicted)})",
            "use a smaller draft model",
        )
    if times == 1 and len({*own, *evicted}) == 1 and len(evicted) >= 1.5 * len(own):
        # vLLM would split the model's layers into two groups as small as the draft model's.
        _refuse_drafts(
            f"{len(own)} layers for {len(evicted)} of the same size",
            f"use a draft model with at most {len(evicted) // 2} layers or more than "
            f"{int(len(evicted) / 1.5)}",
        )
    return times


def _refuse_drafts(what: str, way_out: str) -> NoReturn:
    raise UnsupportedByEvictionError(
        f"--kv-eviction does not work with a draft model (--speculative-config) that has {what} "
        f"yet: {way_out}, remove --speculative-config, or leave out --kv-eviction"
    )


def evicted_specs(specs: Mapping[str, KVCacheSpec]) -> dict[str, EvictingSpec]:
    """Return the specs of the layers with full attention, which are evicted."""
    return {name: spec for name, spec in specs.items() if isinstance(spec, EvictingSpec)}


def with_plain_specs(config: KVCacheConfig) -> KVCacheConfig:
    """Return a cache in which groups of equal layers have these layers' spec.

    Where pages differ in size, vLLM gives each group a table of specs by layer. Its CPU runner then
    clears no blocks, and finds no spec for layers that read the cache of another.
    """
    return replace(config, kv_cache_groups=[_plain(group) for group in config.kv_cache_groups])


def _plain(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group
    first, *others = set(group.kv_cache_spec.kv_cache_specs.values())
    return group if others else replace(group, kv_cache_spec=first)
