# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one file beside each PyTorch implementation of the same name.

The functions of :mod:`vllm_tgvkv.kernels` check their arguments, then run the PyTorch code on CPU
tensors and the kernels of this package on CUDA tensors. The PyTorch code is their reference.
"""

from __future__ import annotations

import torch

on_cpu = False
"""Whether CPU tensors go to the Triton kernels as well; set by tests, under the interpreter."""


def runs(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels take a tensor's work."""
    return tensor.is_cuda or on_cpu
