# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend, extended to caches whose heads have lengths of their own.

Tokens of compressed requests, and all decode tokens beside them, are *ragged rows*: one virtual
sequence per (token, KV head), over pages instead of blocks. Prefill chunks run as in stock.

A decode step is a captured graph: its metadata are persistent tensors, and whatever depends on
them (lengths, page tables) is computed by kernels inside the graph. So a graph is right for every
later batch of its size, and building the metadata of such a step costs the host nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from vllm_tgvkv.attention import RowFinder, check_layer, evicting_spec, first_token
from vllm_tgvkv.config import config_of
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.kernels.decode import DecodePlan, decode, plan_decode
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.pages import CacheShape, PagePool
from vllm_tgvkv.regions import Regions

_TABLE_BYTES = 64 << 20
"""Page tables of as many layers as fit are written at once; those of one layer are in any case."""

_MOST_SPLIT_SEQUENCES = 992
"""FlashAttention 3 balances the splits of at most so many sequences on the device. More than that
fill the device without being split."""

_REPLAY_ROWS = 128
"""Ragged rows at once of requests that compute several tokens, which is rare (see below)."""


class EvictingFlashBackend(FlashAttentionBackend):
    """`FLASH_ATTN` with head pages; chosen by the worker while it loads the model."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return evicting_spec(spec)

    @staticmethod
    def get_impl_cls() -> type[EvictingFlashImpl]:
        return EvictingFlashImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingFlashMetadataBuilder]:
        return EvictingFlashMetadataBuilder


@dataclass
class RaggedRows:
    """R tokens that attend as virtual sequences, one for each of their KV heads."""

    block_table: torch.Tensor
    """Of each token's request, int32 [R, W]."""
    seq_lens: torch.Tensor
    """Keys of the request up to the token, evicted ones counted, int32 [R]."""
    max_seq_len: int
    """At least the longest virtual sequence."""
    num_splits: int
    """Into how many parts a sequence may be split; 0 leaves it to FlashAttention."""
    kernel: RaggedKernel
    tokens: torch.Tensor | None = None
    """Their indices in the batch, int64 [R]; None if they are its first tokens."""

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


class RaggedKernel:
    """Attention of at most `max_rows` rows: a kernel, and the memory of what it is told.

    Graphs refer to that memory. It is filled by the first layer, in the graph if there is one.
    Where several sets of rows `take_turns` in each layer, every layer fills it.
    """

    def __init__(
        self,
        shape: CacheShape,
        regions: Regions,
        max_rows: int,
        take_turns: bool,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.regions = regions
        self.take_turns = take_turns
        self._lengths = torch.zeros(
            shape.num_layers, max_rows, shape.num_heads, dtype=torch.int32, device=device
        )

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedRows, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attention of the rows in the layer of `impl`, after that of the layers before.

        `query` and `output` are [R, H * G, D].
        """
        raise NotImplementedError

    def _lengths_of(self, rows: RaggedRows, layer: int) -> torch.Tensor:
        """Keys of every virtual sequence in every layer, int32 [L, R, H]."""
        lengths = self._lengths[:, : rows.num_rows]
        if self._fills_at(layer):
            write_lengths(*self._state(rows), lengths)
        return lengths

    def _fills_at(self, layer: int) -> bool:
        return layer == 0 or self.take_turns

    def _state(self, rows: RaggedRows) -> tuple[Any, ...]:
        regions = self.regions
        state = (regions.num_retained, regions.num_replaced, regions.offsets)
        return (rows.block_table, rows.seq_lens, *state, self.shape.block_size)


class FlashKernel(RaggedKernel):
    """FlashAttention, which wants a page table of `width` entries for every virtual sequence.

    Tables of as many layers as fit `_TABLE_BYTES` are written at once.
    """

    def __init__(
        self,
        shape: CacheShape,
        regions: Regions,
        max_rows: int,
        take_turns: bool,
        width: int,
        device: torch.device,
    ) -> None:
        super().__init__(shape, regions, max_rows, take_turns, device)
        layer_bytes = max_rows * shape.num_heads * width * 4
        num_layers = 1
        if not take_turns:
            num_layers = max(1, min(shape.num_layers, _TABLE_BYTES // layer_bytes))
        self._tables = torch.zeros(
            num_layers, max_rows, shape.num_heads, width, dtype=torch.int32, device=device
        )
        self._starts = torch.arange(
            max_rows * shape.num_heads + 1, dtype=torch.int32, device=device
        )

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedRows, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        layer, num_layers = impl.layer, self.shape.num_layers
        lengths = self._lengths_of(rows, layer)[layer].flatten()
        tables = self._tables[: num_layers - layer, : rows.num_rows]
        index = layer % len(self._tables)
        if index == 0:
            write_page_tables(*self._state(rows), layer, tables)
        # [R, H * G, D] is [R * H, G, D] as well. vLLM's queries may be a slice of a fused
        # projection; then reshaping copies them.
        by_head = (-1, self.shape.group_size, self.shape.head_size)
        flash_attn.flash_attn_varlen_func(
            q=query.reshape(by_head),
            k=impl.key_pages,
            v=impl.value_pages,
            out=output.view(by_head),
            cu_seqlens_q=self._starts[: len(lengths) + 1],
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=rows.max_seq_len,
            softmax_scale=impl.scale,
            causal=True,
            block_table=self._tables[index, : rows.num_rows].flatten(0, 1),
            fa_version=impl.vllm_flash_attn_version,
            num_splits=rows.num_splits,
        )


class TritonKernel(RaggedKernel):
    """The kernel of our own, which computes pages instead of reading tables."""

    def __init__(
        self,
        shape: CacheShape,
        regions: Regions,
        max_rows: int,
        take_turns: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shape, regions, max_rows, take_turns, device)
        self._plan = DecodePlan.for_device(
            shape.num_layers,
            max_rows,
            shape.num_heads,
            shape.group_size,
            shape.head_size,
            dtype,
            device,
        )

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedRows, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        lengths = self._lengths_of(rows, impl.layer)
        plan = self._plan.for_sequences(rows.num_rows * self.shape.num_heads)
        if self._fills_at(impl.layer):
            plan_decode(lengths, plan)
        decode(
            query,
            impl.pool.keys,
            impl.pool.values,
            rows.block_table,
            lengths,
            self.regions.num_retained,
            self.regions.num_replaced,
            self.regions.offsets,
            impl.layer,
            impl.scale,
            plan,
            output,
        )


@dataclass
class EvictingFlashMetadata(FlashAttentionMetadata):
    """Stock metadata, of the whole batch or of what is left beside the ragged rows."""

    ragged: Sequence[RaggedRows] = ()
    stock_tokens: slice | torch.Tensor = field(default_factory=lambda: slice(None))
    """The tokens that are left to stock attention: a slice, or int64 indices."""
    evictor: Evictor | None = None
    """Set in a step in which some prompt's layers have to be observed."""


class EvictingFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds the metadata and owns the worker's `Evictor`."""

    # Prompts that end are observed by Python code after each layer: batches with prefills
    # keep their attention out of graphs.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False
    slots_first = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)  # decode rows first
        self.layer_names = layer_names
        self.shape = CacheShape(
            num_layers=len(layer_names),
            num_heads=self.num_heads_kv,
            group_size=self.num_heads_q // self.num_heads_kv,
            head_size=self.headdim,
            block_size=self.block_size,
        )
        self.config = config_of(vllm_config)
        self.evictor: Evictor | None = None

    def bind(self, pool: PagePool, find_row: RowFinder) -> None:
        self.evictor = Evictor(self.config, self.shape, pool)
        self._find_row = find_row
        self._kernel: RaggedKernel | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EvictingFlashMetadata:
        ragged, rest, rest_tokens = self._split(common_attn_metadata)
        if rest is None:
            stock = _NO_STOCK_ROWS
        else:
            metadata = super().build(common_prefix_len, rest, fast_build)
            stock = {f.name: getattr(metadata, f.name) for f in fields(FlashAttentionMetadata)}
        return EvictingFlashMetadata(
            **stock,
            ragged=ragged,
            stock_tokens=rest_tokens,
            evictor=self._observer(common_attn_metadata),
        )

    def _observer(self, common: CommonAttentionMetadata) -> Evictor | None:
        if self.evictor is None or not self.evictor.has_work:
            return None
        self.evictor.prepare(partial(first_token, self._find_row, common))
        return self.evictor

    def _split(
        self, common: CommonAttentionMetadata
    ) -> tuple[list[RaggedRows], CommonAttentionMetadata | None, slice | torch.Tensor]:
        """Ragged rows, the batch without them (None if nothing is left), and its tokens."""
        if self.evictor is None:  # the cache is not allocated yet: a trial of vLLM's
            return [], common, slice(None)
        num_live = self.evictor.regions.num_live
        if common.max_query_len == 1 and (num_live or self.use_full_cuda_graph):
            # A graph is captured once, without compressed requests, and replayed with them.
            return [self._decode_rows(common, common.num_reqs)], None, slice(0)
        if not num_live:
            return [], common, slice(None)
        num_decodes, *_ = split_decodes_and_prefills(common, decode_threshold=1)
        replayed = self._replayed_rows(common, num_decodes)
        ragged = [self._decode_rows(common, num_decodes)] if num_decodes else []
        for row in replayed:
            ragged += self._replay_rows(common, row)
        rest, tokens = _without_rows(common, num_decodes, replayed)
        return ragged, rest, tokens

    def _decode_rows(self, common: CommonAttentionMetadata, num_rows: int) -> RaggedRows:
        """The first rows of a batch, which have one token each."""
        if self._kernel is None:
            max_rows = self.vllm_config.scheduler_config.max_num_seqs
            self._kernel = self._make_kernel(
                max(max_rows, self.max_cudagraph_size or 0), common, take_turns=False
            )
        return RaggedRows(
            block_table=common.block_table_tensor[:num_rows],
            seq_lens=common.seq_lens[:num_rows],
            max_seq_len=common.max_seq_len,
            num_splits=self._num_splits(num_rows),
            kernel=self._kernel,
        )

    def _make_kernel(
        self, max_rows: int, common: CommonAttentionMetadata, take_turns: bool
    ) -> RaggedKernel:
        assert self.evictor is not None
        common_arguments = (self.shape, self.evictor.regions, max_rows, take_turns)
        if self.config.decode_kernel == "triton":
            return TritonKernel(*common_arguments, self.evictor.pool.raw.dtype, self.device)
        # The runner's block table has one width from the start to the end.
        width = common.block_table_tensor.shape[1]
        return FlashKernel(*common_arguments, width, self.device)

    def _num_splits(self, num_rows: int) -> int:
        if num_rows * self.shape.num_heads > _MOST_SPLIT_SEQUENCES or envs.VLLM_BATCH_INVARIANT:
            return 1
        # As in stock, a graph needs a bound to reserve memory for.
        if self.use_full_cuda_graph and num_rows <= (self.max_cudagraph_size or 0):
            return self.max_num_splits
        return 0

    def _replayed_rows(self, common: CommonAttentionMetadata, num_decodes: int) -> list[int]:
        """Compressed requests with several tokens in this step, ascending.

        After a preemption a request computes again what it had generated.
        """
        assert self.evictor is not None
        rows = (self._find_row(common, owner) for owner in self.evictor.regions.owners)
        return sorted(row for row in rows if row is not None and row >= num_decodes)

    def _replay_rows(self, common: CommonAttentionMetadata, row: int) -> list[RaggedRows]:
        """The tokens of one compressed request, each as a row, in slices of bounded memory."""
        start, end = common.query_start_loc_cpu[row : row + 2].tolist()
        size = min(_REPLAY_ROWS, end - start)
        # Not the kernel of the decode rows, whose memory holds what later layers need.
        kernel = self._make_kernel(size, common, take_turns=True)
        slices = []
        for first in range(start, end, size):
            tokens = torch.arange(first, min(first + size, end), device=self.device)
            slices.append(
                RaggedRows(
                    block_table=common.block_table_tensor[row].expand(len(tokens), -1),
                    seq_lens=(common.seq_lens[row] - end + 1 + tokens).int(),
                    max_seq_len=common.max_seq_len,
                    num_splits=0 if size * self.shape.num_heads <= _MOST_SPLIT_SEQUENCES else 1,
                    kernel=kernel,
                    tokens=tokens,
                )
            )
        return slices


class EvictingFlashImpl(FlashAttentionImpl):
    """Stock attention, plus ragged rows and a look at prompts that are to be evicted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_layer(self, has_window=self.sliding_window != (-1, -1))
        self.layer = -1
        """Index of the layer in the pool."""

    def bind(self, layer: int, pool: PagePool) -> None:
        self.layer = layer
        self.pool = pool
        # One head, whose stride is one that the tensor memory accelerator accepts.
        pages = pool.raw.view(-1, pool.block_size, 1, 2 * self.head_size)
        self.key_pages, self.value_pages = pages.split(self.head_size, dim=-1)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EvictingFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = (output_scale, output_block_scale)
        if attn_metadata is None:  # a profiling run
            return super().forward(layer, query, key, value, kv_cache, None, output, *scales)
        for rows in attn_metadata.ragged:
            self._attend_ragged(rows, query, output)
        if attn_metadata.num_actual_tokens:
            tokens = attn_metadata.stock_tokens
            stock_output = output[tokens]
            super().forward(
                layer, query[tokens], key, value, kv_cache, attn_metadata, stock_output, *scales
            )
            if isinstance(tokens, torch.Tensor):
                output[tokens] = stock_output  # indexing by tensor gave a copy
        if attn_metadata.evictor is not None:
            attn_metadata.evictor.observe_layer(self.layer, query, self.scale)
        return output

    def _attend_ragged(self, rows: RaggedRows, query: torch.Tensor, output: torch.Tensor) -> None:
        tokens = slice(rows.num_rows) if rows.tokens is None else rows.tokens
        ragged_output = output[tokens]
        rows.kernel.attend(self, rows, query[tokens], ragged_output)
        if rows.tokens is not None:
            output[rows.tokens] = ragged_output  # indexing by tensor gave a copy


def _without_rows(
    common: CommonAttentionMetadata, num_decodes: int, replayed: Sequence[int]
) -> tuple[CommonAttentionMetadata | None, slice | torch.Tensor]:
    """The batch without its first rows and some others, and the tokens that are left."""
    if common.num_reqs == num_decodes + len(replayed):
        return None, slice(0)
    starts_cpu, starts = common.query_start_loc_cpu, common.query_start_loc
    device = starts.device
    if not replayed:
        first = int(starts_cpu[num_decodes])
        return (
            common.replace(
                query_start_loc=starts[num_decodes:] - first,
                query_start_loc_cpu=starts_cpu[num_decodes:] - first,
                seq_lens=common.seq_lens[num_decodes:],
                num_reqs=common.num_reqs - num_decodes,
                num_actual_tokens=common.num_actual_tokens - first,
                block_table_tensor=common.block_table_tensor[num_decodes:],
                slot_mapping=common.slot_mapping[first:],
            ),
            slice(first, None),
        )
    rows = torch.tensor(sorted(set(range(num_decodes, common.num_reqs)) - set(replayed)))
    num_tokens = starts_cpu.diff()
    is_left = torch.zeros(common.num_reqs, dtype=torch.bool)
    is_left[rows] = True
    tokens = is_left.repeat_interleave(num_tokens).nonzero().squeeze(1)
    new_starts = torch.zeros(len(rows) + 1, dtype=starts_cpu.dtype)
    torch.cumsum(num_tokens[rows], 0, out=new_starts[1:])
    rows, tokens = async_tensor_h2d(rows, device), async_tensor_h2d(tokens, device)
    return (
        common.replace(
            query_start_loc=async_tensor_h2d(new_starts, device),
            query_start_loc_cpu=new_starts,
            seq_lens=common.seq_lens[rows],
            num_reqs=len(rows),
            num_actual_tokens=len(tokens),
            block_table_tensor=common.block_table_tensor[rows],
            slot_mapping=common.slot_mapping[tokens],
        ),
        tokens,
    )


_NO_STOCK_ROWS: dict[str, Any] = {
    "num_actual_tokens": 0,
    "max_query_len": 0,
    "query_start_loc": None,
    "max_seq_len": 0,
    "seq_lens": None,
    "block_table": None,
    "slot_mapping": None,
}
"""Stock metadata of a batch whose rows are all ragged; nothing reads it."""
