# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages one after the other in this process, without an engine."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import permutations
from queue import Queue
from typing import Any

import pytest
import torch

from tests.unit.test_ranks import (
    BLOCK_SIZE,
    LAYERS,
    PROMPTS,
    Model,
    both,
    run_out_of_memory,
    settings,
    step,
)
from vllm_tgvkv.cache.pages import CacheShape, page_pool
from vllm_tgvkv.shared.plan import ChoiceOutcome, Failure, Outcome, StepPlan
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages, join_outcomes

assert LAYERS == 3


class Pipeline:
    """The evictors of pipeline stages; the last one answers."""

    def __init__(self, layers: tuple[int, ...], config: Any, model: Model) -> None:
        self.sent: dict[int, Queue[Any]] = defaultdict(Queue)
        self.model, self.evictors = model, []
        for stage, size in enumerate(layers):
            stages = Stages(
                *layers,
                stage=stage,
                send=self.sent[stage].put,
                receive=lambda s: self.sent[s].get(timeout=60),
            )
            cache = model.keys[:, stages.first_layer :][:, :size].contiguous()
            _, _, heads, group, head_size = model.queries.shape
            shape = CacheShape(size, heads, group, head_size, BLOCK_SIZE)
            pool = page_pool(cache.unbind(1), shape.group_size, slots_first=True)
            scales = [head_size**-0.5] * size
            self.evictors.append(Evictor(config, pool, Ranks(), stages, scales=scales.copy))

    def run(self, plan: StepPlan) -> dict[str, Outcome | Failure]:
        """Run one step, stage after stage, so every message is sent before it is received."""
        starts = {"first": 0, "second": PROMPTS["first"].num_tokens}
        answers = []
        for evictor in self.evictors:
            evictor.begin_step(plan)
            evictor.prepare(starts.__getitem__)
            for layer in range(evictor.shape.num_layers):
                queries = self.model.queries[evictor.stages.first_layer + layer].flatten(1, 2)
                evictor.observe_layer(layer, queries, evictor.shape.head_size**-0.5)
            evictor.evict_stored()
            answers.append(evictor.take_outcomes())
        assert not any(answers[:-1])
        outcomes = answers[-1].read() if answers[-1] else []
        assert all(queue.empty() for queue in self.sent.values())
        assert len({outcome.request_id for outcome in outcomes}) == len(outcomes)
        return {outcome.request_id: outcome for outcome in outcomes}

    def counts(self, name: str) -> list[torch.Tensor]:
        return [next(kept for of, kept in e.kept if of == name).counts for e in self.evictors]


@pytest.mark.parametrize("layers", [(1, 2), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize(
    ("budget", "sharpness"),
    [
        (0.4, (1.0, 1.0, 1.0)),
        # The flatter a stage's attention, the more blocks it needs. Where it is sharp, all rows
        # attend to the same few keys.
        ("auto:0.7,min=0.05,max=0.95", (8.0, 1.0, 0.01)),
        ("auto:0.7,min=0.05,max=0.95", (0.01, 1.0, 8.0)),
    ],
    ids=["fraction", "auto", "auto reversed"],
)
def test_the_last_stage_answers_for_all(
    layers: tuple[int, ...], granularity: str, budget: Any, sharpness: tuple[float, ...]
) -> None:
    model = Model.random()
    for queries, factor in zip(model.queries, sharpness, strict=True):
        queries.copy_(factor * (queries[:1] if factor > 1 else queries))
    pipeline = Pipeline(layers, settings(granularity), model)
    plan = step(settings(granularity), both("tgv"), budget)
    outcomes = pipeline.run(plan)
    for eviction in plan.evictions:
        name, outcome = eviction.request_id, outcomes[eviction.request_id]
        assert isinstance(outcome, Outcome)
        counts = pipeline.counts(name)
        blocks = [int(c.sum()) // c.numel() for c in counts]
        assert [int(c.sum()) for c in counts] == [
            b * c.numel() for b, c in zip(blocks, counts, strict=True)
        ]
        if eviction.guard is None:
            assert set(blocks) == {eviction.num_retained}
            assert outcome.num_retained is None
        else:
            assert len(set(blocks)) > 1
            assert outcome.num_retained == max(blocks)
        tail = PROMPTS[name].num_tokens % BLOCK_SIZE
        num_kept = int(torch.cat(counts).sum()) * BLOCK_SIZE / torch.cat(counts).numel()
        assert sum(outcome.kept.values()) == round(num_kept) + tail
        assert set(outcome.seconds) == {"statistics", "selection", "copy"}
    trace = pipeline.evictors[-1].traces.find("first")
    assert trace is not None
    assert trace.counts.tolist() == torch.cat(pipeline.counts("first")).tolist()
    assert trace.scores.shape[0] == LAYERS
    assert not any(e.traces.newest_first() for e in pipeline.evictors[:-1])
    assert not pipeline.run(StepPlan())  # nothing is sent in a step without evictions


@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("part", ["observe_layers", "copy_kept"])
def test_what_fails_on_one_stage_has_failed(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...], part: str
) -> None:
    """It fails once, however many stages it fails on; every stage has a region of a valid shape."""
    pipeline = Pipeline((1, 1, 1), settings("head"), Model.random())
    plan = step(settings("head"), both("tgv"), 0.4)
    calls = 0

    def now() -> bool:
        nonlocal calls
        stage, prompt = divmod(calls, 2)  # each stage has one layer, for each of two prompts
        calls += 1
        return stage in failing and prompt == 0

    run_out_of_memory(monkeypatch, part, now)
    outcomes = pipeline.run(plan)
    assert calls == 6
    assert isinstance(outcomes["first"], Failure)
    assert isinstance(outcomes["second"], Outcome)
    for evictor in pipeline.evictors:
        assert evictor.regions.num_live == 2
        assert not evictor.observations


def test_outcomes_are_joined_in_any_order() -> None:
    seen, kept = {"text": 90, "vision": 60}, {"text": 14, "vision": 10}
    part = Outcome("r", 7, 3, "tgv", seen, kept, {"copy": 1.0}, num_pairs=2)
    more = replace(part, num_retained=5, kept={"text": 13, "vision": 10}, num_pairs=1)
    others = [more, Failure("s", "first")]
    stages = [[part, Failure("s", "second")], others, [replace(part, num_retained=1)]]
    for order in permutations(stages):
        found, failure = join_outcomes(order)
        assert isinstance(found, Outcome)
        assert (found.num_retained, found.kept) == (5, {"text": 41, "vision": 30})
        assert (found.num_pairs, found.seconds) == (5, {"copy": 3.0})
        assert failure == Failure("s", failure.error)  # type: ignore[union-attr]
    alone = Stages(4)
    assert alone.join([part]) == [part]


def test_choices_are_joined_in_any_order() -> None:
    """Tokens that came back are the mean over all stages' heads; a failed tier ends it for all."""
    parts = [ChoiceOutcome("r", 7, 3.0, 4), ChoiceOutcome("r", 7, 0.0, 2)]
    lost = ChoiceOutcome("r", 0, None)
    for order in permutations(parts):
        assert join_outcomes([[each] for each in order]) == [ChoiceOutcome("r", 7, 2.0, 6)]
    for order in permutations([*parts, lost]):
        (found,) = join_outcomes([[each] for each in order])
        assert isinstance(found, ChoiceOutcome)
        assert found.num_recalled is None


def test_a_message_waits_for_the_device_in_its_own_thread() -> None:
    """The step goes on; messages arrive in order, and what one of them raises is not lost."""
    sent: Queue[str] = Queue()
    on_device = threading.Event()

    def send(found: Any) -> None:
        sent.put(found if isinstance(found, str) else found[0].request_id)

    stage = Stages(2, 1, 2, stage=1, send=send)
    assert (stage.first_layer, stage.model_layers, stage.is_last) == (2, 5, False)

    def outcomes(name: str) -> list[Any]:
        assert on_device.wait(60)
        return [Failure(name, "")]

    for name in "abc":
        stage.tell(partial(outcomes, name))
    assert sent.empty()
    on_device.set()
    assert [sent.get(timeout=60) for _ in "abc"] == ["a", "b", "c"]

    def lost() -> list[Any]:
        raise RuntimeError("the device is gone")

    stage.tell(lost)
    assert sent.get(timeout=60) == "RuntimeError: the device is gone"
    time.sleep(0.5)
    with pytest.raises(RuntimeError, match="the device is gone"):
        stage.tell(partial(outcomes, "later"))


def test_a_stage_that_lost_its_outcomes_says_so_to_the_last_one() -> None:
    last = Stages(1, 1, stage=1, receive=lambda stage: "RuntimeError: the device is gone")
    with pytest.raises(RuntimeError, match="pipeline stage 0 are lost: RuntimeError: the device"):
        last.join([])


def test_a_rank_that_is_not_asked_for_an_answer_sends_and_awaits_nothing() -> None:
    """vLLM reads the output of each stage's first rank only: others would wait for ever."""
    early, last = Stages(1, 1, stage=0), Stages(1, 1, stage=1)
    early.tell(lambda: pytest.fail("it would never be received"))
    assert last.join([Failure("a", "")]) == [Failure("a", "")]
