# SPDX-License-Identifier: Apache-2.0
"""Environment and models shared by all tests."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from measure.engines import set_environment
from tests import garbage

ROOT = Path(__file__).parents[1]

# No test fails for the time it takes: machines are busy, and a fresh clone builds tables first.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def default_environment() -> dict[str, str]:
    """Return the settings of tools/cpu/environment.mk."""
    text = (ROOT / "tools/cpu/environment.mk").read_text()
    return dict(re.findall(r"^(\w+) \?= (.*)$", text, flags=re.MULTILINE))


# torch and vLLM read their settings when they are imported. Processes of tests share the cores.
set_environment(default_environment())
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))


def has_cuda() -> bool:
    """Return whether there is a CUDA device, so that a forked engine can still use it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.is_available()


def load_kernels_interpreted() -> None:
    """Import Triton and our Triton kernels so that Triton's interpreter runs them on CPU tensors.

    A ``@triton.jit`` function is interpreted if the variable is set when it is decorated; Triton's
    own functions (``tl.sum``) are decorated when Triton is imported. So this must come before vLLM,
    which imports Triton. The variable is removed afterwards, so that child processes lack it.
    """
    assert "triton" not in sys.modules, "imported before TRITON_INTERPRET could be set"
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        package = importlib.import_module("vllm_tgvkv.kernels.gpu")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            # A module that cannot be imported fails only the tests that use it.
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
        search_builtins_once()
    finally:
        del os.environ["TRITON_INTERPRET"]


def search_builtins_once() -> None:
    """Let Triton's interpreter remember which members of its language are built in.

    It looks for them at each launch and each call of a device function, which takes a third of the
    time of our kernels.
    """
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


if has_cuda():
    # vLLM raises if a step makes the host wait for the device.
    os.environ.setdefault("VLLM_GPU_SYNC_CHECK", "error")
elif importlib.util.find_spec("triton"):
    load_kernels_interpreted()

from evaluation import ablations  # noqa: E402, F401  # registers parts that tests combine


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of all random inputs, unless TGVKV_SEED is set; workers inherit it."""
    seed = os.environ.setdefault("TGVKV_SEED", str(int.from_bytes(os.urandom(4), "little")))
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = seed


def pytest_report_header() -> str:
    return f"TGVKV_SEED={os.environ['TGVKV_SEED']} repeats the random inputs of this run"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test random inputs of its own, whichever tests ran before it."""
    from tests.inputs import seed

    seed(item.nodeid)


SHARING = {"tests/engine/test_cuts.py": "llava", "tests/engine/test_engine.py": "llava"}
"""Files whose tests take the same engines from the fixture `engines`."""


def group_of(nodeid: str) -> str:
    """Return the group of tests that run in one process one after another: by default a file."""
    file = nodeid.partition("::")[0]
    return SHARING.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each group in one process.

    pytest-xdist's own groups (`xdist_group`) do nothing from pytest 9.2 on, without a word: they
    are told by node ids, which cannot be changed any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """Keep modules out of the garbage collections of every engine."""
    garbage.ignore_what_is_alive()


def pytest_unconfigure() -> None:
    garbage.look_at_everything()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests without the device they need."""
    if has_cuda():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from the fields of `TinyModel` to the folder of that model."""
    from tests.models import TinyModel, model_folder

    root = tmp_path_factory.mktemp("models")
    return lambda arch="llava", **fields: model_folder(root, TinyModel(arch, **fields))
