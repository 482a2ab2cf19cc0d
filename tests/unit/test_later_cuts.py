# SPDX-License-Identifier: Apache-2.0
"""All cuts of a request in evictors of ranks and stages, against the oracle in float64.

Ranks are threads of this process, the stages of a rank run one after the other. They serve one
request from its first cut to its last one. What is cached is written before, drawn at random,
and freed blocks are filled with NaN. The oracle decides on its own when to cut, and what is left.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from oracle.emulation import Cutter, Moment
from oracle.emulation import Eviction as OracleEviction
from oracle.methods import Image, Layout, Mix
from tests.configs import AdjustedConfig
from tests.inputs import gates, head_scores, new_rng
from tests.unit.test_ranks import Wire, kept_mask, run_out_of_memory
from vllm_tgvkv.cache.pages import page_pool
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies.head_scores import HeadScores
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.cuts import Ceiling, Cut, plan_cuts
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction, Failure, Observation, Outcome, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, Voters, voters
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages

LAYERS, HEAD_SIZE, SIZE, NUM_BLOCKS = 3, 16, 16, 120
SCALE = HEAD_SIZE**-0.5
PROMPT = PromptMap(150, (VisionSpan(9, 48, (6, 8)), VisionSpan(60, 35, (5, 7))))
ANSWER, ANSWER_ROWS, WINDOW, BUFFER = 110, 20, 24, 32
NAME = "r"
LATER: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": [[4, 0.7], [30, 0.4], [61, 0.2]]},
    "ceiling": {"max_tokens": 70},
}
DEFER = {"schedule": 4, "ceiling": 3}
METHODS = {
    "layer": ("tgv", "snapkv", "h2o", "prefixkv"),
    "head": ("tgv", "adakv", "pyramidkv", "rkv", "h2o_accumulated"),
}
SCORES = {
    **dict.fromkeys(("retentive_rows", "retentive_spread"), Mix("", "uniform", "window", "head")),
    "h2o_accumulated": Mix("", "uniform", "recent_half", "head"),
    "fixed_place": Mix("", "uniform", "by_score", "head"),
}
"""Scores that belong to no method, and the mixes that they are tested in."""
MORE = ("snapkv", "mixkv", "sparsemm", "trimkv", "dbtrimkv", "kvzap")
MORE += ("retentive_rows", "retentive_spread", "fixed_place")
"""Methods that look at values, head scores or gates as well; on one rank."""


@dataclass(frozen=True)
class Model:
    """Rotated keys and queries, and values, of all tokens of a request."""

    keys: torch.Tensor
    """[L, H, n, D]"""
    queries: torch.Tensor
    """[L, n, H, G, D]"""
    values: torch.Tensor
    """[L, H, n, D]"""
    gates: torch.Tensor
    """What gates say, float32 [L, H, n]."""

    @classmethod
    def random(cls, seed: int, kv_heads: int = 4, group: int = 2) -> Model:
        generator = torch.Generator().manual_seed(seed)
        length = PROMPT.num_tokens + ANSWER

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        return cls(
            normal(LAYERS, kv_heads, length, HEAD_SIZE),
            2 * normal(LAYERS, length, kv_heads, group, HEAD_SIZE),
            normal(LAYERS, kv_heads, length, HEAD_SIZE) * normal(LAYERS, 1, length, 1).exp(),
            -normal(LAYERS, kv_heads, length).abs() / 50,
        )

    def attention(self) -> torch.Tensor:
        """Return the causal softmax over all keys, float64 [L, Q, n, n]."""
        queries = self.queries.permute(0, 2, 3, 1, 4).double()  # [L, H, G, n, D]
        logits = queries @ self.keys[:, :, None].double().transpose(-1, -2) * SCALE
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        return logits.masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2)

    def moments(self) -> Iterator[Moment]:
        """Yield the end of each step as the oracle sees it, without any cut."""
        attention, queries = self.attention(), self.queries.flatten(2, 3).transpose(1, 2)
        for n in range(PROMPT.num_tokens, PROMPT.num_tokens + ANSWER):
            kept = torch.ones(*self.keys.shape[:2], n, dtype=torch.bool)
            keys = self.keys[:, :, :n]
            seen = [attention[:, :, :n, :n]], [queries[:, :, :n]], keys, self.values[:, :, :n]
            yield Moment(PROMPT.num_tokens, kept, *seen, self.gates[:, :, :n].double())


@cache
def scores_of(heads: tuple[int, int]) -> HeadScores:
    """Return scores of the query heads of a model with these KV heads and queries of each."""
    return head_scores(LAYERS, *heads)


@cache
def expected(
    seed: int,
    heads: tuple[int, int],
    kind: str,
    method: str,
    granularity: str,
    ranks: int,
    stages: tuple[int, ...],
) -> list[tuple[int, torch.Tensor]]:
    """Return the oracle's cuts: answer tokens, and what is left, bool [L, H, n]."""
    model = Model.random(seed, *heads)
    decode, defer = LATER[kind], DEFER[kind]
    schedule = tuple(map(tuple, decode.get("schedule", ())))
    eviction = OracleEviction(
        *(schedule[0][1] if schedule else 0.6, SIZE, granularity),
        observation_window=WINDOW,
        method=replace(SCORES[method], score=method) if method in SCORES else method,
        head_scores=torch.tensor(scores_of(heads).scores),
        ranks=ranks,
        defer=defer,
        schedule=schedule[1:],
        answer_rows=ANSWER_ROWS,
        ceiling=decode.get("max_tokens"),
        buffer=BUFFER,
    )
    images = tuple(Image(run.start, run.length, run.grid) for run in PROMPT.vision)
    cutter = Cutter(eviction, Layout(PROMPT.num_tokens, images), model.keys.shape[1], stages)
    left = None
    for moment in model.moments():
        if left is not None:
            kept = torch.nn.functional.pad(left, (0, moment.length - left.shape[-1]), value=True)
            moment = replace(moment, kept=kept)
        new = cutter(moment)
        left = moment.kept if new is None else new
    return [(cut.after, cut.selection.kept) for cut in cutter.cuts]


@dataclass
class Request:
    """The scheduler's side of the request: its row of the block table, and what it plans."""

    config: EvictionConfig
    kind: str
    method: str
    row: list[int] = field(default_factory=list)
    num_taken: int = 0
    num_cut: int = 0
    released: list[int] = field(default_factory=list)
    poisoned: list[int] = field(default_factory=list)
    last: int | None = None
    """Cuts to be made; all by default."""
    budget: str | None = None
    """The budget in words, for a trace."""
    is_reported: bool = False

    def take(self, number: int) -> list[int]:
        self.num_taken += number
        return list(range(self.num_taken - number + 1, self.num_taken + 1))

    def cuts(self) -> list[Cut]:
        decode = LATER[self.kind]
        steps = decode.get("schedule", [[DEFER[self.kind], 0.6]])
        num = PROMPT.num_tokens
        scheduled = [(m, Budget.parse(b, "").retained_blocks(num, SIZE)) for m, b in steps]
        ceiling = Ceiling(decode["max_tokens"], BUFFER) if self.kind == "ceiling" else None
        cuts = plan_cuts(num, scheduled, ceiling, SIZE, num + ANSWER)
        found: list[Cut] = []
        cut: Cut | None = cuts.first
        while cut is not None:
            found.append(cut)
            cut = cuts.after(cut)
        return found[: self.last]

    def plan(self, cut: Cut) -> StepPlan:
        """Plan one cut. All rows vote in the step, as of a request that was preempted."""
        policy = self.config.build_policy(self.method)
        is_first, num_answer = not self.num_cut, cut.at - PROMPT.num_tokens
        voting = voters(PROMPT, policy.row_sets, WINDOW, num_answer)
        if not is_first:
            first = max(cut.at - ANSWER_ROWS, self.num_cut) if voting.kinds else cut.at
            rows = np.arange(first, cut.at)
            voting = Voters(dict.fromkeys(voting.kinds, rows), rows, every_row=False)
        self.row += self.take(-(-cut.at // SIZE) - len(self.row))
        old, new = list(self.row), self.take(cut.num_retained)
        self.row[: cut.num_replaced] = new + [0] * (cut.num_replaced - len(new))
        plan = StepPlan(released=self.released, poisoned=self.poisoned)
        self.released = [] if is_first else [old[0]]
        self.poisoned = [block for block in old[: cut.num_replaced] if block]
        self.num_cut = cut.at
        eviction = Eviction(
            request_id=NAME,
            method=self.method,
            prompt=PROMPT,
            voters=voting,
            num_cached=0,
            guard=None,
            traced_budget=self.budget,
            old_blocks=np.array(old, np.int32),
            new_blocks=np.array(new, np.int32),
            row_blocks=np.array(self.row, np.int32),
            num_answer=num_answer,
            num_replaced=cut.num_replaced,
            is_first=is_first,
            is_whole=is_first,
            is_reported=self.is_reported,
        )
        plan.evictions.append(eviction)
        if len(voting.rows):
            plan.observations.append(Observation(NAME, 0, voting.rows, None))
        if voting.every_row:
            chunk = (0, cut.at, eviction.old_blocks, eviction.observed)
            plan.summings.append(ColumnSumChunk(NAME, self.method, *chunk))
        return plan


class Worker:
    """The evictors of one rank in all stages, which run one after the other."""

    def __init__(
        self, model: Model, config: EvictionConfig, ranks: Sequence[Ranks], layers: Sequence[int]
    ) -> None:
        sent: dict[int, Queue[Any]] = defaultdict(Queue)
        of_first, num_heads = ranks[0], model.keys.shape[1]
        replicas = of_first.size // of_first.num_parts
        size = num_heads // of_first.num_parts
        heads = slice(of_first.part * size, (of_first.part + 1) * size)
        group, place = model.queries.shape[3] // replicas, of_first.rank % replicas
        members = slice(place * group, (place + 1) * group)
        self.queries = model.queries[:, :, heads, members].flatten(2, 3)
        self.model, self.heads, self.num_written = model, heads, 0
        self.outcomes: list[list[Outcome | Failure]] = []
        """Of each step."""
        self.evictors: list[Evictor] = []
        for stage, of_stage in enumerate(ranks):
            stages = Stages(
                *layers,
                stage=stage,
                send=sent[stage].put,
                receive=lambda s: sent[s].get(timeout=60),
            )
            cache = torch.full((NUM_BLOCKS, layers[stage], size, SIZE, 2 * HEAD_SIZE), torch.nan)
            pool = page_pool(cache.unbind(1), group, slots_first=True)
            scales = [SCALE] * layers[stage]
            self.evictors.append(Evictor(config, pool, of_stage, stages, scales=scales.copy))

    def write(self, eviction: Eviction, num_tokens: int) -> None:
        """Write what is cached of new tokens to their blocks; clear fresh blocks."""
        size, first_new = SIZE, -(-self.num_written // SIZE)
        fresh = [*eviction.old_blocks[first_new:].tolist(), *eviction.new_blocks.tolist()]
        for evictor in self.evictors:
            first, shape = evictor.stages.first_layer, evictor.shape
            pages = (NUM_BLOCKS, shape.num_layers, shape.num_heads, size, HEAD_SIZE)
            layers = slice(first, first + shape.num_layers)
            pool = evictor.pool
            for view, states in ((pool.keys, self.model.keys), (pool.values, self.model.values)):
                cached = view.view(pages)
                cached[fresh] = 0
                for position in range(self.num_written, num_tokens):
                    block, slot = divmod(position, size)
                    of_token = states[layers, self.heads, position]
                    cached[int(eviction.old_blocks[block]), :, :, slot] = of_token
            if evictor.context.carried is not None:  # of the blocks' last owner
                evictor.context.carried.fill(fresh, 1e9)
            if evictor.context.gate_outputs is not None:
                positions = np.arange(self.num_written, num_tokens)
                said = self.model.gates[layers, self.heads, self.num_written : num_tokens]
                place = eviction.old_blocks[positions // size], positions % size
                values = evictor.context.gate_outputs.values
                values[place[0], :, :, place[1]] = said.permute(2, 0, 1).to(values.dtype)
        self.num_written = num_tokens

    def run(self, plan: StepPlan) -> None:
        """Run a step; every stage but the last one sends its outcomes there."""
        (eviction,) = plan.evictions
        answers = []
        for evictor in self.evictors:
            evictor.begin_step(plan)
        self.write(eviction, eviction.observed.num_tokens)
        for evictor in self.evictors:
            evictor.prepare({NAME: 0}.__getitem__)
            for layer in range(evictor.shape.num_layers):
                queries = self.queries[evictor.stages.first_layer + layer]
                evictor.observe_layer(layer, queries[: self.num_written], SCALE)
            evictor.evict_stored()
            answers.append(evictor.take_outcomes())
        assert not any(answers[:-1])
        self.outcomes.append(answers[-1].read() if answers[-1] else [])

    def kept(self, number: int, num_tokens: int) -> torch.Tensor:
        """Return what one cut left in the region, bool [L, H', n]."""
        return torch.cat([kept_mask(e.kept[number][1], num_tokens) for e in self.evictors])


@dataclass(frozen=True)
class Split:
    """How a model is split into ranks and stages."""

    ranks: int = 1
    stages: tuple[int, ...] = (LAYERS,)
    kv_heads: int = 4
    group: int = 2

    @property
    def replicas(self) -> int:
        return max(1, self.ranks // self.kv_heads)


SPLITS = {
    "alone": Split(),
    "two ranks": Split(2),
    "four ranks of two heads": Split(4, kv_heads=2, group=4),
    "stages": Split(1, (2, 1)),
    "ranks in stages": Split(2, (1, 2)),
}


CASES = [
    (granularity, method, name)
    for granularity, methods in METHODS.items()
    for method in methods
    for name, split in SPLITS.items()
    if method != "rkv" or split.replicas == 1  # a rank knows its own part of the importance only
] + [("head", method, name) for method in MORE for name in ("alone", "stages")]


def serve(split: Split, model: Model, request: Request) -> tuple[list[Worker], list[Wire]]:
    """Serve the request on all ranks, each of which goes through all cuts."""
    wires = [Wire(split.ranks) for _ in split.stages]
    plans = [request.plan(cut) for cut in request.cuts()]

    def work(rank: int) -> Worker:
        own: list[Ranks] = [Ranks() for _ in wires]
        if split.ranks > 1:
            own = [Ranks(split.ranks, rank, split.replicas, w.end(rank)) for w in wires]
        try:
            with torch.inference_mode():
                worker = Worker(model, request.config, own, split.stages)
                for plan in plans:
                    worker.run(plan)
                for evictor in worker.evictors:
                    evictor.begin_step(StepPlan(released=request.released))
                return worker
        finally:
            for wire in wires:
                wire.leave(rank)

    return wires[0].run(work), wires


def settings(
    kind: str, granularity: str, method: str = "tgv", heads: tuple[int, int] = (4, 2)
) -> EvictionConfig:
    used = gates("kvzap" if method == "kvzap" else "trimkv", LAYERS, heads[0])
    mixes = {
        name: {"base": "snapkv", "score": name, "pooling": "none", "retain": mix.retain}
        for name, mix in SCORES.items()
    }
    return AdjustedConfig.from_mapping(
        {
            "policy": "tgv",
            "methods": mixes,
            "head_scores": scores_of(heads),
            "gates": used if method in MORE else None,
            "granularity": granularity,
            "observation_window": WINDOW,
            "decode": LATER[kind],
            "debug": {"record_kept": True, "poison": True},
        }
    )


def assert_told(outcomes: list[Outcome | Failure], wanted: list[tuple[int, torch.Tensor]]) -> None:
    """Assert that there is an outcome of each cut, and that its tokens are those that are left."""
    is_vision = torch.from_numpy(PROMPT.is_vision())
    for number, (outcome, (num_answer, left)) in enumerate(zip(outcomes, wanted, strict=True)):
        assert isinstance(outcome, Outcome)
        assert (outcome.num_answer, outcome.is_first) == (num_answer, not number)
        mean = left[..., : PROMPT.num_tokens][..., is_vision].sum().item() / left[..., 0].numel()
        assert outcome.kept["vision"] == round(mean)
        assert outcome.seen["vision"] == is_vision.sum()
        assert set(outcome.seconds) >= {"selection", "copy"}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize(("granularity", "method", "name"), CASES)
def test_every_cut_leaves_what_the_oracle_leaves(
    name: str, kind: str, granularity: str, method: str
) -> None:
    """All ranks make the same cuts with the same pages; at granularity `layer`, as one rank."""
    split = SPLITS[name]
    heads = split.kv_heads, split.group
    config = settings(kind, granularity, method, heads)
    is_reported = bool(new_rng().integers(2))
    request = Request(config, kind, method, budget="some", is_reported=is_reported)
    parts = split.ranks // split.replicas if granularity == "head" else 1
    wanted = expected(17, heads, kind, method, granularity, parts, split.stages)
    cuts = list(request.cuts())
    assert [cut.at - PROMPT.num_tokens for cut in cuts] == [after for after, _ in wanted]
    assert len(cuts) >= 3
    if kind == "ceiling":  # 5 blocks by the request's own budget, 4 by the ceiling
        assert {cut.num_retained for cut in cuts} == {70 // SIZE}
    workers, _ = serve(split, Model.random(17, *heads), request)
    for number, (cut, (_, left)) in enumerate(zip(cuts, wanted, strict=True)):
        num_candidates = cut.num_replaced * SIZE
        kept = torch.cat([worker.kept(number, num_candidates) for worker in workers], dim=1)
        for copy in range(split.replicas):
            same = torch.equal(kept[:, copy :: split.replicas], left[..., :num_candidates])
            assert same, f"cut {number} keeps other tokens"
        for evictor in (evictor for worker in workers for evictor in worker.evictors):
            _, kept = evictor.kept[number]
            assert kept.counts.sum() == evictor.shape.num_pairs * cut.num_retained
    for worker in workers:
        first, *later = worker.outcomes
        assert len(first) == 1  # the scheduler counts first cuts only
        if is_reported:
            assert_told([outcome for (outcome,) in worker.outcomes], wanted)
        else:
            assert not any(later)
        for evictor in worker.evictors:
            assert evictor.regions.num_live == 1
            assert not evictor.observations
    trace = workers[0].evictors[-1].traces.find(NAME)
    assert trace is not None
    assert [part.num_answer for part in trace.cuts] == [after for after, _ in wanted]
    for number, (part, (_, left)) in enumerate(zip(trace.cuts, wanted, strict=True)):
        num_candidates = part.num_replaced * SIZE
        assert part.counts.tolist() == (left[..., :num_candidates].sum(-1) // SIZE).tolist()
        assert np.isnan(part.scores).any() == (number > 0)  # what is gone has no score


@pytest.mark.parametrize(
    ("granularity", "method", "of_cut"),
    [("layer", "tgv", 2), ("layer", "snapkv", 1), ("head", "tgv", 1)],
)
def test_a_later_cut_exchanges_as_often_as_the_first(
    granularity: str, method: str, of_cut: int
) -> None:
    """All layers together; which tokens are left travels with the scores. Then its outcome."""
    request = Request(settings("schedule", granularity), "schedule", method)
    _, (wire,) = serve(SPLITS["two ranks"], Model.random(3), request)
    assert wire.num_exchanges == (of_cut + 1) * len(list(request.cuts()))


@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("split", ["two ranks", "ranks in stages"])
@pytest.mark.parametrize("part", ["of_row", "observe_layers", "copy_kept"])
def test_a_later_cut_that_fails_on_one_rank_fails_on_all(
    monkeypatch: pytest.MonkeyPatch, granularity: str, split: str, part: str
) -> None:
    """Memory runs out at the second cut on one rank of the last stage."""
    request = Request(settings("schedule", granularity), "schedule", "tgv")
    request.last = 2
    calls: list[None] = []

    def now() -> bool:
        if threading.current_thread().name != "rank 1":
            return False
        calls.append(None)
        return len(calls) == due

    with monkeypatch.context() as counting:
        due = 0
        run_out_of_memory(counting, part, now)
        serve(SPLITS[split], Model.random(3), request)
    due, calls = len(calls), []
    assert due > 1 or part == "of_row"
    run_out_of_memory(monkeypatch, part, now)
    again = Request(request.config, "schedule", "tgv", last=2)
    workers, _ = serve(SPLITS[split], Model.random(3), again)
    for rank, worker in enumerate(workers):
        first, (failure,) = worker.outcomes
        assert isinstance(first[0], Outcome)
        assert isinstance(failure, Failure)
        assert ("OutOfMemoryError" if rank == 1 else "failed on rank 1") in failure.error
        for evictor in worker.evictors:
            assert evictor.regions.num_live == 1
            assert not evictor.observations
