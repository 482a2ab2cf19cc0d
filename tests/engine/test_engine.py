# SPDX-License-Identifier: Apache-2.0
"""Eviction in real engines, against an independent emulation on Hugging Face models.

Engines without prefix caching fill released pages with NaN, and every block is recounted after
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.emulation import Oracle
from tests.engine.running import Ask, SteppedEngine, assert_agrees, engine
from tests.models import LLAVA_IMAGE, QWEN_IMAGE, random_image, random_text
from vllm_tgvkv.policies.tgv import TgvAllocation

pytestmark = [pytest.mark.engine, pytest.mark.slow]

IMAGE_SIZE = 112
VISION_TOKENS = 64
DEBUG = {"poison": True, "record_kept": True}
BUDGETS = (0.5, 0.2, 0.1)
GRANULARITIES = [pytest.param("layer", marks=pytest.mark.nightly), "head"]
"""`test_methods.py` compares both by day."""


def tgv(granularity: str = "layer", **settings: Any) -> dict[str, Any]:
    settings = {"debug": DEBUG, **settings}
    if granularity == "layer":  # the method's own
        return {"policy": "tgv", "budget": 0.1, **settings}
    mixes = {"tgv_head": {"base": "tgv", "granularity": granularity}}
    return {"policy": "tgv_head", "budget": 0.1, "methods": mixes, **settings}


def album(seed: int, *lengths: int, image_text: str = LLAVA_IMAGE, **fields: Any) -> Ask:
    """Return a prompt of texts with these numbers of letters and an image between any two."""
    texts = [random_text(100 * seed + i, n) for i, n in enumerate(lengths)]
    sizes = [(112, 112), (140, 84), (84, 168)]
    images = tuple(
        random_image(100 * seed + i, *sizes[i % len(sizes)]) for i in range(len(lengths) - 1)
    )
    return Ask(image_text.join(texts), images, **fields)


def budget(value: float) -> dict[str, float]:
    return {"kv_eviction_budget": value}


@pytest.fixture(scope="module", params=GRANULARITIES)
def evicting(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    with engine(folder, tgv(request.param)) as running:
        yield running


def test_tokens_and_kept_positions_are_the_oracles(evicting: SteppedEngine, oracle: Oracle) -> None:
    """Three budgets, one to three images, interleaved arrivals and ends, long answers."""
    asks = [
        album(seed, 20 + 9 * seed, 170 + 41 * seed, xargs=budget(value), arrival=3 * seed)
        for seed, value in enumerate(BUDGETS)
    ]
    asks += [
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
        assert list(output.outputs[0].token_ids) == oracle.generate(prompt, ask.max_tokens, kept)


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
        assert list(output.outputs[0].token_ids) == oracle.generate(prompt, ask.max_tokens)
        assert output.kv_transfer_params["kv_eviction"]["skip_reason"] == reason
    after = evicting.counters["requests_skipped"]
    assert {reason: after[reason] - before.get(reason, 0) for reason in after} == dict.fromkeys(
        asks, 1
    )


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
        "given_back": 8 * block_bytes,
    }
    assert report == {
        "policy": evicting.evictor.config.policy,
        "prompt_tokens": 300,
        "budget": 0.1,
        "defer": 0,
        "decode": None,
        **sizes,
        "vision_tokens": 64,
        "skip_reason": None,
        "trace": None,
        "cuts": [{"answer_tokens": 0, **sizes}],
    }
    after = evicting.counters
    assert after["requests_evicted"] - before["requests_evicted"] == 1
    assert after["prompt_tokens_seen"] - before["prompt_tokens_seen"] == 300
    assert after["prompt_tokens_kept"] - before["prompt_tokens_kept"] == 44
    assert after["blocks_given_back"] - before["blocks_given_back"] == 8
    assert evicting.llm.collective_rpc("kv_eviction_stats") == [after]


def test_abort_in_prefill_and_decode(evicting: SteppedEngine) -> None:
    for steps in range(4):
        names = [evicting.add(album(40 + i, 20, 200)) for i in range(3)]
        for _ in range(steps):
            evicting.step()
        evicting.engine.abort_request(names)
        evicting.step()
        evicting.assert_empty()


def test_traces_say_what_was_kept(evicting: SteppedEngine) -> None:
    """As the debug option records them; a guard deals fewer pages than it has."""
    trace = {"kv_eviction_trace": 1}
    asks = [
        album(35, 20, 200, xargs={**budget(0.3), **trace}, max_tokens=3),
        album(36, 20, 240, xargs={"kv_eviction_budget": "auto:0.7", **trace}, max_tokens=3),
        album(37, 20, 240, xargs=budget(0.3), max_tokens=3),
    ]
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
    assert len(listed) == len(traced)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_chunked_prefill_keeps_the_same(folder: Path, oracle: Oracle, granularity: str) -> None:
    """Chunks of 64 tokens in batches with compressed requests; rows vote across chunks."""
    asks = [
        album(50, 20, 280, arrival=0),
        album(51, 20, 150, 60, arrival=2, xargs=budget(0.2)),
        album(52, 3, 200, arrival=9, xargs=budget(0.5)),
        Ask(random_text(53, 150), max_tokens=30, arrival=12),
        album(54, 100, 64, arrival=14),
    ]
    with engine(folder, tgv(granularity), max_num_batched_tokens=64) as running:
        assert_agrees(running, oracle, asks)
        names = [running.add(album(55 + i, 20, 300)) for i in range(3)]
        running.step()  # the first prompt is between two chunks
        running.engine.abort_request(names)
        running.step()
        running.assert_empty()
        assert not running.evictor.observations


@pytest.mark.parametrize("block_size", [16, pytest.param(128, marks=pytest.mark.nightly)])
def test_block_sizes(folder: Path, oracle: Oracle, block_size: int) -> None:
    asks = [
        album(60 + i, 20, 600 + 37 * i, xargs=budget(value), arrival=i)
        for i, value in enumerate(BUDGETS)
    ]
    options = {"block_size": block_size, "num_gpu_blocks_override": 8192 // block_size}
    with engine(folder, tgv("head"), **options) as running:
        assert_agrees(running, oracle, asks)


def test_full_budget_through_the_compressed_path_is_stock(folder: Path) -> None:
    """Every page is kept but copied to fresh blocks: all tokens are stock vLLM's."""
    asks = [album(70 + i, 20, 150 + 67 * i, arrival=2 * i) for i in range(4)]
    with engine(folder) as stock:
        wanted = stock.tokens(asks)
    debug = {**DEBUG, "evict_at_full_budget": True}
    settings = tgv("head", budget=1.0, debug=debug)
    with engine(folder, settings, max_num_batched_tokens=64) as running:
        assert running.tokens(asks) == wanted
        assert running.counters["requests_evicted"] == len(asks)


def test_compiled_model(folder: Path, oracle: Oracle) -> None:
    """torch.compile, vLLM's default: attention and evictions are outside the graphs."""
    asks = [
        album(75 + i, 20, 100 + 33 * i, xargs=budget(value), arrival=i)
        for i, value in enumerate(BUDGETS)
    ]
    with engine(folder, tgv("head"), enforce_eager=False) as running:
        assert_agrees(running, oracle, asks)


def test_prefix_cache_serves_the_same_image_again(folder: Path, oracle: Oracle) -> None:
    """Hits on released blocks; the kept tokens do not depend on the hit."""
    first = album(80, 60, 200, max_tokens=40)
    other_question = Ask(
        first.text[: first.text.index(LLAVA_IMAGE)] + LLAVA_IMAGE + random_text(999, 220),
        first.images,
        max_tokens=40,
    )
    debug = {"record_kept": True}
    with engine(folder, tgv(debug=debug), enable_prefix_caching=True) as running:
        (cold,) = assert_agrees(running, oracle, [first])
        (warm,) = assert_agrees(running, oracle, [first])
        (other,) = assert_agrees(running, oracle, [other_question])
        assert cold.num_cached_tokens == 0
        # The same prompt hits up to its first observation row, another question to the image.
        window = running.evictor.config.observation_window
        assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - window) // 32 * 32
        assert other.num_cached_tokens == (60 + VISION_TOKENS) // 32 * 32
        both = assert_agrees(running, oracle, [first, other_question, first])
        assert all(output.num_cached_tokens > 0 for output in both)


def test_preemption_in_a_small_pool(folder: Path, oracle: Oracle) -> None:
    """A pool that cannot hold all requests: some are preempted, prefill and are evicted again.

    What they had generated is computed again over the compressed cache, several tokens a
    step, so that preemption changes no token.
    """
    asks = [
        album(90 + i, 20, 100 + 10 * i, max_tokens=150, xargs=budget(0.5), arrival=i)
        for i in range(6)
    ]
    with engine(folder, tgv("head"), num_gpu_blocks_override=34, max_num_seqs=6) as running:
        names = [running.add(ask) for ask in asks]
        tokens: dict[str, list[int]] = {}
        while running.engine.has_unfinished_requests():
            for output in running.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        running.assert_empty()
        assert set() < running.preempted.keys() < set(names)
        assert running.counters["requests_evicted"] > len(asks)
        assert all(len(tokens[name]) == 150 for name in names)
        for ask, name in zip(asks, names, strict=True):
            prompt = oracle.prompt(ask.text, ask.images)
            kept = running.kept(name, len(prompt.token_ids))
            assert tokens[name] == oracle.generate(prompt, ask.max_tokens, kept)


def test_a_pool_too_small_for_the_fresh_blocks(folder: Path) -> None:
    """The prompt fits, but not together with its retained blocks: served uncompressed."""
    with engine(
        folder, tgv(), num_gpu_blocks_override=12, max_model_len=350, max_num_seqs=1
    ) as running:
        (output,) = running.run([album(95, 20, 250, max_tokens=16, xargs=budget(0.9))])
        assert len(output.outputs[0].token_ids) == 16
        assert running.counters["requests_skipped"] == {"pool_too_small": 1}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_images_of_several_sizes_with_mrope(
    tiny_model: Callable[..., Path], granularity: str
) -> None:
    """Qwen2.5-VL: each image has its own patch grid; rotary positions in three dimensions."""
    folder = tiny_model("qwen2_5_vl")
    asks = [
        album(110, 20, 200, 60, image_text=QWEN_IMAGE, xargs=budget(0.2)),
        album(111, 5, 30, 40, 230, image_text=QWEN_IMAGE, arrival=2),
        album(112, 0, 180, image_text=QWEN_IMAGE, arrival=4),
    ]
    with engine(folder, tgv(granularity)) as running:
        assert_agrees(running, Oracle(folder), asks)


def test_video_by_position(tiny_model: Callable[..., Path]) -> None:
    """All tokens of a video's frames are vision, which Qwen2.5-VL places contiguously."""
    frames = np.random.default_rng(0).integers(0, 256, (8, 84, 112, 3), dtype=np.uint8)
    told = {"fps": 2.0, "duration": 4.0, "total_num_frames": 8, "frames_indices": list(range(8))}
    video = (frames, {**told, "video_backend": "opencv", "do_sample_frames": False})
    text = random_text(1, 20) + QWEN_IMAGE.replace("image_pad", "video_pad") + random_text(2, 120)
    settings = {"policy": "mine", "budget": 0.2, "methods": {"mine": {"pooling": "grid"}}}
    with engine(tiny_model("qwen2_5_vl"), settings, limit_mm_per_prompt={"video": 1}) as running:
        prompt = {"prompt": text, "multi_modal_data": {"video": [video]}}
        running.engine.add_request("video", prompt, Ask("", max_tokens=40).sampling())
        running.step()
        (candidate,) = running.scheduler.candidates.values()
        (request,) = running.scheduler.requests.values()
        token = running.engine.vllm_config.model_config.hf_config.video_token_id
        is_video = np.array(request.prompt_token_ids) == token
        assert is_video.any()
        assert np.array_equal(candidate.prompt.is_vision(), is_video)
        # 8 frames in pairs, 84 x 112 pixels in tokens of 28 x 28.
        assert [(run.length, run.grid) for run in candidate.prompt.vision] == [(12, (3, 4))] * 4
        while running.engine.has_unfinished_requests():
            running.step()
        assert running.counters["requests_evicted"] == 1
        running.assert_empty()


def test_pooling_of_scores(folder: Path) -> None:
    """Pooled scores keep other vision tokens, but the same number."""
    kinds = ("none", "sequence", "grid")
    mixes = {f"pooled-{kind}": {"base": "tgv", "pooling": kind} for kind in kinds}
    settings = {"policy": "tgv", "methods": mixes, "debug": DEBUG}
    ask = album(120, 20, 100, max_tokens=20, xargs=budget(0.85))
    kept = []
    with engine(folder, settings) as running:
        for mix in mixes:
            asked = replace(ask, xargs={**ask.xargs, "kv_eviction": mix})
            (output,) = running.run([asked])
            found = running.kept(output.request_id, len(output.prompt_token_ids))
            assert found is not None
            kept.append(found)
    plain, *pooled = kept
    for found in pooled:
        assert found.sum() == plain.sum()
        assert not found.equal(plain)
