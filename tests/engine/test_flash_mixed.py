# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention backend in engines of models whose layers are of several kinds.

As in `test_flash.py`, on a CPU: FlashAttention is pretended (`flash_on_cpu.py`), and decode steps
get the metadata of the first step of their size, as a graph would. The evicted layers are vLLM's
last group of layers, not its first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oracle.emulation import Oracle
from tests.engine import flash_on_cpu
from tests.engine import test_hybrids as hybrids
from tests.engine import test_windows as windows
from tests.engine.running import engine
from vllm_tgvkv.worker.warm_up import warm_up

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_on_cpu.pretend(monkeypatch, flash_on_cpu.ReplayOnCPUWorker)


def test_a_hybrid(tiny_model: Callable[..., Path]) -> None:
    """Chunks and decodes in batches, a wait and preemptions; then from cached keys and states."""
    folder = tiny_model("qwen3_5", layers=8)
    replays = flash_on_cpu.ReplayingBuilder.num_replays
    with engine(folder, hybrids.SETTINGS, **hybrids.OPTIONS, **hybrids.CACHING) as running:
        warm_up(running.evictor)  # as the GPU's worker does when it starts
        groups = running.scheduler.kv_cache_config.kv_cache_groups
        assert running.scheduler.group == len(groups) - 1 == 4
        assert running.evictor.shape.block_size == hybrids.BLOCK
        more = ({}, {}, {"kv_eviction_defer": 3})
        asks = [
            hybrids.ask(10 + i, xargs=hybrids.budget(share, **xargs), arrival=2 * i)
            for i, (share, xargs) in enumerate(zip((0.7, 0.5, 0.3), more, strict=True))
        ]
        oracle = Oracle(folder)
        for ask, output in zip(asks[:2], running.run(asks)[:2], strict=True):
            hybrids.assert_nearly_the_oracles(running, oracle, ask, output, least=0.9, most=0.25)

        names, outputs = hybrids.run_with_preemptions(running, asks)
        assert all(np.isfinite(hybrids.logprobs(outputs[name])).all() for name in names)

        assert running.scheduler.reset_prefix_cache()
        cold, warm = (running.run(asks[2:])[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 5 * hybrids.BLOCK)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
        np.testing.assert_array_equal(hybrids.logprobs(cold), hybrids.logprobs(warm))
    assert flash_on_cpu.ReplayingBuilder.num_replays > replays + 20


@pytest.mark.nightly  # by day over runner V2
def test_a_model_with_windows(tiny_model: Callable[..., Path]) -> None:
    """Kept positions and tokens are the oracle's, alone, in batches, and after preemptions."""
    arch = "exaone4_5"
    folder = tiny_model(arch, **windows.MODELS[arch])
    options = {**windows.OPTIONS, **windows.MORE_OPTIONS[arch]}
    replays = flash_on_cpu.ReplayingBuilder.num_replays
    with engine(folder, windows.SETTINGS, block_size=windows.BLOCK_SIZE, **options) as running:
        groups = running.scheduler.kv_cache_config.kv_cache_groups
        assert running.scheduler.group == len(groups) - 1 == 2
        oracle = windows.CausalOracle(folder)
        served = windows.Served(arch, folder, options, running, oracle)
        windows.test_tokens_and_kept_positions_are_the_oracles_alone_and_in_a_batch(served)
        windows.test_waits_preemptions_and_aborts(served)
    # A graph of each group of layers.
    assert flash_on_cpu.ReplayingBuilder.num_replays > replays + 3 * 100
