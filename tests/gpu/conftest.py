# SPDX-License-Identifier: Apache-2.0
"""Device on which these tests run the Triton kernels, and vLLM's model runners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import has_cuda
from tests.gpu import pytorch_on_cpu
from vllm_tgvkv.kernels import gpu


# Module scope, since hypothesis rejects function-scoped fixtures.
@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """Return the device of the tensors, "cuda" or "cpu".

    Without a GPU, the functions of :mod:`vllm_tgvkv.kernels` run the Triton kernels on CPU tensors
    under Triton's interpreter.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    if has_cuda():
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        # `tl.constexpr` functions read it again when they are called.
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(gpu, "on_cpu", True)
        multiply_bfloat16(patch)
        yield "cpu"


# All tests of a module that uses it use no `device`: pytest runs them kind by kind.
@pytest.fixture(scope="module", params=["pytorch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the implementation in PyTorch, or in Triton; return the device of the tensors."""
    if request.param == "triton":
        yield request.getfixturevalue("device")
        return
    with pytorch_on_cpu():
        yield "cpu"


@pytest.fixture(scope="module", params=["1", "0"], ids=["runner-v2", "runner-v1"])
def runner(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose vLLM's model runner; return the value of its variable."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
        yield request.param


def multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply bfloat16 matrices, whose bits it treats as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(matrix: TensorHandle) -> TensorHandle:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        return TensorHandle((matrix.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    patch.setattr(InterpreterBuilder, "create_dot", dot)
