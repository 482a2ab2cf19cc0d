# SPDX-License-Identifier: Apache-2.0
"""Eviction in real engines, against an independent emulation on Hugging Face models.

Engines without prefix caching fill released pages with NaN, and every block is recounted after
every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oracle.emulation import Oracle
from tests.engine.questions import BUDGETS, VISION_TOKENS, album, budget, ladder, tgv
from tests.engine.running import Ask, SteppedEngine, assert_agrees, engine
from tests.models import QWEN_IMAGE, QWEN_VIDEO, random_text, random_video
from vllm_tgvkv.policies.tgv import TgvAllocation

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GRANULARITIES = [pytest.param("layer", marks=pytest.mark.nightly), "head"]
"""`test_methods.py` compares both by day."""


@pytest.fixture(params=GRANULARITIES)
def evicting(request: pytest.FixtureRequest) -> SteppedEngine:
    if request.param == "head":
        return request.getfixturevalue("whole")
    return request.getfixturevalue("engines")(request.getfixturevalue("folder"), tgv())


def test_tokens_and_kept_positions_are_the_oracles(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Three budgets, one to three images, interleaved arrivals and ends, long answers."""
    asks = [
        *ladder(),
        album(10, 5, 40, 90, xargs=budget(0.2), arrival=30),
        album(11, 0, 60, 0, 77, arrival=31, max_tokens=140),
        album(12, 30, 300, arrival=90, xargs={"kv_eviction_budget": 130}),
        album(13, 40, 200, arrival=90, max_tokens=7),
        album(14, 3, 10, 20, arrival=90, xargs=budget(0.6)),  # little text: vision is ranked
    ]
    assert_agrees(evicting, oracle, asks)


def test_extreme_shares_make_ragged_caches(
    evicting: SteppedEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some (layer, head) without a page, others with all of the prompt's: tokens still agree.

    The policy's shares are replaced, since a random model's are nearly equal; the oracle gets
    the kept positions.
    """
    shape, config = evicting.evictor.shape, evicting.evictor.config
    granularity = config.build_policy(config.policy).granularity
    heads = shape.num_heads if granularity == "head" else 1
    shares = torch.full((shape.num_layers, heads), 1e-6)
    shares.view(-1)[::3] = (torch.arange(len(shares.view(-1)[::3])) + 1.0) ** 4
    monkeypatch.setattr(TgvAllocation, "shares", lambda self, layers: shares)
    monkeypatch.setattr(evicting.evictor, "config", replace(config, floor_pages=0))
    asks = [album(15 + i, 20, 250 + 31 * i, xargs=budget(0.4), arrival=i) for i in range(3)]
    for ask, output in zip(asks, evicting.run(asks), strict=True):
        prompt = oracle.prompt(ask.text, ask.images)
        kept = evicting.kept(output.request_id, len(prompt.token_ids))
        assert kept is not None
        num_full = len(prompt.token_ids) // shape.block_size
        pages = kept[:, :, : num_full * shape.block_size].sum(-1) // shape.block_size
        assert pages.min() == 0
        assert pages.max() == num_full
        tokens = list(output.outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, ask.max_tokens, kept, guess=tokens)


def test_lengths_around_block_borders(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Prompts that fill their last block, just miss it, or just start a new one."""
    asks = [
        album(20 + i, 40, 256 - 40 - VISION_TOKENS + extra, max_tokens=max_tokens)
        for i, (extra, max_tokens) in enumerate(
            [(-1, 34), (0, 34), (1, 34), (31, 3), (32, 2), (33, 65)]
        )
    ]
    asks.append(Ask("a", max_tokens=40))  # a prompt of one token
    assert_agrees(evicting, oracle, asks)


def test_protected_tokens_stay_in_every_head(evicting: SteppedEngine, oracle: Oracle) -> None:
    """They are the first tokens, vision among them. A budget too small for them is raised."""
    protected = {"kv_eviction_protected_tokens": 70, "kv_eviction_report": 1}
    asks = [
        album(25, 20, 200, xargs={**budget(0.8), **protected}),
        album(26, 20, 200, xargs={**budget(0.1), **protected}),
        album(26, 20, 200, xargs={**budget(0.1), **protected, "kv_eviction_protect": "none"}),
    ]
    (ample,) = assert_agrees(evicting, oracle, asks[:1])
    small, without = evicting.run(asks[1:])
    blocks_after = []
    for output, number in ((ample, 70), (small, 70), (without, 0)):
        kept = evicting.kept(output.request_id, len(output.prompt_token_ids))
        assert kept is not None
        assert bool(kept[..., :70].all()) == bool(number)
        report = output.kv_transfer_params["kv_eviction"]
        assert report["protected_tokens"] == number
        blocks_after.append(report["blocks_after"])
    # Three blocks for them, one for the floor, and the tail; without them one and the tail.
    assert blocks_after == [7, 5, 2]


def test_what_passes_untouched_says_why(evicting: SteppedEngine, oracle: Oracle) -> None:
    before = evicting.counters["requests_skipped"]
    report = {"kv_eviction_report": 1}
    asks = {
        "text_only": Ask(random_text(1, 300), max_tokens=40, xargs=report),
        "prompt_too_short": album(2, 10, 20, max_tokens=40, xargs=report),
        "policy_none": album(3, 20, 200, xargs={"kv_eviction": "none", **report}, max_tokens=40),
        "budget_covers_prompt": album(4, 20, 200, xargs={**budget(1.0), **report}, max_tokens=40),
        "single_token": album(5, 20, 200, max_tokens=1, xargs=report),
    }
    outputs = evicting.run(list(asks.values()))
    for (reason, ask), output in zip(asks.items(), outputs, strict=True):
        prompt = oracle.prompt(ask.text, ask.images)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, ask.max_tokens, guess=tokens)
        assert output.kv_transfer_params["kv_eviction"]["skip_reason"] == reason
    after = evicting.counters["requests_skipped"]
    new = {reason: after[reason] - before.get(reason, 0) for reason in after}
    assert {reason: number for reason, number in new.items() if number} == dict.fromkeys(asks, 1)


def test_report_and_totals(evicting: SteppedEngine) -> None:
    before = evicting.counters
    ask = album(30, 36, 200, xargs={"kv_eviction_report": 1}, max_tokens=5)
    (output,) = evicting.run([ask])
    sizes = {
        "kept_tokens": 44,  # one block of 32 and the tail of 12
        "blocks_before": 10,
        "blocks_after": 2,
    }
    report = dict(output.kv_transfer_params["kv_eviction"])
    assert report.pop("kept_text_tokens") + report.pop("kept_vision_tokens") == 44
    assert set(report.pop("seconds")) == {"statistics", "selection", "copy"}
    pool = evicting.evictor.pool
    block_bytes = pool.raw.nbytes // pool.num_blocks
    assert report.pop("memory") == {
        "before": 10 * block_bytes,
        "after": 2 * block_bytes,
        "windows": 0,
        "states": 0,
        "drafts": 0,
        "given_back": 8 * block_bytes,
    }
    assert report == {
        "policy": evicting.evictor.config.policy,
        "understood": "10 % of the prompt",
        "prompt_tokens": 300,
        "budget": 0.1,
        "defer": 0,
        "when": "always",
        "decode": None,
        "protected_tokens": 0,
        **sizes,
        "vision_tokens": 64,
        "skip_reason": None,
        "trace": None,
        "cuts": [{"answer_tokens": 0, **sizes, "cause": "first"}],
        "sketch_blocks": 0,
        "recalls": [],
    }
    after = evicting.counters
    assert after["requests_evicted"] - before["requests_evicted"] == 1
    assert after["prompt_tokens_seen"] - before["prompt_tokens_seen"] == 300
    assert after["prompt_tokens_kept"] - before["prompt_tokens_kept"] == 44
    assert after["blocks_given_back"] - before["blocks_given_back"] == 8
    assert evicting.llm.collective_rpc("kv_eviction_stats") == [after]


def test_traces_say_what_was_kept(evicting: SteppedEngine) -> None:
    """As the debug option records them; a guard deals fewer pages than it has."""
    trace = {"kv_eviction_trace": 1}
    asks = [
        album(35, 20, 200, xargs={**budget(0.3), **trace}, max_tokens=3),
        album(36, 20, 240, xargs={"kv_eviction_budget": "auto:0.7", **trace}, max_tokens=3),
        album(37, 20, 240, xargs=budget(0.3), max_tokens=3),
    ]
    (before,) = evicting.llm.collective_rpc("kv_eviction_traces")
    *traced, silent = evicting.run(asks)
    shape = evicting.evictor.shape
    for output in traced:
        (found,) = evicting.llm.collective_rpc("kv_eviction_trace", args=(output.request_id,))
        num_tokens = len(output.prompt_token_ids)
        kept = evicting.kept(output.request_id, num_tokens)
        assert kept is not None
        assert found["kept_by"] == kept.flatten(0, 1).sum(0).tolist()
        full = num_tokens // shape.block_size * shape.block_size
        pages = kept[..., :full].sum(-1) // shape.block_size
        assert found["pages"] == pages.tolist()
        assert [span["grid"] for span in found["vision"]] == [[8, 8]]
        for index in range(shape.num_layers):
            args = (output.request_id, index)
            (layer,) = evicting.llm.collective_rpc("kv_eviction_trace", args=args)
            for of_set in layer["token_sets"]:
                assert len(of_set["scores"]) == full
                for head in of_set["heads"]:
                    assert of_set["positions"] == kept[index, head].nonzero().flatten().tolist()
    assert evicting.llm.collective_rpc("kv_eviction_trace", args=(silent.request_id,)) == [None]
    (listed,) = evicting.llm.collective_rpc("kv_eviction_traces")
    assert len(listed) == len(before) + len(traced)


def test_pooling_of_scores(whole: SteppedEngine) -> None:
    """Pooled scores keep other vision tokens, but the same number."""
    kept = []
    for kind in ("none", "sequence", "grid"):
        xargs = budget(0.85, kv_eviction=f"pooled-{kind}")
        (output,) = whole.run([album(120, 20, 100, max_tokens=20, xargs=xargs)])
        found = whole.kept(output.request_id, len(output.prompt_token_ids))
        assert found is not None
        kept.append(found)
    plain, *pooled = kept
    for found in pooled:
        assert found.sum() == plain.sum()
        assert not found.equal(plain)


@pytest.mark.nightly
@pytest.mark.parametrize("block_size", [16, 128])
def test_block_sizes(folder: Path, oracle: Oracle, block_size: int) -> None:
    asks = [
        album(60 + i, 20, 600 + 37 * i, xargs=budget(value), arrival=i)
        for i, value in enumerate(BUDGETS)
    ]
    options = {"block_size": block_size, "num_gpu_blocks_override": 8192 // block_size}
    with engine(folder, tgv("head"), **options) as running:
        assert_agrees(running, oracle, asks)


@pytest.mark.nightly
def test_compiled_model(folder: Path, oracle: Oracle) -> None:
    """torch.compile, vLLM's default: attention and evictions are outside the graphs."""
    asks = [
        album(75 + i, 20, 100 + 33 * i, xargs=budget(value), arrival=i)
        for i, value in enumerate(BUDGETS)
    ]
    with engine(folder, tgv("head"), enforce_eager=False) as running:
        assert_agrees(running, oracle, asks)


SMALL = {"num_gpu_blocks_override": 34, "max_num_seqs": 6}


def assert_preemption_changes_no_token(running: SteppedEngine, oracle: Oracle) -> None:
    """In a pool that cannot hold all requests some are preempted, prefill and are evicted again.

    What they had generated is computed again over the compressed cache, several tokens a
    step, so that preemption changes no token.
    """
    asks = [
        album(90 + i, 20, 100 + 10 * i, max_tokens=150, xargs=budget(0.5), arrival=i)
        for i in range(6)
    ]
    before = running.counters["requests_evicted"]
    names = [running.add(ask) for ask in asks]
    finished = running.drain()
    assert set() < running.preempted.keys() & set(names) < set(names)
    assert running.counters["requests_evicted"] > before + len(asks)
    for ask, name in zip(asks, names, strict=True):
        prompt = oracle.prompt(ask.text, ask.images)
        kept = running.kept(name, len(prompt.token_ids))
        tokens = list(finished[name].outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, ask.max_tokens, kept, guess=tokens)


def test_preemption_in_a_small_pool(folder: Path, oracle: Oracle) -> None:
    with engine(folder, tgv("head"), **SMALL) as running:
        assert_preemption_changes_no_token(running, oracle)


def test_images_and_videos_with_mrope(tiny_model: Callable[..., Path]) -> None:
    """Qwen2.5-VL: each image has its own patch grid; rotary positions in three dimensions.

    All tokens of a video's frames are vision, which the model places contiguously.
    """
    folder = tiny_model("qwen2_5_vl")
    asks = [
        album(110, 20, 200, 60, image_text=QWEN_IMAGE, xargs=budget(0.2)),
        album(111, 5, 30, 40, 230, image_text=QWEN_IMAGE, arrival=2),
        album(112, 0, 180, image_text=QWEN_IMAGE, arrival=4),
    ]
    text = random_text(1, 20) + QWEN_VIDEO + random_text(2, 120)
    settings = tgv("head", methods={"mine": {"pooling": "grid"}})
    limits = {"limit_mm_per_prompt": {"image": 4, "video": 1}, "skip_mm_profiling": True}
    with engine(folder, settings, **limits) as running:
        assert_agrees(running, Oracle(folder), asks)
        evicted = running.counters["requests_evicted"]
        # 8 frames in pairs, 84 x 112 pixels in tokens of 28 x 28.
        prompt = {"prompt": text, "multi_modal_data": {"video": [random_video(0, 8, 112, 84)]}}
        sampling = Ask("", max_tokens=40, xargs=budget(0.2, kv_eviction="mine")).sampling()
        running.engine.add_request("video", prompt, sampling)
        running.step()
        (candidate,) = running.scheduler.candidates.values()
        (request,) = running.scheduler.requests.values()
        token = running.engine.vllm_config.model_config.hf_config.video_token_id
        is_video = np.array(request.prompt_token_ids) == token
        assert is_video.any()
        assert np.array_equal(candidate.prompt.is_vision(), is_video)
        assert [(run.length, run.grid) for run in candidate.prompt.vision] == [(12, (3, 4))] * 4
        running.drain()
        assert running.counters["requests_evicted"] == evicted + 1
