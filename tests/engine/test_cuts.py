# SPDX-License-Identifier: Apache-2.0
"""Eviction that waits for the answer, and evicts again while it grows: tokens and kept positions.

Every case runs in a real engine and is compared with the oracle, which masks keys of a Hugging Face
model. Freed blocks are filled with NaN, and all blocks are recounted after every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.emulation import Answer, Eviction, Oracle
from oracle.methods import METHODS, Mix, Pool
from tests.engine.questions import DEBUG, HEAD_SCORES, MIXES, question
from tests.engine.running import Ask, SteppedEngine, assert_cuts_agree, name_of
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
TOKENS = 90
SCHEDULE = [[6, 0.6], [30, 0.4], [61, 0.2]]
"""Of which the first two are closer than 32 rows."""
LATER = tuple((after, budget) for after, budget in SCHEDULE[1:])
CACHED = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 26,
    "max_num_seqs": 6,
    "max_model_len": 640,
}
CHUNKED = {"max_num_batched_tokens": 160}


def oracles(name: str) -> str | Mix:
    """Return the oracle's method or mix of this name."""
    if name not in MIXES:
        return METHODS[name]
    if name == "answer":
        return replace(METHODS["snapkv"], rows="answer", retain="by_score")
    if name in ("accumulated", "place"):
        return replace(METHODS[MIXES[name]["base"]], score=MIXES[name]["score"])
    ahead = replace(METHODS["snapkv"], pooling=Pool("sequence", forward=6, back=1))
    return replace(ahead, reduce="max") if name == "largest" else ahead


@dataclass(frozen=True)
class Case:
    """One request: its method, its wait and its budget."""

    method: str
    defer: int
    budget: float = 0.3
    own: dict[str, Any] = field(default_factory=dict)
    """Further fields of the oracle's `Eviction`."""

    def ask(self, seed: int) -> Ask:
        xargs = {
            "kv_eviction": self.method,
            "kv_eviction_budget": self.budget,
            "kv_eviction_defer": self.defer,
            "kv_eviction_report": 1,
        }
        return question(seed, 60, 120 + 17 * seed, max_tokens=TOKENS, xargs=xargs)


WAITING = [
    Case("tgv", 5),
    Case("snapkv", 1),
    Case("adakv", 40),
    Case("aircache", 7, 0.4),
    Case("vlcache", 3, 0.4),
    Case("h2o", 6),
    Case("prefixkv", 2),
    Case("elastic", 9),
    Case("streaming", 4),
    Case("rkv", 5),
    Case("mixkv", 6),
    Case("sparsemm", 3),
    Case("forward", 8),
    Case("largest", 8),
    Case("answer", 12),
    Case("tgv", 0, 0.2),
]


def expected(
    oracle: Oracle,
    running: SteppedEngine,
    case: Case,
    ask: Ask,
    guess: Sequence[int] | None = None,
    **more: Any,
) -> Answer:
    """Return the oracle's answer; `more` are fields of its `Eviction`."""
    config = running.evictor.config
    wanted = Eviction(
        case.budget,
        SIZE,
        method=oracles(case.method),
        sinks=config.sinks,
        observation_window=config.observation_window,
        head_scores=torch.tensor(HEAD_SCORES.scores),
        **{"defer": case.defer, **case.own, **more},
    )
    prompt = oracle.prompt(ask.text, ask.images)
    return oracle.answer(prompt, ask.max_tokens, wanted, guess=guess)


def assert_agrees(
    running: SteppedEngine,
    oracle: Oracle,
    cases: Sequence[Case],
    outputs: Sequence[Any],
    asks: Sequence[Ask] | None = None,
    **more: Any,
) -> None:
    """Assert that tokens, kept positions and reports are the oracle's.

    `asks` are by default those of `Case.ask`.
    """
    asks = asks or [case.ask(index) for index, case in enumerate(cases)]
    for case, ask, output in zip(cases, asks, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        answer = expected(oracle, running, case, ask, tokens, **more)
        kept = running.kept_after_cuts(output.request_id)
        whole = bool(case.own.get("ceiling") or more.get("ceiling"))
        assert_cuts_agree(kept, answer, output, SIZE, whole=whole, case=case)


def preempt_sometimes(running: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt the last request in every 25th step: the order of admission avoids most others."""
    step, steps = running.step, itertools.count(1)
    running.preempted.clear()

    def step_and_preempt() -> list[Any]:
        if not next(steps) % 25 and running.scheduler.running:
            running.preempt(running.scheduler.running[-1])
        return step()

    monkeypatch.setattr(running, "step", step_and_preempt)


@pytest.fixture
def small(
    engines: Callable[..., SteppedEngine], folder: Path, heads: str, monkeypatch: pytest.MonkeyPatch
) -> SteppedEngine:
    """Return an engine with chunks, a prefix cache, preemptions, and a schedule of the server's.

    Its query pool has rows for about two requests that wait.
    """
    monkeypatch.setattr(EvictionConfig, "num_query_rows", 330)
    settings = {"policy": "tgv", "head_scores": heads, "methods": MIXES, "debug": DEBUG}
    settings["decode"] = {"schedule": SCHEDULE}
    running = engines(folder, settings, **CACHED, **CHUNKED)
    running.llm.reset_prefix_cache()
    preempt_sometimes(running, monkeypatch)
    return running


def test_waits_in_a_small_pool(small: SteppedEngine, oracle: Oracle) -> None:
    """With chunks, prefix-cache hits and preemptions, two waiting requests at a time."""

    def once(case: Case, seed: int) -> Ask:
        ask = case.ask(seed)
        return replace(ask, xargs={**ask.xargs, "kv_eviction_schedule": "none"})

    outputs = small.run([once(case, index) for index, case in enumerate(WAITING)])
    assert_agrees(small, oracle, WAITING, outputs)
    assert small.preempted
    hits = {}
    for case in (WAITING[0], Case("answer", 12)):
        small.llm.reset_prefix_cache()
        for _ in range(2):  # the second time with a hit
            (output,) = small.run([once(case, 0)])
            assert_agrees(small, oracle, [case], [output])
        hits[case.method] = output.num_cached_tokens
    # Where only rows of the answer vote, a hit is as long as in stock: all but the last block.
    assert 0 < hits["tgv"] < hits["answer"]
    assert hits["answer"] == (len(output.prompt_token_ids) - 1) // SIZE * SIZE
    assert small.scheduler.query_rows.num_free == 330


def test_a_schedule_evicts_in_steps(small: SteppedEngine, oracle: Oracle) -> None:
    names = ("tgv", "snapkv", "adakv", "streaming", "pyramidkv", "forward", "largest")
    cases = [Case(name, 6, 0.6) for name in (*names, "rkv", "mixkv", "sparsemm", "accumulated")]
    asks = [replace(c.ask(i), xargs=step_xargs(c)) for i, c in enumerate(cases)]
    assert_agrees(small, oracle, cases, small.run(asks), schedule=LATER, answer_rows=ANSWER_ROWS)
    assert small.preempted


def step_xargs(case: Case) -> dict[str, Any]:
    return {"kv_eviction": case.method, "kv_eviction_report": 1}


OWN: list[tuple[Case, dict[str, Any]]] = [
    (
        Case("tgv", 6, 0.6, {"schedule": ((30, 0.4), (61, 0.2))}),
        {"kv_eviction_schedule": "6:0.6,30:0.4,61:0.2"},
    ),
    (
        Case("snapkv", 0, 0.5, {"schedule": ((21, 0.25),)}),
        {"kv_eviction_schedule": [[0, 0.5], [21, 0.25]]},  # as Python may write it
    ),
    (
        Case("adakv", 3, 0.3, {"ceiling": 96, "buffer": 24}),
        {"kv_eviction_budget": 0.3, "kv_eviction_defer": 3, "kv_eviction_max_tokens": 96},
    ),
    (
        Case("rkv", 0, 0.4, {"ceiling": 128, "buffer": 32}),
        {"kv_eviction_budget": 0.4, "kv_eviction_defer": 0, "kv_eviction_max_tokens": 128},
    ),
    (
        Case("elastic", 9, 0.3),  # evicts once only
        {"kv_eviction_schedule": "none", "kv_eviction_budget": 0.3, "kv_eviction_defer": 9},
    ),
    (Case("aircache", 7, 0.4), {"kv_eviction_schedule": "7:0.4"}),
    (Case("h2o", 4, 0.5, {"schedule": ((33, 0.2),)}), {"kv_eviction_schedule": "4:0.5,33:0.2"}),
]
"""Requests, and the options that give them these cuts on any server that has `decode`."""


@pytest.mark.parametrize("server", ["schedule", "on_request"])
def test_requests_of_one_engine_have_their_own_cuts(
    request: pytest.FixtureRequest, oracle: Oracle, server: str
) -> None:
    """Whatever else is in the batch, and whatever the server's own requests do."""
    running = request.getfixturevalue({"schedule": "small", "on_request": "whole"}[server])
    first = Case("tgv", 0, 0.1)
    if server == "schedule":
        first = Case("tgv", 6, 0.6, {"schedule": LATER})
    cases, asked = zip(*[(first, {}), *OWN], strict=True)
    asks = [
        replace(case.ask(index), max_tokens=170, xargs={**step_xargs(case), **own})
        for index, (case, own) in enumerate(zip(cases, asked, strict=True))
    ]
    outputs = running.run(asks)
    assert_agrees(running, oracle, cases, outputs, asks, answer_rows=ANSWER_ROWS)
    assert running.preempted or server == "on_request"
    for case, output in zip(cases, outputs, strict=True):
        report = output.kv_transfer_params["kv_eviction"]
        assert (report["defer"], report["budget"]) == (case.defer, case.budget)
        assert (report["decode"] is not None) == bool(case.own)
        assert len(report["cuts"]) > 1 or not case.own, case
    # Alone, or behind others, a request answers the same.
    again = [replace(ask, arrival=40 * index) for index, ask in enumerate(asks[::-1])]
    assert running.tokens(again)[::-1] == [list(o.outputs[0].token_ids) for o in outputs]


def test_an_answer_that_ends_first_is_never_evicted_for(whole: SteppedEngine) -> None:
    ask = Case("tgv", 20).ask(3)
    before = whole.counters["requests_skipped"].get("answer_too_short", 0)
    short, long = whole.run([replace(ask, max_tokens=21), replace(ask, max_tokens=22)])
    report = short.kv_transfer_params["kv_eviction"]
    assert (report["skip_reason"], report["cuts"]) == ("answer_too_short", [])
    (cut,) = long.kv_transfer_params["kv_eviction"]["cuts"]
    assert cut["answer_tokens"] == 20
    (name,) = [whole.add(ask)]
    while not (found := whole.requests([name])) or found[0].num_output_tokens < 10:
        whole.step()
    whole.core.abort_requests([found[0].request_id])
    whole.engine.output_processor.abort_requests([name], internal=False)
    whole.assert_empty()
    assert whole.counters["requests_skipped"]["answer_too_short"] == before + 2


def test_a_ceiling_bounds_a_long_answer(whole: SteppedEngine, oracle: Oracle) -> None:
    """Prompt and answer are cut together; the number of blocks stays flat.

    The last budgets are above the ceiling, which bounds the first cut as well.
    """
    names = ("snapkv", "adakv", "tgv", "streaming", "rkv", "mixkv", "sparsemm")
    cases = [Case(name, 3) for name in (*names, "accumulated", "place")]
    cases += [Case("snapkv", 0, 0.9), Case("tgv", 3, 0.7)]
    asks = [
        replace(ask, max_tokens=200, xargs={**ask.xargs, "kv_eviction_max_tokens": 96})
        for ask in (case.ask(index) for index, case in enumerate(cases))
    ]
    outputs = whole.run(asks)
    more = {"ceiling": 96, "buffer": 24, "answer_rows": ANSWER_ROWS}
    assert_agrees(whole, oracle, cases, outputs, asks, **more)
    for output in outputs:
        _, *later = output.kv_transfer_params["kv_eviction"]["cuts"]
        assert len(later) >= 2
        assert {cut["blocks_after"] for cut in later} == {96 // SIZE}


def assert_reasons(
    method: str, kept: dict[str, Any], trace: dict[str, Any], num_judged: int, sinks: int
) -> None:
    """Check the reasons of a token set; which scores pooling raised, a unit test checks."""
    reasons, positions = kept["reasons"], kept["positions"]
    assert sorted(p for of_reason in reasons.values() for p in of_reason) == positions
    assert reasons["sink"] == list(range(sinks))
    assert reasons.get("tail", []) == [p for p in positions if p >= num_judged]
    vision = {p for s in trace["vision"] for p in range(s["start"], s["start"] + s["length"])}
    judged = [p for p in positions if sinks <= p < num_judged]
    if method == "tgv":
        assert reasons.get("text", []) == [p for p in judged if p not in vision]
        assert "neighbour" not in reasons  # it does not pool
    else:
        assert "score" in reasons  # "recent" as well, until the answer is longer than its window
        assert "text" not in reasons


@pytest.mark.parametrize(
    "cuts",
    [
        {"kv_eviction_schedule": "4:0.6,20:0.4,50:0.2"},
        {"kv_eviction_budget": 0.3, "kv_eviction_defer": 3, "kv_eviction_max_tokens": 96},
    ],
    ids=["schedule", "ceiling"],
)
@pytest.mark.parametrize("method", ["tgv", "adakv"])
def test_a_trace_has_every_cut(whole: SteppedEngine, method: str, cuts: dict[str, Any]) -> None:
    """As the debug option `record_kept` has them."""

    def found(*args: Any) -> Any:
        (answer,) = whole.llm.collective_rpc("kv_eviction_trace", args=args)
        return answer

    own = {"kv_eviction": method, "kv_eviction_trace": 1, "kv_eviction_report": 1, **cuts}
    shape = whole.evictor.shape
    outputs = [question(seed, 60, 130 + seed, max_tokens=200, xargs=own) for seed in range(2)]
    for output in whole.run(outputs):
        name, num_prompt = output.request_id, len(output.prompt_token_ids)
        kept = [cut for of, cut in whole.evictor.kept if name_of(of) == name]
        told = output.kv_transfer_params["kv_eviction"]["cuts"]
        assert len(kept) == len(told) >= 3
        causes = [cut.pop("cause") for cut in told]
        assert causes == ["first", *["later"] * (len(told) - 1)]
        gone = np.empty(0, np.int64)
        for index, recorded in enumerate(kept):
            trace = found(name, None, index)
            assert trace["cuts"] == [{**cut, "recalled_tokens": None} for cut in told]
            counts = recorded.counts.numpy(force=True)
            assert trace["pages"] == counts.tolist()
            positions = recorded.positions.numpy(force=True)[: counts.sum()]
            num_judged = num_prompt // SIZE * SIZE
            if "kv_eviction_max_tokens" in cuts and index:
                num_judged = (num_prompt + told[index]["answer_tokens"]) // SIZE * SIZE
            kept_by = np.bincount(positions.ravel(), minlength=max(num_judged, num_prompt))
            kept_by[num_judged:] = shape.num_pairs
            assert trace["kept_by"] == kept_by.tolist()
            assert told[index]["kept_tokens"] == sum(trace["kept_by"]) / shape.num_pairs
            first = found(name, 0, index)["token_sets"][0]
            scores = np.array(first["scores"], dtype=float)
            assert len(scores) == num_judged
            assert_reasons(method, first, trace, num_judged, whole.evictor.config.sinks)
            # What the last cut evicted has no score.
            assert np.isnan(scores[gone]).all()
            assert np.isfinite(scores).any()
            gone = np.setdiff1d(np.arange(num_judged), first["positions"])
        assert found(name) == trace
        assert found(name, None, len(told)) is None
