# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as threads of this process, against one rank that has all heads.

The threads exchange the same tensors as vLLM's ranks. If a rank ends while others wait for it, they
raise and the test fails.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.configs import AdjustedConfig
from tests.inputs import gates, head_scores, product
from vllm_tgvkv.cache.pages import page_pool
from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates.folder import GateKind
from vllm_tgvkv.policies import METHOD_NAMES, LayerView, gates_of, has_summaries
from vllm_tgvkv.policies.tgv import TgvAllocation
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction, Failure, Observation, Outcome, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, voters
from vllm_tgvkv.worker import observation, region_writer
from vllm_tgvkv.worker.context import WORKSPACE_BYTES
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.ranks import Exchanges, Ranks
from vllm_tgvkv.worker.stages import Stages
from vllm_tgvkv.worker.warm_up import WarmUpError, warm_up

LAYERS, HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 3, 4, 2, 16, 16
NUM_BLOCKS = 40
WINDOW = 24
PROMPTS = {
    "first": PromptMap(150, (VisionSpan(9, 48, (6, 8)), VisionSpan(60, 35, (5, 7)))),
    "second": PromptMap(115, (VisionSpan(20, 64, (8, 8)),)),
}
HEAD_ONLY = ("adakv", "rkv", "mixkv", "reach", "trimkv", "dbtrimkv", "kvzap")
DROPPING = [name for name in METHOD_NAMES if not has_summaries(name)]
"""Those that keep summaries are refused with several ranks."""
SHARED = [name for name in DROPPING if name not in HEAD_ONLY]
"""Methods that exist at granularity `layer`, where ranks cannot share maxima over rows."""


class Wire:
    """Exchanges tensors between threads, one for each rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self._left: set[int] = set()

    @property
    def num_exchanges(self) -> int:
        return len(self._rounds)

    def end(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        numbers = itertools.count()

        def exchange(values: torch.Tensor) -> torch.Tensor:
            assert values.dtype == torch.float32, "vLLM's shared memory moves no other types"
            with self._changed:
                sent = self._rounds[next(numbers)]
                sent[rank] = values.clone()
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(sent) == self._size or self._left - sent.keys())
                assert len(sent) == self._size, f"ranks {self._left} ended without this exchange"
            return torch.stack([sent[other] for other in range(self._size)])

        return exchange

    def leave(self, rank: int) -> None:
        """Tell the others that this rank exchanges nothing more."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` on a thread for each rank and return the results."""
        results: list[Any] = [None] * self._size

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            finally:
                self.leave(rank)

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self._size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in results
        return results


def kept_mask(found: Any, num_tokens: int) -> torch.Tensor:
    """Return what a cut left in the region, bool [L, H, n]; every page must be full."""
    pairs = found.counts.flatten()
    mask = torch.zeros(len(pairs), num_tokens, dtype=torch.bool)
    pair = torch.repeat_interleave(torch.arange(len(pairs)), pairs)
    mask[pair[:, None], found.positions[: len(pair)].long()] = True
    assert torch.equal(mask.sum(-1), pairs * found.positions.shape[1])
    return mask.unflatten(0, found.counts.shape)


@dataclass
class Run:
    """The result of one step on one rank."""

    evictor: Evictor
    outcomes: dict[str, Outcome | Failure]

    def kept(self, name: str) -> torch.Tensor:
        """Kept positions in full blocks, bool [L, H, P]."""
        (found,) = (kept for of, kept in self.evictor.kept if of == name)
        return kept_mask(found, PROMPTS[name].num_tokens)

    def counts(self, name: str) -> torch.Tensor:
        (found,) = (kept for of, kept in self.evictor.kept if of == name)
        return found.counts


@dataclass
class Model:
    """Keys and queries of all heads; each rank takes its part."""

    keys: torch.Tensor
    """[num_blocks, L, H, N, 2 * D]"""
    queries: torch.Tensor
    """[L, tokens, H, G, D]"""

    @classmethod
    def random(cls, kv_heads: int = HEADS, group: int = GROUP) -> Model:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        tokens = sum(prompt.num_tokens for prompt in PROMPTS.values())
        return cls(
            normal(NUM_BLOCKS, LAYERS, kv_heads, BLOCK_SIZE, 2 * HEAD_SIZE),
            2 * normal(LAYERS, tokens, kv_heads, group, HEAD_SIZE),
        )

    def evict(
        self,
        ranks: Ranks,
        config: EvictionConfig,
        plan: StepPlan,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> Run:
        """Run one step on the heads of one rank."""
        num_heads, group = self.queries.shape[2:4]
        replicas = ranks.size // ranks.num_parts
        heads = slice(
            ranks.part * num_heads // ranks.num_parts,
            (ranks.part + 1) * num_heads // ranks.num_parts,
        )
        place = ranks.rank % replicas
        members = slice(place * group // replicas, (place + 1) * group // replicas)
        cache = self.keys[:, :, heads].contiguous()
        pool = page_pool(cache.unbind(1), group // replicas, slots_first=True)
        scales = [HEAD_SIZE**-0.5] * LAYERS
        evictor = Evictor(config, pool, ranks, Stages(LAYERS), scales=scales.copy)
        evictor.context.workspace_bytes = workspace_bytes
        if evictor.context.gate_outputs is not None:
            evictor.context.gate_outputs.values.copy_(self.keys[:, :, heads, :, 0].abs().neg())
        evictor.begin_step(plan)
        starts = {"first": 0, "second": PROMPTS["first"].num_tokens}
        evictor.prepare(starts.__getitem__)
        for layer in range(LAYERS):
            queries = self.queries[layer, :, heads, members].flatten(1, 2)
            evictor.observe_layer(layer, queries, HEAD_SIZE**-0.5)
        evictor.evict_stored()
        outcomes = evictor.take_outcomes()
        return Run(evictor, {o.request_id: o for o in (outcomes.read() if outcomes else [])})


def settings(
    granularity: str | None, kv_heads: int = HEADS, kind: GateKind = "trimkv"
) -> EvictionConfig:
    return AdjustedConfig.from_mapping(
        {
            "policy": "tgv",
            "head_scores": head_scores(LAYERS, kv_heads),
            "gates": gates(kind, LAYERS, kv_heads),
            "granularity": granularity,
            "observation_window": WINDOW,
            "debug": {"record_kept": True},
        }
    )


def step(config: EvictionConfig, methods: dict[str, str], budget: Any) -> StepPlan:
    """Build a step in which both prompts end; the first one asks for a trace."""
    plan, block = StepPlan(), 1
    for name, prompt in PROMPTS.items():
        policy = config.build_policy(methods[name])
        voting = voters(prompt, policy.row_sets, config.observation_window)
        parsed = Budget.parse(budget, "budget")
        num_old = -(-prompt.num_tokens // BLOCK_SIZE)
        num_new = parsed.retained_blocks(prompt.num_tokens, BLOCK_SIZE)
        blocks = np.arange(block, block + num_old + num_new, dtype=np.int32)
        block += num_old + num_new
        num_full = prompt.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        num_certain = int((~prompt.is_vision()[:num_full]).sum())
        plan.evictions.append(
            Eviction(
                request_id=name,
                method=methods[name],
                prompt=prompt,
                voters=voting,
                num_cached=0,
                guard=parsed.guard(prompt.num_tokens, num_certain, BLOCK_SIZE),
                traced_budget="some" if name == "first" else None,
                old_blocks=blocks[:num_old],
                num_replaced=prompt.num_tokens // BLOCK_SIZE,
                new_blocks=blocks[num_old:],
                row_blocks=blocks[num_old:],
            )
        )
        if len(voting.rows):
            plan.observations.append(Observation(name, 0, voting.rows, None))
        if voting.every_row:
            chunk = (0, prompt.num_tokens, blocks[:num_old], prompt)
            plan.summings.append(ColumnSumChunk(name, methods[name], *chunk))
    return plan


def run_ranks(
    model: Model,
    size: int,
    config: EvictionConfig,
    plan: StepPlan,
    replicas: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[list[Run], Wire]:
    """Run one step on a thread for each rank; without workspace, layers are scored one by one."""
    wire = Wire(size)

    def work(rank: int) -> Run:
        with torch.inference_mode():
            ranks = Ranks(size, rank, replicas, wire.end(rank))
            return model.evict(ranks, config, plan, workspace_bytes)

    return wire.run(work), wire


def both(method: str) -> dict[str, str]:
    return {"first": method, "second": "snapkv"}


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    now: Callable[[], bool],
    owner: Any = None,
    after: bool = False,
) -> None:
    """Let a function fail to allocate memory in each call for which `now()` is true.

    With `after`, it has done its work by then.
    """
    owners = {"observe_layers": observation, "copy_kept": region_writer, "of_row": RaggedKeys}
    owner = owner or owners[part]
    real = getattr(owner, part)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fails = now()
        result = None if fails and not after else real(*args, **kwargs)
        if fails:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return result

    monkeypatch.setattr(owner, part, failing)


def kept_by(runs: Sequence[Run], name: str) -> torch.Tensor:
    return torch.cat([run.kept(name) for run in runs], dim=1)


REPLICATED = ["tgv", "snapkv", "vlcache", "aircache", "h2o", "sparsemm", "random"]


@pytest.mark.parametrize(
    ("granularity", "method", "size", "kv_heads"),
    [
        *(("layer", method, size, 4) for method in SHARED for size in (2, 4)),
        *(("head", method, 2, 4) for method in DROPPING),
        *(("layer", method, 4, 2) for method in REPLICATED),
        *(("head", method, 4, 2) for method in (*REPLICATED, "mixkv")),
    ],
)
def test_ranks_keep_what_one_rank_keeps(
    granularity: str, method: str, size: int, kv_heads: int
) -> None:
    """A head with as many pages as on one rank keeps the same; so do ranks that hold one head.

    At granularity `layer` all have as many. At `head`, every rank deals its own pages.
    """
    replicas = max(1, size // kv_heads)
    config = settings(granularity, kv_heads, gates_of(method) or "trimkv")
    model = Model.random(kv_heads, 2 * HEADS // kv_heads)
    deals_evenly = method in ("snapkv", "h2o", "random", "streaming", "trimkv")
    for budget in (0.2, 0.45, 0.8):
        plan = step(config, both(method), budget)
        alone = model.evict(Ranks(), config, plan)
        runs, _ = run_ranks(model, size, config, plan, replicas)
        for eviction in plan.evictions:
            name = eviction.request_id
            kept, counts = kept_by(runs, name), torch.cat([r.counts(name) for r in runs], dim=1)
            for copy in range(replicas):
                same = counts[:, copy::replicas] == alone.counts(name)
                assert same.all() or (granularity == "head" and not deals_evenly), budget
                assert torch.equal(kept[:, copy::replicas][same], alone.kept(name)[same]), budget
                assert torch.equal(kept[:, copy::replicas], kept[:, ::replicas])
            told = {str(run.outcomes[name].kept) for run in runs}  # type: ignore[union-attr]
            assert len(told) == 1
            if granularity == "layer":
                assert told == {str(alone.outcomes[name].kept)}  # type: ignore[union-attr]
            for run in runs:
                found = run.counts(name)
                assert found.sum() == eviction.num_retained * found.numel()


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_the_first_ranks_trace_has_the_heads_of_all(granularity: str) -> None:
    config, model = settings(granularity), Model.random()
    for budget in (0.45, "auto:0.8,min=0.05,max=0.6"):
        plan = step(config, both("tgv"), budget)
        alone = model.evict(Ranks(), config, plan)
        runs, _ = run_ranks(model, 2, config, plan)
        trace, wanted = runs[0].evictor.traces.find("first"), alone.evictor.traces.find("first")
        assert trace is not None
        assert wanted is not None
        np.testing.assert_allclose(trace.scores, wanted.scores, rtol=1e-5)
        counts = torch.cat([run.counts("first") for run in runs], dim=1)
        assert trace.counts.tolist() == counts.tolist()
        kept, full = kept_by(runs, "first"), PROMPTS["first"].num_tokens // BLOCK_SIZE * BLOCK_SIZE
        for index in range(LAYERS):
            found = trace.layer(index)
            assert found is not None
            for of_set in found["token_sets"]:
                positions = [place for place in of_set["positions"] if place < full]
                for head in of_set["heads"]:
                    assert positions == kept[index, head].nonzero().flatten().tolist()
        assert not runs[1].evictor.traces.newest_first()


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_a_guard_finds_one_number_for_all_ranks(granularity: str) -> None:
    config, model = settings(granularity), Model.random()
    numbers = set()
    for share in (0.3, 0.6, 0.9):
        plan = step(config, both("tgv"), f"auto:{share},min=0.05,max=0.9")
        alone = model.evict(Ranks(), config, plan)
        runs, _ = run_ranks(model, 2, config, plan)
        for name in PROMPTS:
            found = {run.outcomes[name].num_retained for run in runs}  # type: ignore[union-attr]
            assert len(found) == 1
            numbers |= found
            if granularity == "layer":
                assert found == {alone.outcomes[name].num_retained}  # type: ignore[union-attr]
                assert torch.equal(kept_by(runs, name), alone.kept(name))
    assert len(numbers) > 2


@pytest.mark.parametrize(
    ("granularity", "method", "exchanges", "guarded"),
    [
        ("layer", "tgv", 2, 3),
        ("layer", "aircache", 3, 5),
        *(("layer", name, 1, 2) for name in ("snapkv", "vlcache", "h2o", "prefixkv")),
        *(("layer", name, 0, None) for name in ("random", "streaming")),
        *(("head", name, 1, 2) for name in ("tgv", "adakv", "prefixkv")),
        *(("head", name, 1, None) for name in ("kvzap", "dbtrimkv")),
        *(("head", name, 0, 2) for name in ("reach", "snapkv", "h2o", "rkv", "mixkv")),
        *(("head", name, 0, 2) for name in ("sparsemm", "pyramidkv")),
        ("head", "trimkv", 0, None),
    ],
)
def test_ranks_exchange_once_or_twice_for_a_prompt(
    granularity: str, method: str, exchanges: int, guarded: int | None
) -> None:
    """For all layers together; for methods whose heads do not compete never; then the outcomes.

    A guard needs the masses of all heads and agrees on a number.
    """
    config = settings(granularity, kind=gates_of(method) or "trimkv")
    plan = step(config, dict.fromkeys(PROMPTS, method), 0.4)
    plan.evictions = [replace(eviction, traced_budget=None) for eviction in plan.evictions]
    _, wire = run_ranks(Model.random(), 2, config, plan)
    assert wire.num_exchanges == exchanges * len(PROMPTS) + 1
    if guarded is not None:
        plan = step(config, dict.fromkeys(PROMPTS, method), "auto:0.8,min=0.05,max=0.6")
        _, wire = run_ranks(Model.random(), 2, config, plan)
        assert wire.num_exchanges == guarded * len(PROMPTS) + 1


def failures_of(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Return the prompt that failed on all ranks, and each rank's reason."""
    failed = [
        {name for name, outcome in run.outcomes.items() if isinstance(outcome, Failure)}
        for run in runs
    ]
    assert all(found == failed[0] for found in failed)
    (lost,) = failed[0]
    return lost, [run.outcomes[lost].error for run in runs]  # type: ignore[union-attr]


def fails_on_rank_1(
    monkeypatch: pytest.MonkeyPatch, config: EvictionConfig, method: str, part: str, call: int
) -> None:
    """Let a part of the eviction fail in one of its calls; a negative one fails after its work."""
    policy, calls = config.build_policy(method), itertools.count(1)
    owner, name = {
        "score": (type(policy.score), "__call__"),
        "exchange": (Exchanges, "gather"),
        "collective": (Ranks, "gather"),
        "strength": (type(policy.allocation), "strength"),
        "shares": (type(policy.allocation), "shares"),
    }.get(part, (None, part))

    def now() -> bool:
        return threading.current_thread().name == "rank 1" and next(calls) == abs(call)

    run_out_of_memory(monkeypatch, name, now, owner, after=call < 0)


@pytest.mark.parametrize(
    ("granularity", "workspace_bytes", "method", "part", "call"),
    product(
        [("layer", 0), ("layer", WORKSPACE_BYTES), ("head", WORKSPACE_BYTES)],
        ["tgv", "h2o", "aircache"],
        [
            *(("observe_layers", 1), ("observe_layers", 2), ("copy_kept", 1)),
            *(("score", 1), ("score", -2), ("exchange", 2), ("strength", -2), ("collective", 2)),
            *(("shares", 1), ("shares", 2)),
        ],
    ),
)
def test_what_fails_on_one_rank_fails_on_all(
    monkeypatch: pytest.MonkeyPatch,
    granularity: str,
    workspace_bytes: int,
    method: str,
    part: str,
    call: int,
) -> None:
    """A rank fails with one prompt, and takes part in the exchanges that follow without values.

    Two KV heads on four ranks, so that token sets are shared at both granularities. The other
    prompt is evicted on all.
    """
    config, model = settings(granularity, 2), Model.random(kv_heads=2, group=4)
    plan = step(config, dict.fromkeys(PROMPTS, method), "auto:0.9,min=0.2,max=0.6")
    ranks = (model, 4, config, plan, 2, workspace_bytes)
    healthy, _ = run_ranks(*ranks)
    fails_on_rank_1(monkeypatch, config, method, part, call)
    runs, _ = run_ranks(*ranks)
    lost, errors = failures_of(runs)
    assert errors[1] == "OutOfMemoryError: tried to allocate 2 GiB"
    assert {*errors[:1], *errors[2:]} == {f"failed on rank 1: {errors[1]}"}
    (other,) = PROMPTS.keys() - {lost}
    assert torch.equal(kept_by(runs, other), kept_by(healthy, other))
    for run in runs:
        assert run.evictor.regions.num_live == 2
        assert not run.evictor.observations


@pytest.mark.parametrize("call", [1, -1])
@pytest.mark.parametrize(
    ("granularity", "method", "size", "kv_heads"),
    [
        *(("layer", method, 2, 4) for method in SHARED),
        *(("head", method, 2, 4) for method in DROPPING),
        *(("head", method, 4, 2) for method in (*REPLICATED, "mixkv")),
    ],
)
def test_every_method_runs_without_values(
    monkeypatch: pytest.MonkeyPatch,
    granularity: str,
    method: str,
    size: int,
    kv_heads: int,
    call: int,
) -> None:
    """So a rank that failed knows what the others wait for, with any method."""
    config = settings(granularity, kv_heads, gates_of(method) or "trimkv")
    model = Model.random(kv_heads, 2 * HEADS // kv_heads)
    plan = step(config, both(method), 0.4)
    fails_on_rank_1(monkeypatch, config, method, "score", call)
    runs, _ = run_ranks(model, size, config, plan, max(1, size // kv_heads))
    assert failures_of(runs)[0] == "first"


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_warm_up_together(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Each makes the exchanges of its made-up prompts; one that cannot ends the start."""
    config, wire = settings("layer"), Wire(2)
    if fails:
        fails_on_rank_1(monkeypatch, config, "tgv", "strength", 1)

    def work(rank: int) -> str:
        caches = torch.zeros(NUM_BLOCKS, LAYERS, HEADS // 2, BLOCK_SIZE, 2 * HEAD_SIZE)
        pool = page_pool(caches.unbind(1), GROUP, slots_first=True)
        evictor = Evictor(config, pool, Ranks(2, rank, 1, wire.end(rank)), Stages(LAYERS))
        try:
            warm_up(evictor)
        except WarmUpError as error:
            return str(error)
        assert not evictor.ended
        return "done"

    first, second = wire.run(work)
    assert wire.num_exchanges > 3
    assert ("tried to allocate" in second) == ("on rank 1: OutOfMemoryError" in first) == fails
    assert fails or first == second == "done"


def test_an_error_of_the_method_itself_is_every_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fail with the same prompt at the same place, and wait for nothing more."""
    config, model = settings("layer"), Model.random()
    plan = step(config, both("tgv"), "auto:0.9,min=0.2,max=0.6")
    strength = TgvAllocation.strength

    def failing(self: TgvAllocation, view: LayerView, scores: torch.Tensor) -> torch.Tensor:
        if view.prompt.num_tokens == PROMPTS["first"].num_tokens:
            raise ValueError("no such prompt")
        return strength(self, view, scores)

    monkeypatch.setattr(TgvAllocation, "strength", failing)
    runs, _ = run_ranks(model, 2, config, plan)
    assert failures_of(runs) == ("first", ["ValueError: no such prompt"] * 2)
    assert kept_by(runs, "second").any()


def test_numbers_arrive_bit_by_bit() -> None:
    """Exchange doubles, NaN and empty strengths."""
    wire = Wire(2)
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, LAYERS, 2, 5, generator=generator)
    strengths = torch.randn(2, LAYERS, 2, 3, generator=generator, dtype=torch.float64)
    strengths[1, 0, 0, 0] = float("nan")

    def work(rank: int) -> list[torch.Tensor]:
        exchanges = Exchanges(Ranks(2, rank, 1, wire.end(rank)), torch.device("cpu"))
        return exchanges.gather_all([scores[rank], strengths[rank], scores[rank, ..., :0]])

    for found in wire.run(work):
        for part, wanted in zip(found, (scores, strengths, scores[..., :0]), strict=True):
            joined = torch.cat(tuple(wanted), dim=1)
            assert part.dtype == joined.dtype
            torch.testing.assert_close(part, joined, rtol=0, atol=0, equal_nan=True)
