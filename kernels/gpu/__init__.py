# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, in files named like the PyTorch implementations.

The functions of `kernels` check their arguments, then run the PyTorch code on CPU
tensors and the kernels of this package on CUDA tensors. The PyTorch code is their reference.
"""

from __future__ import annotations

import torch

on_cpu = False
"""Whether Triton kernels handle CPU tensors as well; set by tests that use the interpreter."""


def runs(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels handle this tensor."""
    return tensor.is_cuda or on_cpu
