# SPDX-License-Identifier: Apache-2.0
"""Pooling of scores over a window of the sequence for each position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.kernels import gpu


def window_pooling(
    first: np.ndarray, last: np.ndarray, reduce: str, halve: int | None, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a function of scores, float32 `[S, P]`: the score of each position's window.

    Args:
        first, last: first and last position of each position's window, which holds the position
            itself, int64 `[P]`.
        reduce: `max`, or `mean`, whose sums are in float64.
        halve: positions after which a score weighs half: at position j the score of an earlier i
            counts `s[i] 2^(-(j - i) / halve)`, and negative ones 0. None: all count alike.

    Returns:
        A function to float32 `[S, P]`. What depends on the windows alone is on the device already.
    """
    if gpu.runs(torch.empty(0, device=device)):
        from vllm_tgvkv.kernels.gpu.pooling import pool_windows

        positions = np.arange(len(first))
        return partial(
            pool_windows,
            windows=to_device(np.stack((first, last)).astype(np.int32), device),
            forward=int((positions - first).max(initial=0)),
            back=int((last - positions).max(initial=0)),
            is_mean=reduce == "mean",
            halve=halve,
        )
    if halve is not None:
        return _Weighted(first, last, halve, device)
    return _Windows(first, last, reduce, device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class _Windows:
    """Maximum or mean over one window of the sequence for each position.

    A window is put together from windows of 1, 2, 4, ... positions, at most one of each size, which
    are computed for all positions by doubling: log2 of the widest window additions or maxima, and
    as many times the memory of the scores. Sums are in float64, so that equal neighbourhoods have
    equal means.
    """

    def __init__(
        self, first: np.ndarray, last: np.ndarray, reduce: str, device: torch.device
    ) -> None:
        widths = last - first + 1
        num_tokens = len(widths)
        self._num_sizes = int(widths.max()).bit_length()
        # The column behind all windows is the neutral element.
        index = np.full((self._num_sizes, num_tokens), self._num_sizes * num_tokens)
        for size in range(self._num_sizes):
            is_part = (widths >> size) & 1 == 1
            index[size, is_part] = size * num_tokens + first[is_part]
            first = first + (is_part << size)
        self._index = to_device(index.ravel(), device)
        """Where the parts of each position's window are, int64 `[sizes * P]`."""
        self._widths = None if reduce == "max" else to_device(widths, device)

    def __call__(self, scores: Tensor) -> Tensor:
        is_mean = self._widths is not None
        num_sets, num_tokens = scores.shape
        end = self._num_sizes * num_tokens
        dtype = torch.float64 if is_mean else scores.dtype
        table = scores.new_empty(num_sets, end + 1, dtype=dtype)
        table[:, end].fill_(0 if is_mean else float("-inf"))
        table[:, :num_tokens] = scores
        by_size = table[:, :end].view(num_sets, self._num_sizes, num_tokens)
        for size in range(1, self._num_sizes):
            half, number = 1 << (size - 1), num_tokens + 1 - (1 << size)
            narrow = by_size[:, size - 1]
            # Windows that would end behind the prompt are never part of another.
            left, right = narrow[:, :number], narrow[:, half : half + number]
            combine = torch.add if is_mean else torch.maximum
            combine(left, right, out=by_size[:, size, :number])
        parts = table.index_select(1, self._index).view(num_sets, self._num_sizes, num_tokens)
        if self._widths is None:
            return parts.amax(dim=1)
        return (parts.sum(dim=1) / self._widths).float()


class _Weighted:
    """Maximum over windows in which a score weighs half for every `halve` positions forward.

    Windows double: the best of 2k positions is the best of the last k, or of the k before them,
    whose scores count k positions further.
    """

    def __init__(
        self, first: np.ndarray, last: np.ndarray, halve: int, device: torch.device
    ) -> None:
        positions = np.arange(len(first))
        self._behind = _Windows(positions, last, "max", device)
        self._shifts: list[int] = []
        """How far windows are moved to be joined."""
        width, largest, weights = 1, int((positions - first).max(initial=0)) + 1, []
        while width < largest:
            shift = min(width, largest - width)
            weights.append(np.where(positions - shift >= first, 2.0 ** (-shift / halve), 0))
            self._shifts.append(shift)
            width += shift
        self._weights = to_device(np.reshape(weights, (-1, len(first))).astype(np.float32), device)
        """Weights of the moved windows, float32 `[shifts, P]`: 0 where one begins before the
        position's run."""

    def __call__(self, scores: Tensor) -> Tensor:
        pad = max(self._shifts, default=0)
        best, spare = (F.pad(scores.clamp(min=0), (pad, 0)) for _ in range(2))
        end = best.shape[1]
        for place, shift in enumerate(self._shifts):
            moved, out = best[:, pad - shift : end - shift], spare[:, pad:]
            torch.mul(moved, self._weights[place], out=out)
            out.masked_fill_(self._weights[place] == 0, 0)  # 0 times NaN is NaN
            torch.maximum(out, best[:, pad:], out=out)
            best, spare = spare, best
        return torch.maximum(best[:, pad:], self._behind(scores))
