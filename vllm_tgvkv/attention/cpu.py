# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend, extended to caches whose heads differ in length.

A batch without compressed requests runs vLLM's own code unchanged. Otherwise the decode rows,
which come first in the batch, run as one virtual sequence per (request, KV head) over pages
instead of blocks, through the same kernel; prefill chunks in the same batch run as in stock.
A compressed request has several tokens in a step with drafts to verify, and after a preemption,
when it recomputes what it had generated.

One call of the kernel takes all virtual sequences. In layers with learned sinks each KV head makes
its own call: the kernel has a sink for each query head of a sequence, the same for all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_tgvkv.attention.base import (
    NOTHING,
    BatchRows,
    EvictingBackend,
    EvictingBuilder,
    EvictingImpl,
    Split,
    Tokens,
    queries_by_head,
    unsplit,
    without_rows,
    write_back,
)
from vllm_tgvkv.attention.observer import Observer
from vllm_tgvkv.cache.key_numbers import KeyNumbers
from vllm_tgvkv.cache.pages import FP8, PageLayoutError, PagePool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.summaries.reads import SummaryReads

_NUM_FP8_CODES = 123
"""Bytes 0 to 122 are finite numbers in every fp8 format."""

_SINK_VECTOR = 16

_TABLE_STEP = 16
"""Page tables grow by this many pages at once."""


@dataclass
class VirtualSequences:
    """The ragged rows of a step, one virtual sequence per (row, KV head), for all layers.

    There are R rows with T tokens together. In a call of the kernel sequences are ordered by row,
    then head. There is one call for all heads, or one for each.
    """

    seq_lens: torch.Tensor
    """Keys of every row, evicted ones counted, int32 [R]."""
    starts: torch.Tensor
    """First query of every sequence of a call, int32 [R * H + 1], or [R + 1]; the same for all."""
    tables: torch.Tensor
    """Page numbers, int32 [L, R, H, W]."""
    lengths: torch.Tensor
    """Keys of every sequence, int32 [L, R, H]."""
    schedules: list[list[torch.Tensor]]
    """The kernel's work partition of every call in every layer."""
    tokens: slice
    """The part of the batch that holds all tokens of the rows."""
    queries: Tokens
    """Places of the T * H queries of one KV head each, call by call, in the part's [tokens * H]."""
    summaries: SummaryReads | None = None
    """None if no row has summaries."""


class PageTables:
    """Page tables of the ragged rows, kept from step to step.

    A row's tables change when it gets a block, which is every N-th step; only rows that changed
    since the last step are written again. A row may also grow into a block that it has had for a
    while, because drafts were rejected; its tables may have been written in between.

    Tests of tensors here do not synchronise: all of them are the host's.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._shape = shape = regions.shape
        self._tables = torch.empty(shape.num_layers, 0, shape.num_heads, 0, dtype=torch.int32)
        self._blocks = torch.empty(0, 0, dtype=torch.int32)
        """The rows' part of the last block table."""
        self._num_blocks = torch.empty(0, dtype=torch.int32)
        """Blocks of every row that its tables cover."""
        self._version = -1

    @property
    def is_stale(self) -> bool:
        """Whether regions have changed since the last step."""
        return self._version != self._regions.version

    def are_of(self, block_table: torch.Tensor) -> bool:
        """Return whether the rows have the same blocks as in the last step."""
        return torch.equal(block_table[:, : self._blocks.shape[1]], self._blocks)

    def update(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Return the tables of R rows, int32 [L, R, H, W], valid until the next call.

        `block_table` is int32 [R, W'], `seq_lens` int32 [R], `lengths` int32 [L, R, H].
        """
        shape, size = self._shape, self._shape.block_size
        needed = (seq_lens - 1) // size + 1
        num_pages = int(lengths.max() - 1) // size + 1
        blocks = block_table[:, : int(needed.max())]
        _, num_rows, _, width = self._tables.shape
        if self.is_stale or num_rows != len(blocks) or width < num_pages:
            width = (num_pages // _TABLE_STEP + 1) * _TABLE_STEP
            by_pair = (shape.num_layers, len(blocks), shape.num_heads, width)
            self._tables = self._tables.new_empty(by_pair)
            self._num_blocks = torch.empty_like(needed)
            changed = torch.arange(len(blocks))
        else:
            added = blocks.shape[1] - self._blocks.shape[1]
            last = torch.nn.functional.pad(self._blocks, (0, added))
            is_changed = (last != blocks).any(1) | (needed > self._num_blocks)
            changed = is_changed.nonzero().squeeze(1)
        if len(changed):
            tables = torch.empty_like(self._tables[:, : len(changed)])
            self._regions.write_page_tables(block_table[changed], seq_lens[changed], 0, tables)
            self._tables[:, changed] = tables
            self._num_blocks[changed] = needed[changed]
        self._blocks, self._version = blocks, self._regions.version
        return self._tables


class EvictingCPUMetadataBuilder(EvictingBuilder[VirtualSequences], CPUAttentionMetadataBuilder):
    """Builds the metadata of `EvictingCPUImpl`."""

    slots_first = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Decode rows come first, with or without drafts. Which rows have drafts changes from step
        # to step, and rows that change places need new page tables.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._last: VirtualSequences | None = None
        """Page tables of the last step, if the same rows can decode on."""
        if not self.evicts:
            return
        # An AMX machine would store keys in tiles, from which no single token can be copied.
        self.isa = "vec" if self.block_size % 32 == 0 else "vec16"
        self._set_isa_to_layers(layer_names)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self._has_sinks = any(layer.impl.sinks is not None for layer in layers.values())
        check_page_format(self.block_size, self.head_dim, self.dtype, self.isa, self.kv_cache_dtype)

    def bind(self, observer: Observer, rows: BatchRows) -> None:
        super().bind(observer, rows)
        self._tables = PageTables(observer.regions)
        max_rows = self.vllm_config.scheduler_config.max_num_seqs
        self._starts = torch.arange(max_rows * observer.pool.shape.num_heads + 1, dtype=torch.int32)

    def split(self, common: CommonAttentionMetadata) -> Split[VirtualSequences]:
        """Split off all decode rows, and compressed rows with more than one token.

        The kernel takes all decode rows in one call. Without compressed rows none is ragged.
        """
        advanced = self._advance(common)
        if advanced is not None:
            return (advanced,), NOTHING
        regions = self.observer.regions
        if not regions.num_live:
            return unsplit(common)
        is_compressed = regions.num_token_blocks[common.block_table_tensor[:, 0]] > 0
        if not is_compressed.any():
            return unsplit(common)
        assert self.reorder_batch_threshold is not None
        num_decodes, *_ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        others = num_decodes + is_compressed[num_decodes:].nonzero().squeeze(1)
        rows = torch.cat((torch.arange(num_decodes), others))
        ragged = self._make_ragged(common, rows)
        return (ragged,), without_rows(common, num_decodes, others.tolist())

    def _advance(self, common: CommonAttentionMetadata) -> VirtualSequences | None:
        """Return the last step's rows, one token later; None if this step is not just that.

        Most steps are: the same requests decode on and none starts a block. Then only lengths and
        schedules change.
        """
        last = self._last
        if (
            last is None
            or self._tables.is_stale
            or common.max_query_len != 1
            or common.num_reqs != len(last.seq_lens)
        ):
            return None
        last.seq_lens += 1
        if (
            not torch.equal(common.seq_lens, last.seq_lens)
            or not self._tables.are_of(common.block_table_tensor)
            or (last.seq_lens % self.block_size == 1).any()
        ):
            self._last = None
            return None
        last.lengths += 1
        last.schedules = [self._schedules(last.starts, lengths) for lengths in last.lengths]
        return last

    def _make_ragged(self, common: CommonAttentionMetadata, rows: torch.Tensor) -> VirtualSequences:
        """Describe some rows of a batch, int64 [R], to the kernel."""
        regions, num_rows = self.observer.regions, len(rows)
        num_layers, num_heads = regions.shape.num_layers, regions.shape.num_heads
        num_tokens = common.query_start_loc.diff()[rows]
        total = int(num_tokens.sum())
        only_decodes = total == num_rows
        tokens: slice
        queries: Tokens
        heads_at_once = 1 if self._has_sinks else num_heads
        if only_decodes:  # then they are the first of the batch, in order
            tokens, queries = slice(total), slice(None)
            starts = self._starts[: num_rows * heads_at_once + 1]
            if self._has_sinks:
                queries = _of_each_head(torch.arange(total), num_heads)
        else:
            tokens = slice(None)
            first_tokens = common.query_start_loc[rows]
            queries, starts = queries_by_head(first_tokens, num_tokens, heads_at_once)
            if self._has_sinks:
                queries = _of_each_head(queries, num_heads)
        block_table, seq_lens = common.block_table_tensor[rows], common.seq_lens[rows]
        lengths = torch.empty(num_layers, num_rows, num_heads, dtype=torch.int32)
        regions.write_lengths(block_table, seq_lens, lengths)
        ragged = VirtualSequences(
            seq_lens=seq_lens,
            starts=starts,
            tables=self._tables.update(block_table, seq_lens, lengths),
            lengths=lengths,
            schedules=[self._schedules(starts, layer) for layer in lengths],
            tokens=tokens,
            queries=queries,
            summaries=SummaryReads.of_rows(
                self.observer.summaries, block_table, common.query_start_loc, rows
            ),
        )
        self._last = ragged if only_decodes else None
        return ragged

    def _schedules(self, starts: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        """Return the work partition of every call in a layer, from its lengths [R, H]."""
        calls = _by_call(lengths, self._has_sinks)
        return [self._schedule(starts, of_call) for of_call in calls]

    def _schedule(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=lengths.numel(),
            num_heads=self.observer.pool.shape.group_size,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class EvictingCPUImpl(EvictingImpl[VirtualSequences], CPUAttentionBackendImpl):
    """One layer's attention, whose ragged rows run through vLLM's own kernel."""

    def bind(self, layer: int, pool: PagePool, gate_outputs: KeyNumbers | None = None) -> None:
        super().bind(layer, pool, gate_outputs)
        # The kernel loads a vector of 16, from wherever a head's sinks start.
        self._sinks = torch.zeros(self.num_kv_heads, self.num_queries_per_kv + _SINK_VECTOR)

    def kernel_pages(self, pool: PagePool) -> Sequence[torch.Tensor]:
        return pool.raw.view(-1, 1, 2 * pool.shape.block_size, self.head_size).chunk(2, dim=2)

    def attend_ragged(
        self,
        rows: VirtualSequences,
        layer: AttentionLayer,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        # [tokens, H * G, D] is [tokens * H, G, D] as well. vLLM's queries may be a slice of a
        # fused projection; then reshaping copies them.
        by_head = (-1, self.num_queries_per_kv, self.head_size)
        queries = query[rows.tokens].reshape(by_head)
        outputs = output[rows.tokens].view(by_head)
        ragged_queries, ragged_outputs = queries[rows.queries], outputs[rows.queries]
        schedules = rows.schedules[self.layer]
        num_calls = len(schedules)
        for q, out, lengths, tables, schedule, sinks in zip(
            ragged_queries.chunk(num_calls),
            ragged_outputs.chunk(num_calls),
            _by_call(rows.lengths[self.layer], num_calls > 1),
            _by_call(rows.tables[self.layer], num_calls > 1),
            schedules,
            self._sinks_by_call(num_calls),
            strict=True,
        ):
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=self.key_pages,
                value_cache=self.value_pages,
                output=out,
                query_start_loc=rows.starts,
                seq_lens=lengths,
                scale=self.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=tables,
                softcap=0,
                scheduler_metadata=schedule,
                s_aux=sinks,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
            )
        write_back(outputs, rows.queries, ragged_outputs)
        if rows.summaries is not None:
            tables, lengths = rows.tables[self.layer], rows.lengths[self.layer]
            rows.summaries.merge(outputs, queries, tables, lengths, self.layer, self.scale)

    def _sinks_by_call(self, num_calls: int) -> Sequence[torch.Tensor | None]:
        """Return the sinks of the query heads in each call, float32 [G]; None where are none."""
        if self.sinks is None:
            return [None] * num_calls
        of_heads = self._sinks[:, : self.num_queries_per_kv]
        # From the layer's own tensor each time: weights may be loaded again.
        of_heads.copy_(self.sinks.detach().view_as(of_heads))
        return of_heads.unbind()


class EvictingCPUBackend(EvictingBackend, CPUAttentionBackend):
    """`CPU_ATTN` with head pages."""

    impl_cls = EvictingCPUImpl
    builder_cls = EvictingCPUMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


def _by_call(of_sequences: torch.Tensor, by_head: bool) -> Sequence[torch.Tensor]:
    """Divide a layer's tensor [R, H, ...] among the calls of the kernel: all, or one a head."""
    if not by_head:
        return (of_sequences.flatten(0, 1),)
    return of_sequences.transpose(0, 1).contiguous().unbind()


def _of_each_head(tokens: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the places of tokens' queries in [tokens * H], head by head, int64 [H * T]."""
    return (tokens * num_heads + torch.arange(num_heads)[:, None]).flatten()


def check_page_format(
    block_size: int, head_size: int, dtype: torch.dtype, isa: str, kv_cache_dtype: str
) -> None:
    """Write one page with vLLM's kernel, and check that it holds keys [D, N] and values [N, D].

    In a quantised cache, also check that its bytes have the format in `FP8`.

    Raises:
        PageLayoutError: if the page differs.
    """
    numbers = torch.arange(block_size * head_size).view(block_size, head_size)
    if kv_cache_dtype in FP8:
        stored = numbers.remainder(_NUM_FP8_CODES).to(torch.uint8)
        tokens = stored.view(FP8[kv_cache_dtype]).to(dtype).unsqueeze(1)
    else:
        stored = numbers.remainder(251).to(dtype)  # small whole numbers are exact in every dtype
        tokens = stored.unsqueeze(1)
    page = torch.zeros(1, 1, 2 * block_size, head_size, dtype=stored.dtype)
    keys, values = page.chunk(2, dim=2)
    slots = torch.arange(block_size, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        tokens, tokens, keys, values, slots, isa, kv_cache_dtype=kv_cache_dtype
    )
    if not torch.equal(page.flatten(), torch.cat((stored.t().flatten(), stored.flatten()))):
        raise PageLayoutError(
            f"vLLM's CPU kernel stores pages of {block_size} slots x {head_size} values ({dtype}, "
            f"{isa}, --kv-cache-dtype {kv_cache_dtype}) in a format this package does not know: "
            "report it, and leave out --kv-eviction meanwhile"
        )
