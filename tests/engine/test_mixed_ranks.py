# SPDX-License-Identifier: Apache-2.0
"""Models in which some layers are not evicted, on two tensor-parallel ranks.

Windows and states are vLLM's on every rank. The oracles and tolerances are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.emulation import Eviction, Oracle
from tests.engine import test_hybrids as hybrids
from tests.engine import test_windows as windows
from tests.engine.running import Ask
from tests.engine.test_parallel import ParallelEngine, workers

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

RANKS = 2


class MixedEngine(ParallelEngine):
    """Reads what ranks kept of heads that several of them may hold."""

    def kept(self, request_id: str, num_tokens: int) -> torch.Tensor | None:
        parts = self.kept_on_workers(request_id, num_tokens)
        (status, *others) = self.llm.collective_rpc("kv_eviction_status")
        assert others == [status] * (len(parts) - 1)
        (num_heads,) = {part.shape[1] for part in parts}
        replicas = num_heads * len(parts) // status["pool"]["kv_heads"]
        for i, part in enumerate(parts):
            assert torch.equal(part, parts[i // replicas * replicas])
        return torch.cat(parts[::replicas], dim=1)


@dataclass(frozen=True)
class ServedOnRanks(windows.Served):
    """A tiny model with windows on ranks, and its oracle, which has all heads."""

    def eviction(self, ask: Ask, **fields: Any) -> Eviction:
        return replace(super().eviction(ask, **fields), ranks=RANKS)


@pytest.mark.nightly
def test_windows(tiny_model: Callable[..., Path]) -> None:
    """Layers with a window have a KV head on each rank; those with full attention share one."""
    folder = tiny_model("gemma4", layers=9, full_kv_heads=1)
    oracle = windows.CausalOracle(folder)
    assert oracle.kv_heads == 1
    options = {**windows.OPTIONS, "block_size": windows.BLOCK_SIZE, "tensor_parallel_size": RANKS}
    with workers(folder, windows.SETTINGS, MixedEngine, **options) as running:
        served = ServedOnRanks("gemma4", folder, options, running, oracle)
        windows.test_tokens_and_kept_positions_are_the_oracles_alone_and_in_a_batch(served)
        windows.test_waits_preemptions_and_aborts(served)


@pytest.mark.nightly
def test_states(tiny_model: Callable[..., Path]) -> None:
    """Each rank has half of a state and one of the two heads, so blocks are as long as on one."""
    folder = tiny_model("qwen3_5", layers=8)
    oracle = Oracle(folder)
    options = {**hybrids.OPTIONS, **hybrids.CACHING, "tensor_parallel_size": RANKS}
    with workers(folder, hybrids.SETTINGS, MixedEngine, **options) as running:
        assert running.scheduler.tokens_per_block == hybrids.BLOCK
        assert len(running.scheduler.other_managers) == 4
        cases = [("snapkv", 0.7), ("snapkv", 0.3), ("adakv", 0.5), ("tgv", 0.4)]
        asks = [
            hybrids.ask(50 + i, 330, xargs={"kv_eviction": method, "kv_eviction_budget": share})
            for i, (method, share) in enumerate(cases)
        ]
        cold, warm = ([running.run([ask])[0] for ask in asks] for _ in range(2))
        for ask, output, again in zip(asks, cold, warm, strict=True):
            assert (output.num_cached_tokens, again.num_cached_tokens) == (0, 4 * hybrids.BLOCK)
            np.testing.assert_array_equal(hybrids.logprobs(output), hybrids.logprobs(again))
            hybrids.assert_nearly_the_oracles(
                running, oracle, ask, again, least=0.9, most=0.25, ranks=RANKS
            )
        hybrids.test_evictions_after_waits_in_steps_and_after_preemptions(running)
        running.assert_forgotten()
