# SPDX-License-Identifier: Apache-2.0
"""Pooling of token scores over neighbours, in the sequence or in an image's patch grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.kernels.pooling import to_device, window_pooling
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
        self._windows: Callable[[Tensor], Tensor] | None = None
        self._patches: list[tuple[Grid, Tensor]] = []
        """Each shape of the grids, and the positions of all images that have it, int64 `[n]`."""
        if pooling.kind == "grid":
            patches = _patches_by_grid(images)
            if not pooling.has_direction:
                self._patches = [
                    (grid, to_device(found, device)) for grid, found in patches.items()
                ]
        if pooling.kind == "sequence" or pooling.has_direction:
            first, last = _windows(pooling, num_tokens, images, sinks)
            self._windows = window_pooling(first, last, pooling.reduce, pooling.halve, device)

    def __call__(self, scores: Tensor) -> Tensor:
        """Return pooled scores, float32 `[S, P]`, from scores `[S, P]`."""
        if self._windows is not None:
            return self._windows(scores)
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
