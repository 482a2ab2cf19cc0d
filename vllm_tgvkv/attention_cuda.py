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
from vllm_tgvkv.evictor import CacheShape, Evictor
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.pages import PagePool
from vllm_tgvkv.regions import Regions

_TABLE_BYTES = 64 << 20
"""Page tables of as many layers as fit are written at once; those of one layer always are."""

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


class RaggedBuffers:
    """Lengths and page tables of at most `max_rows` rows, in memory that graphs may refer to."""

    def __init__(
        self, shape: CacheShape, max_rows: int, width: int, table_bytes: int, device: torch.device
    ) -> None:
        rows = (max_rows, shape.num_heads)
        layer_bytes = max_rows * shape.num_heads * width * 4
        self.num_table_layers = max(1, min(shape.num_layers, table_bytes // layer_bytes))
        self.tables = torch.zeros(
            self.num_table_layers, *rows, width, dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(shape.num_layers, *rows, dtype=torch.int32, device=device)
        self.starts = torch.arange(
            max_rows * shape.num_heads + 1, dtype=torch.int32, device=device
        )


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
    """Greatest number of parts of a sequence; 0 leaves it to FlashAttention."""
    buffers: RaggedBuffers
    regions: Regions
    block_size: int
    tokens: torch.Tensor | None = None
    """Their indices in the batch, int64 [R]; None if they are its first tokens."""

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    def layer_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page tables int32 [R * H, W] and lengths int32 [R * H] of a layer.

        To be asked for layer after layer: the first writes the lengths of all, and the tables of
        several are written with the first of them.
        """
        buffers, regions = self.buffers, self.regions
        lengths = buffers.lengths[:, : self.num_rows]
        tables = buffers.tables[:, : self.num_rows]
        state = (
            self.block_table,
            self.seq_lens,
            regions.num_retained,
            regions.num_replaced,
            regions.offsets,
            self.block_size,
        )
        if layer == 0:
            write_lengths(*state, lengths)
        index = layer % buffers.num_table_layers
        if index == 0:
            write_page_tables(*state, layer, tables[: len(lengths) - layer])
        return tables[index].flatten(0, 1), lengths[layer].flatten()


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
        self.evictor: Evictor | None = None

    def bind(self, pool: PagePool, find_row: RowFinder) -> None:
        self.evictor = Evictor(config_of(self.vllm_config), self.shape, pool)
        self._find_row = find_row
        self._buffers: RaggedBuffers | None = None

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
        assert self.evictor is not None
        if self._buffers is None:
            # As wide as the runner's block table, which never changes its size.
            max_rows = self.vllm_config.scheduler_config.max_num_seqs
            self._buffers = RaggedBuffers(
                self.shape,
                max(max_rows, self.max_cudagraph_size or 0),
                common.block_table_tensor.shape[1],
                _TABLE_BYTES,
                self.device,
            )
        return RaggedRows(
            block_table=common.block_table_tensor[:num_rows],
            seq_lens=common.seq_lens[:num_rows],
            max_seq_len=common.max_seq_len,
            num_splits=self._num_splits(num_rows),
            buffers=self._buffers,
            regions=self.evictor.regions,
            block_size=self.block_size,
        )

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
        assert self.evictor is not None
        start, end = common.query_start_loc_cpu[row : row + 2].tolist()
        width = common.block_table_tensor.shape[1]
        size = min(_REPLAY_ROWS, end - start)
        buffers = RaggedBuffers(self.shape, size, width, 0, self.device)
        slices = []
        for first in range(start, end, size):
            tokens = torch.arange(first, min(first + size, end), device=self.device)
            slices.append(
                RaggedRows(
                    block_table=common.block_table_tensor[row].expand(len(tokens), -1),
                    seq_lens=(common.seq_lens[row] - end + 1 + tokens).int(),
                    max_seq_len=common.max_seq_len,
                    num_splits=0 if size * self.shape.num_heads <= _MOST_SPLIT_SEQUENCES else 1,
                    buffers=buffers,
                    regions=self.evictor.regions,
                    block_size=self.block_size,
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
        """Attention of the ragged rows; [tokens, H * G, D] is [tokens * H, G, D] as well."""
        by_head = (-1, self.num_queries_per_kv, self.head_size)
        tokens = slice(rows.num_rows) if rows.tokens is None else rows.tokens
        # vLLM's queries may be a slice of a fused projection; then reshaping copies them.
        queries, ragged_output = query[tokens].reshape(by_head), output[tokens]
        tables, lengths = rows.layer_pages(self.layer)
        flash_attn.flash_attn_varlen_func(
            q=queries,
            k=self.key_pages,
            v=self.value_pages,
            out=ragged_output.view(by_head),
            cu_seqlens_q=rows.buffers.starts[: len(lengths) + 1],
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=rows.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=tables,
            fa_version=self.vllm_flash_attn_version,
            num_splits=rows.num_splits,
        )
        if rows.tokens is not None:
            output[rows.tokens] = ragged_output


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
