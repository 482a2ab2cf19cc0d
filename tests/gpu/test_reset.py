# SPDX-License-Identifier: Apache-2.0
"""The prefix cache is reset right after an evicting step, with requests running.

vLLM then preempts and resumes all requests in one step, in which the worker has a compressed row to
write for a request that has new blocks already. Released pages are NaN, every block is recounted
after every step, and the oracle judges each token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracle.emulation import Oracle
from tests.engine.running import Ask, SteppedEngine, assert_close, engine
from tests.engine.test_engine import album, budget, tgv
from tests.gpu.test_engine import OPTIONS, assert_runner
from tests.models import random_text
from vllm_tgvkv.shared.plan import plan_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

RESETS = 3


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112, head_size=64)


def reset_after_evictions(running: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reset the prefix cache after the first steps that evict; return what grows with each reset.

    An entry is the number of requests that were running.
    """
    schedule, step = running.scheduler.schedule, running.engine.step
    evicting: list[int] = []
    resets: list[int] = []

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        evicting.extend([1] * len(plan_of(output).evictions))
        return output

    def step_and_reset() -> Any:
        outputs = step()
        if evicting and len(resets) < RESETS:
            resets.append(len(running.scheduler.running))
            running.engine.reset_prefix_cache(reset_running_requests=True)
        evicting.clear()
        return outputs

    monkeypatch.setattr(running.scheduler, "schedule", watched_schedule)
    monkeypatch.setattr(running.engine, "step", step_and_reset)
    return resets


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_requests_that_are_resumed_at_once_are_right(
    folder: Path, runner: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [
        album(110 + i, 20 + 7 * i, 180 + 30 * i, xargs=budget(0.3), arrival=2 * i, logprobs=1)
        for i in range(4)
    ]
    asks.append(Ask(random_text(115, 150), max_tokens=40, arrival=1, logprobs=1))
    options = {**OPTIONS, "enable_prefix_caching": True, "enforce_eager": eager}
    with engine(folder, tgv("head"), **options) as running:
        assert_runner(running, runner)
        resets = reset_after_evictions(running, monkeypatch)
        assert_close(running, Oracle(folder), asks)
        assert len(resets) == RESETS
        assert max(resets) > 1, "no reset found several requests"
        assert running.counters["requests_evicted"] > len(asks) - 1, "none was evicted twice"
