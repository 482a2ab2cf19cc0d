# SPDX-License-Identifier: Apache-2.0
"""Eviction on a CUDA device: both model runners, with and without graphs, against the oracle.

FlashAttention does not support float32, so the oracle judges each token
(`tests.engine.running.Deviation`). vLLM's own check (`VLLM_GPU_SYNC_CHECK`, set in
`tests/conftest.py`) raises if a step makes the host wait for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Cutter, Eviction, Moment, Oracle
from tests.engine import test_recall, test_speculation, test_summaries
from tests.engine.running import Ask, SteppedEngine, assert_close, engine
from tests.engine.test_engine import BUDGETS, album, budget, tgv
from tests.models import LLAVA_IMAGE, QWEN_IMAGE, random_text
from vllm_tgvkv.shared.prompt import ANSWER_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

IMAGES = {"llava": LLAVA_IMAGE, "qwen2_5_vl": QWEN_IMAGE}
SCHEDULE = {"schedule": [[5, 0.6], [12, 0.3]]}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 16,
    "num_gpu_blocks_override": 512,
    "gpu_memory_utilization": 0.3,
}


def requests(image_text: str) -> list[Ask]:
    """Return requests with three budgets, interleaved, and a prompt that is not evicted."""
    asks = [
        album(
            seed,
            20 + 9 * seed,
            170 + 41 * seed,
            image_text=image_text,
            xargs=budget(value),
            arrival=3 * seed,
            logprobs=1,
        )
        for seed, value in enumerate(BUDGETS)
    ]
    return [*asks, Ask(random_text(53, 150), max_tokens=40, arrival=14, logprobs=1)]


@pytest.fixture(scope="module", params=list(IMAGES))
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path], arch: str) -> Path:
    return tiny_model(arch, image_size=112, head_size=64)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_tokens_and_kept_positions(
    folder: Path, oracle: Oracle, arch: str, runner: str, granularity: str, eager: bool
) -> None:
    with engine(folder, tgv(granularity), enforce_eager=eager, **OPTIONS) as running:
        assert_runner(running, runner)
        assert_close(running, oracle, requests(IMAGES[arch]))


@pytest.mark.parametrize("decode_kernel", ["stock", "triton"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "settings", [{"defer": 5}, {"decode": SCHEDULE}], ids=["waits", "schedule"]
)
def test_cuts_of_answers(
    folder: Path,
    oracle: Oracle,
    arch: str,
    runner: str,
    settings: dict[str, Any],
    eager: bool,
    decode_kernel: str,
) -> None:
    """Queries of decode steps are stored in graphs."""
    xargs = {"kv_eviction_report": 1}
    asks = [
        album(seed, 30, 200 + 40 * seed, image_text=IMAGES[arch], logprobs=1, xargs=xargs)
        for seed in range(3)
    ]
    later = ((12, 0.3),) if "decode" in settings else ()
    first = {"budget": 0.3} if "defer" in settings else {}
    whole = {**tgv("head", decode_kernel=decode_kernel), **settings, **first}
    if "decode" in settings:
        whole.pop("budget", None)
    with engine(folder, whole, enforce_eager=eager, **OPTIONS) as running:
        assert_runner(running, runner)
        wanted = Eviction(
            0.6 if later else 0.3,
            OPTIONS["block_size"],
            "head",
            defer=5,
            schedule=later,
            answer_rows=ANSWER_ROWS,
        )
        assert_answers_close(running, oracle, asks, running.run(asks), wanted)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_summaries_of_evicted_tokens(
    tiny_model: Callable[..., Path], runner: str, eager: bool
) -> None:
    """Cut once and again. What is kept and absorbed does not depend on rounding."""
    folder = tiny_model("llava", image_size=112, head_size=64)
    options = {**OPTIONS, "block_size": test_summaries.BLOCK_SIZE}
    with engine(folder, test_summaries.SETTINGS, enforce_eager=eager, **options) as running:
        assert_runner(running, runner)
        test_summaries.assert_close(running, Oracle(folder))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_tokens_come_back(tiny_model: Callable[..., Path], runner: str, eager: bool) -> None:
    """From pinned memory, every three steps."""
    folder = tiny_model("llava", image_size=112, head_size=64)
    settings = {**test_recall.SETTINGS, "recall": test_recall.RECALL}
    with engine(folder, settings, enforce_eager=eager, **OPTIONS) as running:
        assert_runner(running, runner)
        test_recall.assert_close(running, Oracle(folder))


@pytest.mark.parametrize("decode_kernel", ["stock", "triton"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", test_speculation.METHODS)
def test_drafts_over_compressed_rows(
    tiny_model: Callable[..., Path],
    method: str,
    eager: bool,
    decode_kernel: str,
    runner: str,
) -> None:
    """By n-grams, and with model runner V1 by a model. Wrong ones change nothing."""
    if runner == "1" and method != "ngram":
        pytest.skip("the plugin refuses draft models on model runner V2")
    folder = tiny_model("llava", image_size=112, head_size=64)
    drafts = test_speculation.speculative_config(folder, method)
    if method == "ngram":
        drafts = {**drafts, "prompt_lookup_min": 1}
    settings = tgv("head", decode_kernel=decode_kernel)
    more = {"async_scheduling": False, "disable_log_stats": False, "enforce_eager": eager}
    with engine(folder, settings, speculative_config=drafts, **more, **OPTIONS) as running:
        assert_runner(running, runner)
        assert_close(running, Oracle(folder), requests(LLAVA_IMAGE))
        assert test_speculation.draft_counts(running)[0] > 50


def test_a_prompt_that_ends_with_one_token(
    folder: Path, oracle: Oracle, arch: str, runner: str
) -> None:
    """The step has single tokens only, like one that is replayed as a graph, but is observed."""
    ask = album(60, 20, 200, image_text=IMAGES[arch], logprobs=1)
    length = len(oracle.prompt(ask.text, ask.images).token_ids)
    options = {**OPTIONS, "max_num_batched_tokens": length - 1}
    with engine(folder, tgv("head"), **options) as running:
        assert_runner(running, runner)
        assert_close(running, oracle, [ask])


def test_chunked_prefill_and_prefix_cache(
    folder: Path, oracle: Oracle, arch: str, runner: str
) -> None:
    """Chunks with ragged decodes; the same image again, from the cache."""
    options = {**OPTIONS, "max_num_batched_tokens": 80, "enable_prefix_caching": True}
    with engine(folder, tgv("head", debug={"record_kept": True}), **options) as running:
        assert_runner(running, runner)
        assert_close(running, oracle, requests(IMAGES[arch]))
        assert_close(running, oracle, requests(IMAGES[arch]))


def test_preemption(folder: Path, oracle: Oracle, arch: str, runner: str) -> None:
    """In a pool too small for all, some are preempted and compute several tokens over pages."""
    asks = [
        album(
            90 + i,
            20,
            100 + 10 * i,
            image_text=IMAGES[arch],
            max_tokens=150,
            xargs=budget(0.5),
            arrival=i,
            logprobs=1,
        )
        for i in range(6)
    ]
    options = {**OPTIONS, "num_gpu_blocks_override": 68, "max_num_seqs": 6}
    with engine(folder, tgv("head"), **options) as running:
        assert_runner(running, runner)
        assert_close(running, oracle, asks)
        assert running.counters["requests_evicted"] > len(asks)


@pytest.mark.skipif(os.environ.get("VLLM_GPU_SYNC_CHECK") != "error", reason="waits are no error")
def test_a_wait_after_the_layers_is_seen(
    tiny_model: Callable[..., Path], runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions that follow a step are under vLLM's check as well."""
    folder = tiny_model("llava", image_size=112, head_size=64)
    with engine(folder, tgv("head"), **OPTIONS) as running:
        assert_runner(running, runner)
        wait = torch.ones(1, device="cuda").item
        monkeypatch.setattr(running.evictor, "evict_stored", wait)
        running.add(Ask(random_text(3, 50)))
        with pytest.raises(RuntimeError, match="sync"):
            running.step()


def assert_answers_close(
    running: SteppedEngine,
    oracle: Oracle,
    asks: Sequence[Ask],
    outputs: Sequence[Any],
    wanted: Eviction,
) -> None:
    """Judge answers whose prompts are cut while they grow; `wanted` are the cuts.

    The oracle follows tokens and cuts. From what our last cut left, each cut keeps nearly what the
    oracle would. Tokens have nearly the probability that the oracle gives them over what ours left:
    with everything kept, it is measured to be at least five times as far away.
    """
    config, size = running.evictor.config, running.evictor.shape.block_size
    wanted = replace(wanted, sinks=config.sinks, observation_window=config.observation_window)
    deviation, without = 0.0, 0.0
    for ask, output in zip(asks, outputs, strict=True):
        told = output.kv_transfer_params["kv_eviction"]["cuts"]
        tokens = list(output.outputs[0].token_ids)
        prompt = oracle.prompt(ask.text, ask.images)
        full = len(prompt.token_ids) // size * size
        cutter = Cutter(wanted, prompt.layout, oracle.kv_heads)
        regions = iter(running.kept_after_cuts(output.request_id)[-len(told) :])

        def follow(
            moment: Moment,
            cutter: Cutter = cutter,
            regions: Iterator[torch.Tensor] = regions,
            full: int = full,
        ) -> torch.Tensor | None:
            theirs = cutter(moment)
            if theirs is None:
                return None
            ours = next(regions)[..., : moment.length]
            ours[..., full:] = True
            same = (ours & theirs)[..., :full].sum() / theirs[..., :full].sum()
            assert same > 0.85, cutter.cuts[-1].after
            return ours

        followed = oracle.decode(prompt, len(tokens), follow, tokens).logprobs
        assert [cut["answer_tokens"] for cut in told] == [cut.after for cut in cutter.cuts]
        steps, index = output.outputs[0].logprobs, torch.tensor(tokens)[:, None]
        ours = torch.tensor(
            [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
        )
        theirs = followed.gather(1, index).squeeze(1)
        whole = oracle.logprobs(prompt, tokens, None).gather(1, index).squeeze(1)
        deviation = max(deviation, float((theirs - ours).abs().max()))
        deviation = max(deviation, float((followed.amax(1) - theirs).max()))
        without = max(without, float((whole - ours).abs().max()))
    assert without > 2
    assert deviation < without / 3, (deviation, without)


def assert_runner(running: SteppedEngine, runner: str) -> None:
    """Check that the engine has this package's subclass of the given model runner."""
    found = type(running.core.model_executor.driver_worker.worker.model_runner).__name__
    assert found == {"0": "EvictingModelRunnerV1", "1": "EvictingModelRunnerV2"}[runner]
