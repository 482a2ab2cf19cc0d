# SPDX-License-Identifier: Apache-2.0
"""The tiny LLaVA that most engine tests serve, its oracle, and engines that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oracle.emulation import Oracle
from tests.conftest import group_of
from tests.engine.running import SHARED


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    """Return the folder of a LLaVA with 64 tokens per image."""
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """Return the oracle of that model."""
    return Oracle(folder)


@pytest.fixture
def engines() -> Iterator[Callable[..., Any]]:
    """Return a function from a model and options to an engine, which other tests may share.

    After the test the engine must be as before: without requests, with every block free.
    """
    yield SHARED.get
    SHARED.check()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared engine with its group of tests."""
    if nextitem is None or group_of(nextitem) != group_of(item):
        SHARED.close()
