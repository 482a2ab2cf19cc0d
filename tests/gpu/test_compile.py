# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel builds for four GPU generations without spilling registers."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.gpu.compile import CAPABILITIES

pytest.importorskip("triton", reason="Triton is not installed")

PREFIX = f"{gpu.__name__}."

SPILLING = """
import triton
import triton.language as tl

from vllm_tgvkv.kernels.gpu.compile import Variant


@triton.jit
def add(x, y, length, step, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    values = tl.load(x + place * step, mask=place < length, other=0.0)
    tl.store(y + place, values + 1)


@triton.jit
def hoard(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    first, second = tl.load(x + place), tl.load(x + SIZE + place)
    tl.store(y + place, first * tl.sum(second * tl.sum(first, 0), 0) + second)


def variants():
    types, large, one = {"x": "*fp32", "y": "*fp32"}, {"SIZE": 8192}, {"num_warps": 1}
    yield Variant("fits", add, {**types, "length": "i32"}, {"step": 1, "SIZE": 128})
    yield Variant("spills", hoard, types, large, options=one)
    yield Variant("may spill", hoard, types, large, options=one, spill_limit=1 << 20)
    yield Variant("lacks y", hoard, {"x": "*fp32"}, large)
"""


def compiled(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a new interpreter, since kernels may be interpreted in this one."""
    command = [sys.executable, "-m", "vllm_tgvkv.kernels.gpu.compile", *options]
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.nightly  # minutes for each
@pytest.mark.slow
@pytest.mark.parametrize("cc", CAPABILITIES)
def test_every_variant_builds_without_spills(cc: int) -> None:
    run = compiled("--cc", str(cc))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    lines = [re.split(r" {2,}", line) for line in run.stdout.splitlines()]
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules(gpu.__path__, PREFIX)]
    kernels = {
        (module.__name__.removeprefix(PREFIX), name)
        for module in modules
        for name in vars(module)
        if name.endswith("_kernel")
    }
    assert {(module, kernel) for module, kernel, *_ in lines[1:-1]} == kernels


@pytest.mark.slow
def test_a_kernel_that_spills_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spilling.py").write_text(SPILLING)
    run = compiled("--module", "spilling", "--cc", "90", path=tmp_path)
    assert run.returncode == 1, run.stderr
    *lines, summary = run.stdout.splitlines()[1:]
    verdicts = [("SPILLS" in line, "FAILED" in line) for line in lines]
    assert verdicts == [(False, False), (True, False), (False, False), (False, True)], run.stdout
    assert "missing or unknown arguments: y" in lines[3]
    assert summary == "4 builds, 2 not accepted"


def test_one_kernel_can_be_selected(tmp_path: Path) -> None:
    (tmp_path / "spilling.py").write_text(SPILLING)
    run = compiled("--module", "spilling", "--cc", "80", "--only", "fits", path=tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[1].split()[:4] == ["spilling", "add", "fits", "80"]


def test_other_tests_run_the_pytorch_code() -> None:
    assert gpu.on_cpu is False


def test_subprocesses_are_not_interpreted() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    code = "import triton.language as tl; print(type(tl.sum).__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "JITFunction"
