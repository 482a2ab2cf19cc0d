# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend, extended to caches whose heads have lengths of their own.

A batch without compressed requests runs vLLM's own code unchanged. Otherwise the
decode rows, which the batch has first, run as one virtual sequence per (request,
KV head) over pages instead of blocks, through the same kernel; prefill chunks in
the same batch run as in stock. A compressed request has several tokens in a step
with drafts to verify, and after a preemption, when it computes again what it had
generated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from vllm_tgvkv.attention import RowFinder, check_layer, evicting_spec, first_token
from vllm_tgvkv.config import config_of
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.pages import FP8, CacheShape, PageLayoutError, PagePool
from vllm_tgvkv.ranks import tensor_ranks
from vllm_tgvkv.stages import pipeline_stages

_FP8_CODES = 123
"""So many first bytes are numbers in every format of fp8, neither infinite nor NaN."""

_TABLE_STEP = 16
"""Page tables grow by this many pages at once."""


class EvictingCPUBackend(CPUAttentionBackend):
    """`CPU_ATTN` with head pages; chosen by the worker while it loads the model."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return evicting_spec(spec)

    @staticmethod
    def get_impl_cls() -> type[EvictingCPUImpl]:
        return EvictingCPUImpl

    @staticmethod
    def get_builder_cls() -> type[EvictingCPUMetadataBuilder]:
        return EvictingCPUMetadataBuilder


@dataclass
class RaggedRows:
    """The rows of a step that run as virtual sequences, for all layers.

    There are R rows and T tokens in them; a virtual sequence is a row's tokens for
    one KV head, rows first.
    """

    num_tokens: int
    starts: torch.Tensor
    """First query of every virtual sequence, int32 [R * H + 1]."""
    tables: torch.Tensor
    """Page numbers, int32 [L, R, H, W]."""
    lengths: torch.Tensor
    """Keys of every virtual sequence, int32 [L, R, H]."""
    schedules: list[torch.Tensor]
    """The kernel's own work partition of every layer."""
    queries: torch.Tensor | None
    """Where the T * H queries of one KV head each lie in the batch's, int64; None where the
    rows are the batch's first and have one token each, so that they lie there in order."""


@dataclass
class EvictingCPUMetadata(CPUAttentionMetadata):
    """Stock metadata, of the whole batch or of what is left beside the ragged rows."""

    ragged: RaggedRows | None = None
    stock_tokens: slice | torch.Tensor = field(default_factory=lambda: slice(None))
    """The tokens that are left to stock attention: a slice, or int64 indices."""
    evictor: Evictor | None = None
    """Set in a step in which some prompt's layers have to be observed."""


class EvictingCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the metadata and owns the worker's `Evictor`."""

    slots_first = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Decode rows first, with or without drafts: who has some changes from step to step, and
        # rows that change places get their page tables written anew.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        # An AMX machine would store keys in tiles, from which a token cannot be copied alone.
        self.isa = "vec" if self.block_size % 32 == 0 else "vec16"
        self._set_isa_to_layers(layer_names)
        check_page_format(self.block_size, self.head_dim, self.dtype, self.isa, self.kv_cache_dtype)
        self.layer_names = layer_names
        self.shape = CacheShape(
            num_layers=len(layer_names),
            num_heads=self.num_kv_heads,
            group_size=self.num_heads // self.num_kv_heads,
            head_size=self.head_dim,
            block_size=self.block_size,
        )
        self.evictor: Evictor | None = None
        self._starts = torch.arange(
            vllm_config.scheduler_config.max_num_seqs * self.num_kv_heads + 1, dtype=torch.int32
        )
        self._tables: torch.Tensor | None = None
        self._written = torch.empty(0, dtype=torch.int32)
        """Blocks of every row that its page tables cover."""
        self._seen = torch.empty(0, 0, dtype=torch.int32)
        self._seen_lens = torch.empty(0, dtype=torch.int32)
        self._seen_version = -1
        self._last: RaggedRows | None = None

    def bind(self, pool: PagePool, find_row: RowFinder) -> None:
        ranks, stages = tensor_ranks(self.vllm_config), pipeline_stages(self.shape.num_layers)
        self.evictor = Evictor(config_of(self.vllm_config), self.shape, pool, ranks, stages)
        self._find_row = find_row

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> EvictingCPUMetadata:
        stock_part = common_attn_metadata
        stock_tokens: slice | torch.Tensor = slice(None)
        ragged = self._advance(common_attn_metadata)
        if ragged is not None:
            return EvictingCPUMetadata(**_NO_STOCK_ROWS, ragged=ragged)
        rows = self._ragged_rows(common_attn_metadata)
        if rows is not None:
            ragged = self._make_ragged(common_attn_metadata, rows)
            stock_part, stock_tokens = _without_rows(common_attn_metadata, rows)
        if stock_part.num_reqs:
            stock = super().build(common_prefix_len, stock_part, fast_build)
        else:
            stock = CPUAttentionMetadata(**_NO_STOCK_ROWS)
        observing = self.evictor is not None and self.evictor.prepare(
            partial(first_token, self._find_row, common_attn_metadata)
        )
        return EvictingCPUMetadata(
            **{f.name: getattr(stock, f.name) for f in fields(CPUAttentionMetadata)},
            ragged=ragged,
            stock_tokens=stock_tokens,
            evictor=self.evictor if observing else None,
        )

    def _advance(self, common: CommonAttentionMetadata) -> RaggedRows | None:
        """The last step's rows, one token later; None if this step is not just that.

        It is for most steps: the same requests decode on and none starts a block. Then only
        lengths and schedules change.
        """
        last = self._last
        if (
            last is None
            or self.evictor is None
            or self.evictor.has_work
            or self._seen_version != self.evictor.regions.version
            or common.max_query_len != 1
            or common.num_reqs != len(self._seen)
        ):
            return None
        self._seen_lens += 1
        if (
            not torch.equal(common.seq_lens, self._seen_lens)
            or not torch.equal(common.block_table_tensor[:, : self._seen.shape[1]], self._seen)
            or (self._seen_lens % self.block_size == 1).any()
        ):
            self._last = None
            return None
        last.lengths += 1
        last.schedules = [self._schedule(last.starts, lengths) for lengths in last.lengths]
        return last

    def _ragged_rows(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Rows to run as virtual sequences, int64 [R]; None if no row is compressed.

        All decode rows, since the kernel takes them in one call, and the compressed rows
        with more than one token.
        """
        if self.evictor is None or not self.evictor.regions.num_live:
            return None
        compressed = self.evictor.regions.num_retained[common.block_table_tensor[:, 0]] > 0
        if not compressed.any():
            return None
        assert self.reorder_batch_threshold is not None
        num_decodes, *_ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        compressed[:num_decodes] = True
        return compressed.nonzero().squeeze(1)

    def _make_ragged(self, common: CommonAttentionMetadata, rows: torch.Tensor) -> RaggedRows:
        assert self.evictor is not None
        regions, shape, num_rows = self.evictor.regions, self.shape, len(rows)
        num_tokens = common.query_start_loc.diff()[rows]
        if int(num_tokens.sum()) == num_rows:
            queries = None  # decode rows alone are the batch's first
            starts = self._starts[: num_rows * shape.num_heads + 1]
        else:
            queries, starts = _queries_by_head(
                common.query_start_loc[rows], num_tokens, shape.num_heads
            )
        block_table, seq_lens = common.block_table_tensor[rows], common.seq_lens[rows]
        lengths = torch.empty(
            shape.num_layers, num_rows, shape.num_heads, dtype=torch.int32, device=rows.device
        )
        write_lengths(
            block_table,
            seq_lens,
            regions.num_retained,
            regions.num_replaced,
            regions.offsets,
            shape.block_size,
            lengths,
        )
        ragged = RaggedRows(
            num_tokens=int(num_tokens.sum()),
            starts=starts,
            tables=self._page_tables(block_table, seq_lens, lengths),
            lengths=lengths,
            schedules=[self._schedule(starts, layer) for layer in lengths],
            queries=queries,
        )
        self._seen_lens = seq_lens
        self._last = ragged if queries is None else None
        return ragged

    def _page_tables(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Page tables [L, R, H, W] of R rows.

        A row's tables change when it gets a block, that is every N-th step; only the rows
        that changed since the last step are written anew. A row may also grow into a block that
        it has had for a while, for drafts that were rejected; its tables were perhaps written
        in between. Reading tensors here is no synchronisation: they are the host's.
        """
        assert self.evictor is not None
        regions, shape = self.evictor.regions, self.shape
        needed = (seq_lens - 1) // self.block_size + 1
        num_blocks = int(needed.max())
        num_pages = int(lengths.max() - 1) // self.block_size + 1
        seen = block_table[:, :num_blocks]
        tables = self._tables
        if (
            tables is None
            or self._seen_version != regions.version
            or tables.shape[1] != len(seen)
            or tables.shape[3] < num_pages
        ):
            width = (num_pages // _TABLE_STEP + 1) * _TABLE_STEP
            size = (shape.num_layers, len(seen), shape.num_heads, width)
            tables = torch.empty(size, dtype=torch.int32)
            self._written = torch.empty_like(needed)
            changed = torch.arange(len(seen))
        else:
            is_new = (self._seen_rows(num_blocks) != seen).any(1) | (needed > self._written)
            changed = is_new.nonzero().squeeze(1)
        if len(changed):
            new = torch.empty_like(tables[:, : len(changed)])
            write_page_tables(
                block_table[changed],
                seq_lens[changed],
                regions.num_retained,
                regions.num_replaced,
                regions.offsets,
                self.block_size,
                0,
                new,
            )
            tables[:, changed] = new
            self._written[changed] = needed[changed]
        self._tables, self._seen, self._seen_version = tables, seen, regions.version
        return tables

    def _seen_rows(self, num_blocks: int) -> torch.Tensor:
        """The last step's block table, as wide as this step's."""
        missing = num_blocks - self._seen.shape[1]
        return torch.nn.functional.pad(self._seen, (0, missing))

    def _schedule(self, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=lengths.numel(),
            num_heads=self.shape.group_size,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=lengths.view(-1),
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class EvictingCPUImpl(CPUAttentionBackendImpl):
    """Stock attention, plus ragged decode rows and a look at prompts that are to be evicted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_layer(self, has_window=self.sliding_window != -1)
        self.layer = -1
        """Index of the layer in the pool."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EvictingCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        if attn_metadata.ragged is not None:
            self._attend_ragged(attn_metadata.ragged, layer, query, output)
        if attn_metadata.num_actual_tokens:
            tokens = attn_metadata.stock_tokens
            stock_output = output[tokens]
            super().forward(
                layer,
                query[tokens],
                key,
                value,
                kv_cache,
                attn_metadata,
                stock_output,
                output_scale,
                output_block_scale,
            )
            if isinstance(tokens, torch.Tensor):
                output[tokens] = stock_output  # indexing by tensor gave a copy
        if attn_metadata.evictor is not None:
            # Quantised keys lie in the cache divided by their scale.
            key_scale = layer._k_scale_float if self.is_fp8_kv_cache else 1.0
            attn_metadata.evictor.observe_layer(self.layer, query, self.scale * key_scale)
        return output

    def _attend_ragged(
        self, rows: RaggedRows, layer: Any, query: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Attention of the ragged rows; [tokens, H * G, D] is [tokens * H, G, D] as well."""
        by_head = (-1, self.num_queries_per_kv, self.head_size)
        num_tokens = len(query) if rows.queries is not None else rows.num_tokens
        # vLLM's queries may be a slice of a fused projection; then reshaping copies them.
        queries = query[:num_tokens].reshape(by_head)
        outputs = output[:num_tokens].view(by_head)
        ragged_outputs = outputs
        if rows.queries is not None:
            queries, ragged_outputs = queries[rows.queries], outputs[rows.queries]
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=self.key_pages,
            value_cache=self.value_pages,
            output=ragged_outputs,
            query_start_loc=rows.starts,
            seq_lens=rows.lengths[self.layer].view(-1),
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=rows.tables[self.layer].flatten(0, 1),
            softcap=0,
            scheduler_metadata=rows.schedules[self.layer],
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if rows.queries is not None:
            outputs[rows.queries] = ragged_outputs

    def bind(self, layer: int, pool: PagePool) -> None:
        self.layer = layer
        self.pool = pool
        pages = pool.raw.view(-1, 1, 2 * pool.block_size, self.head_size)
        self.key_pages, self.value_pages = pages.chunk(2, dim=2)


def _queries_by_head(
    first_tokens: torch.Tensor, num_tokens: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of virtual sequences: rows first, then KV heads, then tokens.

    `first_tokens` and `num_tokens` are int32 [R]. Returns their indices in
    [tokens * H], int64 [T * H], and each sequence's first, int32 [R * H + 1].
    """
    lengths = num_tokens.repeat_interleave(num_heads)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    token = torch.arange(len(sequence)) - starts[sequence] + first_tokens[sequence // num_heads]
    return token * num_heads + sequence % num_heads, starts


def _without_rows(
    common: CommonAttentionMetadata, rows: torch.Tensor
) -> tuple[CommonAttentionMetadata, slice | torch.Tensor]:
    """The batch without some rows, and its tokens that are left."""
    num_rows = len(rows)
    if num_rows == common.num_reqs:
        return common.replace(num_reqs=0, num_actual_tokens=0), slice(0)
    starts = common.query_start_loc
    if int(rows[-1]) == num_rows - 1:  # the first rows
        left = torch.arange(num_rows, common.num_reqs)
        first = int(starts[num_rows])
        tokens: slice | torch.Tensor = slice(first, None)
        num_tokens = common.num_actual_tokens - first
    else:
        is_left = torch.ones(common.num_reqs, dtype=torch.bool)
        is_left[rows] = False
        left = is_left.nonzero().squeeze(1)
        tokens = is_left.repeat_interleave(starts.diff()).nonzero().squeeze(1)
        num_tokens = len(tokens)
    new_starts = torch.zeros(len(left) + 1, dtype=starts.dtype)
    torch.cumsum(starts.diff()[left], 0, out=new_starts[1:])
    return (
        common.replace(
            query_start_loc=new_starts,
            query_start_loc_cpu=new_starts,
            seq_lens=common.seq_lens[left],
            num_reqs=len(left),
            num_actual_tokens=num_tokens,
            block_table_tensor=common.block_table_tensor[left],
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
    "scheduler_metadata": None,
}
"""Stock metadata of a batch whose rows are all ragged; nothing reads it."""


def check_page_format(
    block_size: int, head_size: int, dtype: torch.dtype, isa: str, kv_cache_dtype: str
) -> None:
    """Write one page with vLLM's kernel and see that keys lie [D, N] and values [N, D].

    In a quantised cache also that bytes are what `FP8` says.

    Raises:
        PageLayoutError: if they do not.
    """
    numbers = torch.arange(block_size * head_size).view(block_size, head_size)
    if kv_cache_dtype in FP8:
        stored = numbers.remainder(_FP8_CODES).to(torch.uint8)
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
