# SPDX-License-Identifier: Apache-2.0
"""Pooling of token scores over neighbours, in the sequence or in an image's patch grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.shared.prompt import Grid, VisionSpan

_KINDS = ("none", "sequence", "grid")
_REDUCTIONS = ("max", "mean")
_DEFAULT_KERNEL = 3
_LARGEST_KERNEL = 255
"""Bound of the time: pooling over a grid looks at `kernel` squared patches for each patch."""
_LARGEST_REACH = 4096


@dataclass(frozen=True)
class Pooling:
    """Pooling of a token's score with its neighbours' scores.

    `sequence`: over the `kernel` nearest positions of the same run, which is one image or the
    text between two images. A tile of an image and a frame of a video are each a run. `grid`:
    over `kernel` x `kernel` patches of the same image; text stays as it is. At a border,
    positions outside do not count.

    `forward` and `back` take the place of `kernel` and give pooling a direction: a score
    counts for the `forward` positions after its token and the `back` positions before it, so
    that position j gets `reduce` over `s[j - forward .. j + back]`. What is read onwards from
    where the model looks now is then kept as well. `sequence` pools inside each run; `grid`
    pools inside each image only, along its rows in reading order and on to the next row, and text
    stays as it is. The sinks, which are kept whatever their scores, are a run of their own: theirs
    are the highest of most heads, and the tokens after them are no better for it.

    `halve` gives scores a weight, half as much with every `halve` positions that they count
    forward: position j gets the maximum over i of `s[i] 2^(-(j - i) / halve)` for i up to j, and
    of `s[i]` for i after it. Scores are not negative.

    Raises:
        ValueError: for an unknown `kind` or `reduce`, a number outside of its bounds, or fields
            that exclude each other.
    """

    kind: Literal["none", "sequence", "grid"] = "none"
    kernel: int | None = None
    """None: 3, unless a reach is given."""
    reduce: Literal["max", "mean"] = "max"
    forward: int | None = None
    """None: 0, if `back` is given."""
    back: int | None = None
    """None: 0, if `forward` is given."""
    halve: int | None = None
    """Positions after which a score's weight is half; None: 1 as far as `forward`."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("kind", self.kind, _KINDS),
            ("reduce", self.reduce, _REDUCTIONS),
        ):
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        kernel = self.kernel
        if kernel is not None and not (_is_count(kernel, 1, _LARGEST_KERNEL) and kernel % 2):
            raise ValueError(
                f"kernel must be an odd positive number, at most {_LARGEST_KERNEL}, got {kernel!r}"
            )
        for name, number, least in (
            ("forward", self.forward, 0),
            ("back", self.back, 0),
            ("halve", self.halve, 1),
        ):
            if number is not None and not _is_count(number, least, _LARGEST_REACH):
                raise ValueError(
                    f"{name} must be a whole number from {least} to {_LARGEST_REACH}, "
                    f"got {number!r}"
                )
        self._check_together()

    def _check_together(self) -> None:
        for name, reach in (("forward", self.forward), ("back", self.back)):
            if reach is not None and self.kernel is not None:
                raise ValueError(
                    f"kernel {self.kernel} and {name} {reach} exclude each other: give kernel for "
                    "the same reach on both sides, or forward and back"
                )
            if reach is not None and self.kind == "none":
                raise ValueError(f"{name} is {reach} and kind none: give kind sequence or grid")
        halve = self.halve
        if halve is not None and self.forward is None:
            raise ValueError(f"halve is {halve}: give forward too, the largest reach, such as 256")
        if halve is not None and self.reduce != "max":
            raise ValueError(f"halve is {halve} and reduce {self.reduce}: give reduce max")

    def serving(self, num_tokens: int) -> Pooling:
        """Return it for scores that serve the next `num_tokens` tokens of an answer only.

        These read about as far ahead of where the model looks now. So a score weighs half after as
        many positions at the latest, and counts for twice as many at most.
        """
        if self.forward is None:
            return self
        halve = self.halve and min(self.halve, num_tokens)
        return replace(self, forward=min(self.forward, 2 * num_tokens), halve=halve)

    @property
    def has_direction(self) -> bool:
        """Whether a reach is given instead of a kernel."""
        return self.forward is not None or self.back is not None

    @property
    def reach(self) -> tuple[int, int]:
        """Positions after and before a token for which its score counts."""
        if self.has_direction:
            return self.forward or 0, self.back or 0
        half = (self.kernel or _DEFAULT_KERNEL) // 2
        return half, half

    @property
    def bytes_per_score(self) -> int:
        """Bound of the memory that pooling takes for each score of a layer."""
        if self.kind == "none":
            return 0
        if self.halve is not None:  # two buffers, and what counts backward
            return 64 + (self.reach[1] + 1).bit_length() * 16
        is_square = self.kind == "grid" and not self.has_direction
        num_sizes = 0 if is_square else (sum(self.reach) + 1).bit_length()
        # Windows of each size, the parts of every position's window, and where these are.
        return 32 + num_sizes * (2 * (8 if self.reduce == "mean" else 4) + 8)


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class Pooler:
    """Pooling of the scores of one prompt, by layer.

    All that depends on the prompt alone is made once, on the host. So a layer takes as many
    launches for a video of many frames as for one image; several grids of different shape take
    some for each shape.

    Raises:
        ValueError: if `grid` pooling meets an image whose grid is unknown or does not fit its
            length.
    """

    def __init__(
        self,
        pooling: Pooling,
        num_tokens: int,
        images: tuple[VisionSpan, ...],
        device: torch.device,
        sinks: int = 0,
    ) -> None:
        self._pooling = pooling
        self._windows: _Windows | None = None
        self._weighted: _Weighted | None = None
        self._patches: list[tuple[Grid, Tensor]] = []
        """Each shape of the grids, and the positions of all images that have it, int64 `[n]`."""
        if pooling.kind == "grid":
            patches = _patches_by_grid(images)
            if not pooling.has_direction:
                self._patches = [(grid, _copy(found, device)) for grid, found in patches.items()]
        if pooling.halve is not None:
            first, last = _windows(pooling, num_tokens, images, sinks)
            self._weighted = _Weighted(first, last, pooling.halve, device)
        elif pooling.kind == "sequence" or pooling.has_direction:
            first, last = _windows(pooling, num_tokens, images, sinks)
            self._windows = _Windows(first, last, pooling.reduce, device)

    def __call__(self, scores: Tensor) -> Tensor:
        """Return pooled scores, float32 `[S, P]`, from scores `[S, P]`."""
        if self._weighted is not None:
            return self._weighted.pooled(scores)
        if self._windows is not None:
            return self._windows.pooled(scores)
        pooled = scores.clone() if self._patches else scores
        for (rows, columns), positions in self._patches:
            grids = scores.index_select(1, positions).view(len(scores), -1, rows, columns)
            pooled.index_copy_(1, positions, _pool_grids(grids, self._pooling).flatten(1))
        return pooled


def _windows(
    pooling: Pooling, num_tokens: int, images: tuple[VisionSpan, ...], sinks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last position that each position is pooled with, int64 `[P]` each."""
    starts = [image.start for image in images]
    ends = [image.start + image.length for image in images]
    apart = [min(sinks, num_tokens)] if pooling.has_direction else []
    edges = np.unique([0, *apart, *starts, *ends, num_tokens])
    sizes = np.diff(edges)
    positions = np.arange(num_tokens)
    forward, back = pooling.reach
    images_before = np.searchsorted(np.array(starts), edges[:-1], side="right")
    is_vision = images_before > np.searchsorted(np.array(ends), edges[:-1], side="right")
    has_neighbours = np.repeat(is_vision | (pooling.kind == "sequence"), sizes)
    first = np.maximum(positions - forward * has_neighbours, np.repeat(edges[:-1], sizes))
    last = np.minimum(positions + back * has_neighbours, np.repeat(edges[1:] - 1, sizes))
    return first, last


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
        self._index = _copy(index.ravel(), device)
        """Where the parts of each position's window are, int64 `[sizes * P]`."""
        self._widths = None if reduce == "max" else _copy(widths, device)

    def pooled(self, scores: Tensor) -> Tensor:
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
        self._weights = _copy(np.reshape(weights, (-1, len(first))).astype(np.float32), device)
        """Weights of the moved windows, float32 `[shifts, P]`: 0 where one begins before the
        position's run."""

    def pooled(self, scores: Tensor) -> Tensor:
        pad = max(self._shifts, default=0)
        best, spare = (F.pad(scores.clamp(min=0), (pad, 0)) for _ in range(2))
        end = best.shape[1]
        for place, shift in enumerate(self._shifts):
            moved, out = best[:, pad - shift : end - shift], spare[:, pad:]
            torch.mul(moved, self._weights[place], out=out)
            torch.maximum(out, best[:, pad:], out=out)
            best, spare = spare, best
        return torch.maximum(best[:, pad:], self._behind.pooled(scores))


def _patches_by_grid(images: tuple[VisionSpan, ...]) -> dict[Grid, np.ndarray]:
    """Return the positions of the images with each shape of grid, int64, image by image."""
    found: dict[Grid, list[np.ndarray]] = {}
    for image in images:
        positions = np.arange(image.start, image.start + image.length)
        found.setdefault(_grid(image), []).append(positions)
    return {grid: np.concatenate(positions) for grid, positions in found.items()}


def _pool_grids(grids: Tensor, pooling: Pooling) -> Tensor:
    """Return the pooled scores of images, `[S, images, rows, columns]` like its argument."""
    reach, _ = pooling.reach
    if pooling.reduce == "mean":
        return F.avg_pool2d(grids, 2 * reach + 1, 1, reach, count_include_pad=False)
    return F.max_pool2d(grids, 2 * reach + 1, 1, reach)


def _grid(image: VisionSpan) -> Grid:
    where = f"the image at positions {image.start}..{image.start + image.length - 1}"
    if image.grid is None:
        raise ValueError(f"pooling over the patch grid: the grid of {where} is not known")
    rows, columns = image.grid
    if rows * columns != image.length:
        raise ValueError(
            f"pooling over the patch grid: {where} has {image.length} tokens, "
            f"its grid {rows} x {columns}"
        )
    return rows, columns


def _copy(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
