# SPDX-License-Identifier: Apache-2.0
"""The tiny LLaVA that most engine tests serve, and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oracle.emulation import Oracle


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    """Return the folder of a LLaVA with 64 tokens per image."""
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """Return the oracle of that model."""
    return Oracle(folder)
