# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with one message for all kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
SMALL_INTEGERS = (*INTEGERS, torch.int16, torch.int8, torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QUERIES = (*FLOATS, torch.float8_e4m3fn)


def indexable(tensor: Tensor) -> Tensor:
    """Return a tensor, or its bytes if it is fp8, for which a GPU has few of PyTorch's operations.

    A view that copies and indices treat like the numbers; `view(dtype)` turns the result back.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype] = (),
    fits: bool = True,
) -> None:
    """Check a tensor's shape, in which a letter is any size, and its dtype, if any are given.

    Args:
        fits: whether it has what else it needs, which `shape` shows.

    Raises:
        ValueError: if it differs; the message names the tensor, and what it must be.
    """
    fits &= tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or (dtypes and tensor.dtype not in dtypes):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"{kinds} [{', '.join(map(str, shape))}]".lstrip()
        raise ValueError(f"{name} must be {wanted}, got {tensor.dtype} {list(tensor.shape)}")
