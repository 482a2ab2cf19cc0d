# SPDX-License-Identifier: Apache-2.0
"""Prefix cache, preemption, aborts and invalid requests in one engine with a small pool.

Blocks that are released are filled with NaN, and every block is recounted in every step. Where
eviction must not change anything, the result must be stock vLLM's; elsewhere tokens and kept
positions must be the oracle's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.request import Request, RequestStatus

from oracle.emulation import Oracle
from tests.engine.questions import BLOCK_SIZE, SETTINGS, VISION_TOKENS, budget, question
from tests.engine.running import Ask, SteppedEngine, assert_agrees, assert_outputs_agree
from tests.models import LLAVA_IMAGE, random_image, random_text
from vllm_tgvkv.policies import POLICY_NAMES

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def evicting(engines: Callable[..., SteppedEngine], folder: Path) -> SteppedEngine:
    """Return an engine with prefix cache, chunks, priorities and a pool for few prompts."""
    return engines(
        folder,
        SETTINGS,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        num_gpu_blocks_override=40,
        max_num_batched_tokens=160,
        max_num_seqs=5,
    )


# -- the prefix cache -----------------------------------------------------------------------


def cached_blocks(running: SteppedEngine) -> dict[tuple[int, Any], torch.Tensor]:
    """Return the content of every block in the prefix cache, by block and hash."""
    pool = running.evictor.pool
    content = pool.raw.view(pool.num_blocks, -1)
    blocks = running.scheduler.kv_cache_manager.block_pool.blocks
    return {
        (block.block_id, block.block_hash): content[block.block_id].clone()
        for block in blocks
        if block.block_hash is not None
    }


def test_eviction_never_makes_a_cached_block_wrong(evicting: SteppedEngine, oracle: Oracle) -> None:
    """A block keeps its content as long as its hash, and it is the content without eviction."""
    evicting.llm.reset_prefix_cache()
    shared = question(1, 100, 150)
    other = replace(shared, text=shared.text[:-90] + random_text(9, 120))
    asks = [
        replace(ask, xargs=budget(0.5, kv_eviction=method), max_tokens=90)
        for ask, method in itertools.product(
            (shared, other, question(2, 30, 200)), ("tgv", "random", "h2o")
        )
    ]
    seen: dict[Any, torch.Tensor] = {}
    before: dict[tuple[int, Any], torch.Tensor] = {}
    survived = 0

    def compare() -> None:
        nonlocal before, survived
        now = cached_blocks(evicting)
        for key in before.keys() & now.keys():
            survived += 1
            assert torch.equal(before[key], now[key]), f"cached block {key[0]} was written"
        seen.update({hash_: content for (_, hash_), content in now.items()})
        before = now

    names = [evicting.add(ask) for ask in asks]
    finished = evicting.drain(compare)
    assert evicting.preempted.keys() & set(names)
    assert survived > 1000
    assert evicting.llm.reset_prefix_cache()
    stock: dict[Any, torch.Tensor] = {}
    for ask in (shared, other, question(2, 30, 200)):
        evicting.run([replace(ask, xargs={"kv_eviction": "none"}, max_tokens=2)])
        stock.update({hash_: content for (_, hash_), content in cached_blocks(evicting).items()})
    assert len(stock) > 15
    assert stock.keys() == seen.keys()
    for hash_, content in stock.items():
        torch.testing.assert_close(seen[hash_], content, atol=1e-3, rtol=1e-3)
    for name, ask in zip(names, asks, strict=True):
        kept = evicting.kept(name, len(finished[name].prompt_token_ids))
        tokens = list(finished[name].outputs[0].token_ids)
        prompt = oracle.prompt(ask.text, ask.images)
        assert tokens == oracle.generate(prompt, ask.max_tokens, kept, guess=tokens)


def test_a_preempted_request_is_evicted_again_though_all_of_its_prompt_is_cached(
    evicting: SteppedEngine,
) -> None:
    """A method without attention accepts any hit, but a step must still end the prompt."""
    prompt = question(6, 60, 4 * BLOCK_SIZE - 60 + 2 * BLOCK_SIZE, max_tokens=60)
    assert (60 + VISION_TOKENS + 132) % BLOCK_SIZE == 0
    for method in ("random", "streaming"):
        ask = replace(prompt, xargs=budget(0.5, kv_eviction=method))
        alone = evicting.tokens([ask])
        holder = evicting.add(replace(prompt, xargs={"kv_eviction": "none"}, max_tokens=100))
        name = evicting.add(ask)
        for _ in range(25):
            evicting.step()
        (request,) = evicting.requests([name])
        evicting.preempt(request)
        evictions = evicting.counters["requests_evicted"]
        finished = evicting.drain()
        assert list(finished[name].outputs[0].token_ids) == alone[0]
        assert evicting.counters["requests_evicted"] == evictions + 1
        assert len(finished[holder].outputs[0].token_ids) == 100


def test_reset_of_the_prefix_cache_under_compressed_requests(
    evicting: SteppedEngine, oracle: Oracle
) -> None:
    """Refused while they run, else they are preempted; no token changes."""
    asks = [
        question(10 + i, 20, 100 + 40 * i, max_tokens=40, xargs=budget(0.3), arrival=3 * i)
        for i in range(3)
    ]
    names = []
    for ask in asks:  # one decodes, one has just begun to, one is between two chunks
        names.append(evicting.add(ask))
        for _ in range(2):
            evicting.step()
    evictions = evicting.counters["requests_evicted"]
    assert evicting.evictor.regions.num_live >= 2
    assert not evicting.llm.reset_prefix_cache()
    evicting.step()
    assert evicting.llm.reset_prefix_cache(reset_running_requests=True)
    pool = evicting.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert {r.status for r in evicting.requests(names)} == {RequestStatus.PREEMPTED}
    finished = evicting.drain()
    assert_outputs_agree(evicting, oracle, asks, [finished[name] for name in names])
    assert evicting.counters["requests_evicted"] >= evictions + 3


def test_an_image_that_a_hit_had_covered_is_encoded_after_a_preemption(
    evicting: SteppedEngine, oracle: Oracle
) -> None:
    """The worker did not get its data with the request; stock vLLM ends there."""
    ask = question(60, 20, 150, max_tokens=40, xargs=budget(0.3))
    evicting.run([ask])
    name = evicting.add(ask)
    for _ in range(3):
        evicting.step()
    (request,) = evicting.requests([name])
    runner = evicting.core.model_executor.driver_worker.worker.model_runner
    (image,) = runner.requests[request.request_id].mm_features
    assert image.data is None
    assert evicting.llm.reset_prefix_cache(reset_running_requests=True)
    evicting.engine.reset_encoder_cache()
    finished = evicting.drain()
    assert_outputs_agree(evicting, oracle, [ask], [finished[name]])


# -- scheduling -----------------------------------------------------------------------------


def test_priorities_decide_who_is_preempted(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Late urgent requests displace compressed ones; no token changes."""
    plain = [question(20 + i, 20, 150, max_tokens=120, xargs=budget(0.6)) for i in range(3)]
    urgent = [question(30 + i, 20, 250, max_tokens=150, xargs=budget(0.6)) for i in range(2)]
    evictions = evicting.counters["requests_evicted"]
    names = [evicting.add(ask, priority=5) for ask in plain]
    for _ in range(12):
        evicting.step()
    names += [evicting.add(ask, priority=1) for ask in urgent]
    finished = evicting.drain()
    # Each is evicted once, and once more if it was compressed when it was preempted.
    assert evicting.counters["requests_evicted"] > evictions + len(names)
    preempted = evicting.preempted.keys() & set(names)
    assert preempted < set(names[:3])
    assert_outputs_agree(evicting, oracle, plain + urgent, [finished[name] for name in names])


@pytest.mark.parametrize(
    "phase",
    ["waiting", "between chunks", "the step that ends the prefill", "decoding", "preempted"],
)
def test_abort_in_every_phase(evicting: SteppedEngine, oracle: Oracle, phase: str) -> None:
    """The others continue undisturbed, and no state is left."""
    bystander = question(40, 20, 120, max_tokens=50, xargs=budget(0.3))
    victims = [
        question(41, 20, 300, xargs=budget("auto:0.9"), max_tokens=80),
        question(42, 20, 310, xargs=budget(0.4, kv_eviction="h2o"), max_tokens=80),
    ]
    stays = evicting.add(bystander, priority=-1)
    names = [evicting.add(victim, priority=5) for victim in victims]
    inner = [r.request_id for r in evicting.requests(names)]
    manager = evicting.scheduler.manager

    def reached() -> bool:
        first, _ = evicting.requests(names)
        computed, length = first.num_computed_tokens, first.num_prompt_tokens
        return {
            "waiting": True,
            "between chunks": 0 < computed < length,
            "the step that ends the prefill": 0 < computed < length <= computed + 160,
            "decoding": manager.is_compressed(inner[1]) and manager.is_compressed(inner[0]),
            "preempted": first.status == RequestStatus.PREEMPTED,
        }[phase]

    if phase == "preempted":
        for _ in range(12):
            evicting.step()
        for request in evicting.requests(names):
            evicting.preempt(request)
    while not reached():
        evicting.step()
    if phase == "the step that ends the prefill":
        # An engine in another process learns of it after the step ran, before it is recorded.
        evicting.core.aborts_queue.put_nowait(inner)
        evictions = evicting.counters["requests_evicted"]
        evicting.step()
        assert evicting.counters["requests_evicted"] == evictions  # `auto` counts by outcome
        evicting.engine.output_processor.abort_requests(names, internal=False)
    else:
        evicting.engine.abort_request(names)
    assert not evicting.requests(names)
    finished = evicting.drain()
    assert finished.keys() == {stays}
    assert_outputs_agree(evicting, oracle, [bystander], [finished[stays]])


def test_a_paused_engine_continues(evicting: SteppedEngine, oracle: Oracle) -> None:
    """One whose memory was given back is in `test_sleep.py`."""
    asks = [question(70 + i, 20, 140, max_tokens=40, xargs=budget(0.3)) for i in range(2)]
    names = [evicting.add(ask) for ask in asks]
    for _ in range(8):
        evicting.step()
    assert evicting.evictor.regions.num_live == 2
    evicting.llm.sleep(level=0, mode="keep")
    assert [o for _ in range(3) for o in evicting.engine.step()] == []
    evicting.llm.wake_up(tags=["scheduling"])
    finished = evicting.drain()
    assert_outputs_agree(evicting, oracle, asks, [finished[name] for name in names])


def test_weights_are_reloaded(
    evicting: SteppedEngine, oracle: Oracle, tiny_model: Callable[..., Path]
) -> None:
    """Under a compressed request, and from another model: attention stays the plugin's."""
    ask = question(80, 20, 140, max_tokens=30, xargs=budget(0.3))
    name = evicting.add(ask)
    for _ in range(8):
        evicting.step()
    evicting.llm.collective_rpc("reload_weights")
    assert_outputs_agree(evicting, oracle, [ask], [evicting.drain()[name]])
    evicting.engine.reset_encoder_cache()
    other = tiny_model("llava", image_size=112, seed=1)
    here = evicting.engine.vllm_config.model_config.model
    for weights, its_oracle in ((str(other), Oracle(other)), (here, oracle)):
        evicting.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        evicting.llm.reset_prefix_cache()
        evicting.engine.reset_encoder_cache()
        assert_agrees(evicting, its_oracle, [ask])


# -- invalid and unusual requests -----------------------------------------------------------


INVALID: dict[str, list[Any]] = {
    "kv_eviction": [
        *(None, 0, 1.5, True, "", "TGV", "tgv ", "x" * 100_000, ["tgv"], {"a": 1}, b"tgv")
    ],
    "kv_eviction_budget": [
        *(None, True, "", "half", "9" * 5000, 10**400, -(10**5000), [], {}, "0x10", 1e-400),
        *(float("inf"), float("nan"), "auto:", "auto:nan", "auto:0.9,min=2", "auto:1" * 9999),
    ],
    "kv_eviction_report": ["1", 2, [1], {}, None, float("nan"), 10**5000],
    "kv_eviction_trace": ["1", 2, [1], {}, None],
    "kv_eviction_" + "x" * 10_000: [1],
    "kv_eviction\x00": [1],
}


@pytest.mark.parametrize("key", INVALID, ids=lambda key: key[:20])
def test_hostile_options_end_their_request_and_no_more(
    evicting: SteppedEngine, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The front end refuses them; one that reached the scheduler is served without eviction."""
    ask = question(90, 20, 140, max_tokens=2)
    for value in INVALID[key]:
        with pytest.raises(VLLMValidationError, match=r"kv_eviction|extra_args") as caught:
            evicting.add(replace(ask, xargs={key: value}))
        assert len(str(caught.value)) < 600
        assert not evicting.scheduler.requests
    skipped = evicting.counters["requests_skipped"].get("invalid_request", 0)
    add_request = evicting.scheduler.add_request
    for value in INVALID[key]:

        def add_hostile(request: Request, value: Any = value) -> None:
            assert request.sampling_params is not None
            request.sampling_params.extra_args = {key: value}
            add_request(request)

        monkeypatch.setattr(evicting.scheduler, "add_request", add_hostile)
        evicting.add(ask)
    assert {len(o.outputs[0].token_ids) for o in evicting.drain().values()} == {2}
    skipped += len(INVALID[key])
    assert evicting.counters["requests_skipped"]["invalid_request"] == skipped


def test_images_that_overlap_cost_the_eviction_and_no_more(
    evicting: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM never places images so; if it did, the scheduler would keep the whole cache."""
    ask = question(95, 20, 140, max_tokens=2)
    skipped = evicting.counters["requests_skipped"].get("unsupported_request", 0)
    add_request = evicting.scheduler.add_request
    for shift in (1, -1, 10_000):

        def add_overlapping(request: Request, shift: int = shift) -> None:
            placed = request.mm_features
            (image,) = placed
            position = replace(image.mm_position, offset=image.mm_position.offset + shift)
            request.mm_features = [replace(image, mm_position=position), image]
            add_request(request)
            request.mm_features = placed

        monkeypatch.setattr(evicting.scheduler, "add_request", add_overlapping)
        evicting.add(ask)
    assert {len(o.outputs[0].token_ids) for o in evicting.drain().values()} == {2}
    assert evicting.counters["requests_skipped"]["unsupported_request"] == skipped + 3


def test_odd_prompts_are_evicted_or_pass(evicting: SteppedEngine) -> None:
    """Every method, on prompts of only images, only text, and images at either end."""
    images = tuple(random_image(i, 112, 112) for i in range(4))
    tiny = tuple(Image.new("RGB", (1, 1), (i, 0, 0)) for i in range(4))
    text = random_text(7, 150)
    prompts = [
        (LLAVA_IMAGE * 4, images),
        (LLAVA_IMAGE * 4, tiny),
        (LLAVA_IMAGE * 2 + text, images[:2]),
        (text + LLAVA_IMAGE * 2, images[:2]),
        (LLAVA_IMAGE * 3 + text, images[:1]),  # two placeholders are text, as they are to vLLM
        (text * 2, ()),
        ("a", ()),
    ]
    for prompt, pictures in prompts:
        asks = [
            Ask(prompt, pictures, 20, budget(value, kv_eviction=name, kv_eviction_report=1))
            for name, value in zip(POLICY_NAMES, itertools.cycle((0.1, 0.5, 3)))
        ]
        for output in evicting.run(asks):
            report = output.kv_transfer_params["kv_eviction"]
            assert len(output.outputs[0].token_ids) == 20
            assert all(0 <= token < 260 for token in output.outputs[0].token_ids)
            evicted = report["skip_reason"] is None
            assert evicted == (len(pictures) > 0), report
    # Placeholders by token id without an image are text to vLLM.
    token = evicting.engine.vllm_config.model_config.hf_config.image_token_id
    params = SamplingParams(max_tokens=3, temperature=0)
    prompt = {"prompt_token_ids": [token] * 200}
    (output,) = evicting.llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids


REFUSED = {
    "five images": Ask(LLAVA_IMAGE * 5, tuple(random_image(i) for i in range(5))),  # 4 at most
    "ten thousand images": Ask(LLAVA_IMAGE * 10_000, (random_image(12),) * 10_000),
    "two for one": Ask(LLAVA_IMAGE, tuple(random_image(i) for i in (10, 11))),
    "no place": Ask("", (random_image(13),)),
    "0x0": Ask(LLAVA_IMAGE, (Image.new("RGB", (0, 0)),)),
    "0x20": Ask(LLAVA_IMAGE, (Image.new("RGB", (0, 20)),)),
    "nothing": Ask(""),
    "long": Ask("a" * 2000),
    "text": Ask(LLAVA_IMAGE, ("not an image",)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_what_vllm_refuses_leaves_nothing_behind(evicting: SteppedEngine, ask: Ask) -> None:
    with contextlib.suppress(Exception):
        evicting.add(replace(ask, max_tokens=3))
        pytest.fail("vLLM accepts it now; test what happens to it")
    assert not evicting.scheduler.requests
    evicting.drain()
    assert len(evicting.tokens([question(91, 20, 140, max_tokens=3)])[0]) == 3


def test_sessions_of_several_inputs_pass_untouched(evicting: SteppedEngine, oracle: Oracle) -> None:
    """vLLM's streaming input extends answered prompts, so nothing may be evicted."""
    ask = question(150, 20, 140, max_tokens=6)
    params = ask.sampling()
    skipped = evicting.counters["requests_skipped"].get("unsupported_request", 0)

    def chunk(prompt: Any) -> str:
        request = evicting.engine.input_processor.process_inputs(
            "session", prompt, params, evicting.engine.get_supported_tasks(), resumable=True
        )
        request.request_id = "session"
        record, _ = evicting.core.preprocess_add_request(request)
        evicting.core.add_request(record)
        tokens: list[int] = []
        for _ in range(12):
            for outputs in evicting.core.step()[0].values():
                tokens += [t for o in outputs.outputs for t in o.new_token_ids]
        return str(tokens)

    first = chunk(ask.prompt())
    assert first == str(oracle.generate(oracle.prompt(ask.text, ask.images), 6))
    assert chunk({"prompt": random_text(151, 60)}) != first
    assert evicting.counters["requests_skipped"]["unsupported_request"] == skipped + 1
    evicting.core.abort_requests(["session"])
    evicting.assert_empty()
