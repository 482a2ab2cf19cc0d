# SPDX-License-Identifier: Apache-2.0
"""Pooling of scores by its definition: each position with its neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oracle.token_sets import Layout


@dataclass(frozen=True)
class Pool:
    """Pooling of scores: kind "none", "sequence" or "grid", reduce "max" or "mean".

    Over the `kernel` nearest; or, with `forward` or `back`, position j over positions
    j - forward .. j + back of its run, where text is pooled by "sequence" alone. With
    `halve`, a score weighs half for every `halve` positions that it counts forward.
    """

    kind: str = "none"
    kernel: int = 3
    reduce: str = "max"
    forward: int | None = None
    back: int | None = None
    halve: int | None = None

    @property
    def has_direction(self) -> bool:
        return self.forward is not None or self.back is not None


NO_POOLING = Pool()
SNAP = Pool("sequence", 7, "max")
"""SnapKV's."""


def runs(layout: Layout) -> list[int]:
    """Return the index of each position's run: an image, or text between images."""
    number, result, vision = 0, [], layout.vision
    starts = {image.start for image in layout.images}
    for j in range(layout.length):
        if j in starts or (j > 0 and vision[j] != vision[j - 1]):
            number += 1
        result.append(number)
    return result


def neighbours(layout: Layout, pool: Pool, sinks: int = 0) -> list[list[int]]:
    """Return for each position the positions it is pooled with, including itself.

    With a direction, the first `sinks` positions are a run of their own.
    """
    reach, everything = pool.kernel // 2, range(layout.length)
    first = last = reach
    part = [(number, False) for number in runs(layout)]
    if pool.has_direction:
        first, last = pool.forward or 0, pool.back or 0
        part = [(number, j < sinks) for j, (number, _) in enumerate(part)]
    if pool.has_direction or pool.kind == "sequence":
        return [
            [i for i in everything if part[i] == part[j] and j - first <= i <= j + last]
            if pool.kind == "sequence" or layout.vision[j]
            else [j]
            for j in everything
        ]
    near = [[j] for j in everything]
    if pool.kind == "grid":
        for image in layout.images:
            assert image.grid is not None
            patches = [divmod(n, image.grid[1]) for n in range(image.length)]
            for n, (row, column) in enumerate(patches):
                near[image.start + n] = [
                    image.start + m
                    for m, (r, c) in enumerate(patches)
                    if abs(r - row) <= reach and abs(c - column) <= reach
                ]
    return near


@lru_cache(maxsize=32)
def weights(layout: Layout, pool: Pool, sinks: int) -> Tensor:
    """Return float64 [P, P]: in row j the weight of each position that j is pooled with, or 0."""
    result = torch.zeros(layout.length, layout.length, dtype=torch.float64)
    for j, near in enumerate(neighbours(layout, pool, sinks)):
        halvings = [max(j - i, 0) / pool.halve if pool.halve else 0.0 for i in near]
        result[j, near] = torch.tensor([2**-n for n in halvings], dtype=torch.float64)
    return result


def pooled(scores: Tensor, layout: Layout, pool: Pool, sinks: int = 0) -> Tensor:
    """Return the scores [P] after pooling; NaN stands for no score, and is in no other's pool."""
    factors, has_score = weights(layout, pool, sinks), ~scores.isnan()
    counted = (factors > 0) & has_score
    weighted = factors * scores.double().where(has_score, 0)
    if pool.reduce == "max":
        result = weighted.masked_fill(~counted, -math.inf).amax(1)
    else:
        result = weighted.sum(1) / counted.sum(1)
    return result.where(has_score, math.nan)
