# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of vLLM, with eviction in a real engine.

Two yardsticks. Where eviction must not change a thing, every page is kept but dealt anew into fresh
blocks, and all of vLLM's answer must be stock's. Where it must, tokens and kept positions are the
oracle's. In all engines blocks that are given back are filled with NaN, prefix cache or not, and
every block is recounted in every step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from oracle.emulation import Oracle
from tests.engine.running import Ask, Engine, assert_agrees, assert_outputs_agree, engine
from tests.models import LLAVA_IMAGE, random_image, random_text
from tests.server.serving import ChatServer, eventually, messages, report_of, serve
from vllm_tgvkv.attention_cpu import EvictingCPUImpl
from vllm_tgvkv.errors import UnsupportedByEvictionError
from vllm_tgvkv.policies import POLICY_NAMES

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

DEBUG = {"poison": True, "record_kept": True, "check_integrity": True}
SETTINGS = {"policy": "tgv", "budget": 0.1, "debug": DEBUG}
BLOCK_SIZE = 32
VISION_TOKENS = 64


def question(seed: int, before: int, after: int, **fields: Any) -> Ask:
    """An image between two stretches of text of these lengths."""
    text = random_text(2 * seed, before) + LLAVA_IMAGE + random_text(2 * seed + 1, after)
    return Ask(text, (random_image(seed, 112, 112),), **fields)


def budget(value: float | str, **more: Any) -> dict[str, Any]:
    return {"kv_eviction_budget": value, **more}


_names = itertools.count()


def submit(
    running: Engine, ask: Ask, *, priority: int = 0, lora: Any = None, **sampling: Any
) -> str:
    """Add a request, with more than an `Ask` can wish for; returns its id."""
    name = f"s{next(_names)}"
    values = {
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "extra_args": dict(ask.xargs) or None,
    }
    params = SamplingParams(**(values | sampling))
    running.engine.add_request(name, ask.prompt(), params, priority=priority, lora_request=lora)
    return name


def requests(running: Engine, names: Sequence[str]) -> list[Any]:
    """The engine's own records of unfinished requests; vLLM adds a suffix to their ids."""
    found = running.scheduler.requests.values()
    return [r for name in names for r in found if r.request_id.rsplit("-", 1)[0] == name]


def drain(running: Engine, look: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Step until nothing is left; final outputs by id. `look` is called after every step."""
    finished: dict[str, Any] = {}
    for _ in range(2000):
        if not running.engine.has_unfinished_requests():
            break
        finished.update({o.request_id: o for o in running.step() if o.finished})
        look()
    assert not running.engine.has_unfinished_requests(), "a request never ends"
    running.assert_empty()
    assert_forgotten(running)
    return finished


def assert_forgotten(running: Engine) -> None:
    """The worker remembers nothing of any request, once it has heard of their end."""
    if running.evicts:
        evictor = running.evictor
        assert evictor.regions.num_live == 0
        assert not evictor.regions.num_retained.any()
        assert not evictor.observations


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Engine]:
    """A prefix cache, chunks, priorities, and a pool that several prompts do not fit into."""
    with engine(
        folder,
        SETTINGS,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        num_gpu_blocks_override=40,
        max_num_batched_tokens=160,
        max_num_seqs=5,
    ) as running:
        yield running


@pytest.fixture
def evicting(shared: Engine) -> Iterator[Engine]:
    """The same engine for every test; what a failed one leaves behind is not the next one's."""
    yield shared
    shared.core.abort_requests(list(shared.scheduler.requests))
    answers = shared.engine.output_processor
    answers.abort_requests(list(answers.request_states), internal=True)


# -- the prefix cache -----------------------------------------------------------------------


def cached_blocks(running: Engine) -> dict[tuple[int, Any], torch.Tensor]:
    """What every block of the prefix cache holds, by block and hash."""
    pool = running.evictor.pool
    content = pool.raw.view(pool.num_blocks, -1)
    blocks = running.scheduler.kv_cache_manager.block_pool.blocks
    return {
        (block.block_id, block.block_hash): content[block.block_id].clone()
        for block in blocks
        if block.block_hash is not None
    }


def test_eviction_never_makes_a_cached_block_wrong(evicting: Engine, oracle: Oracle) -> None:
    """Whatever happens around it, a block keeps its content as long as it keeps its hash.

    And that content is what the same prompts give without eviction.
    """
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
    preempted, survived = set(), 0

    def look() -> None:
        nonlocal before, survived
        preempted.update(
            r.request_id for r in evicting.scheduler.requests.values() if r.num_preemptions
        )
        now = cached_blocks(evicting)
        for key in before.keys() & now.keys():
            survived += 1
            assert torch.equal(before[key], now[key]), f"cached block {key[0]} was written"
        seen.update({hash_: content for (_, hash_), content in now.items()})
        before = now

    names = [submit(evicting, ask) for ask in asks]
    finished = drain(evicting, look)
    assert preempted
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
        tokens = oracle.generate(oracle.prompt(ask.text, ask.images), ask.max_tokens, kept)
        assert list(finished[name].outputs[0].token_ids) == tokens


def test_a_chats_turns_hit_as_in_stock_and_are_evicted_anew(
    evicting: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `prefix_reuse: full`: a second question to the image, and then the chat goes on."""
    config = replace(evicting.scheduler.eviction_config, prefix_reuse="full")
    monkeypatch.setattr(evicting.scheduler, "eviction_config", config)
    first = question(5, 60, 120, max_tokens=20)
    answer = " the answer of the first turn "
    turns = [
        first,
        replace(first, text=first.text[:-120] + random_text(51, 130)),
        replace(first, text=first.text + answer + random_text(52, 90)),
    ]
    hits = {}
    for method in ("none", "tgv"):
        evicting.llm.reset_prefix_cache()
        xargs = budget(0.4, kv_eviction=method)
        outputs = [evicting.run([replace(turn, xargs=xargs)])[0] for turn in turns]
        hits[method] = [output.num_cached_tokens for output in outputs]
    assert hits["tgv"] == hits["none"]
    assert hits["tgv"][:2] == [0, (60 + VISION_TOKENS) // BLOCK_SIZE * BLOCK_SIZE]
    # Every full block of the first prompt, and none of its answer, which read a compressed cache.
    assert hits["tgv"][2] == (60 + VISION_TOKENS + 120) // BLOCK_SIZE * BLOCK_SIZE
    kept = []
    for turn, output in zip(turns, outputs, strict=True):
        # The rows behind the hit vote, all of which are the last rows of text.
        rows = len(output.prompt_token_ids) - max(output.num_cached_tokens, 60 + VISION_TOKENS)
        with monkeypatch.context() as patch:
            window = replace(config, observation_window=min(rows, config.observation_window))
            patch.setattr(evicting.evictor, "config", window)
            asked = [replace(turn, xargs=budget(0.4))]
            assert_outputs_agree(evicting, oracle, asked, [output])
        kept.append(evicting.kept(output.request_id, len(output.prompt_token_ids)))
    shared = slice(60 + VISION_TOKENS)
    assert len({str(mask[:, :, shared].tolist()) for mask in kept}) == 3


def test_a_preempted_request_is_evicted_again_though_all_of_its_prompt_is_cached(
    evicting: Engine,
) -> None:
    """A method that looks at no attention accepts any hit, but a step has to end the prompt."""
    prompt = question(6, 60, 4 * BLOCK_SIZE - 60 + 2 * BLOCK_SIZE, max_tokens=60)
    assert (60 + VISION_TOKENS + 132) % BLOCK_SIZE == 0
    for method in ("random", "streaming"):
        wish = replace(prompt, xargs=budget(0.5, kv_eviction=method))
        alone = evicting.tokens([wish])
        holder = submit(evicting, replace(prompt, xargs={"kv_eviction": "none"}, max_tokens=100))
        name = submit(evicting, wish)
        for _ in range(25):
            evicting.step()
        (request,) = requests(evicting, [name])
        evicting.scheduler.running.remove(request)
        evicting.scheduler._preempt_request(request, 0.0)
        evictions = evicting.counters["requests_evicted"]
        finished = drain(evicting)
        assert list(finished[name].outputs[0].token_ids) == alone[0]
        assert evicting.counters["requests_evicted"] == evictions + 1
        assert len(finished[holder].outputs[0].token_ids) == 100


def test_reset_of_the_prefix_cache_under_compressed_requests(
    evicting: Engine, oracle: Oracle
) -> None:
    """It is refused while they run, or they are preempted, and no token changes."""
    asks = [
        question(10 + i, 20, 100 + 40 * i, max_tokens=40, xargs=budget(0.3), arrival=3 * i)
        for i in range(3)
    ]
    names = []
    for ask in asks:  # one decodes for long, one has just begun to, one is between two chunks
        names.append(submit(evicting, ask))
        for _ in range(2):
            evicting.step()
    evictions = evicting.counters["requests_evicted"]
    assert evicting.evictor.regions.num_live >= 2
    assert not evicting.llm.reset_prefix_cache()
    evicting.step()
    assert evicting.llm.reset_prefix_cache(reset_running_requests=True)
    pool = evicting.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert {r.status for r in requests(evicting, names)} == {RequestStatus.PREEMPTED}
    finished = drain(evicting)
    assert_outputs_agree(evicting, oracle, asks, [finished[name] for name in names])
    assert evicting.counters["requests_evicted"] >= evictions + 3


def test_an_image_that_a_hit_had_covered_is_encoded_after_a_preemption(
    evicting: Engine, oracle: Oracle
) -> None:
    """Its data did not come to the worker with the request; in stock vLLM that ends the engine."""
    ask = question(60, 20, 150, max_tokens=40, xargs=budget(0.3))
    evicting.run([ask])
    name = submit(evicting, ask)
    for _ in range(3):
        evicting.step()
    (request,) = requests(evicting, [name])
    runner = evicting.core.model_executor.driver_worker.worker.model_runner
    (image,) = runner.requests[request.request_id].mm_features
    assert image.data is None
    assert evicting.llm.reset_prefix_cache(reset_running_requests=True)
    evicting.engine.reset_encoder_cache()
    finished = drain(evicting)
    assert_outputs_agree(evicting, oracle, [ask], [finished[name]])


# -- scheduling -----------------------------------------------------------------------------


def test_priorities_decide_who_is_preempted(
    evicting: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late and urgent requests displace compressed ones; no token changes."""
    plain = [question(20 + i, 20, 150, max_tokens=120, xargs=budget(0.6)) for i in range(3)]
    urgent = [question(30 + i, 20, 250, max_tokens=150, xargs=budget(0.6)) for i in range(2)]
    victims: dict[str, bool] = {}
    scheduler = evicting.scheduler
    preempt = scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        is_compressed = scheduler.manager.is_compressed(request.request_id)
        victims[request.request_id.rsplit("-", 1)[0]] = is_compressed
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", watched)
    names = [submit(evicting, ask, priority=5) for ask in plain]
    for _ in range(12):
        evicting.step()
    names += [submit(evicting, ask, priority=1) for ask in urgent]
    finished = drain(evicting)
    assert any(victims.values())
    assert victims.keys() < set(names[:3])
    assert_outputs_agree(evicting, oracle, plain + urgent, [finished[name] for name in names])


@pytest.mark.parametrize(
    "phase",
    ["waiting", "between chunks", "the step that ends the prefill", "decoding", "preempted"],
)
def test_abort_in_every_phase(evicting: Engine, oracle: Oracle, phase: str) -> None:
    """The others go on as if nothing had been, and nothing is left behind."""
    bystander = question(40, 20, 120, max_tokens=50, xargs=budget(0.3))
    victims = [
        question(41, 20, 300, xargs=budget("auto:0.9"), max_tokens=80),
        question(42, 20, 310, xargs=budget(0.4, kv_eviction="h2o"), max_tokens=80),
    ]
    stays = submit(evicting, bystander, priority=-1)
    names = [submit(evicting, victim, priority=5) for victim in victims]
    inner = [r.request_id for r in requests(evicting, names)]
    manager = evicting.scheduler.manager

    def reached() -> bool:
        first, _ = requests(evicting, names)
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
        for request in requests(evicting, names):
            evicting.scheduler.running.remove(request)
            evicting.scheduler._preempt_request(request, 0.0)
    while not reached():
        evicting.step()
    if phase == "the step that ends the prefill":
        # An engine in a process of its own hears of it after the step ran, before it is recorded.
        evicting.core.aborts_queue.put_nowait(inner)
        evictions = evicting.counters["requests_evicted"]
        evicting.step()
        assert evicting.counters["requests_evicted"] == evictions  # `auto` counts by outcome
        evicting.engine.output_processor.abort_requests(names, internal=False)
    else:
        evicting.engine.abort_request(names)
    assert not requests(evicting, names)
    finished = drain(evicting)
    assert finished.keys() == {stays}
    assert_outputs_agree(evicting, oracle, [bystander], [finished[stays]])


def test_a_request_keeps_the_same_alone_and_in_any_batch(evicting: Engine) -> None:
    """Bit for bit: with other neighbours, chunks, hits and after a preemption."""
    asks = [
        question(60 + i, 30, 120 + 60 * i, xargs=budget(0.3, kv_eviction=method), max_tokens=30)
        for i, method in enumerate(("tgv", "snapkv", "h2o", "prefixkv"))
    ]
    want = []
    for ask in asks:
        evicting.llm.reset_prefix_cache()
        (output,) = evicting.run([ask])
        want.append((output, evicting.kept(output.request_id, len(output.prompt_token_ids))))
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        names = {i: submit(evicting, asks[i]) for i in order}
        finished = drain(evicting)
        for i, name in names.items():
            alone, kept = want[i]
            together = evicting.kept(name, len(alone.prompt_token_ids))
            assert torch.equal(together, kept), asks[i].xargs
            assert finished[name].outputs[0].token_ids == alone.outputs[0].token_ids


def test_pause_sleep_and_wake_up(evicting: Engine, oracle: Oracle) -> None:
    """A paused engine goes on where it was; one whose cache was dropped computes it anew.

    vLLM's CPU worker keeps its memory when it sleeps, so the cache is filled with NaN instead.
    """
    asks: list[Ask] = []

    def start(seed: int) -> list[str]:
        # Images of their own: vLLM loses track of an encoded image that is asked for again
        # around a reset of its caches.
        asks[:] = [question(seed + i, 20, 140, max_tokens=40, xargs=budget(0.3)) for i in range(2)]
        names = [submit(evicting, ask) for ask in asks]
        for _ in range(8):
            evicting.step()
        assert evicting.evictor.regions.num_live == 2
        return names

    names = start(70)
    evicting.llm.sleep(level=0, mode="keep")
    assert [o for _ in range(3) for o in evicting.engine.step()] == []
    evicting.llm.wake_up(tags=["scheduling"])
    finished = drain(evicting)
    assert_outputs_agree(evicting, oracle, asks, [finished[name] for name in names])

    names = start(72)
    evictions = evicting.counters["requests_evicted"]
    evicting.llm.sleep(level=1, mode="keep")
    evicting.evictor.pool.raw.fill_(float("nan"))
    evicting.llm.wake_up()
    finished = drain(evicting)
    assert_outputs_agree(evicting, oracle, asks, [finished[name] for name in names])
    assert evicting.counters["requests_evicted"] == evictions + 2

    names = start(74)
    evicting.llm.sleep(level=1, mode="abort")
    evicting.evictor.pool.raw.fill_(float("nan"))
    evicting.engine.output_processor.abort_requests(names, internal=False)
    evicting.llm.wake_up()
    evicting.assert_empty()
    assert_forgotten(evicting)
    evicting.evictor.pool.raw.zero_()
    start(76)
    drain(evicting)
    assert_agrees(evicting, oracle, asks)


def test_weights_are_reloaded(
    evicting: Engine, oracle: Oracle, tiny_model: Callable[..., Path]
) -> None:
    """Under a compressed request, and to another model's: attention stays the plugin's."""
    ask = question(80, 20, 140, max_tokens=30, xargs=budget(0.3))
    name = submit(evicting, ask)
    for _ in range(8):
        evicting.step()
    evicting.llm.collective_rpc("reload_weights")
    assert_outputs_agree(evicting, oracle, [ask], [drain(evicting)[name]])
    evicting.engine.reset_encoder_cache()
    other = tiny_model("llava", image_size=112, seed=1)
    here = evicting.engine.vllm_config.model_config.model
    for weights, its_oracle in ((str(other), Oracle(other)), (here, oracle)):
        evicting.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        evicting.llm.reset_prefix_cache()
        evicting.engine.reset_encoder_cache()
        assert_agrees(evicting, its_oracle, [ask])


# -- what is asked for wrongly --------------------------------------------------------------


WRONG: dict[str, list[Any]] = {
    "kv_eviction": [
        None,
        0,
        1.5,
        True,
        "",
        "TGV",
        "tgv ",
        "x" * 100_000,
        ["tgv"],
        {"a": 1},
        b"tgv",
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


@pytest.mark.parametrize("key", WRONG, ids=lambda key: key[:20])
def test_hostile_wishes_end_their_request_and_no_more(evicting: Engine, key: str) -> None:
    """Refused where they come in; and if one got to the engine, served without eviction."""
    ask = question(90, 20, 140, max_tokens=2)
    for value in WRONG[key]:
        with pytest.raises(VLLMValidationError, match=r"kv_eviction|extra_args") as caught:
            submit(evicting, replace(ask, xargs={key: value}))
        assert len(str(caught.value)) < 600
        assert not evicting.scheduler.requests
    names = [submit(evicting, ask) for _ in WRONG[key]]
    records = requests(evicting, names)
    skipped = evicting.counters["requests_skipped"].get("invalid_request", 0)
    for request, value in zip(records, WRONG[key], strict=True):
        request.sampling_params.extra_args = {key: value}
        evicting.scheduler._forget(request.request_id)
        evicting.scheduler._consider(request)
    assert {len(o.outputs[0].token_ids) for o in drain(evicting).values()} == {2}
    skipped += len(records)
    assert evicting.counters["requests_skipped"]["invalid_request"] == skipped


def test_images_that_overlap_cost_the_eviction_and_no_more(evicting: Engine) -> None:
    """vLLM places them side by side; told otherwise, the scheduler keeps the whole cache."""
    ask = question(95, 20, 140, max_tokens=2)
    names = [submit(evicting, ask) for _ in range(3)]
    skipped = evicting.counters["requests_skipped"].get("unsupported_request", 0)
    for request, shift in zip(requests(evicting, names), (1, -1, 10_000), strict=True):
        placed = request.mm_features
        (image,) = placed
        where = replace(image.mm_position, offset=image.mm_position.offset + shift)
        evicting.scheduler._forget(request.request_id)
        request.mm_features = [replace(image, mm_position=where), image]
        evicting.scheduler._consider(request)
        request.mm_features = placed
    assert {len(o.outputs[0].token_ids) for o in drain(evicting).values()} == {2}
    assert evicting.counters["requests_skipped"]["unsupported_request"] == skipped + 3


def test_odd_prompts_are_evicted_or_pass(evicting: Engine) -> None:
    """All methods, on prompts of images alone, of text alone, and images at either end."""
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
    # Placeholders by token id, and no image: text as far as vLLM is concerned.
    token = evicting.engine.vllm_config.model_config.hf_config.image_token_id
    params = SamplingParams(max_tokens=3, temperature=0)
    prompt = {"prompt_token_ids": [token] * 200}
    (output,) = evicting.llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    "ask",
    [
        Ask(LLAVA_IMAGE * 5, tuple(random_image(i) for i in range(5))),  # the limit is 4
        Ask(LLAVA_IMAGE * 10_000, (random_image(12),) * 10_000),
        Ask(LLAVA_IMAGE, tuple(random_image(i) for i in (10, 11))),
        Ask("", (random_image(13),)),
        Ask(LLAVA_IMAGE, (Image.new("RGB", (0, 0)),)),
        Ask(LLAVA_IMAGE, (Image.new("RGB", (0, 20)),)),
        Ask(""),
        Ask("a" * 2000),
        Ask(LLAVA_IMAGE, ("not an image",)),  # type: ignore[arg-type]
    ],
    ids=[
        "five images",
        "ten thousand images",
        "two for one",
        "no place",
        "0x0",
        "0x20",
        "nothing",
        "long",
        "text",
    ],
)
def test_what_vllm_refuses_leaves_nothing_behind(evicting: Engine, ask: Ask) -> None:
    with contextlib.suppress(Exception):
        submit(evicting, replace(ask, max_tokens=3))
        pytest.fail("vLLM takes it now: what becomes of it?")
    assert not evicting.scheduler.requests
    drain(evicting)
    assert len(evicting.tokens([question(91, 20, 140, max_tokens=3)])[0]) == 3


def test_sessions_of_several_inputs_pass_untouched(evicting: Engine, oracle: Oracle) -> None:
    """vLLM's streaming input appends to a prompt after it was answered: nothing may be dropped."""
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


# -- how a token is chosen ------------------------------------------------------------------

JSON_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz:"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1, "seed": 7},
    "top k, top p, min p": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 3,
    },
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logit bias": {"logit_bias": {65: 5.0, 70: -50.0}},
    "bad words": {"bad_words": ["a", "e", "th"]},
    "allowed tokens": {"allowed_token_ids": list(range(64, 90))},
    "min tokens, then a stop token": {"stop_token_ids": list(range(60, 120)), "min_tokens": 10},
    "stop string": {"stop": list(LETTERS), "min_tokens": 3, "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 5},
    "logprobs of the prompt": {"logprobs": 2, "prompt_logprobs": 3},
    "several": {"n": 2, "temperature": 1, "seed": 11, "output_kind": RequestOutputKind.FINAL_ONLY},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes", "no, it is not"])},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f ]{30,45}[.]")},
    "json": {"structured_outputs": StructuredOutputsParams(json=JSON_SCHEMA)},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(grammar='root ::= ("ab" | "cd")+ "."')
    },
    "greedy, to the end of the model's length": {"max_tokens": None},
}
FULLY = {**SETTINGS, "budget": 1.0, "debug": {**DEBUG, "evict_at_full_budget": True}}


def sample(running: Engine, preempt_every: int | None = None) -> dict[str, Any]:
    """Every kind of sampling, a request each, one arriving in every step."""
    steps = itertools.count(1)
    names: dict[str, str] = {}
    finished: dict[str, Any] = {}
    waiting = list(enumerate(SAMPLINGS.items()))
    while waiting or running.engine.has_unfinished_requests():
        if waiting:
            seed, (kind, sampling) = waiting.pop(0)
            ends = "structured_outputs" not in sampling
            ask = question(100 + seed, 20, 90 + 7 * seed, max_tokens=40)
            names[kind] = submit(running, ask, **{"ignore_eos": ends, **sampling})
        if preempt_every and not next(steps) % preempt_every and running.scheduler.running:
            running.scheduler._preempt_request(running.scheduler.running.pop(), 0.0)
        finished.update({o.request_id: o for o in running.step() if o.finished})
    running.assert_empty()
    return {kind: finished[name] for kind, name in names.items()}


def numbers(logprobs: Any) -> torch.Tensor:
    """Log-probabilities of all positions, in the order of the token ids."""
    rows = [position for position in logprobs if position]
    return torch.tensor([row[token].logprob for row in rows for token in sorted(row)])


def embedded(running: Engine) -> list[int]:
    """Tokens that follow a prompt given as embeddings."""
    vectors = torch.randn(150, 128, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (output,) = running.llm.generate([{"prompt_embeds": vectors}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def beams(running: Engine) -> list[Any]:
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (output,) = running.llm.beam_search([question(99, 20, 120).prompt()], params)
    return [(beam.tokens, pytest.approx(beam.cum_logprob, 1e-3)) for beam in output.sequences]


def test_with_everything_kept_every_way_to_sample_gives_what_stock_gives(folder: Path) -> None:
    """Through compressed caches, in chunks and after preemptions, where stock had none of it."""
    options = {"max_model_len": 336, "enable_prefix_caching": True, "enable_prompt_embeds": True}
    with engine(folder, **options) as stock:
        want, want_beams, want_embedded = sample(stock), beams(stock), embedded(stock)
    small = {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 256}
    with engine(folder, FULLY, **options, **small) as running:
        preemptions = []
        preempt = running.scheduler._preempt_request

        def watched(request: Any, *args: Any, **kwargs: Any) -> None:
            preemptions.append(request)
            preempt(request, *args, **kwargs)

        running.scheduler._preempt_request = watched  # type: ignore[method-assign]
        found = sample(running, preempt_every=9)
        seeded = [r for r in preemptions if r.sampling_params.seed is not None]
        guided = [r for r in preemptions if r.sampling_params.structured_outputs is not None]
        assert seeded
        assert guided
        assert running.counters["requests_evicted"] > len(SAMPLINGS) + 1
        # A beam is a request of one token; a prompt of embeddings has no token ids to hash.
        assert beams(running) == want_beams
        assert embedded(running) == want_embedded
        skipped = running.counters["requests_skipped"]
        assert skipped.keys() == {"single_token", "unsupported_request"}
        with pytest.raises(ValueError, match="only supported for pooling"):
            running.llm.embed(["a prompt"])
    for kind, stocks in want.items():
        ours = found[kind]
        for mine, its in zip(ours.outputs, stocks.outputs, strict=True):
            assert list(mine.token_ids) == list(its.token_ids), kind
            assert (mine.text, mine.finish_reason) == (its.text, its.finish_reason), kind
            assert mine.stop_reason == its.stop_reason, kind
            if its.logprobs:
                torch.testing.assert_close(numbers(mine.logprobs), numbers(its.logprobs))
        if stocks.prompt_logprobs:
            ours, stocks = numbers(ours.prompt_logprobs), numbers(stocks.prompt_logprobs)
            torch.testing.assert_close(ours, stocks, atol=1e-4, rtol=1e-4)
    to_the_end = found["greedy, to the end of the model's length"]
    assert len(to_the_end.prompt_token_ids) + len(to_the_end.outputs[0].token_ids) == 336
    assert len({choice.text for choice in found["several"].outputs}) == 2
    assert found["stop string"].outputs[0].stop_reason in LETTERS
    assert found["min tokens, then a stop token"].outputs[0].finish_reason == "stop"
    assert json.loads(found["json"].outputs[0].text).keys() == {"a", "b"}
    assert re.fullmatch("[a-f ]{30,45}[.]", found["regex"].outputs[0].text)
    assert re.fullmatch("(ab|cd)+[.]?", found["grammar"].outputs[0].text)
    assert found["choice"].outputs[0].text in ("yes", "no, it is not")


# -- adapters -------------------------------------------------------------------------------


def write_adapter(folder: Path, oracle: Oracle, seed: int) -> dict[str, torch.Tensor]:
    """Write a LoRA adapter of random weights; returns what it adds to each weight."""
    generator = torch.Generator().manual_seed(seed)
    rank, scale, added, weights = 8, 4.0, {}, {}
    for layer in range(oracle.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"model.language_model.layers.{layer}.self_attn.{name}"
            rows, columns = oracle.model.get_submodule(module).weight.shape
            down = torch.randn(rank, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, rank, generator=generator) / rows**0.5
            added[f"{module}.weight"] = scale * up @ down
            weights[f"base_model.model.{module}.lora_A.weight"] = down
            weights[f"base_model.model.{module}.lora_B.weight"] = up
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": scale * rank}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config |= {"target_modules": targets, "bias": "none", "base_model_name_or_path": ""}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return added


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name: the adapter's folder and the oracle of the model that it makes."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("first", "second")):
        adapted = Oracle(folder)
        added = write_adapter(root / name, adapted, seed)
        with torch.no_grad():
            for key, weight in added.items():
                adapted.model.get_parameter(key).add_(weight)
        found[name] = (root / name, adapted)
    return found


def test_adapters_have_caches_of_their_own(
    folder: Path, oracle: Oracle, adapters: dict[str, Any]
) -> None:
    """Two LoRA adapters and none, in one batch: each keeps what its own attention says."""
    models = {"": (None, oracle)}
    for number, (name, (path, adapted)) in enumerate(adapters.items(), 1):
        models[name] = (LoRARequest(name, number, str(path)), adapted)
    ask = question(130, 60, 160, max_tokens=30, xargs=budget(0.4))
    others = {name: question(131 + i, 20, 180, max_tokens=40) for i, name in enumerate(models)}
    with engine(
        folder,
        SETTINGS,
        enable_lora=True,
        max_loras=3,  # on CPU vLLM gives a request without adapter the last one: an empty one
        enable_prefix_caching=True,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=160,
    ) as running:
        names: list[tuple[str, str, Ask]] = []
        for asked in (dict.fromkeys(models, ask), others):
            for name, (lora, _) in models.items():
                names.append((submit(running, asked[name], lora=lora), name, asked[name]))
                running.step()
        finished = drain(running)
        for request_id, name, asked_ in names:
            assert finished[request_id].num_cached_tokens == 0
            assert_outputs_agree(running, models[name][1], [asked_], [finished[request_id]])
        first = [running.kept(request_id, 284) for request_id, *_ in names[:3]]
        assert len({str(kept.nonzero().tolist()) for kept in first if kept is not None}) == 3
        for name, (lora, its_oracle) in models.items():  # the second time it hits its own blocks
            again = submit(running, ask, lora=lora)
            output = drain(running)[again]
            # All but the rows that vote, of which there are 128.
            assert output.num_cached_tokens == (284 - 128) // BLOCK_SIZE * BLOCK_SIZE, name
            assert_outputs_agree(running, its_oracle, [ask], [output])
        guided = StructuredOutputsParams(json=JSON_SCHEMA)
        lora = models["first"][0]
        name = submit(running, ask, lora=lora, structured_outputs=guided, ignore_eos=False)
        text = drain(running)[name].outputs[0].text
        assert running.kept(name, 284) is not None
        assert text.lstrip().startswith("{")
        assert set(text) <= set('{}" ab:0123456789-,yesno\n\t\r')


# -- options of the server ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 1024,
            "mm_processor_cache_gb": 0,
            "scheduler_reserve_full_isl": False,
            "watermark": 0.2,
            "skip_mm_profiling": True,
        },
        {
            "long_prefill_token_threshold": 48,
            "disable_chunked_mm_input": True,
            "max_num_active_seqs": 3,
            "max_num_batched_tokens": 128,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
        },
    ],
    ids=["whole prompts", "short chunks"],
)
def test_options_that_decide_how_prompts_are_scheduled(
    folder: Path, oracle: Oracle, options: dict[str, Any]
) -> None:
    """Tokens and kept positions do not depend on them; events tell what the prefix cache holds."""
    asks = [
        question(140 + i, 10 + 17 * i, 260 - 40 * i, xargs=budget(0.3), max_tokens=60, arrival=i)
        for i in range(5)
    ]
    asks.append(replace(asks[0], arrival=70))
    with engine(folder, SETTINGS, num_gpu_blocks_override=40, **options) as running:
        stored: set[Any] = set()

        def listen(batch: Any) -> None:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    stored.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    stored.difference_update(event.block_hashes)

        running.scheduler.kv_event_publisher.publish = listen  # type: ignore[method-assign]
        outputs = assert_agrees(running, oracle, asks)
        assert running.counters["requests_evicted"] >= len(asks)
        if "kv_events_config" in options:
            assert outputs[-1].num_cached_tokens > 0
            cached = running.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
            assert len(stored) == len(cached)
            assert stored


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("alibi_slopes", [0.5] * 4, "ALiBi"),
        ("kv_sharing_target_layer_name", "layer", "layers that share a KV cache"),
        ("sinks", torch.zeros(4), "learned attention sinks"),
        ("logits_soft_cap", 30.0, "soft-capped"),
        ("sliding_window", 64, "sliding-window"),
    ],
)
def test_layers_that_attend_otherwise_are_refused(
    folder: Path, field: str, value: Any, what: str
) -> None:
    """What no flag and no field of a configuration tells is found when the layer is made."""
    plain = {"num_heads": 4, "head_size": 32, "scale": 1.0, "num_kv_heads": 2}
    plain |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    with set_current_vllm_config(EngineArgs(model=str(folder)).create_engine_config()):
        EvictingCPUImpl(**plain)
        with pytest.raises(UnsupportedByEvictionError, match=what):
            EvictingCPUImpl(**{**plain, field: value})


# -- over HTTP ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(
    folder: Path, adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    """Adapters, vLLM's own control routes, and a line for each request."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--kv-eviction-budget", "0.3", "--enable-log-requests", "--scheduling-policy"]
    flags += ["priority", "--enable-lora", "--max-loras", "3", "--lora-modules"]
    flags += [f"{name}={path}" for name, (path, _) in adapters.items()]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with serve(folder, log, {"debug": DEBUG}, environment=environment, flags=flags) as running:
        yield running


def post(server: ChatServer, route: str) -> Any:
    request = urllib.request.Request(f"{server.url}{route}", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or b"null")


def answer(server: ChatServer, xargs: dict[str, Any], model: str = "tiny", **fields: Any) -> Any:
    """One chat answer; `extra_body` is joined with what every request has."""
    extra = {"vllm_xargs": {"kv_eviction_report": 1, **xargs}, **fields.pop("extra_body", {})}
    body = {"messages": messages(1), "max_tokens": 30, "temperature": 0, **fields}
    return server.client.chat.completions.create(model=model, extra_body=extra, **body)


def test_guided_answers_and_logprobs_over_http(server: ChatServer) -> None:
    schema = {"name": "s", "schema": JSON_SCHEMA, "strict": True}
    guided = answer(
        server,
        {},
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(guided.choices[0].message.content).keys() == {"a", "b"}
    assert report_of(guided)["skip_reason"] is None
    choice = answer(server, {}, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert choice.choices[0].message.content in ("left", "right")
    assert report_of(choice)["skip_reason"] is None
    fields = {"logprobs": True, "top_logprobs": 4, "extra_body": {"prompt_logprobs": 1}}
    evicted = answer(server, {}, max_tokens=4, **fields)
    stock = answer(server, {"kv_eviction": "none"}, max_tokens=4, **fields)
    assert report_of(evicted)["skip_reason"] is None
    # The first token and the whole prompt come from the full cache.
    mine, its = (a.choices[0].logprobs.content for a in (evicted, stock))
    assert [t.token for t in mine[0].top_logprobs] == [t.token for t in its[0].top_logprobs]
    assert mine[0].logprob == pytest.approx(its[0].logprob, abs=1e-3)
    assert mine[3].logprob != pytest.approx(its[3].logprob, abs=1e-3)
    assert len(evicted.prompt_logprobs) == evicted.usage.prompt_tokens
    for here, there in zip(evicted.prompt_logprobs[1:], stock.prompt_logprobs[1:], strict=True):
        for token in here.keys() & there.keys():
            assert here[token]["logprob"] == pytest.approx(there[token]["logprob"], abs=1e-3)


def test_beams_are_stocks_over_http(server: ChatServer) -> None:
    """Each step of a beam is a request of one token, which never reads a compressed cache."""
    beams = {"n": 2, "max_tokens": 4, "extra_body": {"use_beam_search": True}}
    texts = [
        [choice.message.content for choice in answer(server, xargs, **beams).choices]
        for xargs in ({}, {"kv_eviction": "none"})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2


def test_adapters_are_models_over_http(server: ChatServer) -> None:
    answers = [answer(server, {}, model=model) for model in ("tiny", "first", "second")]
    assert len({a.choices[0].message.content for a in answers}) == 3
    assert {report_of(a)["skip_reason"] for a in answers} == {None}
    # Our numbers travel in a field of vLLM's statistics that is there for adapters.
    labels = [sample.labels for sample in server.samples("vllm:lora_requests_info")]
    assert labels
    assert not [value for label in labels for value in label.values() if "eviction" in value]


def test_a_client_that_goes_away(server: ChatServer) -> None:
    stream = answer(server, {}, max_tokens=600, stream=True, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(stream)
    stream.close()
    running = ("vllm:num_requests_running", "vllm:kv_eviction_compressed_requests")

    def nothing_runs() -> bool:
        answer(server, {}, max_tokens=2)  # statistics come with steps
        return not any(sample.value for sample in server.samples(*running))

    assert eventually(nothing_runs)


@pytest.mark.parametrize(
    "disturb",
    [("/pause?mode=keep", "/resume"), ("/reset_prefix_cache?reset_running_requests=true",)],
    ids=["pause", "reset"],
)
def test_control_routes_change_no_answer(server: ChatServer, disturb: Sequence[str]) -> None:
    # An image that was not asked for before, which vLLM would lose track of.
    fields = {"max_tokens": 150, "messages": messages(10 + len(disturb))}
    fields["extra_body"] = {"ignore_eos": True}
    stream = answer(server, {}, stream=True, **fields)
    chunks = (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    text = "".join(itertools.islice(chunks, 4))
    for route in disturb:
        told = post(server, route)
        assert told in ({"status": "paused"}, {"status": "resumed"}, {"success": True})
    disturbed = text + "".join(chunks)
    assert answer(server, {}, **fields).choices[0].message.content == disturbed


@pytest.mark.parametrize("route", ["embeddings", "audio/transcriptions", "audio/translations"])
def test_what_the_model_cannot_do_is_an_error_of_vllms(server: ChatServer, route: str) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        server.client.post(f"/{route}", cast_to=object, body={"model": "tiny", "input": "a"})
    assert report_of(answer(server, {}, max_tokens=2))["skip_reason"] is None


def test_the_servers_log_tells_requests_and_no_error(server: ChatServer) -> None:
    lines = server.lines()
    assert [line for line in lines if "Received request" in line]
    assert [line for line in lines if re.search(r"\bERROR\b|Traceback|Integrity", line)] == []
