# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend, extended to caches whose heads differ in length.

Compressed requests, and all requests that decode in a batch with such requests, are *ragged rows*:
one virtual sequence per (row, KV head), over pages instead of blocks. Prefill chunks run as in
stock. A row has one token, or several with drafts to verify.

A decode step is a captured graph: its metadata are persistent tensors, and everything that depends
on them (lengths, page tables) is computed by kernels inside the graph. So a graph is right for
every later batch of its size, and building the metadata of such a step costs the host nothing.
With K drafts, it has 1 + K tokens of each row; steps with others run outside of graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm import envs
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_tgvkv.attention.base import (
    NOTHING,
    BatchRows,
    EvictingBackend,
    EvictingBuilder,
    EvictingImpl,
    Split,
    queries_by_head,
    unsplit,
    without_rows,
)
from vllm_tgvkv.attention.observer import Observer
from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.kernels.checks import indexable
from vllm_tgvkv.kernels.decode import MOST_QUERIES, DecodePlan, Descales, decode, plan_decode
from vllm_tgvkv.kernels.sinks import apply_sinks
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.summaries.blocks import SummaryBlocks

_TABLE_BYTES = 64 << 20
"""Page tables are written for as many layers at once as fit, or for as many rows of one layer."""

_MAX_SPLIT_SEQUENCES = 992
"""FlashAttention 3 splits long sequences among thread blocks in batches of at most this many
sequences, and in larger ones none (`PREPARE_VARLEN_MAX_BATCHES_1CTA` in its `flash_api.cpp`)."""

_KEYS_PER_LAUNCH = 1024
"""The keys that one thread block reads while one more slice of a batch is launched. Estimated: 3
launches of 2 us (schedule, attention, sum of splits), and 8192 keys in 50 us."""

_DESCALES = ("q_descale", "k_descale", "v_descale")
"""FlashAttention's arguments for `Descales`, float32 [sequences, KV heads] each."""

_REPLAY_ROWS = 128
"""Most ragged rows at once of a request that computes several tokens, which is rare (see below)."""


def most_split_sequences(max_rows: int, num_heads: int, num_splits: int) -> int:
    """Return the most sequences of a launch that splits them, times the splits of each."""
    return num_splits * min(max_rows * num_heads, _MAX_SPLIT_SEQUENCES)


@dataclass
class Queries:
    """The query tokens of the rows of a launch, where rows may have several."""

    starts: torch.Tensor
    """First query of every virtual sequence of FlashAttention, int32 [r * H + 1]; of every row for
    this package's kernel, int32 [R + 1]."""
    order: torch.Tensor | None = None
    """Places of the sequences' queries in [T * H], row by row, head by head, int64 [t * H]; None if
    the kernel finds them itself."""


@dataclass
class RaggedTokens:
    """R rows that attend as virtual sequences, one for each of their KV heads."""

    block_table: torch.Tensor
    """Of each row's request, int32 [R, W]."""
    seq_lens: torch.Tensor
    """Keys of the request up to the row's last token, evicted ones counted, int32 [R]."""
    max_seq_len: int
    """Upper bound of the virtual sequences' lengths."""
    rows_per_launch: int
    """Rows that one launch of FlashAttention takes."""
    num_splits: int
    """Parts that a sequence may be split into; 0 leaves it to FlashAttention 2."""
    kernel: RaggedKernel
    tokens: slice
    """Their places in the batch."""
    takes_turns: bool
    """Whether other rows use the kernel's memory as well, layer by layer."""
    queries: Sequence[Queries] = ()
    """Of every launch; empty if each row has one token."""

    def __len__(self) -> int:
        return len(self.seq_lens)

    def fills_at(self, layer: int) -> bool:
        """Return whether lengths of all layers are written before this layer."""
        return layer == 0 or self.takes_turns


class RaggedKernel:
    """Attention of at most `max_rows` ragged rows: a kernel and the memory of its inputs.

    Graphs refer to that memory. The first layer fills it, in the graph if there is one. Where
    several sets of rows take turns in each layer, every layer fills it. A row has at most
    `most_queries` tokens.
    """

    def __init__(self, regions: Regions, max_rows: int, most_queries: int = 1) -> None:
        self.shape = shape = regions.shape
        self.regions = regions
        self.max_rows = max_rows
        self.most_queries = most_queries
        self.device = regions.offsets.device
        size = (shape.num_layers, max_rows, shape.num_heads)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=self.device)

    def attend(
        self,
        impl: EvictingFlashImpl,
        rows: RaggedTokens,
        query: torch.Tensor,
        output: torch.Tensor,
        descales: Descales | None,
    ) -> None:
        """Attend to the pages of the layer of `impl`; to be called layer by layer.

        `query` and `output` are [T, H * G, D]. `descales` are the layer's, if its cache is fp8.
        """
        raise NotImplementedError

    def queries(
        self, num_rows: int, size: int, starts: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Sequence[Queries]:
        """Return the query tokens of rows with several, of every launch of at most `size` rows.

        Args:
            starts: first token of every row, and the end of the last, int32 [R + 1] on the device
                and on the host; None if all have `most_queries` tokens, as in a graph.
        """
        raise NotImplementedError

    def _write_lengths(self, rows: RaggedTokens) -> torch.Tensor:
        """Return the keys of every virtual sequence in every layer, int32 [L, R, H]."""
        lengths = self._lengths[:, : len(rows)]
        self.regions.write_lengths(rows.block_table, rows.seq_lens, lengths)
        return lengths


class FlashKernel(RaggedKernel):
    """FlashAttention, which needs a page table of `width` entries for every virtual sequence.

    Tables stand at the start of one buffer: few rows' for several layers at once, and very many
    rows' for some of them at a time.
    """

    def __init__(
        self, summaries: SummaryBlocks, max_rows: int, width: int, most_queries: int = 1
    ) -> None:
        super().__init__(summaries.regions, max_rows, most_queries)
        self._width = width
        self._summaries = summaries
        shape = self.shape
        size = self.num_entries(shape, max_rows, width)
        # Never anything but valid pages: FlashAttention may load entries after a sequence's last.
        self._buffer = torch.zeros(size, dtype=torch.int32, device=self.device)
        starts = torch.arange(max_rows * shape.num_heads + 1, dtype=torch.int32, device=self.device)
        self._rows_of_tables = size // (shape.num_heads * width)
        """Rows whose tables of one layer fit the buffer."""
        self._starts: Callable[[int], torch.Tensor] = cache(lambda number: starts[: number + 1])
        self._all_queries: Queries | None = None
        """Of `max_rows` rows that all have `most_queries` tokens."""
        if most_queries > 1:
            first = torch.arange(max_rows, dtype=torch.int32) * most_queries
            made = queries_by_head(first, torch.full_like(first, most_queries), shape.num_heads)
            order, of_sequences = (each.to(self.device) for each in made)
            self._all_queries = Queries(of_sequences, order)
        self._layer_lengths: tuple[torch.Tensor, ...] = ()
        """Of the current rows, int32 [R * H] for every layer."""
        self._layer_tables: tuple[torch.Tensor, ...] = ()
        """Of the current rows, or of some if they are many, int32 [r * H, width] for every layer
        that they are written for."""

    @staticmethod
    def num_entries(shape: CacheShape, max_rows: int, width: int) -> int:
        """Return the size of the buffer, in entries of 4 bytes."""
        of_row = shape.num_heads * width
        return max(of_row, min(shape.num_layers * max_rows * of_row, _TABLE_BYTES // 4))

    def attend(
        self,
        impl: EvictingFlashImpl,
        rows: RaggedTokens,
        query: torch.Tensor,
        output: torch.Tensor,
        descales: Descales | None,
    ) -> None:
        layer, shape = impl.layer, self.shape
        if rows.fills_at(layer):
            self._layer_lengths = self._write_lengths(rows).flatten(1).unbind()
        # [T, H * G, D] is [T * H, G, D] as well. vLLM's queries may be a slice of a fused
        # projection; then reshaping copies them.
        by_head = (-1, shape.group_size, shape.head_size)
        queries, outputs = query.reshape(by_head), output.view(by_head)
        size = self._rows_at_once(rows.rows_per_launch)
        parts = zip(
            self._inputs(rows, layer, size, queries, outputs),
            self._tables(rows, layer, size),
            strict=True,
        )
        log_sums = None
        for number, ((q, out, lengths, starts, order), table) in enumerate(parts):
            of_fp8 = {}
            if descales is not None:  # of every sequence and its KV head
                each = (descale.expand(len(lengths), 1) for descale in descales)
                of_fp8 = dict(zip(_DESCALES, each, strict=True))
            found = flash_attn.flash_attn_varlen_func(
                q=q,
                k=impl.key_pages,
                v=impl.value_pages,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1 if order is None else self.most_queries,
                seqused_k=lengths,
                max_seqlen_k=rows.max_seq_len,
                softmax_scale=impl.scale,
                causal=True,
                block_table=table,
                fa_version=impl.vllm_flash_attn_version,
                num_splits=rows.num_splits,
                return_softmax_lse=self._summaries.are_used or impl.sinks is not None,
                **of_fp8,
            )
            if order is not None:
                outputs.index_copy_(0, order, out)
                if impl.sinks is not None:
                    if log_sums is None:
                        log_sums = found[1].new_empty(shape.group_size, len(outputs))
                    log_sums.index_copy_(1, order, found[1])
            elif impl.sinks is not None:
                # They differ between KV heads. FlashAttention, to which all virtual sequences have
                # the same heads, takes one for each of these.
                apply_sinks(out, found[1], impl.sinks)
            if self._summaries.are_used:
                of_launch = slice(number * size, (number + 1) * size)
                self._summaries.merge(
                    out,
                    found[1],  # [G, sequences], natural logarithms
                    q,
                    rows.block_table[of_launch],
                    rows.seq_lens[of_launch],
                    layer,
                    impl.scale,
                )
        if log_sums is not None and impl.sinks is not None:
            apply_sinks(outputs, log_sums, impl.sinks)

    def queries(
        self, num_rows: int, size: int, starts: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Sequence[Queries]:
        num_heads, size = self.shape.num_heads, self._rows_at_once(size)
        found = []
        for first in range(0, num_rows, size):
            end = min(first + size, num_rows)
            if starts is None:
                whole, of_row = self._all_queries, num_heads * self.most_queries
                assert whole is not None
                assert whole.order is not None
                order = whole.order[first * of_row : end * of_row]
                found.append(Queries(whole.starts[: (end - first) * num_heads + 1], order))
                continue
            on_host = starts[1][first : end + 1]
            made = queries_by_head(on_host[:-1], on_host.diff(), num_heads)
            order, of_sequences = (async_tensor_h2d(x, self.device) for x in made)
            found.append(Queries(of_sequences, order))
        return found

    def _rows_at_once(self, size: int) -> int:
        """Return the rows of a launch that may have `size`: their tables fit the buffer."""
        return min(size, self._rows_of_tables)

    def _inputs(
        self,
        rows: RaggedTokens,
        layer: int,
        size: int,
        queries: torch.Tensor,
        outputs: torch.Tensor,
    ) -> Iterator[
        tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    ]:
        """Yield queries, outputs, lengths, starts and order of every launch.

        Queries of rows with several tokens are copied: a sequence's stand one after the other.
        """
        size *= self.shape.num_heads
        if not rows.queries:
            for q, out, lengths in _slices((queries, outputs, self._layer_lengths[layer]), size):
                yield q, out, lengths, self._starts(len(lengths)), None
            return
        all_lengths = _slices((self._layer_lengths[layer],), size)
        for of_launch, (lengths,) in zip(rows.queries, all_lengths, strict=True):
            assert of_launch.order is not None
            q = indexable(queries).index_select(0, of_launch.order).view(queries.dtype)
            out = outputs.new_empty(q.shape)
            yield q, out, lengths, of_launch.starts, of_launch.order

    def _tables(self, rows: RaggedTokens, layer: int, size: int) -> Iterator[torch.Tensor]:
        """Yield the page tables of each launch of `size` rows, int32 [size * H, width]."""
        num_rows, num_layers = len(rows), 1
        together = num_rows
        if num_rows > self._rows_of_tables:
            together = self._rows_of_tables // size * size
        elif not rows.takes_turns:
            num_layers = self._rows_of_tables // num_rows
        for first in range(0, num_rows, together):
            if layer % num_layers == 0:
                some = slice(first, first + together)
                most = min(num_layers, self.shape.num_layers - layer)
                self._layer_tables = self._write_tables(rows, some, layer, most)
            tables = self._layer_tables[layer % num_layers]
            for (table,) in _slices((tables,), size * self.shape.num_heads):
                yield table

    def _write_tables(
        self, rows: RaggedTokens, some: slice, layer: int, num_layers: int
    ) -> tuple[torch.Tensor, ...]:
        """Write the tables of some rows in some layers, int32 [r * H, width] each."""
        block_table, seq_lens = rows.block_table[some], rows.seq_lens[some]
        size = (num_layers, len(seq_lens), self.shape.num_heads, self._width)
        tables = self._buffer[: math.prod(size)].view(size)
        self.regions.write_page_tables(block_table, seq_lens, layer, tables)
        return tables.flatten(1, 2).unbind()


class TritonKernel(RaggedKernel):
    """This package's kernel, which computes pages instead of reading tables."""

    def __init__(
        self, regions: Regions, max_rows: int, dtype: torch.dtype, most_queries: int = 1
    ) -> None:
        super().__init__(regions, max_rows, most_queries)
        shape = self.shape
        if most_queries > 1 and most_queries * shape.group_size > MOST_QUERIES:
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with num_speculative_tokens {most_queries - 1} and "
                f"its own decode kernel, which takes {MOST_QUERIES} queries of a KV head at once "
                f"and gets {shape.group_size} for each token, yet: use decode_kernel: stock (which "
                "FlashAttention 4 has not), draft less, remove --speculative-config or leave out "
                "--kv-eviction"
            )
        self._plan = DecodePlan.for_device(
            shape.num_layers,
            max_rows,
            shape.num_heads,
            shape.group_size,
            shape.head_size,
            dtype,
            self.device,
            most_queries,
        )
        tokens = max_rows * most_queries + 1
        self._starts = torch.arange(0, tokens, most_queries, dtype=torch.int32, device=self.device)

    def queries(
        self, num_rows: int, size: int, starts: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Sequence[Queries]:
        return [Queries(self._starts[: num_rows + 1] if starts is None else starts[0])]

    def attend(
        self,
        impl: EvictingFlashImpl,
        rows: RaggedTokens,
        query: torch.Tensor,
        output: torch.Tensor,
        descales: Descales | None,
    ) -> None:
        if rows.fills_at(impl.layer):
            self._current_lengths = self._write_lengths(rows)
            group_size, most = self.shape.group_size, self.most_queries if rows.queries else 1
            num_sequences = len(rows) * self.shape.num_heads
            self._current_plan = self._plan.for_sequences(num_sequences, group_size * most)
            plan_decode(self._current_lengths, self._current_plan)
        decode(
            query,
            impl.pool.keys,
            impl.pool.values,
            rows.block_table,
            self._current_lengths,
            *self.regions.state,
            impl.layer,
            impl.scale,
            self._current_plan,
            output,
            impl.sinks,
            descales,
            *((rows.queries[0].starts, self.most_queries) if rows.queries else ()),
        )


def _slices(tensors: tuple[torch.Tensor, ...], size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    """Split tensors of the same length into slices of at most `size`."""
    if len(tensors[0]) <= size:
        return (tensors,)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


class EvictingFlashMetadataBuilder(EvictingBuilder[RaggedTokens], FlashAttentionMetadataBuilder):
    """Builds the metadata of `EvictingFlashImpl`."""

    # Python code observes each layer of prompts that end: batches with prefills keep their
    # attention out of graphs.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False
    reorder_batch_threshold: int = 1
    """Most tokens of a decode row; these rows come first."""
    slots_first = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def bind(self, observer: Observer, rows: BatchRows) -> None:
        """Attach the worker's observer, and allocate the kernel's memory, which graphs refer to."""
        super().bind(observer, rows)
        shape, config = observer.pool.shape, self.vllm_config
        max_rows = max(config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self._most_rows = _MAX_SPLIT_SEQUENCES // shape.num_heads
        # Of FlashAttention 3. Where windows differ between layers, vLLM clears it with the first
        # batch, because it cannot schedule such layers together.
        self._splits = self.aot_schedule
        self._kernel: RaggedKernel
        if observer.decode_kernel == "triton":
            dtype = observer.pool.raw.dtype
            self._kernel = TritonKernel(
                observer.regions, max_rows, dtype, self.reorder_batch_threshold
            )
        else:
            width = cdiv(config.model_config.max_model_len, shape.block_size)
            self._kernel = FlashKernel(
                observer.summaries, max_rows, width, self.reorder_batch_threshold
            )
        if self.use_full_cuda_graph:
            observer.record_decodes(max_rows * self.reorder_batch_threshold)

    def warm_up(self, layer: AttentionLayer) -> None:
        """Let the first evicted layer decode a token that nobody has, also with drafts.

        So all kernels of ragged rows are compiled before the first request, with graphs or without.
        """
        shape, device = self.observer.pool.shape, self.device
        width = cdiv(self.vllm_config.model_config.max_model_len, shape.block_size)
        for num_tokens in sorted({1, self.reorder_batch_threshold}):
            rows = self._ragged_tokens(
                torch.zeros(1, width, dtype=torch.int32, device=device),
                torch.full((1,), num_tokens, dtype=torch.int32, device=device),
                max_seq_len=num_tokens,
                tokens=slice(num_tokens),
                takes_turns=False,
                have_drafts=num_tokens > 1,
            )
            size = num_tokens, shape.num_heads * shape.group_size, shape.head_size
            output = torch.empty(size, dtype=self.vllm_config.model_config.dtype, device=device)
            query = torch.zeros(size, dtype=self.observer.query_dtype, device=device)
            layer.impl.attend_ragged(rows, layer, query, output)

    def may_be_graph(self, common: CommonAttentionMetadata) -> bool:
        most = self.reorder_batch_threshold
        return common.max_query_len == most and common.num_actual_tokens == most * common.num_reqs

    def split(self, common: CommonAttentionMetadata) -> Split[RaggedTokens]:
        """Split off all decode rows, and every token of compressed requests with more.

        Without compressed requests none is ragged, except in a step that may be a graph.
        """
        num_live = self.observer.regions.num_live
        if self.may_be_graph(common) and (num_live or self.use_full_cuda_graph):
            # A graph is captured once, without compressed requests, and replayed with them.
            return (self._decode_tokens(common, common.num_reqs),), NOTHING
        if not num_live:
            return unsplit(common)
        num_decodes, *_ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        replayed = self._replayed_rows(common, num_decodes)
        ragged = []
        if num_decodes:
            ragged.append(self._decode_tokens(common, num_decodes, takes_turns=bool(replayed)))
        for row in replayed:
            ragged += self._replayed_tokens(common, row)
        return ragged, without_rows(common, num_decodes, replayed)

    def _decode_tokens(
        self, common: CommonAttentionMetadata, num_rows: int, takes_turns: bool = False
    ) -> RaggedTokens:
        """Return the first rows of a batch, which have at most `reorder_batch_threshold` tokens."""
        rows, num_tokens, starts = slice(num_rows), num_rows, None
        if self.reorder_batch_threshold > 1:
            if self.may_be_graph(common):
                num_tokens = common.num_actual_tokens
            else:
                of_rows = slice(num_rows + 1)
                starts = common.query_start_loc[of_rows], common.query_start_loc_cpu[of_rows]
                num_tokens = int(starts[1][-1])
        return self._ragged_tokens(
            common.block_table_tensor[rows],
            common.seq_lens[rows],
            common.max_seq_len,
            slice(num_tokens),
            takes_turns,
            have_drafts=num_tokens > num_rows,
            starts=starts,
        )

    def _replayed_rows(self, common: CommonAttentionMetadata, num_decodes: int) -> list[int]:
        """Return the compressed requests behind the decode rows of this step, ascending.

        After a preemption a request recomputes what it had generated. Only rows of several tokens
        are looked at, so the number of compressed requests does not matter.
        """
        owns, request_at = self.observer.regions.owns, self._rows.request_at
        rows = range(num_decodes, common.num_reqs)
        return [row for row in rows if owns(request_at(row))]

    def _replayed_tokens(self, common: CommonAttentionMetadata, row: int) -> Iterator[RaggedTokens]:
        """Yield the tokens of one compressed request, in slices of bounded memory."""
        start, end = common.query_start_loc_cpu[row : row + 2].tolist()
        size = min(_REPLAY_ROWS, self._kernel.max_rows, self._most_rows)
        for first in range(start, end, size):
            last = min(first + size, end)
            # Keys up to each token: the row's last token sees all of them.
            before_end = torch.arange(first - end + 1, last - end + 1, device=self.device)
            block_table = common.block_table_tensor[row].expand(len(before_end), -1)
            seq_lens = (common.seq_lens[row] + before_end).int()
            tokens = slice(first, last)
            yield self._ragged_tokens(
                block_table, seq_lens, common.max_seq_len, tokens, takes_turns=True
            )

    def _ragged_tokens(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        tokens: slice,
        takes_turns: bool,
        have_drafts: bool = False,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> RaggedTokens:
        """Describe rows of one token each, or `have_drafts`: see `RaggedKernel.queries`."""
        rows_per_launch, num_splits = self._launches(len(seq_lens), max_seq_len)
        queries: Sequence[Queries] = ()
        if have_drafts:
            queries = self._kernel.queries(len(seq_lens), rows_per_launch, starts)
        return RaggedTokens(
            block_table,
            seq_lens,
            max_seq_len,
            rows_per_launch,
            num_splits,
            self._kernel,
            tokens,
            takes_turns,
            queries,
        )

    def _launches(self, num_rows: int, max_seq_len: int) -> tuple[int, int]:
        """Return the rows of one launch of FlashAttention, and the most splits of a sequence.

        FlashAttention 3 splits in slices of `_MAX_SPLIT_SEQUENCES` only. More launches are worth it
        if one thread block could take longer for the longest sequence. It reserves memory for the
        most splits of every sequence, so a bound is given outside of graphs as well: without one it
        may be 128, since each sequence here has one head. FlashAttention 2 decides by itself (0),
        and splits in small batches only.
        """
        if envs.VLLM_BATCH_INVARIANT:
            return num_rows, 1
        if not self._splits:
            return num_rows, 0
        num_splits = self.attention_config.flash_attn_max_num_splits_for_cuda_graph
        num_slices = cdiv(num_rows, self._most_rows)
        if num_slices == 1:
            return num_rows, num_splits
        if num_slices * _KEYS_PER_LAUNCH < max_seq_len:
            return cdiv(num_rows, num_slices), num_splits
        return num_rows, 1


class EvictingFlashImpl(EvictingImpl[RaggedTokens], FlashAttentionImpl):
    """One layer's attention, whose ragged tokens run through a `RaggedKernel`."""

    def kernel_pages(self, pool: PagePool) -> Sequence[torch.Tensor]:
        # One head, whose stride is one that the tensor memory accelerator accepts.
        pages = pool.raw.view(pool.keys.dtype)
        pages = pages.view(-1, pool.shape.block_size, 1, 2 * self.head_size)
        return pages.split(self.head_size, dim=-1)

    def attend_ragged(
        self, rows: RaggedTokens, layer: AttentionLayer, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        descales = None
        if self.has_fp8_queries:
            # Tensors, as graphs need them: weights may be loaded again.
            descales = layer._q_scale, layer._k_scale, layer._v_scale
        rows.kernel.attend(self, rows, query[rows.tokens], output[rows.tokens], descales)


class EvictingFlashBackend(EvictingBackend, FlashAttentionBackend):
    """`FLASH_ATTN` with head pages."""

    impl_cls = EvictingFlashImpl
    builder_cls = EvictingFlashMetadataBuilder
