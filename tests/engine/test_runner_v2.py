# SPDX-License-Identifier: Apache-2.0
"""Eviction on vLLM's model runner V2, in processes where Triton's interpreter runs its kernels.

`runner_v2.py` lists what is pretended. Runner, scheduler, evictor, backend and block tables are the
GPU's. Every step is scheduled before the previous step's tokens are known.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.engine import runner_v2

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process that is prepared before it imports vLLM."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=runner_v2.prepare) as pool:
        yield pool


@pytest.mark.parametrize(
    ("case", "arch", "fields"),
    [
        ("chunks_hits_and_resets", "llava", {"image_size": 112}),
        pytest.param("preemption", "llava", {"image_size": 112}, marks=pytest.mark.nightly),
        pytest.param("text_of_a_hybrid", "qwen3_5", {"layers": 8}, marks=pytest.mark.nightly),
        ("images_and_windows", "exaone4_5", {"layers": 6, "image_size": 112}),
        ("pressure", "llava", {"image_size": 112}),
        ("drafts", "llava", {"image_size": 112, "initializer_range": 0.055}),
    ],
)
def test_tokens_and_kept_positions_are_the_oracles(
    process: ProcessPoolExecutor,
    tiny_model: Callable[..., Path],
    case: str,
    arch: str,
    fields: dict[str, int],
) -> None:
    process.submit(globals()[case], tiny_model(arch, **fields)).result()


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        pytest.param("ranks", "schedule", marks=pytest.mark.nightly),
        pytest.param("stages", "ceiling", marks=pytest.mark.nightly),
        pytest.param("grid", "ceiling", marks=pytest.mark.nightly),
    ],
)
def test_cuts_in_several_workers(
    tiny_model: Callable[..., Path], tmp_path: Path, split: str, kind: str
) -> None:
    """On two ranks, in two stages, and both."""
    folder = tiny_model("llava", image_size=112, layers=5)
    program = [sys.executable, "-m", "tests.engine.split_on_runner_v2"]
    subprocess.run([*program, str(folder), str(tmp_path), split, kind], check=True, timeout=600)


# -- run in the other process, which must not have imported vLLM before ----------------------


def chunks_hits_and_resets(folder: Path) -> None:
    """Chunked prompts with ragged decodes, prefix-cache hits, budgets per request.

    Then the step after an evicting one preempts every request and resumes it at once, several
    times.
    """
    from oracle.emulation import Eviction, Oracle
    from oracle.methods import Auto
    from tests.engine.questions import album, budget, ladder, tgv
    from tests.engine.running import Ask, assert_agrees, assert_outputs_agree, engine, expected
    from tests.models import random_text

    runner_v2.pretend_gpu_worker()
    oracle = Oracle(folder)
    asks = [*ladder(), Ask(random_text(53, 150), max_tokens=30, arrival=12)]
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    with engine(folder, tgv("head"), **options) as running:
        assert type(running.worker.model_runner).__mro__[1].__name__ == "EvictingModelRunnerV2"
        assert type(running.scheduler).__name__ == "AsyncEvictionScheduler"
        assert_agrees(running, oracle, asks)
        outputs = assert_agrees(running, oracle, asks)
        assert all(output.num_cached_tokens for output in outputs[:3])

        # The scheduler gets the number of blocks that the device found a step later.
        ask = album(60, 20, 300, xargs={"kv_eviction_budget": "auto:0.9"})
        (output,) = running.run([ask])
        window = running.evictor.config.observation_window
        size = running.evictor.shape.block_size
        eviction = Eviction(Auto(0.9), size, "head", observation_window=window)
        tokens, selection = expected(oracle, ask, eviction)
        kept = running.kept(output.request_id, len(output.prompt_token_ids))
        assert (kept == selection.kept).all()
        assert list(output.outputs[0].token_ids) == tokens

        asks = [
            album(120 + i, 20, 120 + 50 * i, max_tokens=12, xargs=budget(0.3)) for i in range(3)
        ]
        names, compressed, num_resets = [], set(), 0
        for ask in asks:
            names.append(running.add(ask))
            running.step()
        finished = {}
        while running.engine.has_unfinished_requests():
            finished.update({o.request_id: o for o in running.step() if o.finished})
            now = set(running.scheduler.manager.compressions)
            if now - compressed and num_resets < 3:
                assert running.llm.reset_prefix_cache(reset_running_requests=True)
                num_resets += 1
                now = set()
            compressed = now
        assert num_resets == 3
        running.assert_empty()
        assert_outputs_agree(running, oracle, asks, [finished[name] for name in names])


def preemption(folder: Path) -> None:
    from oracle.emulation import Oracle
    from tests.engine.test_engine import test_preemption_in_a_small_pool

    runner_v2.pretend_gpu_worker()
    test_preemption_in_a_small_pool(folder, Oracle(folder))


def drafts(folder: Path) -> None:
    """By n-grams that vLLM's kernel finds. All rows have as many drafts, right or wrong."""
    from dataclasses import replace

    from oracle.emulation import Oracle
    from tests.engine.questions import ladder, tgv
    from tests.engine.running import Ask, assert_agrees, engine
    from tests.engine.test_speculation import NGRAM, draft_counts
    from tests.models import random_text

    runner_v2.pretend_gpu_worker()
    runner_v2.take_any_mask()
    asks = [replace(ask, max_tokens=30) for ask in ladder()]
    asks.append(Ask(random_text(53, 150), max_tokens=30, arrival=12))
    options = {"speculative_config": NGRAM, "disable_log_stats": False}
    with engine(folder, tgv("head"), max_num_batched_tokens=64, **options) as running:
        assert type(running.worker.model_runner).__mro__[1].__name__ == "EvictingModelRunnerV2"
        assert not running.core.async_scheduling
        assert_agrees(running, Oracle(folder), asks)
        drafted, accepted = draft_counts(running)
        assert 10 < accepted < drafted - 10


def pressure(folder: Path) -> None:
    """Rows that stay whole, that are cut while they decode, restored, and cut again."""
    from oracle.emulation import Oracle
    from tests.engine import test_pressure as pressed
    from tests.engine.changes import assert_changes_agree, restore_soon
    from tests.engine.running import engine

    runner_v2.pretend_gpu_worker()
    asks = [pressed.ask(seed, pressed.METHODS[seed], 48, arrival=seed) for seed in range(3)]
    asks.append(pressed.ask(9, tokens=5))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        engine(folder, pressed.SETTINGS, **pressed.OPTIONS) as running,
    ):
        restore_soon(monkeypatch)
        assert type(running.worker.model_runner).__mro__[1].__name__ == "EvictingModelRunnerV2"
        outputs = pressed.serve(running, asks, crowds={14: 2, 34: 2})
        assert_changes_agree(running, Oracle(folder), asks, outputs)
    *cut, whole = pressed.causes(outputs)
    assert whole == []
    assert sum(each[:2] == ["pressure", "restored"] for each in cut) >= 1
    assert sum(each.count("pressure") >= 2 for each in cut) >= 1


def text_of_a_hybrid(folder: Path) -> None:
    """States are copied by vLLM's own kernels. The evicted layers are the last group.

    Text only: the interpreter gets the position embeddings of this model's vision tower wrong.
    """
    import numpy as np

    from oracle.emulation import Oracle
    from tests.engine import test_hybrids as hybrids
    from tests.engine.running import Ask, engine
    from tests.models import random_text

    runner_v2.pretend_gpu_worker()
    oracle = Oracle(folder)
    oracle.model.config.image_token_id = -1
    asks = [
        Ask(random_text(i, 440), (), hybrids.TOKENS, hybrids.budget(share), 2 * i, logprobs=0)
        for i, share in enumerate((0.7, 0.3))
    ]
    settings = {**hybrids.SETTINGS, "text_only": "evict"}
    with engine(folder, settings, **hybrids.OPTIONS, **hybrids.CACHING) as running:
        assert running.scheduler.group == 4
        for ask, output in zip(asks, running.run(asks), strict=True):
            hybrids.assert_nearly_the_oracles(running, oracle, ask, output, least=0.9, most=0.25)
        assert running.scheduler.reset_prefix_cache()
        cold, warm = (running.run(asks[1:])[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 4 * hybrids.BLOCK)
        np.testing.assert_array_equal(hybrids.logprobs(cold), hybrids.logprobs(warm))


def images_and_windows(folder: Path) -> None:
    """Chunks, ragged decodes and a prefix-cache hit; evicted layers are the last group."""
    import torch

    from tests.engine import test_windows as windows
    from tests.engine.running import engine

    runner_v2.pretend_gpu_worker()
    options = {**windows.OPTIONS, **windows.MORE_OPTIONS["exaone4_5"]}
    with engine(folder, windows.SETTINGS, block_size=windows.BLOCK_SIZE, **options) as running:
        assert running.scheduler.group == 2
        oracle = windows.CausalOracle(folder)
        served = windows.Served("exaone4_5", folder, options, running, oracle)
        cases = [("snapkv", 0.3), ("h2o", 0.2)]
        made = [
            served.stable(i, windows.evicted_with(*case), arrival=2 * i)
            for i, case in enumerate(cases)
        ]
        outputs = running.run([ask for ask, _ in made])
        (again,) = running.run([made[0][0]])
        assert again.num_cached_tokens > oracle.window
        for (ask, prompt), output in zip([*made, made[0]], [*outputs, again], strict=True):
            selection = oracle.select(prompt, served.eviction(ask))
            kept = running.kept(output.request_id, len(prompt.token_ids))
            assert torch.equal(kept, selection.kept)
            tokens = oracle.generate(prompt, windows.TOKENS, kept)
            assert list(output.outputs[0].token_ids) == tokens
