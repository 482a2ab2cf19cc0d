# SPDX-License-Identifier: Apache-2.0
"""Models whose layers are of several kinds on a CUDA device, on both model runners.

Without a GPU the same requests run in `tests/engine/test_flash_mixed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.emulation import Oracle
from tests.engine import test_hybrids as hybrids
from tests.engine import test_windows as windows
from tests.engine.questions import DEBUG
from tests.engine.running import deviation, engine
from tests.engine.test_engine import BUDGETS, tgv
from tests.gpu.test_engine import OPTIONS, assert_runner

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

WINDOWED = "exaone4_5"


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_hybrid(tiny_model: Callable[..., Path], runner: str, eager: bool) -> None:
    """Chunks and decodes in a batch; then from cached keys and states."""
    folder = tiny_model("qwen3_5", layers=8, head_size=64)
    options = {**hybrids.OPTIONS, **hybrids.CACHING, **OPTIONS, "enforce_eager": eager}
    with engine(folder, hybrids.SETTINGS, **options) as running:
        assert_runner(running, runner)
        oracle = Oracle(folder)
        shares = (0.7, 0.5, 0.3)
        asks = [
            hybrids.ask(10 + i, xargs=hybrids.budget(share), arrival=2 * i)
            for i, share in enumerate(shares)
        ]
        for _ in range(2):
            for ask, output in zip(asks, running.run(asks), strict=True):
                assert np.isfinite(hybrids.logprobs(output)).all()
                hybrids.assert_nearly_the_oracles(
                    running, oracle, ask, output, least=0.9, most=0.25
                )
        assert output.num_cached_tokens > 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_windows(tiny_model: Callable[..., Path], runner: str, eager: bool) -> None:
    """Several windows in a prompt, chunks, and the prefix cache."""
    folder = tiny_model(WINDOWED, **windows.MODELS[WINDOWED], head_size=64)
    options: dict[str, Any] = {**windows.OPTIONS, **windows.MORE_OPTIONS[WINDOWED], **OPTIONS}
    settings = tgv("head", debug={**DEBUG, "poison": False})
    with engine(folder, settings, enforce_eager=eager, **options) as running:
        assert_runner(running, runner)
        oracle = windows.CausalOracle(folder)
        served = windows.Served(WINDOWED, folder, options, running, oracle)
        asks = [
            served.ask(i, {"kv_eviction_budget": budget}, arrival=2 * i, logprobs=1)
            for i, budget in enumerate(BUDGETS)
        ]
        for _ in range(2):
            found = deviation(running, oracle, asks, 0.1)
            # As in `assert_close`, but windows see the same with and without eviction.
            assert found.logprob < 0.5, found
            assert found.regret < 0.5, found
            assert found.kept > 0.95, found
            assert found.without_eviction > 1, found
