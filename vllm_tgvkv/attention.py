# SPDX-License-Identifier: Apache-2.0
"""What the attention backends of all platforms have in common."""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, replace_as

from vllm_tgvkv.errors import UnsupportedByEvictionError
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.manager import EvictingSpec
from vllm_tgvkv.pages import PagePool


class RowFinder(Protocol):
    """Where requests stand in a batch; the two model runners keep it in different places."""

    def __call__(self, common: CommonAttentionMetadata, request_id: str) -> int | None:
        """Row of a request in the batch that is being built; None if it is not in it."""


class EvictingBuilder(Protocol):
    """A metadata builder that owns a worker's `Evictor`."""

    layer_names: list[str]
    slots_first: bool
    """Page format, see `page_pool`."""
    evictor: Evictor | None

    def bind(self, pool: PagePool, find_row: RowFinder) -> None:
        """Attach the cache, once vLLM has allocated it."""


class EvictingImpl(Protocol):
    """The attention of a layer that reads pages."""

    def bind(self, layer: int, pool: PagePool) -> None:
        """Attach the pool, once vLLM has allocated the cache; `layer` is the index in it."""


def first_token(find_row: RowFinder, common: CommonAttentionMetadata, request_id: str) -> int:
    """Index of a request's first token in the batch's queries; the request must be in it."""
    row = find_row(common, request_id)
    assert row is not None, f"{request_id} is observed, but not in the batch"
    return int(common.query_start_loc_cpu[row])


def evicting_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec by which vLLM lets `EvictingManager` manage a layer's blocks.

    Raises:
        UnsupportedByEvictionError: unless the layer has full attention.
    """
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedByEvictionError(
            f"--kv-eviction works with full attention only, and this model has a layer with "
            f"{type(spec).__name__}: serve another model or leave out --kv-eviction"
        )
    return replace_as(spec, EvictingSpec)


def check_layer(impl: Any, has_window: bool) -> None:
    """Refuse what the statistics and the ragged decode do not compute.

    Raises:
        UnsupportedByEvictionError: with the first such property of the layer.
    """
    for found, what in (
        (impl.alibi_slopes is not None, "ALiBi position biases"),
        (has_window, "sliding-window attention"),
        (bool(impl.logits_soft_cap), "soft-capped attention logits"),
        (impl.sinks is not None, "learned attention sinks"),
        (impl.kv_sharing_target_layer_name is not None, "layers that share a KV cache"),
    ):
        if found:
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with {what} yet: serve another model "
                "or leave out --kv-eviction"
            )
