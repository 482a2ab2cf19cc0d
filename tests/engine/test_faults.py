# SPDX-License-Identifier: Apache-2.0
"""Faults inside an eviction: an exception fails one request, a dead worker ends the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from oracle.emulation import Oracle
from tests.engine.questions import album, budget
from tests.engine.running import Ask, SteppedEngine, assert_outputs_agree, engine
from tests.server.serving import STOP_SECONDS, serve
from vllm_tgvkv.policies.base import LayerView
from vllm_tgvkv.policies.snapkv import SnapScore
from vllm_tgvkv.policies.tgv import TgvAllocation
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.worker import observation

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[SteppedEngine]:
    """Run an engine with chunks of 160 tokens, so that prompts also fail between two chunks."""
    debug = {"poison": True, "record_kept": True, "check_integrity": True}
    settings = {"policy": "tgv", "budget": 0.2, "debug": debug}
    with engine(folder, settings, max_num_batched_tokens=160) as found:
        yield found


def with_snapkv(ask: Ask) -> Ask:
    return Ask(ask.text, ask.images, ask.max_tokens, {"kv_eviction": "snapkv"}, ask.arrival)


def failing(error: BaseException, layer: int) -> Callable[..., Any]:
    def score(self: Any, view: LayerView) -> torch.Tensor:
        if view.layer == layer:
            raise error
        return view.attention.column_sums

    return score


@pytest.mark.parametrize(
    ("error", "layer"),
    [
        (ValueError("no score for this"), 0),
        (ZeroDivisionError(), 3),
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), 2),
    ],
    ids=repr,
)
def test_a_method_that_raises_ends_its_request_with_an_error(
    running: SteppedEngine,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    layer: int,
) -> None:
    """Requests before, during and after it answer as the oracle."""
    monkeypatch.setattr(SnapScore, "__call__", failing(error, layer))
    good = [album(seed, 20, 180, max_tokens=40, arrival=seed) for seed in range(3)]
    bad = [with_snapkv(album(10 + seed, 20, 90, max_tokens=40, arrival=seed)) for seed in (0, 4)]
    skipped = running.counters["requests_skipped"].get("policy_failed", 0)
    with caplog.at_level("ERROR", "vllm.tgvkv"):
        outputs = running.run([*good, *bad])  # asserts that every block is back
    for output in outputs[len(good) :]:
        assert output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].token_ids) <= 1
    assert_outputs_agree(running, oracle, good, outputs[: len(good)], budget=0.2)
    assert running.counters["requests_skipped"]["policy_failed"] == skipped + len(bad)
    logged = [record for record in caplog.records if record.name == "vllm.tgvkv"]
    assert len(logged) == len(bad)
    assert logged[0].exc_info is not None
    assert logged[0].exc_info[1] is error
    assert running.evictor.regions.num_live == 0


def test_memory_that_runs_out_between_two_chunks(
    running: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2O observes every chunk: an early one fails, long before the eviction."""
    real, calls = observation.observe_layers, 0

    def observe(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(observation, "observe_layers", observe)
    ask = album(20, 20, 500, max_tokens=5)
    (output,) = running.run([Ask(ask.text, ask.images, 5, {"kv_eviction": "h2o"})])
    assert output.outputs[0].finish_reason == "error"
    assert not running.evictor.observations


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.25])
def test_scores_and_strengths_without_information(
    running: SteppedEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """NaN, infinite or all equal: the choice is valid and has the requested size."""
    monkeypatch.setattr(
        SnapScore, "__call__", lambda self, view: torch.full_like(view.attention.column_sums, value)
    )
    monkeypatch.setattr(
        TgvAllocation,
        "strength",
        lambda self, view, scores: scores.new_full((len(scores), 1), value),
    )
    ask = with_snapkv(album(30, 20, 200, max_tokens=30))
    tgv = album(31, 20, 200, max_tokens=30, xargs=budget(0.3))
    outputs = running.run([ask, tgv])
    for request, output in zip([ask, tgv], outputs, strict=True):
        num_tokens = len(output.prompt_token_ids)
        kept = running.kept(output.request_id, num_tokens)
        assert kept is not None
        size = running.evictor.shape.block_size
        wanted = Budget(fraction=request.xargs.get("kv_eviction_budget", 0.2))
        num_kept = wanted.retained_blocks(num_tokens, size) * size + num_tokens % size
        assert (kept.sum(-1) == num_kept).all()  # equal shares
        prompt = oracle.prompt(request.text, request.images)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, 30, kept, guess=tokens)


def test_a_worker_that_dies_in_an_eviction_fails_all_requests(folder: Path, tmp_path: Path) -> None:
    """As in stock vLLM: waiting requests get an error, and the server ends."""

    def ask(max_tokens: int) -> int:
        try:
            server.ask(max_tokens=max_tokens)
        except openai.APIStatusError as error:
            return error.status_code
        except openai.APIConnectionError:
            return 0
        return 200

    # One of vLLM's development routes tells the worker to die.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    flags = ["--worker-extension-cls", "tests.engine.dying_worker.Mortal"]
    with (
        serve(folder, tmp_path / "log", {}, environment=environment, flags=flags) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        waiting = [threads.submit(ask, 600) for _ in range(2)]
        time.sleep(1)
        call = {"method": "die_in_the_next_eviction"}
        assert httpx.post(f"{server.url}/collective_rpc", json=call, timeout=60).is_success
        waiting.append(threads.submit(ask, 8))
        codes = [future.result(60) for future in waiting]
        assert all(code == 0 or code >= 500 for code in codes)
        server.process.wait(STOP_SECONDS)
