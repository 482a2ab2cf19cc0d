# SPDX-License-Identifier: Apache-2.0
"""Kernels run, interpreted or compiled, as the other tests of this folder assume."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from tests.gpu import pytorch_on_cpu
from vllm_tgvkv.kernels import gpu

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = triton.language


def test_a_kernel_runs_with_functions_of_triton(device: str) -> None:
    @triton.jit
    def row_totals(values, totals, width, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        columns = tl.arange(0, BLOCK)
        loaded = tl.load(values + row * width + columns, mask=columns < width, other=0.0)
        tl.store(totals + row, tl.sum(loaded, 0) + tl.cdiv(width, 4) + tl.max(loaded, 0))

    values = torch.randn(5, 19, device=device)
    totals = torch.full((5,), torch.nan, device=device)
    row_totals[(5,)](values, totals, 19, BLOCK=32)
    torch.testing.assert_close(totals, values.sum(1) + 5 + values.amax(1))


def test_the_device_selects_the_kernels(device: str) -> None:
    values = torch.zeros(1, device=device)
    assert gpu.runs(values)
    with pytorch_on_cpu():
        assert not gpu.runs(values.cpu())
    assert gpu.runs(values)


def test_every_module_imports() -> None:
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        importlib.import_module(module.name)
