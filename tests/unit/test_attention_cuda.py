# SPDX-License-Identifier: Apache-2.0
"""Launches and host work of a step of the CUDA backend, and the inputs of its kernels.

Where nothing is computed, the device is `meta`: its tensors have no values to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from tests.engine import flash_on_cpu
from tests.inputs import random_sinks
from tests.unit.test_page_tables import NUM_BLOCKS, Batch, batches
from vllm_tgvkv.attention import cuda as attention_cuda
from vllm_tgvkv.attention.base import EvictingMetadata
from vllm_tgvkv.attention.cuda import (
    EvictingFlashImpl,
    EvictingFlashMetadataBuilder,
    FlashKernel,
    RaggedTokens,
)
from vllm_tgvkv.cache.pages import FP8, CacheShape, PagePool
from vllm_tgvkv.cache.queries import DecodeQueries, QueryPool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels import page_tables
from vllm_tgvkv.kernels.checks import indexable
from vllm_tgvkv.kernels.decode import DecodePlan, decode
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.shared.plan import Observation, StepPlan
from vllm_tgvkv.summaries import blocks as summary_blocks
from vllm_tgvkv.summaries.blocks import SummaryBlocks
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.model_runner import RowsV2
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages

SHAPE = CacheShape(num_layers=36, num_heads=8, group_size=4, head_size=128, block_size=16)
"""Qwen3-VL-8B's."""


def make_pool(shape: CacheShape, num_blocks: int, device: str, is_fp8: bool = False) -> PagePool:
    """A pool of random numbers, float32 or fp8."""
    page = 2 * shape.block_size * shape.head_size
    raw = torch.randn(num_blocks * shape.num_pairs, page, device=device)
    if is_fp8:
        raw = raw.to(FP8["fp8"])
    pages = raw.view(-1, shape.block_size, 2 * shape.head_size)
    keys, values = pages.split(shape.head_size, dim=2)
    return PagePool(indexable(raw), keys, values, shape)


def make_impl(
    layer: int, pool: PagePool, version: int = 3, sinks: torch.Tensor | None = None
) -> EvictingFlashImpl:
    """One layer's attention, with the fields that ragged rows need."""
    impl = EvictingFlashImpl.__new__(EvictingFlashImpl)
    impl.kv_sharing_target_layer_name = None
    fields = {"scale": 0.3, "head_size": pool.shape.head_size, "vllm_flash_attn_version": version}
    cache_dtype = "fp8" if pool.raw.dtype == torch.uint8 else "auto"
    impl.__dict__.update(fields, kv_cache_dtype=cache_dtype, sinks=sinks)
    impl.supports_quant_query_input = True
    impl.bind(layer, pool)
    return impl


# -- values ----------------------------------------------------------------------------------


@given(batch=batches(), data=st.data())
def test_attention_equals_the_reference(batch: Batch, data: st.DataObject) -> None:
    """However many layers' tables fit at once and rows a launch, after rows of other numbers.

    Some layers may have learned sinks. The cache may be fp8, with scales of both of vLLM's shapes.
    Rows may have drafts, all as many (as in a graph) or not.
    """
    layers, heads, size = batch.layers, batch.heads, batch.block_size
    shape = CacheShape(layers, heads, group_size=2, head_size=4, block_size=size)
    table, seq_lens, *state = batch.pooled
    state_of = Regions(NUM_BLOCKS, shape, torch.device("cpu"))
    state_of.num_token_blocks, state_of.num_replaced, state_of.offsets = state
    is_fp8 = data.draw(st.booleans())
    pool = make_pool(shape, NUM_BLOCKS, "cpu", is_fp8)
    of_query, of_keys, of_values = descales = torch.rand(1), torch.rand(()), torch.rand(1)
    scales: Any = SimpleNamespace(_q_scale=of_query, _k_scale=of_keys, _v_scale=of_values)
    num_rows, max_rows = len(table), len(table) + data.draw(st.integers(0, 3))
    # Drafts are in the tail of every head. Rows without tokens pad a graph.
    replaced = batch.gathered[3]
    tails = [length for length in (seq_lens - replaced * size).tolist() if length]
    most, is_uniform = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    if is_uniform:
        most = min(most, *tails, 3)
    numbers = [
        most if is_uniform else data.draw(st.integers(1, min(most, tail or most)))
        for tail in (seq_lens - replaced * size).tolist()
    ]
    ends = [0, *torch.tensor(numbers).cumsum(0).tolist()]
    of_layer = 4 * max_rows * heads * batch.width
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            attention_cuda,
            "_TABLE_BYTES",
            int(data.draw(st.sampled_from([0, 0.3, 0.6, 1, 2, 4])) * of_layer),
        )
        monkeypatch.setattr(
            flash_attn, "flash_attn_varlen_func", flash_on_cpu.attend, raising=False
        )
        summaries = SummaryBlocks(pool, state_of, are_used=False)
        kernel = FlashKernel(summaries, max_rows, batch.width, most)

        def attend(first: int, end: int, takes_turns: bool) -> list[torch.Tensor]:
            rows_per_launch = data.draw(st.integers(1, max_rows))
            starts = torch.tensor(ends[first : end + 1]).int()
            given = None if is_uniform else (starts, starts)
            are_single = ends[end] == end and not is_uniform
            rows = RaggedTokens(
                table[first:end],
                seq_lens[first:end],
                max_seq_len=layers * 8 * size,
                rows_per_launch=rows_per_launch,
                num_splits=0,
                kernel=kernel,
                tokens=slice(ends[first], ends[end]),
                takes_turns=takes_turns,
                queries=()
                if most == 1 or are_single
                else kernel.queries(end - first, rows_per_launch, given),
            )
            outputs = []
            for layer in range(layers):
                outputs.append(torch.full(query.shape, float("nan")))
                impl = make_impl(layer, pool, sinks=sinks[layer])
                impl.attend_ragged(rows, scales, query, outputs[-1])
            return outputs

        query = torch.randn(ends[-1], heads * 2, 4)
        if is_fp8:
            query = query.to(FP8["fp8"])
        sinks = [
            random_sinks(heads * 2) if data.draw(st.booleans()) else None for _ in range(layers)
        ]
        attend(0, data.draw(st.integers(1, num_rows)), takes_turns=False)
        outputs = attend(0, num_rows, takes_turns=data.draw(st.booleans()))
    lengths = torch.empty(layers, num_rows, heads, dtype=torch.int32)
    page_tables.write_lengths(*batch.pooled, size, lengths)
    plan = DecodePlan.allocate(layers, num_rows, heads, 2, 4, 16, 1, "cpu", most)
    of_query, of_keys, of_values = descales if is_fp8 else torch.ones(3)
    for layer, output in enumerate(outputs):
        expected = torch.full(query.shape, float("nan"), dtype=torch.float64)
        pages = (pool.keys.double() * of_keys, pool.values.double() * of_values)
        given = (table, lengths, *state, layer, 0.3, plan, expected, sinks[layer])
        starts = torch.tensor(ends).int()
        decode(query.double() * of_query, *pages, *given, None, starts, most)
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


# -- counts ----------------------------------------------------------------------------------


@dataclass
class Requests:
    """The batch of a step, on `meta`, with the rows of model runner V2.

    All requests that decode are compressed, and those that replay what they had generated.
    """

    num_decodes: int
    prefills: tuple[int, ...] = ()
    """Tokens of every prompt in the step."""
    replays: tuple[int, ...] = ()
    look_ups: list[Any] = field(default_factory=list)
    num_drafts: int = 0
    """Most drafts of a request that decodes."""
    undrafted: int = 0
    """Requests that decode, the first ones, which have none in this step."""

    def common(self, max_seq_len: int = 32768) -> CommonAttentionMetadata:
        """The batch as the model runner describes it."""
        drafting = [1 + self.num_drafts] * (self.num_decodes - self.undrafted)
        lengths = [*[1] * self.undrafted, *drafting, *self.prefills, *self.replays]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        num_rows, num_tokens = len(lengths), sum(lengths)
        device = {"dtype": torch.int32, "device": "meta"}
        return CommonAttentionMetadata(
            query_start_loc=starts.to("meta"),
            query_start_loc_cpu=starts,
            seq_lens=torch.empty(num_rows, **device),
            num_reqs=num_rows,
            num_actual_tokens=num_tokens,
            max_query_len=max(lengths),
            max_seq_len=max_seq_len,
            block_table_tensor=torch.empty(num_rows, 2048, **device),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device="meta"),
        )

    def builder(self, graphs: bool = False, version: int = 3, **settings: Any) -> Any:
        """The backend's metadata builder, bound to these requests."""
        config = EvictionConfig.from_mapping({"policy": "tgv", **settings})
        num_rows = self.num_decodes + len(self.prefills) + len(self.replays)
        names = [f"r{row}" for row in range(num_rows)]
        places = np.arange(num_rows)[::-1]
        runner = SimpleNamespace(
            batch=SimpleNamespace(req_ids=names, idx_mapping_np=places),
            req_states=SimpleNamespace(
                req_id_to_index=dict(zip(names, places.tolist(), strict=True))
            ),
        )

        rows = RowsV2(runner, group=0)  # type: ignore[arg-type]

        def request_at(row: int) -> str:
            self.look_ups.append(row)
            return rows.request_at(row)

        made: Any = EvictingFlashMetadataBuilder.__new__(EvictingFlashMetadataBuilder)
        scheduler = SimpleNamespace(max_num_seqs=1024)
        model = SimpleNamespace(max_model_len=32768, dtype=torch.bfloat16)
        made.__dict__.update(
            vllm_config=SimpleNamespace(scheduler_config=scheduler, model_config=model),
            device=torch.device("meta"),
            use_full_cuda_graph=graphs,
            max_cudagraph_size=512 if graphs else None,
            attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
            aot_schedule=version == 3,
            reorder_batch_threshold=1 + self.num_drafts,
        )
        live = Regions(2000, SHAPE, torch.device("meta"))
        prompts = range(self.num_decodes, self.num_decodes + len(self.prefills))
        for row in set(range(num_rows)) - set(prompts):
            live.add(f"r{row}", row + 1, 1, 1, torch.empty(SHAPE.num_pairs + 1, device="meta"))
        pool = make_pool(SHAPE, 8, "meta")
        evictor = Evictor(config, pool, Ranks(), Stages(SHAPE.num_layers))
        evictor.regions = evictor.summaries.regions = live
        made.bind(evictor, SimpleNamespace(find_row=rows.find_row, request_at=request_at))
        # So does vLLM with the first batch where windows differ between layers.
        made.aot_schedule = False
        return made


class Counts(TorchDispatchMode):
    """Counts the operations of a step: on the host, views, and launches on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host = self.views = self.torch = self.lengths = self.stock = 0
        self.tables: list[torch.Size] = []
        """Shapes of what each launch wrote."""
        self.attention: list[tuple[int, int]] = []
        """Virtual sequences and splits of each launch."""
        self.queries: list[tuple[int, int]] = []
        """Queries of each launch, and the most of a sequence."""
        self.sinks: list[tuple[int, int]] = []
        """Virtual sequences and query heads of each launch that applies sinks."""
        self.merged: list[int] = []
        """Virtual sequences of each launch that merges summaries."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            self.views += 1
        elif isinstance(result, torch.Tensor) and result.is_meta:
            self.torch += 1
        else:
            self.host += 1
        return result

    def __enter__(self) -> Counts:
        self._patches = pytest.MonkeyPatch()
        replace = partial(self._patches.setattr, raising=False)
        replace(page_tables, "write_lengths", self._write_lengths)
        replace(page_tables, "write_page_tables", self._write_page_tables)
        replace(flash_attn, "flash_attn_varlen_func", self._attend)
        replace(summary_blocks, "merge_rows", self._merge)
        replace(attention_cuda, "apply_sinks", self._apply_sinks)
        replace(flash_attn.FlashAttentionMetadataBuilder, "build", lambda *args: "stock")
        replace(flash_attn.FlashAttentionImpl, "forward", self._stock)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.undo()

    def _write_lengths(self, *args: Any) -> None:
        self.lengths += 1

    def _write_page_tables(self, *args: Any) -> None:
        self.tables.append(args[-1].shape)

    def _attend(self, **arguments: Any) -> Any:
        size = len(arguments["seqused_k"])
        assert len(arguments["q"]) == len(arguments["out"])
        assert len(arguments["block_table"]) == size
        assert len(arguments["cu_seqlens_q"]) == size + 1
        self.queries.append((len(arguments["q"]), arguments["max_seqlen_q"]))
        self.attention.append((size, arguments["num_splits"]))
        return ("output", "log sums") if arguments["return_softmax_lse"] else "output"

    def _apply_sinks(self, outputs: Any, log_sums: Any, sinks: torch.Tensor) -> None:
        assert log_sums == "log sums"
        self.sinks.append((len(outputs), len(sinks)))

    def _merge(self, outputs: Any, log_sums: Any, queries: Any, *args: Any) -> None:
        block_table, seq_lens = args[2:4]
        assert log_sums == "log sums"
        assert len(outputs) == len(queries) == len(block_table) * SHAPE.num_heads
        assert len(block_table) == len(seq_lens)
        self.merged.append(len(outputs))

    def _stock(self, *args: Any) -> None:
        self.stock += 1


def forward(
    counts: Counts,
    metadata: EvictingMetadata[RaggedTokens],
    num_tokens: int,
    version: int = 3,
    has_sinks: bool = False,
) -> None:
    """Run the attention of every layer."""
    pool = make_pool(SHAPE, 8, "meta")
    size = (num_tokens, SHAPE.num_heads * SHAPE.group_size, SHAPE.head_size)
    sinks = torch.empty(size[1], device="meta") if has_sinks else None
    impls = [make_impl(layer, pool, version, sinks) for layer in range(SHAPE.num_layers)]
    query, output = torch.empty(size, device="meta"), torch.empty(size, device="meta")
    with counts:
        for impl in impls:
            impl.forward(None, query, query, query, None, metadata, output)  # type: ignore[arg-type]


def counted(
    requests: Requests, max_seq_len: int = 32768, has_sinks: bool = False, **options: Any
) -> tuple[Counts, Counts]:
    """Return the counts of a step: of its metadata, and of the attention of all layers."""
    builder, common = requests.builder(**options), requests.common(max_seq_len)
    building, attending = Counts(), Counts()
    with building:
        metadata = builder.build(0, common)
    version = options.get("version", 3)
    forward(attending, metadata, common.num_actual_tokens, version, has_sinks)
    return building, attending


@pytest.mark.parametrize("graphs", [False, True])
def test_host_budget_of_a_decode_step(graphs: bool) -> None:
    """Metadata are two views. A layer is four views and one launch of FlashAttention.

    Lengths are written once a step, page tables once for all layers that fit 64 MiB.
    """
    building, attending = counted(Requests(64), graphs=graphs)
    assert (building.host, building.torch, building.views) == (0, 0, 2)
    of_layer = 64 * SHAPE.num_heads * 2048 * 4
    num_writes = -(-SHAPE.num_layers * of_layer // attention_cuda._TABLE_BYTES)
    assert num_writes == 3
    assert (attending.lengths, len(attending.tables)) == (1, num_writes)
    assert sum(shape[0] for shape in attending.tables) == SHAPE.num_layers
    assert attending.attention == [(512, 32)] * SHAPE.num_layers
    assert (attending.host, attending.torch) == (0, 0)
    assert attending.views <= 4 * SHAPE.num_layers + 3 + 6 * num_writes + 1
    assert attending.queries == [(512, 1)] * SHAPE.num_layers


def test_drafts_add_two_copies_a_layer() -> None:
    """One of the queries and one of the outputs. Drafts change neither tables nor sequences.

    A graph has the same order of queries for every batch: nothing is made for a step.
    """
    requests = Requests(64, num_drafts=3)
    building, attending = counted(requests, graphs=True)
    _, plain = counted(Requests(64), graphs=True)
    assert (building.host, building.torch, building.views) == (0, 0, 4)
    assert attending.attention == plain.attention
    assert attending.tables == plain.tables
    assert attending.queries == [(4 * 512, 4)] * SHAPE.num_layers
    assert (attending.host, attending.torch) == (0, 3 * SHAPE.num_layers)  # one is an allocation
    _, attending = counted(Requests(1024, num_drafts=1), graphs=True)
    assert {
        num // size
        for (num, _), (size, _) in zip(attending.queries, attending.attention, strict=True)
    } == {2}
    assert len(attending.attention) == 9 * SHAPE.num_layers


@pytest.mark.parametrize("prefills", [(), (100,)])
def test_rows_with_and_without_drafts_share_a_launch(prefills: tuple[int, ...]) -> None:
    """Their order is made on the host, once a step. No row of a prompt is ragged."""
    requests = Requests(64, prefills, num_drafts=3, undrafted=40)
    building, attending = counted(requests, graphs=True)
    assert building.torch <= 2 + len(prefills)
    assert building.host <= 32
    assert requests.look_ups == list(range(64, 64 + len(prefills)))
    assert attending.attention == [(512, 32)] * SHAPE.num_layers
    assert attending.queries == [((40 + 24 * 4) * 8, 4)] * SHAPE.num_layers
    assert attending.stock == SHAPE.num_layers * bool(prefills)
    undrafted = Requests(64, prefills, num_drafts=3, undrafted=64)
    _, attending = counted(undrafted, graphs=True)
    assert attending.queries == [(512, 1)] * SHAPE.num_layers
    assert attending.torch == 0


@pytest.mark.parametrize("kernel", ["stock", "triton"])
def test_every_kernel_of_a_ragged_row_runs_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Also without graphs, whose capture would compile them."""
    builder = Requests(1).builder(decode_kernel=kernel)
    called: list[str] = []
    for name in ("decode", "plan_decode"):
        monkeypatch.setattr(attention_cuda, name, lambda *_, name=name: called.append(name))
    layer: Any = SimpleNamespace(impl=make_impl(0, make_pool(SHAPE, 8, "meta"), 3, None))
    with Counts() as counts:
        builder.warm_up(layer)
    assert counts.lengths == 1
    if kernel == "stock":
        assert (len(counts.tables), counts.attention, called) == (1, [(SHAPE.num_heads, 32)], [])
    else:
        assert (counts.tables, counts.attention, called) == ([], [], ["plan_decode", "decode"])
    with Counts() as counts:
        Requests(1, num_drafts=3).builder(decode_kernel=kernel).warm_up(layer)
    if kernel == "stock":
        assert counts.queries == [(SHAPE.num_heads, 1), (4 * SHAPE.num_heads, 4)]
    else:
        assert called[2:] == ["plan_decode", "decode"] * 2


def test_our_kernel_takes_a_bounded_number_of_drafts() -> None:
    """With 4 query heads of each KV head."""
    Requests(1, num_drafts=15).builder(decode_kernel="triton")
    with pytest.raises(UnsupportedByEvictionError, match="with num_speculative_tokens 16 and"):
        Requests(1, num_drafts=16).builder(decode_kernel="triton")
    Requests(1, num_drafts=16).builder()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("num_rows", [64, 256])
def test_a_server_with_summaries_adds_a_launch_for_each_of_attention(
    num_rows: int, graphs: bool
) -> None:
    """And two views of it: nothing else, on the host or on the device."""
    building, attending = counted(Requests(num_rows), graphs=graphs, policy="retentivekv")
    plain_building, plain = counted(Requests(num_rows), graphs=graphs)
    assert attending.merged == [size for size, _ in attending.attention]
    assert len(attending.merged) == SHAPE.num_layers * (1 if num_rows == 64 else 3)
    assert attending.attention == plain.attention
    assert not plain.merged
    assert building.views == plain_building.views
    assert (building.host, building.torch) == (attending.host, attending.torch) == (0, 0)
    assert attending.views == plain.views + 2 * len(attending.merged)


@pytest.mark.parametrize("num_rows", [64, 256])
def test_sinks_add_a_launch_for_each_of_attention(num_rows: int) -> None:
    """And nothing else, on the host or on the device."""
    _, attending = counted(Requests(num_rows), graphs=True, has_sinks=True)
    _, plain = counted(Requests(num_rows), graphs=True)
    num_heads = SHAPE.num_heads * SHAPE.group_size
    assert attending.sinks == [(size, num_heads) for size, _ in plain.attention]
    assert attending.attention == plain.attention
    assert not plain.sinks
    assert attending.views == plain.views
    assert (attending.host, attending.torch) == (0, 0)


@pytest.mark.parametrize("num_waiting", [0, 1, 64])
def test_a_server_that_waits_adds_one_launch_a_layer(num_waiting: int) -> None:
    """And one copy a step where destinations change: graphs are the same for any of them."""
    requests = Requests(64)
    builder, common = requests.builder(graphs=True, defer=4), requests.common()

    def build(num_waiting: int) -> tuple[Counts, EvictingMetadata[RaggedTokens]]:
        chunks = [
            Observation(f"r{row}", 300, np.array([300]), stored=np.array([row + 1]))
            for row in range(num_waiting)
        ]
        builder.observer.begin_step(StepPlan(observations=chunks))
        assert not builder.observer.has_work(may_be_graph=True)
        assert builder.observer.has_work(may_be_graph=False) == bool(chunks)
        with Counts() as counts:
            metadata = builder.build(0, common)
        return counts, metadata

    building, metadata = build(num_waiting)
    assert building.torch == bool(num_waiting)
    attending = Counts()
    forward(attending, metadata, 64)
    assert attending.attention == [(512, 32)] * SHAPE.num_layers
    assert (attending.host, attending.torch) == (0, SHAPE.num_layers)
    assert build(0)[0].torch == bool(num_waiting)  # clears them
    assert build(0)[0].torch == 0


def test_queries_go_to_the_rows_of_requests_that_wait() -> None:
    """Those of all others, and of padded tokens, to the row that nobody reads."""
    pool = QueryPool(5, CacheShape(2, 3, 1, 4, 16), torch.float32, torch.device("cpu"))
    decodes = DecodeQueries(pool, max_tokens=6)
    stored = decodes.of_batch(4)  # once, as a graph has it
    before = torch.randn(2, 6, 3, 4)
    for tokens, rows in (([], []), ([2, 0], [5, 1]), ([1], [5]), ([], [])):
        pool._queries.copy_(before)
        decodes.direct(np.array(tokens, np.int64), np.array(rows, np.int64))
        queries = torch.randn(2, 6, 3, 4)
        for layer in range(2):
            stored.store(layer, queries[layer])
            expected = before[layer, 1:].clone()
            for token, row in zip(tokens, rows, strict=True):
                expected[row - 1] = queries[layer, token]
            assert torch.equal(pool.load(slice(layer, layer + 1), torch.arange(1, 6))[0], expected)


@pytest.mark.parametrize("settings", [{}, {"defer": 4}], ids=str)
@pytest.mark.parametrize("work", ["observations", "summings", "evictions"])
def test_only_servers_that_wait_store_queries_in_graphs(
    settings: dict[str, Any], work: str
) -> None:
    """A step with other work is observed in any case, and stores no query twice.

    An eviction whose votes are all stored follows the step.
    """
    requests = Requests(3)
    builder = requests.builder(graphs=True, **settings)
    part: Any = SimpleNamespace(request_id="a", stored=np.ones(1, np.int64))
    builder.observer.begin_step(StepPlan(**{work: [part]}))
    in_graph = work == "evictions" or (bool(settings) and work == "observations")
    assert builder.observer.has_work(may_be_graph=True) == (not in_graph)
    builder.observer.begin_step(StepPlan())
    metadata = builder.build(0, requests.common())
    assert (metadata.stored_queries is not None) == bool(settings)
    mixed = Requests(3, prefills=(7,))
    builder = mixed.builder(graphs=True, **settings)
    with Counts():  # which replaces stock attention's part of the batch
        assert builder.build(0, mixed.common()).stored_queries is None


@pytest.mark.parametrize("num_decodes", [64, 256, 1024])
def test_host_budget_of_a_mixed_step(num_decodes: int) -> None:
    """Not a function of the number of compressed requests: only rows of prompts are looked up."""
    requests = Requests(num_decodes, prefills=(100, 300))
    building, attending = counted(requests)
    assert requests.look_ups == [num_decodes, num_decodes + 1]
    assert building.host + building.views + building.torch <= 24
    assert building.torch <= 1  # starts of the prompts' queries
    assert (attending.host, attending.torch, attending.lengths) == (0, 0, 1)
    num_launches = len(attending.attention) // SHAPE.num_layers
    assert attending.stock == SHAPE.num_layers
    assert num_launches == -(-num_decodes // 124)
    of_layer = 4 + 2 + (4 if num_launches > 1 else 0)  # those of the prompts; slices
    others = 3 + 6 * len(attending.tables) + num_launches
    assert attending.views <= of_layer * SHAPE.num_layers + others


def test_requests_that_replay_take_turns_with_decodes() -> None:
    """Each set of tokens has its tables written in every layer, in the same memory."""
    requests = Requests(64, prefills=(100,), replays=(200, 7))
    builder, common = requests.builder(), requests.common()
    with Counts() as building:
        metadata = builder.build(0, common)
    assert [rows.tokens for rows in metadata.ragged] == [
        slice(64),
        slice(164, 288),
        slice(288, 364),
        slice(364, 371),
    ]
    assert requests.look_ups == [64, 65, 66]
    assert building.torch <= 4 * 3 + 9
    attending = Counts()
    forward(attending, metadata, common.num_actual_tokens)
    assert attending.lengths == len(attending.tables) == 4 * SHAPE.num_layers
    assert {shape[:2] for shape in attending.tables} == {(1, 64), (1, 124), (1, 76), (1, 7)}


@pytest.mark.parametrize(
    ("num_rows", "max_seq_len", "expected", "num_writes"),
    [
        (1, 32768, [(8, 32)], 1),
        (28, 32768, [(224, 32)], 1),
        (29, 32768, [(232, 32)], 2),
        (124, 100, [(992, 32)], 5),
        (125, 32768, [(504, 32), (496, 32)], 5),
        (125, 2049, [(504, 32), (496, 32)], 5),
        (1024, 32768, [*[(912, 32)] * 8, (896, 32)], 36),
        # Sequences are too short to be worth more launches.
        (125, 2048, [(1000, 1)], 5),
        (1024, 9 * 1024, [(8192, 1)], 36),
    ],
)
@pytest.mark.parametrize("graphs", [False, True])
def test_long_sequences_are_split_in_large_batches(
    num_rows: int, max_seq_len: int, expected: list[tuple[int, int]], num_writes: int, graphs: bool
) -> None:
    """Tables of few rows are written for many layers at once.

    The number of rows of this step counts, not the largest: the buffer holds 1024 rows.
    """
    _, attending = counted(Requests(num_rows), max_seq_len, graphs=graphs)
    assert attending.attention == expected * SHAPE.num_layers
    if graphs:
        assert len(attending.tables) == num_writes
        assert {shape[1:] for shape in attending.tables} == {(num_rows, SHAPE.num_heads, 2048)}


def test_what_splits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 refuses a number of splits; batches have to be invariant if asked for."""
    for num_rows in (1, 1024):
        _, attending = counted(Requests(num_rows), version=2)
        assert attending.attention == [(num_rows * SHAPE.num_heads, 0)] * SHAPE.num_layers
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _, attending = counted(Requests(125))
    assert attending.attention == [(1000, 1)] * SHAPE.num_layers
