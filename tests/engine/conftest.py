# SPDX-License-Identifier: Apache-2.0
"""The tiny LLaVA that most engine tests serve, its oracle, and engines that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oracle.emulation import Oracle
from tests.conftest import group_of
from tests.engine.questions import HEAD_SCORES, MIXES, tgv
from tests.engine.running import SHARED, SteppedEngine
from vllm_tgvkv.policies.head_scores import write


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    """Return the folder of a LLaVA with 64 tokens per image."""
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """Return the oracle of that model."""
    return Oracle(folder)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of head scores."""
    file = tmp_path_factory.mktemp("heads") / "heads.json"
    write(file, HEAD_SCORES.model, HEAD_SCORES.kv_heads, HEAD_SCORES.scores, {})
    return str(file)


@pytest.fixture
def engines() -> Iterator[Callable[..., Any]]:
    """Return a function from a model and options to an engine, which other tests may share.

    After the test the engine must be as before: without requests, with every block free.
    """
    yield SHARED.get
    SHARED.check()


@pytest.fixture
def whole(engines: Callable[..., SteppedEngine], folder: Path, heads: str) -> SteppedEngine:
    """Return an engine that prefills prompts whole, whose requests may have any method and cuts.

    The last tests of `test_cuts.py` and the first of `test_engine.py` share it.
    """
    kinds = ("none", "sequence", "grid")
    pooled = {f"pooled-{kind}": {"base": "tgv", "pooling": kind} for kind in kinds}
    decode = {"on_request": True}
    settings = tgv("head", methods={**MIXES, **pooled}, head_scores=heads, decode=decode)
    return engines(folder, settings)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared engine with its group of tests."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        SHARED.close()
