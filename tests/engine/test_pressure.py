# SPDX-License-Identifier: Apache-2.0
"""Requests that shrink only when memory is short, and get their prompts back when it is not.

The engine's reports tell at which tokens a request was cut, to how many blocks, and when its prompt
came back. The oracle makes the same changes on a Hugging Face model and has to give the same tokens
and kept positions. Freed blocks are filled with NaN, and all blocks are recounted in every step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind

from oracle.emulation import Oracle
from tests.engine import flash_on_cpu
from tests.engine.changes import assert_changes_agree, causes_of, restore_soon
from tests.engine.questions import DEBUG, question
from tests.engine.running import Ask, SteppedEngine, engine, name_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE = 32
SETTINGS = {"policy": "reach", "budget": 0.1, "when": "pressure", "debug": DEBUG}
OPTIONS = {
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 48,
    "max_num_seqs": 6,
    "max_model_len": 640,
    "max_num_batched_tokens": 160,
    "scheduling_policy": "priority",
}
METHODS = ("reach", "snapkv", "tgv", "streaming")


def ask(seed: int, method: str = "reach", tokens: int = 90, **fields: Any) -> Ask:
    xargs = {"kv_eviction": method, "kv_eviction_report": 1, **fields.pop("xargs", {})}
    return question(seed, 60, 120 + 17 * (seed % 8), max_tokens=tokens, xargs=xargs, **fields)


@pytest.fixture(scope="module", params=["one by one", "ahead"])
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    """Yield an engine whose steps are scheduled one by one, and one that schedules ahead."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "ahead":
            flash_on_cpu.schedule_ahead(monkeypatch)
        with engine(folder, SETTINGS, **OPTIONS) as running:
            assert running.core.async_scheduling == (request.param == "ahead")
            yield running


@pytest.fixture
def running(started: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> SteppedEngine:
    """Return it with an empty prefix cache; requests get their prompts back soon."""
    restore_soon(monkeypatch)
    assert started.scheduler.reset_prefix_cache()
    started.evictor.kept.clear()
    return started


def causes(outputs: Sequence[Any]) -> list[list[str]]:
    return [causes_of(output) for output in outputs]


def test_with_room_answers_are_those_of_the_whole_cache(
    running: SteppedEngine, oracle: Oracle
) -> None:
    asks = [ask(seed, method) for seed, method in enumerate(METHODS[:3])]
    outputs = running.run(asks)
    assert causes(outputs) == [[], [], []]
    for asked, output in zip(asks, outputs, strict=True):
        prompt = oracle.prompt(asked.text, asked.images)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, asked.max_tokens, guess=tokens)


def serve(
    running: SteppedEngine,
    asks: Sequence[Ask],
    priorities: Sequence[int] = (),
    crowds: Mapping[int, int] | None = None,
    preempt_at: Sequence[int] = (),
    **sampling: Any,
) -> list[Any]:
    """Serve requests that arrive at their steps; return their outputs in order.

    Args:
        priorities: of the requests.
        crowds: by step, a number of requests with long prompts that arrive besides, and are
            aborted 7 steps later: what is freed for them may come back.
        preempt_at: steps before which a request that shrank is preempted, the longest first.
        sampling: fields of the requests' `SamplingParams`.
    """
    names: dict[int, str] = {}
    crowd: list[tuple[int, str]] = []
    finished: dict[str, Any] = {}
    for step in itertools.count():
        for index, asked in enumerate(asks):
            if asked.arrival == step:
                priority = priorities[index] if priorities else 0
                names[index] = running.add(asked, priority=priority, **sampling)
        for number in range((crowds or {}).get(step, 0)):
            long = question(50 + number, 100, 420, xargs={"kv_eviction": "none"})
            crowd.append((step + 7, running.add(long, priority=9)))
        for end, name in crowd:
            if end == step:
                running.engine.abort_request([name])
        if step in preempt_at:
            shrunk = [r for r in running.scheduler.running if is_shrunk(running, r.request_id)]
            running.preempt(max(shrunk, key=lambda request: request.num_output_tokens))
        if len(names) == len(asks) and not running.engine.has_unfinished_requests():
            break
        finished.update({each.request_id: each for each in running.step() if each.finished})
        assert step < 2000, "a request never ends"
    running.assert_empty()
    running.assert_forgotten()
    return [finished[names[index]] for index in range(len(asks))]


def is_shrunk(running: SteppedEngine, request_id: str) -> bool:
    return running.scheduler.manager.is_compressed(request_id)


def test_bursts(running: SteppedEngine, oracle: Oracle) -> None:
    """Crowds come and go: requests are cut, cut further, whole again, cut again, preempted."""
    asks = [ask(seed, METHODS[seed % 4], 200, arrival=3 * seed) for seed in range(4)]
    asks += [ask(10 + i, METHODS[i % 4], 60, arrival=90 + i) for i in range(4)]
    crowds = {30: 1, 70: 1, 110: 2, 150: 2, 190: 1}
    # What is in flight when a test preempts would be computed twice.
    preempt_at = () if running.core.async_scheduling else (48, 160)
    outputs = serve(running, asks, [0, 1, 0, 1] * 2, crowds, preempt_at)
    assert_changes_agree(running, oracle, asks, outputs)
    found = Counter(pair for each in causes(outputs) for pair in itertools.pairwise(each))
    assert sum(map(bool, causes(outputs))) >= 6
    assert found["pressure", "restored"] >= 2
    assert found["restored", "pressure"] >= 2
    assert found["pressure", "pressure"] >= 2
    assert found["pressure", "preempted"] == len(preempt_at)
    assert running.scheduler.query_rows.num_free == running.evictor.config.num_query_rows


def test_requests_with_one_prompt(running: SteppedEngine, oracle: Oracle) -> None:
    """Each is cut by itself, and nobody reads the answer of one that was cut as a prefix."""
    methods = ("reach", "reach", "tgv")
    asks = [ask(3, method, 130, arrival=4 * i) for i, method in enumerate(methods)]
    asks += [ask(20 + i, METHODS[i], 60, arrival=30 + i) for i in range(3)]
    outputs = serve(running, asks, crowds={24: 2, 60: 2})
    assert all(output.num_cached_tokens >= 8 * SIZE for output in outputs[1:3])
    assert_changes_agree(running, oracle, asks, outputs)
    assert all("pressure" in each for each in causes(outputs[:3]))
    # A second turn of the conversation finds the prompt in the cache, if that, and no more.
    said = outputs[0]
    more = replace(asks[0], text=asks[0].text + said.outputs[0].text + "again", max_tokens=20)
    (again,) = running.run([more])
    assert again.num_cached_tokens <= len(said.prompt_token_ids) // SIZE * SIZE
    assert_changes_agree(running, oracle, [more], [again])


def test_two_answers_to_one_request(
    running: SteppedEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the prompt's blocks; each is cut and restored by itself. vLLM returns one report.

    With `top_k` 1 both are the greedy answer, which vLLM gives only once otherwise.
    """
    records, reports = running.scheduler.records, {}
    close = records.close_report

    def closed(request_id: str) -> dict[str, Any] | None:
        reports[name_of(request_id)] = found = close(request_id)
        return found

    monkeypatch.setattr(records, "close_report", closed)
    several = {"n": 2, "temperature": 1, "top_k": 1, "output_kind": RequestOutputKind.FINAL_ONLY}
    asks = [ask(seed, METHODS[seed], 110, arrival=4 * seed) for seed in range(2)]
    outputs = serve(running, asks, crowds={24: 2, 60: 2}, **several)
    answers = [
        SimpleNamespace(
            request_id=f"{number}_{output.request_id}",
            outputs=[answer],
            kv_transfer_params={"kv_eviction": reports[f"{number}_{output.request_id}"]},
        )
        for output in outputs
        for number, answer in enumerate(output.outputs)
    ]
    twice = [asked for asked in asks for _ in range(2)]
    found = assert_changes_agree(running, oracle, twice, answers)
    assert len(found) == 4
    assert sum("pressure" in each for each in causes(answers)) >= 3
    assert any("restored" in each for each in causes(answers))
