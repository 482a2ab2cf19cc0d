# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend, extended to caches whose heads differ in length.

Tokens of compressed requests, and all decode tokens of a batch with such requests, are *ragged
rows*: one virtual sequence per (token, KV head), over pages instead of blocks. Prefill chunks run
as in stock.

A decode step is a captured graph: its metadata are persistent tensors, and everything that depends
on them (lengths, page tables) is computed by kernels inside the graph. So a graph is right for
every later batch of its size, and building the metadata of such a step costs the host nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_tgvkv.attention import (
    NOTHING,
    EvictingBackend,
    EvictingBuilder,
    EvictingImpl,
    RowFinder,
    Split,
    Tokens,
    unsplit,
    without_rows,
    write_back,
)
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.kernels.decode import DecodePlan, decode, plan_decode
from vllm_tgvkv.pages import CacheShape, PagePool
from vllm_tgvkv.regions import Regions

_TABLE_BYTES = 64 << 20
"""Page tables are written for as many layers at once as fit, and for one layer in any case."""

_MAX_SPLIT_SEQUENCES = 992
"""FlashAttention 3 balances the splits of at most this many sequences on the device. More fill the
device without being split."""

_REPLAY_ROWS = 128
"""Most ragged rows at once of a request that computes several tokens, which is rare (see below)."""


@dataclass
class RaggedTokens:
    """R tokens that attend as virtual sequences, one for each of their KV heads."""

    block_table: torch.Tensor
    """Of each token's request, int32 [R, W]."""
    seq_lens: torch.Tensor
    """Keys of the request up to the token, evicted ones counted, int32 [R]."""
    max_seq_len: int
    """Upper bound of the virtual sequences' lengths."""
    num_splits: int
    """Parts that a sequence may be split into; 0 leaves it to FlashAttention."""
    kernel: RaggedKernel
    tokens: Tokens
    """Their places in the batch."""

    def __len__(self) -> int:
        return len(self.seq_lens)


class RaggedKernel:
    """Attention of at most `max_rows` ragged tokens: a kernel and the memory of its inputs.

    Graphs refer to that memory. The first layer fills it, in the graph if there is one. Where
    several sets of tokens `take_turns` in each layer, every layer fills it.
    """

    def __init__(
        self, shape: CacheShape, regions: Regions, max_rows: int, take_turns: bool
    ) -> None:
        self.shape = shape
        self.regions = regions
        self.take_turns = take_turns
        self.device = regions.offsets.device
        size = (shape.num_layers, max_rows, shape.num_heads)
        self._lengths = torch.zeros(size, dtype=torch.int32, device=self.device)

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedTokens, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attend to the pages of the layer of `impl`; to be called layer by layer.

        `query` and `output` are [R, H * G, D].
        """
        raise NotImplementedError

    def _lengths_of(self, rows: RaggedTokens, layer: int) -> torch.Tensor:
        """Return the keys of every virtual sequence in every layer, int32 [L, R, H]."""
        lengths = self._lengths[:, : len(rows)]
        if self._fills_at(layer):
            self.regions.write_lengths(
                rows.block_table, rows.seq_lens, self.shape.block_size, lengths
            )
        return lengths

    def _fills_at(self, layer: int) -> bool:
        return layer == 0 or self.take_turns


class FlashKernel(RaggedKernel):
    """FlashAttention, which needs a page table of `width` entries for every virtual sequence."""

    def __init__(
        self,
        shape: CacheShape,
        regions: Regions,
        max_rows: int,
        take_turns: bool,
        width: int,
    ) -> None:
        super().__init__(shape, regions, max_rows, take_turns)
        layer_bytes = max_rows * shape.num_heads * width * 4
        num_layers = 1
        if not take_turns:
            num_layers = max(1, min(shape.num_layers, _TABLE_BYTES // layer_bytes))
        size = (num_layers, max_rows, shape.num_heads, width)
        self._tables = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(
            max_rows * shape.num_heads + 1, dtype=torch.int32, device=self.device
        )

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedTokens, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        layer, num_layers = impl.layer, self.shape.num_layers
        lengths = self._lengths_of(rows, layer)[layer].flatten()
        index = layer % len(self._tables)
        if index == 0:
            tables = self._tables[: num_layers - layer, : len(rows)]
            self.regions.write_page_tables(
                rows.block_table, rows.seq_lens, self.shape.block_size, layer, tables
            )
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
            block_table=self._tables[index, : len(rows)].flatten(0, 1),
            fa_version=impl.vllm_flash_attn_version,
            num_splits=rows.num_splits,
        )


class TritonKernel(RaggedKernel):
    """This package's kernel, which computes pages instead of reading tables."""

    def __init__(
        self,
        shape: CacheShape,
        regions: Regions,
        max_rows: int,
        take_turns: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, regions, max_rows, take_turns)
        self._plan = DecodePlan.for_device(
            shape.num_layers,
            max_rows,
            shape.num_heads,
            shape.group_size,
            shape.head_size,
            dtype,
            self.device,
        )

    def attend(
        self, impl: EvictingFlashImpl, rows: RaggedTokens, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        lengths = self._lengths_of(rows, impl.layer)
        plan = self._plan.for_sequences(len(rows) * self.shape.num_heads)
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


class EvictingFlashMetadataBuilder(EvictingBuilder[RaggedTokens], FlashAttentionMetadataBuilder):
    """Builds the metadata of `EvictingFlashImpl`."""

    # Python code observes each layer of prompts that end: batches with prefills keep their
    # attention out of graphs.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False
    reorder_batch_threshold = 1  # decode rows first
    slots_first = True

    def bind(self, evictor: Evictor, find_row: RowFinder) -> None:
        super().bind(evictor, find_row)
        self._kernel: RaggedKernel | None = None

    def split(self, common: CommonAttentionMetadata) -> Split[RaggedTokens]:
        """Split off all decode tokens, and every token of compressed requests with several.

        Without compressed requests none is ragged, except in a step that may be a graph.
        """
        num_live = self.evictor.regions.num_live
        if common.max_query_len == 1 and (num_live or self.use_full_cuda_graph):
            # A graph is captured once, without compressed requests, and replayed with them.
            return (self._decode_tokens(common, common.num_reqs),), NOTHING
        if not num_live:
            return unsplit(common)
        num_decodes, *_ = split_decodes_and_prefills(common, decode_threshold=1)
        replayed = self._replayed_rows(common, num_decodes)
        ragged = [self._decode_tokens(common, num_decodes)] if num_decodes else []
        for row in replayed:
            ragged += self._replayed_tokens(common, row)
        return ragged, without_rows(common, num_decodes, replayed)

    def _decode_tokens(self, common: CommonAttentionMetadata, num_rows: int) -> RaggedTokens:
        """Return the first rows of a batch, which have one token each."""
        max_graph_rows = self.max_cudagraph_size or 0
        if self._kernel is None:
            max_rows = self.vllm_config.scheduler_config.max_num_seqs
            self._kernel = self._make_kernel(
                max(max_rows, max_graph_rows), common, take_turns=False
            )
        in_graph = self.use_full_cuda_graph and num_rows <= max_graph_rows
        return RaggedTokens(
            block_table=common.block_table_tensor[:num_rows],
            seq_lens=common.seq_lens[:num_rows],
            max_seq_len=common.max_seq_len,
            num_splits=self._num_splits(num_rows, in_graph),
            kernel=self._kernel,
            tokens=slice(num_rows),
        )

    def _make_kernel(
        self, max_rows: int, common: CommonAttentionMetadata, take_turns: bool
    ) -> RaggedKernel:
        evictor = self.evictor
        common_arguments = (evictor.shape, evictor.regions, max_rows, take_turns)
        if evictor.config.decode_kernel == "triton":
            return TritonKernel(*common_arguments, evictor.pool.raw.dtype)
        # The runner's block table has the same width in every step.
        return FlashKernel(*common_arguments, common.block_table_tensor.shape[1])

    def _num_splits(self, num_rows: int, in_graph: bool) -> int:
        """Return the number of parts that each of `num_rows` * H sequences may be split into.

        0 leaves it to FlashAttention, except in a graph: as in stock, that needs a bound to reserve
        memory for.
        """
        num_sequences = num_rows * self.evictor.shape.num_heads
        if num_sequences > _MAX_SPLIT_SEQUENCES or envs.VLLM_BATCH_INVARIANT:
            return 1
        return self.max_num_splits if in_graph else 0

    def _replayed_rows(self, common: CommonAttentionMetadata, num_decodes: int) -> list[int]:
        """Return the compressed requests with several tokens in this step, ascending.

        After a preemption a request recomputes what it had generated.
        """
        rows = (self._find_row(common, owner) for owner in self.evictor.regions.owners)
        return sorted(row for row in rows if row is not None and row >= num_decodes)

    def _replayed_tokens(self, common: CommonAttentionMetadata, row: int) -> Iterator[RaggedTokens]:
        """Yield the tokens of one compressed request, in slices of bounded memory."""
        start, end = common.query_start_loc_cpu[row : row + 2].tolist()
        size = min(_REPLAY_ROWS, end - start)
        # Not the kernel of the decode tokens, whose memory holds what later layers need.
        kernel = self._make_kernel(size, common, take_turns=True)
        for first in range(start, end, size):
            tokens = torch.arange(first, min(first + size, end), device=self.device)
            yield RaggedTokens(
                block_table=common.block_table_tensor[row].expand(len(tokens), -1),
                seq_lens=(common.seq_lens[row] - end + 1 + tokens).int(),
                max_seq_len=common.max_seq_len,
                num_splits=self._num_splits(size, in_graph=False),
                kernel=kernel,
                tokens=tokens,
            )


class EvictingFlashImpl(EvictingImpl[RaggedTokens], FlashAttentionImpl):
    """One layer's attention, whose ragged tokens run through a `RaggedKernel`."""

    def bind(self, layer: int, pool: PagePool) -> None:
        super().bind(layer, pool)
        # One head, whose stride is one that the tensor memory accelerator accepts.
        pages = pool.raw.view(-1, pool.block_size, 1, 2 * self.head_size)
        self.key_pages, self.value_pages = pages.split(self.head_size, dim=-1)

    def attend_ragged(
        self,
        rows: RaggedTokens,
        layer: AttentionLayer,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        ragged_output = output[rows.tokens]
        rows.kernel.attend(self, rows, query[rows.tokens], ragged_output)
        write_back(output, rows.tokens, ragged_output)


class EvictingFlashBackend(EvictingBackend, FlashAttentionBackend):
    """`FLASH_ATTN` with head pages."""

    impl_cls = EvictingFlashImpl
    builder_cls = EvictingFlashMetadataBuilder
