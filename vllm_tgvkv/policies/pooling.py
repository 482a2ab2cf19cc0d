# SPDX-License-Identifier: Apache-2.0
"""Pooling of token scores over neighbours, in the sequence or in an image's patch grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.prompt import VisionSpan

_KINDS = ("none", "sequence", "grid")
_REDUCTIONS = ("max", "mean")
_LARGEST_KERNEL = 255
"""Bound of the memory: pooling over a sequence takes ``kernel`` times that of the scores."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of a token's score with its neighbours' scores.

    ``sequence``: over the ``kernel`` nearest positions of the same run, which is one image or the
    text between two images. ``grid``: over ``kernel`` x ``kernel`` patches of the same image; text
    stays as it is. At a border, positions outside do not count.

    Raises:
        ValueError: for an unknown ``kind`` or ``reduce``, or a kernel that is not odd and positive.
    """

    kind: Literal["none", "sequence", "grid"] = "none"
    kernel: int = 3
    reduce: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {self.kind!r}")
        if self.reduce not in _REDUCTIONS:
            raise ValueError(f"reduce must be one of {', '.join(_REDUCTIONS)}, got {self.reduce!r}")
        is_count = isinstance(self.kernel, int) and not isinstance(self.kernel, bool)
        if not is_count or not 1 <= self.kernel <= _LARGEST_KERNEL or self.kernel % 2 == 0:
            raise ValueError(
                f"kernel must be an odd positive number, at most {_LARGEST_KERNEL}, got "
                f"{self.kernel!r}"
            )


def pool(
    scores: Tensor, is_vision: Tensor, images: tuple[VisionSpan, ...], pooling: Pooling
) -> Tensor:
    """Return pooled scores, float32 ``[S, P]``, from scores ``[S, P]`` and the mask bool ``[P]``.

    Raises:
        ValueError: if ``grid`` pooling meets an image whose grid is unknown or does not fit its
            length.
    """
    if pooling.kind == "sequence":
        return _pool_sequence(scores, _run_numbers(is_vision, images), pooling)
    if pooling.kind == "grid":
        return _pool_grids(scores, images, pooling)
    return scores


def _run_numbers(is_vision: Tensor, images: tuple[VisionSpan, ...]) -> Tensor:
    """Return the index of each position's run, int64 ``[P]``, ascending."""
    starts = torch.zeros_like(is_vision)
    starts[1:] = is_vision[1:] != is_vision[:-1]
    for image in images:  # there may be no text between two images
        starts[image.start] = True
    return starts.cumsum(dim=0)


def _pool_sequence(scores: Tensor, runs: Tensor, pooling: Pooling) -> Tensor:
    reach = pooling.kernel // 2
    neighbours = F.pad(scores, (reach, reach)).unfold(-1, pooling.kernel, 1)  # [S, P, kernel]
    same_run = F.pad(runs, (reach, reach), value=-1).unfold(0, pooling.kernel, 1) == runs[:, None]
    if pooling.reduce == "max":
        return neighbours.masked_fill(~same_run, float("-inf")).amax(dim=-1)
    # In float64, so that equal neighbourhoods have equal means in any order of summation.
    sums = neighbours.masked_fill(~same_run, 0).sum(dim=-1, dtype=torch.float64)
    return (sums / same_run.sum(dim=-1)).float()


def _pool_grids(scores: Tensor, images: tuple[VisionSpan, ...], pooling: Pooling) -> Tensor:
    pooled = scores.clone()
    for image in images:
        rows, columns = _grid(image)
        patches = slice(image.start, image.start + image.length)
        grid = _pool_grid(scores[:, patches].reshape(-1, rows, columns), pooling)
        pooled[:, patches] = grid.flatten(1)
    return pooled


def _pool_grid(grid: Tensor, pooling: Pooling) -> Tensor:
    """Return the pooled scores of one image, ``[S, rows, columns]`` like its argument."""
    reach = pooling.kernel // 2
    if pooling.reduce == "mean":
        return F.avg_pool2d(grid, pooling.kernel, 1, reach, count_include_pad=False)
    return F.max_pool2d(grid, pooling.kernel, 1, reach)


def _grid(image: VisionSpan) -> tuple[int, int]:
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
