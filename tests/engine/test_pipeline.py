# SPDX-License-Identifier: Apache-2.0
"""Eviction in two pipeline stages, each a process with its own core.

The oracle deals each stage's pages among the layers of that stage. Released blocks are poisoned,
and every block is recounted after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Eviction, Oracle, Prompt, Selection
from oracle.methods import Auto
from tests.engine.questions import DEBUG, album
from tests.engine.running import Ask, stable_ask
from tests.engine.test_parallel import ParallelEngine, workers
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.policies.snapkv import SnapScore
from vllm_tgvkv.shared.plan import Outcome, plan_of

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

STAGES = (3, 2)
"""Layers of each stage."""
ROWS = 128
NAMES = {
    f"{method}_by_{granularity}": {"base": method, "granularity": granularity}
    for granularity, of_granularity in {
        "layer": ("tgv", "snapkv", "vlcache", "h2o", "prefixkv", "random"),
        "head": ("tgv", "adakv", "pyramidkv", "aircache"),
    }.items()
    for method in of_granularity
}
SETTINGS = {
    "policy": "tgv",
    "budget": 0.2,
    "observation_window": ROWS,
    "methods": NAMES,
    "debug": {**DEBUG, "evict_at_full_budget": True},
}


class PipelineEngine(ParallelEngine):
    """Counts the steps that were scheduled while a step with an eviction was in flight."""

    keeps_traces = -1
    num_overlaps = 0

    def step(self) -> list[Any]:
        in_flight = [output for _, output, _ in self.core.batch_queue]
        outputs = super().step()
        new = [o for _, o, _ in self.core.batch_queue if all(o is not old for old in in_flight)]
        if any(plan_of(output).evictions for output in in_flight):
            self.num_overlaps += any(output.total_num_scheduled_tokens for output in new)
        return outputs

    def run(self, asks: Sequence[Ask]) -> list[Any]:
        outputs = super().run(asks)
        self.assert_forgotten()
        return outputs


@dataclass(frozen=True)
class Expected:
    """A request whose kept tokens do not depend on rounding, with the oracle's selection."""

    ask: Ask
    prompt: Prompt
    selection: Selection | None
    """None if the oracle does not define it, as with random scores."""


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112, layers=sum(STAGES))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[PipelineEngine]:
    """Chunks of 128 tokens run together with compressed decodes, in a pool too small for all."""
    options = {
        "max_num_batched_tokens": 128,
        "max_model_len": 640,
        "num_gpu_blocks_override": 24,
        "enable_prefix_caching": True,
    }
    with workers(folder, SETTINGS, PipelineEngine, pipeline_parallel_size=2, **options) as found:
        yield found


def expect(
    oracle: Oracle,
    seed: int,
    lengths: tuple[int, ...],
    name: str,
    budget: float | Auto,
    max_tokens: int = 20,
    arrival: int = 0,
    stages: Sequence[int] = STAGES,
) -> Expected:
    """Return a request with a method of `NAMES`, and the tokens that each stage must keep."""
    base, granularity = NAMES[name]["base"], NAMES[name]["granularity"]
    wanted = Eviction(budget, granularity=granularity, method=base, observation_window=ROWS)
    words: Any = budget
    if isinstance(budget, Auto):
        words = f"auto:{budget.share},min={budget.least},max={budget.most}"
    xargs = {
        "kv_eviction": name,
        "kv_eviction_budget": words,
        "kv_eviction_trace": 1,
        "kv_eviction_report": 1,
    }

    def make(attempt: int) -> Ask:
        number = seed + 1000 * attempt
        return album(number, *lengths, max_tokens=max_tokens, arrival=arrival, xargs=xargs)

    if base == "random":
        ask = make(0)
        return Expected(ask, oracle.prompt(ask.text, ask.images), None)
    ask, prompt = stable_ask(oracle, make, wanted, stages=stages)
    return Expected(ask, prompt, oracle.select(prompt, wanted, stages))


def assert_served(
    running: PipelineEngine,
    oracle: Oracle,
    expected: Expected,
    output: Any,
    stages: Sequence[int] = STAGES,
) -> list[torch.Tensor]:
    """Check kept tokens, text, trace and report against the oracle.

    Returns:
        What each stage kept, bool [L, H, P].
    """
    size, num_tokens = running.scheduler.block_size, len(expected.prompt.token_ids)
    num_full, num_tail = divmod(num_tokens, size)
    parts = running.kept_on_workers(output.request_id, num_tokens)
    assert tuple(map(len, parts)) == tuple(stages)
    kept = torch.cat(parts)
    ask = expected.ask
    if expected.selection is not None:
        assert torch.equal(kept, expected.selection.kept), f"{ask.xargs} keeps other tokens"
    tokens = list(output.outputs[0].token_ids)
    theirs = oracle.generate(expected.prompt, ask.max_tokens, kept, guess=tokens)
    assert tokens == theirs, ask.xargs

    pages = kept[..., : num_full * size].sum(-1) // size
    blocks = [int(part.sum()) / part.numel() for part in pages.split(list(stages))]
    trace = running.only_answer("kv_eviction_trace", output.request_id)
    assert trace["pages"] == pages.tolist()
    assert trace["kept_by"] == kept.flatten(0, 1).sum(0).tolist()
    for layer in (0, stages[0], sum(stages) - 1):
        found = running.only_answer("kv_eviction_trace", output.request_id, layer)
        for of_set in found["token_sets"]:
            for head in of_set["heads"]:
                assert of_set["positions"] == kept[layer, head].nonzero().flatten().tolist()
    sizes = {
        "kept_tokens": round(float(kept.sum()) / kept[..., 0].numel()),
        "blocks_before": num_full + (num_tail > 0),
        # One block table for all stages: the one that needs most blocks decides.
        "blocks_after": max(blocks) + (num_tail > 0),
    }
    report = output.kv_transfer_params["kv_eviction"]
    assert {name: report[name] for name in sizes} == sizes
    assert {name: trace[name] for name in sizes} == sizes
    return parts


def test_each_stage_keeps_what_its_layers_say(
    running: PipelineEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are prefilled in several chunks, and other steps overlap with evictions."""
    outcomes: dict[str, Outcome] = {}
    monkeypatch.setattr(
        running.scheduler.records.counters,
        "record_outcome",
        lambda outcome: outcomes.update({outcome.request_id.rsplit("-", 1)[0]: outcome}),
    )
    budgets = (0.45, 0.15, 0.3, 0.4, 0.2) * 2
    cases = [
        expect(oracle, seed, (20 + 5 * seed, 150 + 14 * seed), name, budget, arrival=2 * seed)
        for seed, (name, budget) in enumerate(zip(NAMES, budgets, strict=True))
    ]
    outputs = running.run([case.ask for case in cases])
    dealt = []
    for case, output in zip(cases, outputs, strict=True):
        parts = assert_served(running, oracle, case, output)
        full = len(case.prompt.token_ids) // 32 * 32
        means = [part[..., :full].sum() / part[..., 0].numel() for part in parts]
        assert means[0] == means[1]  # pages do not move between stages
        dealt.append(torch.cat(parts).sum(-1).unique().numel() > 1)
        outcome, vision = outcomes[output.request_id], case.prompt.vision
        kept = torch.cat(parts).double().mean((0, 1))
        assert outcome.kept["vision"] == round(float(kept[vision].sum()))
        assert sum(outcome.kept.values()) == round(float(kept.sum()))
        assert outcome.seen["vision"] == int(vision.sum())
    assert any(dealt)
    assert running.num_overlaps > 3


def test_with_auto_the_stage_that_needs_most_blocks_decides(
    running: PipelineEngine, oracle: Oracle
) -> None:
    cases = [
        expect(oracle, 40, (10, 10, 10, 40), f"tgv_by_{granularity}", Auto(share, 0.1, 0.9))
        for granularity, share in product(("layer", "head"), (0.5, 0.8))
    ]
    outputs = running.run([case.ask for case in cases])
    unequal = 0
    for case, output in zip(cases, outputs, strict=True):
        parts = assert_served(running, oracle, case, output)
        first, last = (part.float().mean() for part in parts)
        unequal += bool(first != last)
    assert unequal


def test_preemption_prefix_cache_and_a_budget_of_everything(
    running: PipelineEngine, oracle: Oracle
) -> None:
    """The pool is too small for all; a repeated prompt hits; a full budget answers like stock."""
    cases = [
        expect(oracle, 60 + seed, (20, 150 + 20 * seed), name, 0.5, 160)
        for seed, name in enumerate(("tgv_by_head", "snapkv_by_layer", "adakv_by_head"))
    ]
    full = expect(oracle, 70, (30, 130), "tgv_by_layer", 1.0, 160)
    asks = [*(case.ask for case in cases), full.ask]
    before = running.counters["requests_evicted"]
    outputs = running.run(asks)
    assert running.counters["requests_evicted"] > before + len(asks)  # some a second time
    for case, output in zip([*cases, full], outputs, strict=True):
        parts = assert_served(running, oracle, case, output)
    assert all(part.all() for part in parts)
    tokens = list(outputs[-1].outputs[0].token_ids)
    assert tokens == oracle.generate(full.prompt, full.ask.max_tokens, guess=tokens)

    *_, case = cases
    (*_, hit) = running.run([case.ask, replace(case.ask, arrival=8)])
    assert hit.num_cached_tokens > 0
    assert_served(running, oracle, case, hit)


def break_method(worker: Any, layers: Sequence[int], rank: int | None = None) -> None:
    """Let SnapKV raise at some layers of the model, on one rank or all; `()` repairs it."""
    if rank not in (None, worker.evictor.ranks.rank):
        return
    original = getattr(SnapScore, "original", SnapScore.__call__)

    def score(self: Any, view: Any) -> torch.Tensor:
        if view.layer in layers:
            raise ValueError(f"no score of layer {view.layer}")
        return original(self, view)

    SnapScore.original, SnapScore.__call__ = original, score  # type: ignore[attr-defined, method-assign]


def break_sums(worker: Any, stage: int) -> None:
    """Let memory run out at a stage's first chunk of a prompt whose rows are all summed."""
    if (worker.evictor.stages.first_layer > 0) != bool(stage):
        return
    original = RowSums.add

    def add(*args: Any) -> None:
        RowSums.add = original  # type: ignore[method-assign]
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    RowSums.add = add  # type: ignore[method-assign]


@pytest.mark.parametrize("layers", [(1,), (4,), (0, 3)], ids=["first", "last", "both"])
def test_what_fails_on_one_stage_ends_its_request_and_no_other(
    running: PipelineEngine, oracle: Oracle, layers: tuple[int, ...]
) -> None:
    good = [expect(oracle, 80 + i, (20, 180), "tgv_by_layer", 0.3, 40, arrival=i) for i in range(2)]
    bad = [
        album(90 + i, 20, 90, max_tokens=40, arrival=2 * i, xargs={"kv_eviction": "snapkv"})
        for i in range(2)
    ]
    h2o = album(95, 20, 300, max_tokens=40, arrival=1, xargs={"kv_eviction": "h2o"})
    failed = running.counters["requests_skipped"].get("policy_failed", 0)
    running.llm.collective_rpc(break_method, args=(layers,))
    running.llm.collective_rpc(break_sums, args=(int(layers[0] >= STAGES[0]),))
    try:
        outputs = running.run([*(case.ask for case in good), *bad, h2o])
    finally:
        running.llm.collective_rpc(break_method, args=((),))
    for output in outputs[len(good) :]:
        assert output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].token_ids) <= 1
    for case, output in zip(good, outputs[: len(good)], strict=True):
        assert_served(running, oracle, case, output)
    assert running.counters["requests_skipped"]["policy_failed"] == failed + len(bad) + 1


def test_abort_after_any_number_of_steps(running: PipelineEngine, oracle: Oracle) -> None:
    bystander = expect(oracle, 100, (20, 150), "tgv_by_head", 0.3, 40)
    for steps in (0, 2, 3, 5, 8):
        stays = running.add(bystander.ask)
        names = [
            running.add(album(110 + i, 20, 200 + 50 * i, xargs={"kv_eviction": method}))
            for i, method in enumerate(("tgv", "h2o"))
        ]
        for _ in range(steps):
            running.step()
        running.engine.abort_request(names)
        finished = {}
        while running.engine.has_unfinished_requests():
            finished.update({o.request_id: o for o in running.step() if o.finished})
        running.assert_empty()
        running.assert_forgotten()
        assert_served(running, oracle, bystander, finished[stays])


def test_stages_report_the_same_status(running: PipelineEngine) -> None:
    first, last = running.llm.collective_rpc("kv_eviction_status")
    assert first == last
    assert first["pool"]["layers"] == sum(STAGES)
    assert first["totals"] == running.counters
