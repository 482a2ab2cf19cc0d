# SPDX-License-Identifier: Apache-2.0
"""Eviction that waits for the answer, and evicts again while it grows: tokens and kept positions.

Every case runs in a real engine and is compared with the oracle, which masks keys of a Hugging Face
model. Freed blocks are filled with NaN, and all blocks are recounted after every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Answer, Eviction, Oracle
from oracle.methods import METHODS, Mix, Pool
from tests.configs import pooling_name
from tests.engine.questions import question
from tests.engine.running import Ask, SteppedEngine, engine
from tests.engine.test_speculation import NGRAM
from tests.inputs import head_scores
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies.head_scores import write
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
TOKENS = 90
HEAD_SCORES = head_scores(layers=4, kv_heads=2, group=2)
DEBUG = {"poison": True, "record_kept": True, "check_integrity": True}
AHEAD = pooling_name("sequence", forward=6, back=1)
MIXES = {
    "forward": {"base": "snapkv", "pooling": AHEAD},
    "largest": {"base": "snapkv", "pooling": AHEAD, "reduce": "max"},
    "answer": {"base": "snapkv", "rows": "answer", "retain": "by_score"},
}
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


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of head scores."""
    file = tmp_path_factory.mktemp("heads") / "heads.json"
    write(file, HEAD_SCORES.model, HEAD_SCORES.kv_heads, HEAD_SCORES.scores, {})
    return str(file)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def whole(folder: Path, heads: str) -> Iterator[SteppedEngine]:
    """Run an engine whose prompts come in one chunk."""
    settings = {"policy": "tgv", "methods": MIXES, "head_scores": heads, "debug": DEBUG}
    with engine(folder, settings) as running:
        yield running


def expected(oracle: Oracle, running: SteppedEngine, case: Case, ask: Ask, **more: Any) -> Answer:
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
    return oracle.answer(oracle.prompt(ask.text, ask.images), ask.max_tokens, wanted)


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
        answer = expected(oracle, running, case, ask, **more)
        kept = running.kept_after_cuts(output.request_id)
        kept = kept[len(kept) - len(answer.cuts) :]
        num_prompt = len(output.prompt_token_ids)
        for ours, cut in zip(kept, answer.cuts, strict=True):
            theirs = cut.selection.kept
            bounded = case.own.get("ceiling") or more.get("ceiling")
            ceiling = bounded is not None and cut is not answer.cuts[0]
            num_candidates = (theirs.shape[-1] if ceiling else num_prompt) // SIZE * SIZE
            same = torch.equal(ours[..., :num_candidates], theirs[..., :num_candidates])
            assert same, f"{case}: cut after {cut.after} keeps other tokens"
            assert not ours[..., num_candidates:].any(), case
        assert list(output.outputs[0].token_ids) == answer.tokens, case
        report = output.kv_transfer_params["kv_eviction"]
        assert [cut["answer_tokens"] for cut in report["cuts"]] == [c.after for c in answer.cuts]


def test_the_answer_so_far_votes(whole: SteppedEngine, oracle: Oracle) -> None:
    outputs = whole.run([case.ask(index) for index, case in enumerate(WAITING)])
    assert_agrees(whole, oracle, WAITING, outputs)
    assert whole.scheduler.query_rows.num_free == whole.evictor.config.num_query_rows


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


def preempt_sometimes(running: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt the last request in every 25th step: the order of admission avoids most others."""
    step, steps = running.step, itertools.count(1)

    def step_and_preempt() -> list[Any]:
        if not next(steps) % 25 and running.scheduler.running:
            running.preempt(running.scheduler.running[-1])
        return step()

    monkeypatch.setattr(running, "step", step_and_preempt)


def test_waits_in_a_small_pool(
    folder: Path, heads: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks, prefix-cache hits and preemptions, two waiting requests at a time."""
    settings = {"policy": "tgv", "methods": MIXES, "debug": DEBUG}
    settings["head_scores"] = heads
    options = {**CACHED, **CHUNKED, "max_model_len": 640}  # the longest answers exceed 512
    monkeypatch.setattr(EvictionConfig, "num_query_rows", 330)
    with engine(folder, settings, **options) as running:
        preempt_sometimes(running, monkeypatch)
        asks = [case.ask(index) for index, case in enumerate(WAITING)]
        assert_agrees(running, oracle, WAITING, running.run(asks))
        assert running.preempted
        hits = {}
        for case in (WAITING[0], Case("answer", 12)):
            running.llm.reset_prefix_cache()
            for _ in range(2):  # the second time with a hit
                (output,) = running.run([case.ask(0)])
                assert_agrees(running, oracle, [case], [output])
            hits[case.method] = output.num_cached_tokens
        # Where only rows of the answer vote, a hit is as long as in stock: all but the last block.
        assert 0 < hits["tgv"] < hits["answer"]
        assert hits["answer"] == (len(output.prompt_token_ids) - 1) // SIZE * SIZE
        assert running.scheduler.query_rows.num_free == 330


SCHEDULE = [[6, 0.6], [30, 0.4], [61, 0.2]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.nightly),
        pytest.param({**CACHED, **CHUNKED}, id="cached"),
        pytest.param({"speculative_config": NGRAM}, id="drafts"),
    ],
)
def test_a_schedule_evicts_in_steps(
    folder: Path,
    heads: str,
    oracle: Oracle,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        "policy": "tgv",
        "head_scores": heads,
        "methods": MIXES,
        "decode": {"schedule": SCHEDULE},  # of which the first two are closer than 32 rows
        "debug": DEBUG,
    }
    names = ("tgv", "snapkv", "adakv", "streaming", "pyramidkv", "h2o", "forward", "largest")
    cases = [Case(name, 6, 0.6) for name in (*names, "rkv", "mixkv", "sparsemm")]
    with engine(folder, settings, **options) as running:
        if CACHED.items() <= options.items():
            preempt_sometimes(running, monkeypatch)
        asks = [replace(c.ask(i), xargs=step_xargs(c)) for i, c in enumerate(cases)]
        outputs = running.run(asks)
        later = tuple((after, budget) for after, budget in SCHEDULE[1:])
        assert_agrees(running, oracle, cases, outputs, schedule=later, answer_rows=ANSWER_ROWS)
        assert running.preempted or "num_gpu_blocks_override" not in options


def step_xargs(case: Case) -> dict[str, Any]:
    return {"kv_eviction": case.method, "kv_eviction_report": 1}


def test_a_ceiling_bounds_a_long_answer(folder: Path, heads: str, oracle: Oracle) -> None:
    """Prompt and answer are cut together; the number of blocks stays flat.

    The last budgets are above the ceiling, which bounds the first cut as well.
    """
    settings = {
        "policy": "tgv",
        "budget": 0.3,
        "head_scores": heads,
        "decode": {"max_tokens": 96},
        "debug": DEBUG,
    }
    names = ("snapkv", "adakv", "tgv", "streaming", "rkv", "mixkv", "sparsemm")
    cases = [Case(name, 3) for name in names]
    cases += [Case("snapkv", 0, 0.9), Case("tgv", 3, 0.7)]
    with engine(folder, settings) as running:
        asks = [replace(c.ask(i), max_tokens=200) for i, c in enumerate(cases)]
        outputs = running.run(asks)
        more = {"ceiling": 96, "buffer": 24, "answer_rows": ANSWER_ROWS}
        assert_agrees(running, oracle, cases, outputs, asks, **more)
        for output in outputs:
            _, *later = output.kv_transfer_params["kv_eviction"]["cuts"]
            assert len(later) >= 2
            assert {cut["blocks_after"] for cut in later} == {96 // SIZE}


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
        {
            "kv_eviction_budget": 0.3,
            "kv_eviction_defer": 3,
            "kv_eviction_max_tokens": 96,
        },
    ),
    (
        Case("rkv", 0, 0.4, {"ceiling": 128, "buffer": 32}),
        {
            "kv_eviction_budget": 0.4,
            "kv_eviction_defer": 0,
            "kv_eviction_max_tokens": 128,
        },
    ),
    (
        Case("elastic", 9, 0.3),  # evicts once only
        {
            "kv_eviction_schedule": "none",
            "kv_eviction_budget": 0.3,
            "kv_eviction_defer": 9,
        },
    ),
    (Case("aircache", 7, 0.4), {"kv_eviction_schedule": "7:0.4"}),
    (Case("h2o", 4, 0.5, {"schedule": ((33, 0.2),)}), {"kv_eviction_schedule": "4:0.5,33:0.2"}),
]
"""Requests, and the options that give them these cuts on any server that has `decode`."""


@pytest.mark.parametrize(
    "options",
    [
        {"decode": {"on_request": True}},
        {"decode": {"schedule": [[2, 0.7], [11, 0.15]]}, "num_blocks": 40},
    ],
    ids=["on_request", "cached"],
)
def test_requests_of_one_engine_have_their_own_cuts(
    folder: Path, oracle: Oracle, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is in the batch, and whatever the server's own requests do."""
    settings = {"policy": "tgv", "decode": options["decode"], "debug": DEBUG}
    num_blocks = options.get("num_blocks")
    more = {**CACHED, **CHUNKED, "num_gpu_blocks_override": num_blocks} if num_blocks else {}
    first = Case("tgv", 0, 0.1)
    if num_blocks:
        first = Case("tgv", 2, 0.7, {"schedule": ((11, 0.15),)})
    cases, asked = zip(*[(first, {}), *OWN], strict=True)
    with engine(folder, settings, **more) as running:
        asks = []
        for index, (case, own) in enumerate(zip(cases, asked, strict=True)):
            xargs = {"kv_eviction": case.method, "kv_eviction_report": 1, **own}
            asks.append(replace(case.ask(index), max_tokens=170, xargs=xargs))
        if num_blocks:
            preempt_sometimes(running, monkeypatch)
        outputs = running.run(asks)
        assert_agrees(running, oracle, cases, outputs, asks, answer_rows=ANSWER_ROWS)
        assert running.preempted or not num_blocks
        for case, output in zip(cases, outputs, strict=True):
            report = output.kv_transfer_params["kv_eviction"]
            assert (report["defer"], report["budget"]) == (case.defer, case.budget)
            assert (report["decode"] is not None) == bool(case.own)
            assert len(report["cuts"]) > 1 or not case.own, case
        # Alone, or behind others, a request answers the same.
        again = [replace(ask, arrival=40 * index) for index, ask in enumerate(asks[::-1])]
        assert running.tokens(again)[::-1] == [list(o.outputs[0].token_ids) for o in outputs]
