# SPDX-License-Identifier: Apache-2.0
"""Drafts over compressed caches: by n-grams, a draft model and EAGLE, and at random.

The draft model is the first half of the model's layers. It sees no images. The reference is an
engine that serves the same requests without drafts and with room for all; where every page is kept,
it is stock vLLM with the same drafts. Freed blocks are filled with NaN, and all blocks are
recounted in every step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite.binding import ffi

from oracle.emulation import Oracle
from tests.engine.changes import assert_changes_agree, causes_of, restore_soon
from tests.engine.questions import DEBUG
from tests.engine.running import Ask, SteppedEngine, engine
from tests.engine.test_sampling import SAMPLINGS, numbers
from tests.models import LLAVA_IMAGE, eagle_head, language_part, random_image, random_text

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

# An engine with n-grams loads numba. Without this, no later engine of the process would start: vLLM
# on CPU reads `__dict__` of everything in every module, and llvmlite's library returns a function.
ffi._lib_fn_wrapper.get = lambda self, name: None

BLOCK_SIZE = 32
VISION_TOKENS = 64
NUM_DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
METHODS = ("ngram", "draft_model", "eagle", "eagle3")
GRANULARITIES = {name: {"base": "tgv", "granularity": name} for name in ("layer", "head")}
SETTINGS = {
    "policy": "tgv",
    "budget": 0.1,
    "methods": GRANULARITIES,
    "decode": {"on_request": True},
    "debug": {**DEBUG, "evict_at_full_budget": True},
}


def question(seed: int, after: int, method: str, budget: Any = 1.0, **fields: Any) -> Ask:
    """20 letters, an image, and `after` letters."""
    text = random_text(2 * seed, 20) + LLAVA_IMAGE + random_text(2 * seed + 1, after)
    xargs = {"kv_eviction": method, "kv_eviction_budget": budget}
    return Ask(text, (random_image(seed, 112, 112),), **{"xargs": xargs, **fields})


_BORDER = 256 - 20 - VISION_TOKENS
"""Letters that fill a block to its last slot."""
ASKS = [
    question(0, 170, "layer", 0.5),
    question(1, 211, "head", 0.5, arrival=3),
    question(2, 250, "layer", "auto:0.8", arrival=3),
    Ask(random_text(3, 150), arrival=5),
    question(4, 230, "head", "auto:0.6", arrival=6),
    question(5, 190, "none", arrival=8),
    question(6, _BORDER - 1, "head", 0.2, arrival=10),
    question(7, _BORDER, "layer", 0.5, arrival=10),
    question(8, _BORDER + 1, "head", 0.5, arrival=12),
    question(9, 120, "layer", 0.3, arrival=14, max_tokens=6),
]
WAITS = {"layer": 1, "head": 7, "h2o": 12, "streaming": 5, "snapkv": 30}
WAITING = [
    question(20 + i, 100 + 37 * i, method, 0.4, arrival=2 * i) for i, method in enumerate(WAITS)
]
for ask, defer in zip(WAITING, WAITS.values(), strict=True):
    ask.xargs["kv_eviction_defer"] = defer
for number, name in enumerate(("tgv", "adakv", "h2o")):  # cut again and again
    WAITING.append(question(26 + number, 120 + 31 * number, name, arrival=12 + 2 * number))
    WAITING[-1].xargs.pop("kv_eviction_budget")
    WAITING[-1].xargs["kv_eviction_schedule"] = "6:0.6,30:0.4,61:0.2"
NUM_EVICTED = sum(ask.xargs.get("kv_eviction", "none") != "none" for ask in ASKS)
SAMPLED = {
    **{kind: how for kind, how in SAMPLINGS.items() if kind != "logit bias"},  # refused with drafts
    "top k, top p, min p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3},
}


@dataclass(frozen=True)
class Answer:
    """A request's tokens, and the kept positions of its prompt."""

    prompt: list[int]
    tokens: list[int]
    kept: torch.Tensor | None


def answers(running: SteppedEngine, asks: Sequence[Ask]) -> list[Answer]:
    found = []
    for output in running.run(asks):
        prompt = list(output.prompt_token_ids)
        kept = running.kept(output.request_id, len(prompt))
        found.append(Answer(prompt, list(output.outputs[0].token_ids), kept))
    return found


def sampled(running: SteppedEngine) -> dict[str, Any]:
    """Serve every kind of sampling, two requests at a time, so that none is preempted.

    A preempted request loses its drafts, and drafts take random numbers as well.
    """
    finished = {}
    waiting = list(enumerate(SAMPLED.items()))
    while waiting:
        names = {}
        for seed, (kind, how) in waiting[:2]:
            ask = question(100 + seed, 90 + 7 * seed, "layer", max_tokens=40)
            ask = ask if running.evicts else replace(ask, xargs={})
            how = {"ignore_eos": "structured_outputs" not in how, **how}
            names[running.add(ask, **how)] = kind
        waiting = waiting[2:]
        finished |= {names[name]: output for name, output in running.drain().items()}
    return finished


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    """Weights so small that the model sometimes repeats itself, but still depends on its prompt."""
    return tiny_model("llava", image_size=112, initializer_range=0.055)


@pytest.fixture(scope="module")
def undrafted(folder: Path) -> dict[str, list[Answer]]:
    """Without drafts, chunks, hits and preemptions."""
    with engine(folder, SETTINGS) as running:
        found = answers(running, ASKS)
        assert running.counters["requests_evicted"] == NUM_EVICTED
        waited = answers(running, WAITING)
        assert running.counters["requests_evicted"] == NUM_EVICTED + len(WAITING)
    return {"at once": found, "waiting": waited}


@pytest.fixture(scope="module")
def alone(undrafted: dict[str, list[Answer]]) -> list[Answer]:
    return undrafted["at once"]


def speculative_config(folder: Path, method: str) -> dict[str, Any]:
    """Return the drafts that a method makes for the model in a folder."""
    if method == "ngram":
        return NGRAM
    is_eagle = method.startswith("eagle")
    model = eagle_head(folder, method) if is_eagle else language_part(folder, layers=2)
    return {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def speculative(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return speculative_config(folder, request.param)


@pytest.fixture(scope="module")
def drafting(folder: Path, alone: Any, speculative: dict[str, Any]) -> Iterator[SteppedEngine]:
    """An engine with chunks, a prefix cache, and a pool too small for several prompts.

    It starts after the others have ended, since a process has one engine at a time.
    """
    with engine(
        folder,
        SETTINGS,
        speculative_config=speculative,
        max_model_len=448,
        max_num_batched_tokens=128 + 6 * (speculative is not NGRAM),  # a draft model takes some
        max_num_seqs=6,
        num_gpu_blocks_override=25 if speculative is NGRAM else 33,
        enable_prefix_caching=True,
        disable_log_stats=False,
    ) as running:
        yield running


def draft_counts(running: SteppedEngine) -> tuple[int, int]:
    """Return the drafts that were verified and accepted so far, by vLLM's own metrics."""
    values = {metric.name: getattr(metric, "value", 0) for metric in running.llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return values[f"{prefix}draft_tokens"], values[f"{prefix}accepted_tokens"]


def preempt_often(running: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt a request, which loses its drafts, every ninth step."""
    step, steps, scheduler = running.step, itertools.count(1), running.scheduler

    def step_and_preempt() -> list[Any]:
        if not next(steps) % 9 and scheduler.running:
            running.preempt(scheduler.running[-1])
        return step()

    monkeypatch.setattr(running, "step", step_and_preempt)


def draft_at_random(
    running: SteppedEngine,
    alone: Sequence[Answer],
    monkeypatch: pytest.MonkeyPatch,
    fills: bool = False,
) -> dict[str, int]:
    """Replace n-grams: some right drafts, then some wrong ones, drawn for every row and step.

    With `fills` all rows have as many in most steps. Returns how often right drafts, and wrong ones
    only, crossed the end of a block.
    """
    runner: Any = running.core.model_executor.driver_worker.worker.model_runner
    answer_of = {tuple(answer.prompt): answer.tokens for answer in alone}
    dice = random.Random(0)
    crossed = {"accepted": 0, "rejected": 0}

    def propose(num: int, sampled: list[list[int]], lengths: Any, *_: Any, **__: Any) -> Any:
        drafts, are_full = [], fills and dice.random() < 0.8
        for row, name in enumerate(runner.input_batch.req_ids):
            prompt = runner.requests[name].prompt_token_ids
            position = int(lengths[row]) - len(prompt)
            right = answer_of[tuple(prompt)][position : position + dice.randint(0, num)]
            most = num - len(right)
            num_wrong = most if are_full else dice.randint(0, most)
            wrong = [dice.randrange(64, 90) for _ in range(num_wrong)]
            drafts.append(right + wrong if sampled[row] else [])
            slot = (int(lengths[row]) - 1) % BLOCK_SIZE
            crossed["accepted"] += slot + len(right) >= BLOCK_SIZE
            crossed["rejected"] += slot + len(right) < BLOCK_SIZE <= slot + len(drafts[-1])
        return drafts

    monkeypatch.setattr(runner.drafter, "propose", propose)
    return crossed


def assert_same(running: SteppedEngine, alone: Sequence[Answer]) -> None:
    """Check that drafts, right and wrong, change neither tokens nor kept positions."""
    running.llm.reset_prefix_cache()
    before = draft_counts(running)
    evicted = running.counters["requests_evicted"]
    for index, (found, wanted) in enumerate(zip(answers(running, ASKS), alone, strict=True)):
        assert found.tokens == wanted.tokens, f"request {index}"
        assert (found.kept is None) == (wanted.kept is None), f"request {index}"
        if found.kept is not None:
            assert torch.equal(found.kept, wanted.kept), f"request {index} keeps other tokens"
    assert running.counters["requests_evicted"] > evicted + NUM_EVICTED, "no request was preempted"
    drafted, accepted = (
        now - then for now, then in zip(draft_counts(running), before, strict=True)
    )
    assert 50 < accepted < drafted - 50


@pytest.mark.parametrize("speculative", METHODS, indirect=True)
def test_drafts_change_neither_tokens_nor_what_is_kept(
    drafting: SteppedEngine,
    alone: list[Answer],
    folder: Path,
    speculative: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle, which has no drafts, agrees."""
    if speculative is not NGRAM:  # blocks are too many for preemptions
        preempt_often(drafting, monkeypatch)
    assert_same(drafting, alone)
    oracle = Oracle(folder)
    for ask, answer in zip(ASKS, alone, strict=True):
        prompt = oracle.prompt(ask.text, ask.images)
        tokens = oracle.generate(prompt, ask.max_tokens, answer.kept, guess=answer.tokens)
        assert tokens == answer.tokens


@pytest.mark.parametrize("speculative", ["ngram"], indirect=True)
def test_random_drafts_change_nothing(
    drafting: SteppedEngine, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some right drafts, then some wrong ones, drawn for every row and step.

    So drafts that are accepted, rejected and proposed again cross block borders in every order.
    Which rows have drafts changes from step to step.
    """
    crossed = draft_at_random(drafting, alone, monkeypatch)
    preempt_often(drafting, monkeypatch)
    assert_same(drafting, alone)
    assert min(crossed.values()) > 5


def test_drafts_of_a_waiting_request_change_nothing(
    drafting: SteppedEngine, undrafted: dict[str, list[Answer]]
) -> None:
    """A draft that is rejected neither votes nor evicts."""
    wanted = undrafted["waiting"]
    _, accepted = draft_counts(drafting)
    for _ in range(2):  # the second time with hits
        for ask, found, want in zip(WAITING, answers(drafting, WAITING), wanted, strict=True):
            name = ask.xargs["kv_eviction"]
            assert found.tokens == want.tokens, name
            assert found.kept is not None
            assert want.kept is not None
            assert torch.equal(found.kept, want.kept), f"{name} keeps other tokens"
    assert draft_counts(drafting)[1] > accepted
    name = drafting.add(WAITING[4])
    while not (found := drafting.requests([name])) or found[0].num_output_tokens < 8:
        drafting.step()
    drafting.engine.abort_request([name])
    drafting.step()
    drafting.assert_empty()
    rows = drafting.scheduler.query_rows
    assert rows.num_free == drafting.scheduler.eviction_config.num_query_rows


def test_drafts_under_pressure_change_nothing(
    drafting: SteppedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts and returns are between tokens that were accepted; the oracle agrees."""
    restore_soon(monkeypatch)
    asks = []
    for number, method in enumerate(("reach", "snapkv", "tgv", "streaming") * 2):
        more = {"kv_eviction_when": "pressure", "kv_eviction_report": 1}
        asks.append(question(70 + number, 130 + 11 * number, method, 0.1, arrival=8 * number))
        asks[-1].xargs.update(more)
    drafting.llm.reset_prefix_cache()
    drafting.evictor.kept.clear()
    _, accepted = draft_counts(drafting)
    outputs = drafting.run(asks)
    assert_changes_agree(drafting, Oracle(folder), asks, outputs)
    found = Counter(cause for each in outputs for cause in causes_of(each))
    assert found["pressure"] >= 6
    if drafting.scheduler.block_size == BLOCK_SIZE:  # else most prompts have a block without a hash
        assert found["restored"]
    assert draft_counts(drafting)[1] > accepted + 10


def test_a_prompt_that_is_cached_to_its_last_token_ends_with_it(drafting: SteppedEngine) -> None:
    """With running requests, vLLM fills a first step of one token up with places for drafts."""
    length = 4 * BLOCK_SIZE + 1 - 20 - VISION_TOKENS
    evicted = question(50, length, "streaming", 0.5, max_tokens=20)  # takes any hit
    other = question(51, length, "none", max_tokens=20)
    running = question(52, 40, "none", max_tokens=60)
    asks = (evicted, other)
    drafting.llm.reset_prefix_cache()
    want = [answers(drafting, [ask])[0] for ask in asks]
    before = drafting.counters["requests_evicted"]
    drafting.add(running)
    for _ in range(4):
        drafting.step()
    names = [drafting.add(ask) for ask in asks]
    finished = drafting.drain()
    assert drafting.counters["requests_evicted"] == before + 1
    hits = [finished[name].num_cached_tokens for name in names]
    size = drafting.scheduler.block_size  # of the model's blocks and a draft model's
    assert hits == [3 * BLOCK_SIZE // size * size, 4 * BLOCK_SIZE]
    for name, wanted in zip(names, want, strict=True):
        assert list(finished[name].outputs[0].token_ids) == wanted.tokens


def test_requests_end_while_their_drafts_are_pending(drafting: SteppedEngine) -> None:
    """By an abort, or while preempted; `assert_empty` finds every block free."""
    asks = [question(60 + i, 100, "head", 0.5, max_tokens=60) for i in range(3)]
    names = [drafting.add(ask) for ask in asks]
    while not any(request.spec_token_ids for request in drafting.requests(names)):
        drafting.step()
    drafting.preempt(drafting.scheduler.running[-1])
    drafting.engine.abort_request(names)
    drafting.step()
    drafting.assert_empty()
    assert drafting.evictor.regions.num_live == 0


@pytest.mark.nightly
@pytest.mark.parametrize("speculative", METHODS, indirect=True)
def test_with_everything_kept_every_way_to_sample_gives_what_stock_gives(
    drafting: SteppedEngine, folder: Path, speculative: dict[str, Any]
) -> None:
    """Through compressed caches and in chunks, with the same drafts.

    The last test: another engine ends the shared one.
    """
    evicted = drafting.counters["requests_evicted"]
    drafted, _ = draft_counts(drafting)
    found = sampled(drafting)
    assert drafting.counters["requests_evicted"] == evicted + len(SAMPLED) + 1  # n is 2 once
    assert draft_counts(drafting)[0] > drafted
    with engine(folder, speculative_config=speculative, max_model_len=448) as running:
        stocks = sampled(running)
    for kind, stock in stocks.items():
        for mine, its in zip(found[kind].outputs, stock.outputs, strict=True):
            assert list(mine.token_ids) == list(its.token_ids), kind
            assert (mine.text, mine.finish_reason) == (its.text, its.finish_reason), kind
            assert mine.stop_reason == its.stop_reason, kind
            if its.logprobs:
                torch.testing.assert_close(numbers(mine.logprobs), numbers(its.logprobs))
