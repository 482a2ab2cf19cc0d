# SPDX-License-Identifier: Apache-2.0
"""Tests of the Triton kernels: compiled on a GPU, under Triton's interpreter without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm_tgvkv.kernels import gpu


@contextlib.contextmanager
def pytorch_on_cpu() -> Iterator[None]:
    """Run the PyTorch implementations for CPU tensors in this context, as references."""
    before, gpu.on_cpu = gpu.on_cpu, False
    try:
        yield
    finally:
        gpu.on_cpu = before
