# SPDX-License-Identifier: Apache-2.0
"""Environment and models shared by all tests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def default_environment() -> dict[str, str]:
    """Return the settings of tools/cpu/environment.mk."""
    text = (ROOT / "tools/cpu/environment.mk").read_text()
    return dict(re.findall(r"^(\w+) \?= (.*)$", text, flags=re.MULTILINE))


# Before torch and vLLM are imported: both read their settings then.
for _name, _value in default_environment().items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from the fields of `TinyModel` to the folder of that model."""
    from tests.models import TinyModel, model_folder

    root = tmp_path_factory.mktemp("models")
    return lambda arch="llava", **fields: model_folder(root, TinyModel(arch, **fields))
