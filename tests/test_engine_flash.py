# SPDX-License-Identifier: Apache-2.0
"""The CUDA attention backend in real engines, FlashAttention itself apart (`flash_on_cpu.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import flash_on_cpu
from tests.emulation import Oracle
from tests.engine import Engine, assert_agrees, engine
from tests.test_engine import BUDGETS, IMAGE_SIZE, album, budget, tgv

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=IMAGE_SIZE)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def flash() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        flash_on_cpu.pretend(monkeypatch)
        yield


@pytest.fixture(scope="module", params=["layer", "head"])
def evicting(request: pytest.FixtureRequest, folder: Path, flash: None) -> Iterator[Engine]:
    with engine(folder, tgv(request.param), block_size=16) as running:
        yield running


def test_tokens_and_kept_positions_are_the_oracles(evicting: Engine, oracle: Oracle) -> None:
    """Three budgets, one to three images, arrivals and ends interleaved, many blocks of decode."""
    asks = [
        album(seed, 20 + 9 * seed, 170 + 41 * seed, xargs=budget(value), arrival=3 * seed)
        for seed, value in enumerate(BUDGETS)
    ]
    asks += [
        album(10, 5, 40, 90, xargs=budget(0.2), arrival=30),
        album(12, 30, 300, arrival=60, xargs={"kv_eviction_budget": 130}),
        album(14, 3, 10, 20, arrival=60, xargs=budget(0.6)),
    ]
    assert_agrees(evicting, oracle, asks)
