# SPDX-License-Identifier: Apache-2.0
"""Memory outside the pool: what evictions really allocate, at the size of a long prompt.

Tensors of the device `meta` have sizes and no content, and the Triton kernels are replaced by
nothing. So evictions of any length run here as they would on a GPU, and every tensor is counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.utils.mem_utils import MemorySnapshot, memory_profiling
from vllm.v1.worker.gpu_worker import Worker

from tests.configs import AdjustedConfig
from tests.conftest import ROOT
from tests.inputs import gates, head_scores, product, replace_kernels
from tests.unit.test_policies import NoSynchronisation
from vllm_tgvkv.attention.cuda import (
    EvictingFlashMetadataBuilder,
    Queries,
    RaggedKernel,
    most_split_sequences,
)
from vllm_tgvkv.blocks.manager import EvictingSpec, StateSpec, WindowSpec
from vllm_tgvkv.blocks.states import evicted_specs
from vllm_tgvkv.cache.pages import FP8, CacheShape, page_pool
from vllm_tgvkv.cache.queries import DecodeQueries, QueryPool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.kernels import select
from vllm_tgvkv.kernels import summaries as kernel
from vllm_tgvkv.kernels.decode import DecodePlan
from vllm_tgvkv.policies import (
    METHOD_NAMES,
    Policy,
    Pooling,
    Prompt,
    build_policy,
    gates_of,
    has_summaries,
)
from vllm_tgvkv.policies.pooling import Pooler
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.plan import Observation, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, Voters
from vllm_tgvkv.summaries.blocks import SummaryBlocks
from vllm_tgvkv.worker import cuda as worker_cuda
from vllm_tgvkv.worker import memory
from vllm_tgvkv.worker.context import WORKSPACE_BYTES
from vllm_tgvkv.worker.cuda import EvictionGPUWorker, memory_of
from vllm_tgvkv.worker.decision import ScoredPrompt
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.memory import Sizes, memory_outside_pool
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages
from vllm_tgvkv.worker.warm_up import WarmUpError, made_up_step, warm_up

triton = pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = CacheShape(num_layers=8, num_heads=8, group_size=4, head_size=128, block_size=16)
TOKENS = 1 << 17
SIZES = Sizes(
    SHAPE,
    element_bytes=2,
    max_tokens=TOKENS,
    step_tokens=TOKENS,
    max_rows=256,
    table_width=TOKENS // 16,
    workspace_bytes=WORKSPACE_BYTES,
    pool_tokens=2 * TOKENS,
)
PAGES = (SHAPE.num_layers, SHAPE.num_heads, SHAPE.block_size, 2 * SHAPE.head_size)
MOST_TOKENS_OF_RKV = 1 << 14
"""Its operations are as many as its tokens: more would take minutes."""
HEAD_ONLY = ("adakv", "rkv", "mixkv", "trimkv", "dbtrimkv", "kvzap")
LAYER_METHODS = [name for name in METHOD_NAMES if name not in HEAD_ONLY and not has_summaries(name)]
MIXES = {
    "aircache_query_heads": {"base": "aircache", "score": "aircache_query_heads"},
    "h2o_accumulated": {"base": "h2o", "score": "h2o_accumulated"},
}
"""Methods that take more memory than their bases."""
METHODS = [
    *((name, "head") for name in (*METHOD_NAMES, "h2o_accumulated")),
    *((name, "layer") for name in (*LAYER_METHODS, "aircache_query_heads")),
]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on `meta` that exist at the same time.

    Tensors in fp8 are converted and seen as bytes, for which a GPU has all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        known = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not func.is_view and func.overloadpacket != torch.ops.aten._to_copy:
            assert not any(x.dtype in FP8.values() for x in known), func
        before = {x.untyped_storage()._cdata for x in known}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self._live.values()))
        return result


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of the GPU, without its kernels."""
    replace_kernels(monkeypatch)


def settings(policy: str, granularity: str | None = None, **others: Any) -> EvictionConfig:
    if policy == "sparsemm":
        others["head_scores"] = head_scores(SHAPE.num_layers, SHAPE.num_heads)
    if policy in METHOD_NAMES and (kind := gates_of(policy)) is not None:
        others["gates"] = gates(kind, SHAPE.num_layers, SHAPE.num_heads)
    if policy in MIXES:
        others["methods"] = {policy: MIXES[policy]}
    return AdjustedConfig.from_mapping({"policy": policy, "granularity": granularity, **others})


def summarises(method: str) -> bool:
    return has_summaries(MIXES[method]["base"] if method in MIXES else method)


def takes_auto(policy: Policy) -> bool:
    return policy.score.rows != "none" and policy.summaries is None


def most_bytes(
    config: EvictionConfig,
    num_tokens: int,
    later: bool = False,
    ranks: Ranks | None = None,
    is_fp8: bool = False,
) -> int:
    """Return the most bytes that evicting one prompt takes, with the whole prompt retained.

    Methods with summaries retain a block less, of which two hold these.

    With `later`, those of the eviction after that, which retains all of it again.
    """
    num_blocks = num_tokens // SHAPE.block_size
    size = (2 * num_blocks + 2, *PAGES)
    stored = torch.uint8 if is_fp8 else torch.bfloat16
    cache, dtype = torch.empty(size, dtype=stored, device="meta"), FP8["fp8"] if is_fp8 else stored
    pool = page_pool(cache.unbind(1), SHAPE.group_size, slots_first=True, dtype=dtype)
    evictor = Evictor(config, pool, ranks or Ranks(), Stages(SHAPE.num_layers), dtype)
    old = np.arange(1, num_blocks + 1, dtype=np.int32)
    prompt = PromptMap(num_tokens, (VisionSpan(100, num_tokens - 2000, None),))
    policy = config.build_policy(config.policy)
    guarded = takes_auto(policy) and config.auto_weight(policy) == 1
    guard = Guard(0.9, 1) if guarded else None
    # Where all tokens find room there is no summary: one block less.
    num_retained = num_blocks - (policy.summaries is not None)
    new = (old + num_blocks)[:num_retained]
    plan = made_up_step(config, prompt, guard, old, new, SHAPE.block_size)
    heads = SHAPE.num_heads * SHAPE.group_size
    queries = torch.empty(num_tokens, heads, SHAPE.head_size, dtype=stored, device="meta")

    def most_of(plan: StepPlan) -> int:
        evictor.begin_step(plan)
        with torch.inference_mode(), LiveBytes() as live:
            evictor.prepare(lambda _: 0)
            for layer in range(SHAPE.num_layers):
                evictor.observe_layer(layer, queries, 1.0)
            evictor.evict_stored()
        return live.most

    most = most_of(plan)
    assert [type(ended).__name__ for ended in evictor.ended] == ["PendingOutcome"], evictor.ended
    if later:
        # No token of the answer fits the blocks: the prompt's last ones stand for them.
        (first,) = plan.evictions
        rows = np.arange(num_tokens - 32, num_tokens)
        voting = Voters(dict.fromkeys(first.voters.kinds, rows), rows, every_row=False)
        row = np.zeros_like(old)
        row[:num_retained] = new
        again = replace(first, voters=voting, old_blocks=row, new_blocks=old[:num_retained])
        again = replace(again, is_first=False, is_whole=False)
        most = most_of(
            StepPlan(observations=[Observation("warm-up", 0, rows, None)], evictions=[again])
        )
        assert len(evictor.ended) == 1, evictor.ended  # later ones have no outcome but a failure
    return most


@pytest.mark.parametrize(
    ("method", "granularity", "num_tokens", "budget", "is_fp8"),
    product(METHODS, [1 << 17, 1 << 12], [None, "auto:0.9"], [False, True], strength=1),
)
def test_an_eviction_takes_no_more_than_is_set_aside(
    no_kernels: None,
    method: str,
    granularity: str,
    num_tokens: int,
    budget: str | None,
    is_fp8: bool,
) -> None:
    """Nor much less: with any budget, guarded where it may be, the whole prompt in one chunk."""
    if is_fp8 and summarises(method):
        pytest.skip("refused")
    if method == "rkv":
        num_tokens = min(num_tokens, MOST_TOKENS_OF_RKV)
    once = {"query_rows": 544, "defer": 0, "when": "always", "observation_window": 512}
    config = settings(method, granularity, **once)
    if budget and takes_auto(config.build_policy(method)):
        config = settings(method, granularity, budget=budget, **once)
    most = most_bytes(config, num_tokens, is_fp8=is_fp8)
    # What one chunk of all tokens takes, without a second prompt that ends in the same step.
    sizes = {"max_tokens": num_tokens, "step_tokens": num_tokens}
    lines = lines_of(config, **sizes, element_bytes=1 if is_fp8 else 2)
    for name in ("scores", "masses", "column sums"):
        lines[name] //= 2
    # Shorter prompts, whose layers are scored together, take more queries than these.
    least = 0.25 if num_tokens > 1 << 12 else 0
    assert least * sum(lines.values()) <= most <= sum(lines.values()), lines


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("method", "granularity"), [("snapkv", "head"), ("streaming", "layer")])
def test_a_deep_model_keeps_a_long_prompt_in_no_more_than_is_set_aside(
    no_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    granularity: str,
    block_size: int,
) -> None:
    """The copy takes most then: positions, slots, and the count of kept vision tokens."""
    shape = replace(SHAPE, num_layers=64, block_size=block_size)
    monkeypatch.setattr(sys.modules[__name__], "SHAPE", shape)
    pages = (shape.num_layers, shape.num_heads, block_size, 2 * shape.head_size)
    monkeypatch.setattr(sys.modules[__name__], "PAGES", pages)
    num_tokens = 1 << 18
    config = settings(method, granularity, query_rows=544, defer=0, when="always")
    most = most_bytes(config, num_tokens)
    sizes = {"max_tokens": num_tokens, "pool_tokens": 2 * num_tokens, "step_tokens": num_tokens}
    sizes["table_width"] = num_tokens // block_size
    policy = config.build_policy(method)
    lines = memory._of_method(config, policy, replace(SIZES, shape=shape, **sizes))
    lines["scores"] //= 2
    assert 0.25 * sum(lines.values()) <= most <= sum(lines.values()), lines


@pytest.fixture
def gather() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """A collective among four ranks, as vLLM's, which moves nothing: there is only this one."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=store)

    def gather(values: torch.Tensor) -> torch.Tensor:
        gathered = values.new_empty(4, *values.shape)
        torch.distributed.all_gather_into_tensor(gathered, values)
        return gathered

    yield gather
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("method", "granularity", "replicas", "exchanges"),
    [
        *(("tgv", "layer", 1, 17), ("vlcache", "layer", 1, 9), ("prefixkv", "layer", 1, 9)),
        *(("aircache", "layer", 1, 33), ("h2o", "layer", 1, 3), ("adakv", "head", 1, 2)),
        *(("dbtrimkv", "head", 1, 1), ("reach", "head", 1, 2), ("tgv", "head", 2, 18)),
        *(("snapkv", "head", 2, 10), ("mixkv", "head", 2, 10)),
    ],
)
def test_ranks_take_no_more_than_is_set_aside_and_never_wait(
    no_kernels: None,
    gather: Callable[[torch.Tensor], torch.Tensor],
    method: str,
    granularity: str,
    replicas: int,
    exchanges: int,
) -> None:
    """Nor much less. A read of any value by the host would raise.

    With 512 rows of 131,072 tokens most methods score layer by layer, and exchange as often; a
    guard adds its number, and masses of heads.
    """
    once: dict[str, Any] = {"query_rows": 544, "defer": 0, "when": "always"}
    once |= {"budget": "auto:0.9"} if method != "dbtrimkv" else {}
    config = settings(method, granularity, observation_window=512, **once)
    sent: list[int] = []

    def counted(values: torch.Tensor) -> torch.Tensor:
        sent.append(values.nbytes)
        return gather(values)

    ranks = Ranks(4, 1, replicas, counted)
    with NoSynchronisation():
        most = most_bytes(config, TOKENS, ranks=ranks)
    sizes = replace(SIZES, ranks=ranks)
    lines = memory._of_method(config, config.build_policy(method), sizes)
    for name in ("scores", "masses", "column sums"):
        lines[name] //= 2
    # Shorter prompts, whose layers are scored together, take more queries than these.
    assert 0.2 * sum(lines.values()) <= most <= sum(lines.values()), lines
    assert len(sent) == exchanges


def lines_of(config: EvictionConfig, **sizes: int) -> dict[str, int]:
    """Return what the server's method takes."""
    policy = config.build_policy(config.policy)
    return memory._of_method(config, policy, replace(SIZES, **sizes))


CUT_AGAIN = {"schedule": [[0, 0.9], [40, 0.5]]}
ONCE = ("vlcache", "aircache", "aircache_query_heads", "elastic")
"""Methods that `decode` refuses."""


@pytest.mark.parametrize(
    ("method", "granularity"),
    [
        pytest.param(method, kind, marks=[pytest.mark.nightly] if is_similar else [])
        for method, kind in METHODS
        if method not in ONCE
        for is_similar in [kind == "layer" and method not in ("tgv", "h2o", "prefixkv")]
    ],
)
def test_a_later_eviction_takes_no_more_than_is_set_aside(
    no_kernels: None, method: str, granularity: str
) -> None:
    """Nor much less: with as many tokens, in a row that is compressed already.

    And no operation waits for the device.
    """
    num_tokens = 1 << 15 if summarises(method) else TOKENS
    num_tokens = MOST_TOKENS_OF_RKV if method == "rkv" else num_tokens
    config = settings(method, granularity, query_rows=544, decode=CUT_AGAIN)
    with NoSynchronisation():
        most = most_bytes(config, num_tokens, later=True)
    width = num_tokens // SHAPE.block_size
    lines = lines_of(config, step_tokens=0, max_tokens=num_tokens, table_width=width)
    assert 0.4 * sum(lines.values()) <= most <= sum(lines.values()), lines


@pytest.mark.parametrize("num_sets", [1, 8])
@pytest.mark.parametrize(
    "pooling",
    [
        *(Pooling("sequence", 7), Pooling("sequence", 255, "mean"), Pooling("grid", 5)),
        *(Pooling("sequence", forward=40, back=1), Pooling("grid", forward=16)),
        *(Pooling("sequence", None, "mean", 4096, 4096), Pooling("grid", 5, "mean")),
    ],
    ids=str,
)
def test_pooling_takes_no_more_than_scoring(
    no_kernels: None, pooling: Pooling, num_sets: int
) -> None:
    """With the scores, and with what belongs to the prompt: as much as scoring may take."""
    num_tokens = 1 << 14
    images = (VisionSpan(64, 10000, (100, 100)),)
    with LiveBytes() as live:
        scores = torch.empty(num_sets, num_tokens, device="meta")
        Pooler(pooling, num_tokens, images, scores.device)(scores)
    assert live.most <= build_policy("snapkv").scoring_bytes(0, 1) * num_sets * num_tokens


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("size", "head_size", "num_tokens"),
    [(16, 128, 4096), (32, 64, 4096), (128, 128, 4096), (16, 256, 4096), (128, 64, 1 << 22)],
)
def test_absorbing_takes_no_more_than_is_set_aside(
    size: int, head_size: int, num_tokens: int, later: bool
) -> None:
    """Nor much less, for some pairs of a layer and a head together; nothing waits for the device.

    Of many tokens, distances are int64.
    """
    num_pairs, rows = 3, kernel.num_rows(size, head_size)
    device = {"device": "meta"}
    pool = torch.empty(8, size, 2 * head_size, dtype=torch.bfloat16, **device).chunk(2, dim=2)
    tables = torch.empty(num_pairs, num_tokens // size, dtype=torch.int64, **device)
    places = kernel.Places(*torch.empty(3, num_tokens, dtype=torch.int64, **device))
    decays = torch.empty(num_tokens, **device)
    earlier = None
    if later:
        means = torch.empty(2, num_pairs, rows, head_size, **device)
        summary = kernel.Summary(*means, torch.empty(num_pairs, rows, **device))
        roots = torch.empty(num_pairs, rows, dtype=torch.int64, **device)
        earlier = kernel.Rooted(summary, roots)
    with LiveBytes() as live, NoSynchronisation():
        positions = torch.empty(num_pairs, num_tokens, dtype=torch.int64, **device)
        weights, scores = torch.empty(2, num_pairs, num_tokens, **device)
        given = (*pool, tables, positions, weights, scores, places, decays, rows, earlier)
        kernel.absorb(*given)
    expected = kernel.bytes_per_token(rows, head_size, num_tokens) * num_pairs * num_tokens
    assert 0.6 * expected <= live.most <= expected


def test_memory_of_a_guarded_decision_does_not_grow_with_the_layers(no_kernels: None) -> None:
    """Beyond scores, masses, kept positions and tiers: ranking keys are made slice by slice."""
    of_layers = {}
    for num_layers in (8, 32):
        tokens, heads, size = 1 << 17, 8, 16
        scores, masses = torch.empty(2, num_layers, heads, tokens, device="meta").unbind()
        policy = settings("h2o", "head").build_policy("h2o")
        is_vision = torch.empty(tokens, dtype=torch.bool, device="meta")
        prompt = Prompt(tokens, tokens, is_vision, sinks=4)
        strengths = torch.empty(num_layers, heads, 1, device="meta")
        scored = ScoredPrompt(policy, prompt, scores, strengths, heads, size, 1, masses)
        with torch.inference_mode(), LiveBytes() as live:
            scored.decide(100, Guard(0.9, 1))
        of_layers[num_layers] = live.most - num_layers * heads * tokens
    assert of_layers[32] - of_layers[8] < 16 << 20
    assert of_layers[32] < 8 * select.KEY_BYTES


@pytest.mark.parametrize("method", ["adakv", "h2o", "prefixkv", "tgv"])
def test_slices_keep_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of layers at a time: the same pages and tokens, with a guard and without."""
    layers, heads, tokens, size = 5, 3, 160, 8
    num_sets = heads
    policy = settings(method, "head").build_policy(method)
    scores = torch.rand(layers, num_sets, tokens) ** 8
    masses = torch.rand(layers, num_sets, tokens + 3) ** 4
    strengths = torch.rand(layers, num_sets, 1)
    is_vision = torch.rand(tokens + 3) < 0.6
    prompt = Prompt(tokens + 3, tokens, is_vision, sinks=4)
    scored = ScoredPrompt(policy, prompt, scores, strengths, heads, size, 1, masses)
    found = []
    for key_bytes in (1 << 30, 2 * num_sets * tokens * 8, 0):
        monkeypatch.setattr(select, "KEY_BYTES", key_bytes)
        guarded = scored.decide(20, Guard(0.7, 1))
        assert 1 < guarded.num_token_blocks < 20
        found.append((scored.decide(9), guarded))
    for plain, guarded in found[1:]:
        for one, other in ((plain, found[0][0]), (guarded, found[0][1])):
            assert torch.equal(one.counts, other.counts)
            pages = int(one.counts.sum())
            assert torch.equal(one.positions[:pages], other.positions[:pages])


def tensor_bytes(*owners: object) -> int:
    """Return the bytes of the tensors that objects hold, and dataclasses in them."""
    found: dict[int, int] = {}
    todo = list(owners)
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(
            value, RaggedKernel | Queries | DecodePlan | Regions | QueryPool | DecodeQueries
        ):
            todo += [v for v in vars(value).values() if not isinstance(v, CacheShape | Regions)]
    return sum(found.values())


def test_vllm_counts_what_is_loaded_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """So gates, which are loaded there, with their buffers, are not subtracted once more.

    vLLM asks the device how much is free, before the model is loaded and after the trial run.
    """
    free = 100

    def measure(self: MemorySnapshot) -> None:
        self.free_memory, self.torch_peak, self.torch_memory = free, 0, 0

    monkeypatch.setattr(MemorySnapshot, "measure", measure)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda *args: None)
    started = MemorySnapshot(device=torch.device("cpu"))
    free -= 40  # the model
    free -= 7  # the gates
    with memory_profiling(started, weights_memory=40) as found:
        pass
    assert found.non_kv_cache_memory == 47
    assert "gates" not in memory_outside_pool(settings("dbtrimkv"), SIZES).lines


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("decode", [None, CUT_AGAIN], ids=["once", "again"])
def test_region_state_and_the_query_pool_take_what_is_set_aside(
    decode: Any, dtype: torch.dtype
) -> None:
    config = settings("tgv", decode=decode)
    found = memory_outside_pool(config, replace(SIZES, element_bytes=dtype.itemsize))
    device = torch.device("cpu")
    regions = Regions(1000, SHAPE, device, keeps_positions=bool(decode))
    caches = torch.empty(1000, *PAGES, device="meta").unbind(1)
    pool = page_pool(caches, SHAPE.group_size, slots_first=True)
    summaries = SummaryBlocks(pool, regions, are_used=False)
    assert tensor_bytes(regions) + tensor_bytes(summaries.counts) == 1000 * found.block_bytes
    queries = QueryPool(config.num_query_rows, SHAPE, dtype, device)
    stored = DecodeQueries(queries, SIZES.max_rows) if config.waits else queries
    assert tensor_bytes(stored) == found.lines["query pool"]


def test_the_pool_and_its_region_state_fit_what_is_left() -> None:
    found = memory_outside_pool(settings("tgv"), SIZES)
    available, block = 10 << 30, 128 << 10
    left = found.left_for_pool(available, block)
    num_blocks = left // block
    assert found.num_bytes + num_blocks * (block + found.block_bytes) <= available
    assert found.num_bytes + (num_blocks + 2) * (block + found.block_bytes) > available
    assert found.left_for_pool(1 << 20, block) < 0


@pytest.mark.parametrize(("given", "is_fp8"), [(None, False), (None, True), (5 << 30, False)])
def test_the_pool_gets_what_eviction_leaves(
    given: int | None, is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the size that vLLM recommends for the next start, and in one line of the log.

    A pool that the user sizes stays. vLLM finds 10 GiB. Queries may be fp8, as the cache is.
    """
    config = SimpleNamespace(
        additional_config={CONFIG_KEY: {"policy": "tgv"}},
        model_config=SimpleNamespace(max_model_len=TOKENS, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=512),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
    )
    impl = SimpleNamespace(num_queries_per_kv=4, has_fp8_queries=is_fp8)
    layers = {"layer.0": SimpleNamespace(impl=impl)}
    config.compilation_config.static_forward_context = layers
    stored = torch.uint8 if is_fp8 else torch.bfloat16
    sizes = {"num_kv_heads": 8, "head_size": 128, "dtype": stored}
    spec = EvictingSpec(block_size=16, **sizes)
    specs = {
        # The blocks of others lie over those of the evicted layers, and take no more memory.
        "state": StateSpec(block_size=16, shapes=((9, 64),), dtypes=(torch.bfloat16,)),
        "window": WindowSpec(block_size=16, **sizes, sliding_window=64),
        **{f"layer.{i}": spec for i in range(SHAPE.num_layers)},
    }
    worker = EvictionGPUWorker.__new__(EvictionGPUWorker)
    worker.__dict__.update(
        vllm_config=config,
        cache_config=SimpleNamespace(kv_cache_memory_bytes=given),
        peak_activation_memory=1 << 30,
        get_kv_cache_spec=lambda: specs,
    )
    monkeypatch.setattr(worker_cuda, "tensor_ranks", lambda config: Ranks())
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: given or 10 << 30)
    lines: list[str] = []
    log = SimpleNamespace(info=lambda message, *values: lines.append(message % values))
    monkeypatch.setattr(worker_cuda, "logger", log)
    left = worker.determine_available_memory()
    if given:
        assert left == given
        return
    own = {"step_tokens": 8192, "max_rows": 512, "split_sequences": 32 * 992}
    block_bytes = SHAPE.num_pairs * 16 * 2 * 128 * stored.itemsize
    own["element_bytes"] = stored.itemsize
    sizes = replace(SIZES, **own, pool_tokens=(10 << 30) // block_bytes * 16)
    expected = memory_outside_pool(settings("tgv"), sizes)
    assert memory_of(config, evicted_specs(specs), (10 << 30) // block_bytes) == expected
    assert left == expected.left_for_pool(10 << 30, block_bytes)
    assert 0 < left < (10 << 30) - expected.num_bytes
    assert worker.peak_activation_memory == (1 << 30) + (10 << 30) - left
    assert worker.available_kv_cache_memory_bytes == left
    (line,) = lines
    assert line.startswith("KV eviction takes ")
    for words in (f"{expected.num_bytes / 2**20:.0f} MiB outside the pool (", *expected.lines):
        assert words in line


SMALL = CacheShape(num_layers=2, num_heads=2, group_size=2, head_size=16, block_size=16)


def small_evictor(config: EvictionConfig, num_blocks: int) -> Evictor:
    caches = torch.zeros(num_blocks, 2, 2, 16, 32).unbind(1)
    pool = page_pool(caches, SMALL.group_size, slots_first=True)
    return Evictor(config, pool, Ranks(), Stages(2))


@pytest.mark.parametrize("kernel", ["stock", "triton"])
@pytest.mark.parametrize("max_rows", [4, 256])
@pytest.mark.parametrize("row_tokens", [1, 4])
def test_decode_kernels_are_allocated_at_start(kernel: str, max_rows: int, row_tokens: int) -> None:
    """When the evictor is bound: not in the first step with a compressed request."""
    config = settings("tgv", decode_kernel=kernel)
    evictor = small_evictor(config, 4)
    builder = EvictingFlashMetadataBuilder.__new__(EvictingFlashMetadataBuilder)
    builder.max_cudagraph_size, builder.reorder_batch_threshold = max_rows, row_tokens
    builder.use_full_cuda_graph = builder.aot_schedule = True
    builder.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        model_config=SimpleNamespace(max_model_len=TOKENS),
    )
    builder.bind(evictor, SimpleNamespace())
    sizes = replace(SIZES, shape=SMALL, max_rows=max_rows, row_tokens=row_tokens)
    lines = memory._of_server(config, sizes)
    expected = sum(lines.values()) - lines["query pool"]
    found = tensor_bytes(builder._kernel)
    assert 0 < found <= expected
    if kernel == "stock":
        starts = 4 * (max_rows * SMALL.num_heads + 1)  # which only a closure refers to
        drafts = lines.get("drafts", 0)  # more than half of them in a step
        assert expected - starts - drafts <= found <= expected - starts - drafts // 2


def test_the_page_has_these_formulas() -> None:
    """Each formula of the table in `docs/design.md` gives what the code computes."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Memory outside the pool")
    formulas = dict(re.findall(r"^\| (\w[\w ]*) \| `([^`]+)` \|", section, re.MULTILINE))
    for method, granularity, more in (
        ("h2o", "head", {}),
        ("h2o_accumulated", "head", {"decode": CUT_AGAIN}),
        ("tgv", "layer", {}),
        ("dbtrimkv", "head", {"decode": CUT_AGAIN}),
        ("kvzap", "head", {}),
        ("prefixkv", "layer", {"decode": CUT_AGAIN}),
        ("snapkv", "head", {"recall": {"gib": 3.5, "every": 5}}),
        ("snapkv", "head", {"defer": 3}),
    ):
        config = settings(method, granularity, **more)
        row_tokens = 4 if "defer" in more else 1
        sizes = replace(SIZES, step_tokens=8192, max_tokens=1 << 15, table_width=2048)
        sizes = replace(sizes, row_tokens=row_tokens)
        split = most_split_sequences(sizes.max_rows, SHAPE.num_heads, 32)
        sizes = replace(sizes, split_sequences=split)
        policy = config.build_policy(method)
        found = {
            **memory._of_server(config, sizes),
            **memory._of_recall(config, sizes),
            **memory._of_method(config, policy, sizes),
        }
        sets = SHAPE.num_heads if granularity == "head" else 1
        symbols = {
            "L": SHAPE.num_layers,
            "H": SHAPE.num_heads,
            "G": SHAPE.group_size,
            "S": sets,
            "D": SHAPE.head_size,
            "N": SHAPE.block_size,
            "P": sizes.max_tokens,
            "B": sizes.step_tokens,
            "X": 32,
            "R": sizes.max_rows,
            "W": row_tokens,
            "Q": config.num_query_rows,
            "b": sizes.element_bytes,
            "MiB": 1 << 20,
            "max": max,
            "min": min,
            "all": int(method.startswith("h2o")),
            "carries": int(config.carries_scores),
            "auto": int(config.auto_weight(policy) == 1),
            "apart": 0,
            "attends": int(policy.score.rows != "none"),
            "T": 3.5 * 2**30 * ("recall" in more) / (4 * SHAPE.head_size),
            "every": 5,
            "decode": int(bool(more) and "defer" not in more),
            "waits": int(bool(more)),
            "gates": int(config.gates is not None),
        }
        checked = {name: eval(formula, {}, symbols) for name, formula in formulas.items()}
        of_block = sum(map(checked.pop, ("region state", "gate outputs", "carried scores")))
        assert of_block == memory_outside_pool(config, sizes).block_bytes
        absent = {"votes": 0, "drafts": 0, "way to the tier": checked["way to the tier"]}
        assert checked == absent | {name: found[name] for name in checked if name in found}
        assert found.keys() - checked.keys() == {"statistics", "work"}


@pytest.mark.parametrize("where", ["score", "allocation"])
def test_a_warm_up_that_fails_ends_the_start(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile would otherwise fail every request, each with HTTP 500."""
    evictor = small_evictor(settings("tgv"), 9)
    warm_up(evictor)  # works

    def fail(*args: object) -> None:
        raise RuntimeError("out of registers")

    policy = evictor.config.build_policy("tgv")
    owner, name = (policy.score, "__call__") if where == "score" else (policy.allocation, "shares")
    monkeypatch.setattr(type(owner), name, fail)
    with pytest.raises(WarmUpError) as caught:
        warm_up(evictor)
    message = str(caught.value)
    assert "method 'tgv' failed: RuntimeError: out of registers" in message
    for way_out in ("--gpu-memory-utilization", "kernels.gpu.compile", "leave out --kv-eviction"):
        assert way_out in message


WAITING = {"base": "snapkv", "rows": "answer"}


@pytest.mark.parametrize(
    ("policy", "waiting"),
    product(
        ["tgv", "h2o", "rkv", "mixkv", "streaming", "answer", "retentivekv", "elastic"],
        [
            {"defer": 4},
            {"defer": 400},
            {"defer": 2, "budget": 0.5},
            {"decode": {"schedule": [[4, 0.3], [9, 0.1]]}},
            {"defer": 1, "decode": {"max_tokens": 32}},
            {"defer": 1, "decode": {"on_request": True}},
            {"defer": 1, "decode": {"on_request": True}, "budget": "auto:0.9"},
        ],
        strength=1,
    ),
    ids=str,
)
def test_a_warm_up_waits_and_cuts_again_like_the_server(
    policy: str, waiting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs each eviction that a request will need, and leaves nothing."""
    if policy in ("streaming", "retentivekv") and "auto" in str(waiting.get("budget")):
        pytest.skip("auto guards attention, which streaming ignores, and leaves no summaries")
    if policy == "elastic" and ({"schedule", "max_tokens"} & waiting.get("decode", {}).keys()):
        pytest.skip("elastic merges tokens, so it evicts once")
    config = settings(policy, methods={"answer": WAITING}, query_rows=700, **waiting)
    evictor = small_evictor(config, 13)
    evicted: list[tuple[bool, int]] = []
    evict = evictor._evict
    kinds = ("vision", "text") if policy == "retentivekv" else ()

    def record(seen: Any, due: Any) -> Any:
        assert due.summary_kinds == kinds
        evicted.append((due.eviction.is_first, due.eviction.num_answer))
        return evict(seen, due)

    monkeypatch.setattr(evictor, "_evict", record)
    warm_up(evictor)
    first = (True, min(config.first_eviction(policy)[1], 15))
    cuts_again = config.decode is not None and policy != "elastic"
    assert evicted == ([first, (False, 15)] if cuts_again else [first]) * 2
    assert not evictor.pool.raw.any()
    assert not evictor.regions.num_live
    assert not evictor.regions.num_token_blocks.any()
    assert not any((evictor.observations, evictor.ended, evictor.kept))
