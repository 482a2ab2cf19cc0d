# SPDX-License-Identifier: Apache-2.0
"""The evicting part of an attention backend, on any platform.

Each step's batch is split in two. *Ragged rows* attend over head pages, one virtual sequence per
KV head: tokens of compressed requests, and the decode tokens that share a kernel call with them.
The rest of the batch runs vLLM's own attention, unchanged.

The classes here are mixins in front of vLLM's: `cpu.py`, `cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
    is_quantized_kv_cache,
    replace_as,
)

from vllm_tgvkv.attention.observer import Observer
from vllm_tgvkv.blocks.manager import EvictingSpec, WindowSpec
from vllm_tgvkv.cache.key_numbers import KeyNumbers
from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.cache.queries import StoredQueries
from vllm_tgvkv.gates.tap import Tap
from vllm_tgvkv.kernels.checks import indexable
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.shared.layer_types import has_windows

Rows = TypeVar("Rows")
"""A backend's description of ragged rows for its kernel."""

Tokens: TypeAlias = slice | torch.Tensor
"""Some tokens of a batch: a slice, or int64 indices."""

Rest: TypeAlias = tuple[CommonAttentionMetadata | None, Tokens]
"""The part of a batch that is left to vLLM's attention, and its tokens; None if it is empty."""

Split: TypeAlias = tuple[Sequence[Rows], Rest]
"""A batch's ragged rows, and the rest of it."""

NOTHING: Rest = (None, slice(0))


class BatchRows(Protocol):
    """Rows of the batch that is being built; vLLM's two model runners store them differently."""

    def find_row(self, request_id: str) -> int | None:
        """Return a request's row, or None if it has none."""

    def request_at(self, row: int) -> str:
        """Return the request in a row."""


@dataclass
class EvictingMetadata(Generic[Rows]):
    """Attention metadata of one step, the same for all layers."""

    ragged: Sequence[Rows]
    stock: AttentionMetadata | None
    """vLLM's metadata of the rest of the batch; None if all rows are ragged."""
    stock_tokens: Tokens
    observer: Observer | None = None
    """Set in steps in which it observes the layers."""
    stored_queries: StoredQueries | None = None
    """Set in steps in which every layer stores the queries itself, as part of a graph."""


class EvictingBackend:
    """Hooks of a backend with head pages; the worker selects it while it loads the model."""

    impl_cls: ClassVar[type[EvictingImpl[Any]]]
    builder_cls: ClassVar[type[EvictingBuilder[Any]]]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return evicting_spec(spec)

    @classmethod
    def get_impl_cls(cls) -> type[EvictingImpl[Any]]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[EvictingBuilder[Any]]:
        return cls.builder_cls


class EvictingBuilder(Generic[Rows]):
    """Builds `EvictingMetadata`: the ragged rows, and vLLM's metadata of the rest.

    The one of layers with a window has no observer and leaves all of a batch to vLLM.
    """

    slots_first: ClassVar[bool]
    """Page format of the backend's kernels, see `page_pool`."""

    # Of vLLM's builder.
    kv_cache_spec: AttentionSpec
    layer_names: list[str]

    _observer: Observer | None = None

    def bind(self, observer: Observer, rows: BatchRows) -> None:
        """Attach the observer of the worker, once vLLM has allocated the cache."""
        self._observer = observer
        self._rows = rows

    @property
    def evicts(self) -> bool:
        """Whether its layers are evicted: those with full attention."""
        return isinstance(self.kv_cache_spec, EvictingSpec)

    @property
    def observer(self) -> Observer:
        assert self._observer is not None, "the KV cache is not allocated yet"
        return self._observer

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EvictingMetadata[Rows]:
        common = common_attn_metadata
        observer = self._observer
        # Layers with a window have no observer, and no layer has one before the cache is allocated.
        ragged, (rest, tokens) = unsplit(common) if observer is None else self.split(common)
        stock = None
        if rest is not None:
            stock = super().build(common_prefix_len, rest, fast_build)  # type: ignore[misc]
        metadata = EvictingMetadata(ragged, stock, tokens)
        if observer is None:
            return metadata
        may_be_graph, first_token = self.may_be_graph(common), self._first_token(common)
        if observer.has_work(may_be_graph):
            observer.prepare(first_token)
            metadata.observer = observer
        elif may_be_graph:
            num_tokens = common.num_actual_tokens
            metadata.stored_queries = observer.stored_queries(num_tokens, first_token)
        return metadata

    def may_be_graph(self, common: CommonAttentionMetadata) -> bool:
        """Return whether a step that is not observed may be replayed as one graph."""
        return common.max_query_len == 1

    def warm_up(self, layer: AttentionLayer) -> None:
        """Compile what ragged rows need, given the first evicted layer."""

    def split(self, common: CommonAttentionMetadata) -> Split[Rows]:
        """Split a batch, once the cache is allocated."""
        raise NotImplementedError

    def _first_token(self, common: CommonAttentionMetadata) -> Callable[[str], int]:
        """Return a function from a request's id to the index of its first token in a batch."""

        @cache
        def starts() -> np.ndarray:  # an element of a tensor takes ten times longer
            return common.query_start_loc_cpu.numpy()

        def first_token(request_id: str) -> int:
            row = self._rows.find_row(request_id)
            assert row is not None, f"{request_id} is observed, but not in the batch"
            return int(starts()[row])

        return first_token


class EvictingImpl(Generic[Rows]):
    """The attention of one layer: ragged rows, vLLM's attention of the rest, observation."""

    # Of vLLM's attention.
    kv_cache_dtype: str
    kv_sharing_target_layer_name: str | None
    scale: float
    supports_quant_query_input: bool
    """Whether it takes queries of a quantised cache in fp8 as well, divided by their scale."""
    sinks: torch.Tensor | None
    """Learned logit of one more key of each query head, whose value is zero, [H * G]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An engine with such a model was checked for what it allows.
        text = get_current_vllm_config().model_config.hf_text_config
        check_layer(self, has_windows(text))
        self.layer = -1
        """Index in the pool of the layer whose cache it reads."""
        self.tap: Tap | None = None
        """Runs the layer's gate, once the model is loaded."""
        self._gate_pages: torch.Tensor | None = None

    def bind(self, layer: int, pool: PagePool, gate_outputs: KeyNumbers | None = None) -> None:
        """Attach the pool, once vLLM has allocated the cache.

        `layer` is the layer's index in it, or its owner's if the layer reads another's cache.
        """
        self.layer = layer
        self.pool = pool
        self.key_pages, self.value_pages = self.kernel_pages(pool)
        self._gate_pages = gate_outputs.layers[layer] if gate_outputs is not None else None

    def kernel_pages(self, pool: PagePool) -> Sequence[torch.Tensor]:
        """Return the pool's keys and values as the backend's kernel reads them."""
        raise NotImplementedError

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values at their slots, and what the gate says of their tokens."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        if self.tap is not None and self._gate_pages is not None:
            self.tap.store(slot_mapping, self._gate_pages)

    def warm_up_gate(self) -> None:
        """Compile what its gate launches, before requests come and graphs are captured."""
        if self.tap is not None and self._gate_pages is not None:
            self.tap.warm_up(self._gate_pages)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EvictingMetadata[Rows] | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attend = super().forward  # type: ignore[misc]
        scales = (output_scale, output_block_scale)
        if attn_metadata is None:  # a profiling run
            return attend(layer, query, key, value, kv_cache, None, output, *scales)
        for rows in attn_metadata.ragged:
            self.attend_ragged(rows, layer, query, output)
        stock, tokens = attn_metadata.stock, attn_metadata.stock_tokens
        if stock is not None:
            stock_output = output[tokens]
            stock_query = taken(query, tokens)
            attend(layer, stock_query, key, value, kv_cache, stock, stock_output, *scales)
            write_back(output, tokens, stock_output)
        if self.kv_sharing_target_layer_name is not None:
            return output  # the owner of the cache votes on it
        query = indexable(query)
        if attn_metadata.stored_queries is not None:
            attn_metadata.stored_queries.store(self.layer, query)
        if attn_metadata.observer is not None:
            attn_metadata.observer.observe_layer(self.layer, query, self.product_scale(layer))
        return output

    def product_scale(self, layer: AttentionLayer) -> float:
        """Return the factor of products of queries and keys as attention gets them."""
        scale = self.scale
        # Quantised numbers are divided by their scale.
        if is_quantized_kv_cache(self.kv_cache_dtype):
            scale *= layer._k_scale_float
        if self.has_fp8_queries:
            scale *= layer._q_scale_float
        return scale

    @property
    def has_fp8_queries(self) -> bool:
        """Whether queries come in the format of a quantised cache, with a scale of their own."""
        return self.supports_quant_query_input and is_quantized_kv_cache(self.kv_cache_dtype)

    def attend_ragged(
        self, rows: Rows, layer: AttentionLayer, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Write the attention of ragged rows to their places in `output`.

        `query` and `output` cover the whole batch, [tokens, H * G, D].
        """
        raise NotImplementedError


def unsplit(common: CommonAttentionMetadata) -> Split[Any]:
    """Leave all of a batch to vLLM's attention."""
    return (), (common, slice(None))


def taken(whole: torch.Tensor, index: Tokens) -> torch.Tensor:
    """Return `whole[index]`; fp8 is copied as bytes."""
    if isinstance(index, torch.Tensor):
        return indexable(whole)[index].view(whole.dtype)
    return whole[index]


def write_back(whole: torch.Tensor, index: Tokens, part: torch.Tensor) -> None:
    """Store `part`, made by `whole[index]` and changed since, in its place.

    Indexing by a slice gives a view, which needs nothing; indexing by a tensor gives a copy.
    """
    if isinstance(index, torch.Tensor):
        whole[index] = part


def without_rows(common: CommonAttentionMetadata, num_first: int, others: Sequence[int]) -> Rest:
    """Return the batch without its first rows and some `others`, which are ascending.

    Never waits for the device: sizes are computed from the host's copy of the query starts.
    """
    if common.num_reqs == num_first + len(others):
        return NOTHING
    starts_cpu, starts = common.query_start_loc_cpu, common.query_start_loc
    rows: Tokens
    tokens: Tokens
    if not others:
        first = int(starts_cpu[num_first])
        rows, tokens = slice(num_first, None), slice(first, None)
        num_rows, num_tokens = common.num_reqs - num_first, common.num_actual_tokens - first
        new_starts_cpu, new_starts = starts_cpu[num_first:] - first, starts[num_first:] - first
    else:
        is_left = torch.ones(common.num_reqs, dtype=torch.bool)
        is_left[:num_first] = False
        is_left[list(others)] = False
        lengths = starts_cpu.diff()
        rows_cpu = is_left.nonzero().squeeze(1)
        tokens_cpu = is_left.repeat_interleave(lengths).nonzero().squeeze(1)
        num_rows, num_tokens = len(rows_cpu), len(tokens_cpu)
        new_starts_cpu = torch.zeros(num_rows + 1, dtype=starts_cpu.dtype)
        torch.cumsum(lengths[rows_cpu], 0, out=new_starts_cpu[1:])
        rows, tokens, new_starts = (
            async_tensor_h2d(values, starts.device)
            for values in (rows_cpu, tokens_cpu, new_starts_cpu)
        )
    rest = common.replace(
        query_start_loc=new_starts,
        query_start_loc_cpu=new_starts_cpu,
        seq_lens=common.seq_lens[rows],
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[tokens],
    )
    return rest, tokens


def queries_by_head(
    first_tokens: torch.Tensor, num_tokens: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order queries by row, then KV head, then token.

    `first_tokens` and `num_tokens` are int32 [R]. Returns their indices in [tokens * H],
    int64 [T * H], and each sequence's first, int32 [R * H + 1].
    """
    lengths = num_tokens.repeat_interleave(num_heads)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    token = torch.arange(len(sequence)) - starts[sequence] + first_tokens[sequence // num_heads]
    return token * num_heads + sequence % num_heads, starts


def evicting_spec(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec that makes vLLM use `EvictingManager` for a layer's blocks.

    The spec of a layer with a window (see `check_layer`) gets a `WindowManager`.

    Raises:
        UnsupportedByEvictionError: unless the layer has full attention or a window.
    """
    if type(spec) is SlidingWindowSpec:
        return replace_as(spec, WindowSpec)
    if type(spec) is not FullAttentionSpec:
        raise UnsupportedByEvictionError(
            f"--kv-eviction works with full attention only, and this model has a layer with "
            f"{type(spec).__name__}: serve another model or leave out --kv-eviction"
        )
    return replace_as(spec, EvictingSpec)


def check_layer(impl: AttentionImpl, may_slide: bool = False) -> None:
    """Refuse layers that the statistics and the ragged kernels do not compute.

    Args:
        may_slide: whether the model lists layers with windows. These run vLLM's own attention,
            and layers of either kind may read the cache of another.

    Raises:
        UnsupportedByEvictionError: with the first such property of the layer.
    """
    no_window = (-1, (-1, -1))  # on CPU, in FlashAttention
    if may_slide and impl.sliding_window not in no_window:
        return
    shares = impl.kv_sharing_target_layer_name is not None
    for found, what in (
        (impl.alibi_slopes is not None, "ALiBi position biases"),
        (impl.sliding_window not in no_window, "sliding-window attention"),
        (bool(impl.logits_soft_cap), "soft-capped attention logits"),
        (shares and not may_slide, "layers that share a KV cache"),
    ):
        if found:
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with {what} yet: serve another model "
                "or leave out --kv-eviction"
            )
