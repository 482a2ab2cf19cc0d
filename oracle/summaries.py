# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens, one token after the other, in float64.

A summary has a few rows. Each row has a mass n and the weighted means of the keys and values that
it has absorbed; attention reads it as a key whose logit is raised by log n. At a later cut the rows
that there are count as tokens, each at the place of its root and with its mass as its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.methods import Image, Layout


@dataclass
class Row:
    """A row of a summary: its root's position, its mass, and the means of keys and values, [D]."""

    root: int
    mass: float
    key: Tensor
    value: Tensor

    def absorb(self, weight: float, key: Tensor, value: Tensor) -> None:
        """Add a token: n' = n + w, mean' = (n mean + w x) / n'."""
        total = self.mass + weight
        if total == 0:
            return
        self.key = (self.mass * self.key + weight * key) / total
        self.value = (self.mass * self.value + weight * value) / total
        self.mass = total


@dataclass(frozen=True)
class Rules:
    """How tokens are absorbed.

    Attributes:
        of: "both" for a summary of vision and one of text, "all" for one of both together, or
            "vision" or "text" for one alone.
        weight: "tokens", every token weighs 1; or "score", it weighs its score, divided by the mean
            score of the tokens that the summary absorbs.
        decay: factor of a vision token's weight for each step away from its root.
        gate: factor of all masses.
        rows: greatest number of rows of a summary.
    """

    of: str = "both"
    weight: str = "tokens"
    decay: float = 0.9
    gate: float = 1.0
    rows: int = 15

    def kinds(self, layout: Layout) -> list[str]:
        """Return what each summary of a prompt is of."""
        kinds = ["vision", "text"] if self.of == "both" else [self.of]
        return [kind for kind in kinds if kind != "vision" or layout.images]


def image_of(layout: Layout, j: int) -> Image | None:
    """Return the image that position j belongs to, or None for text."""
    return next((i for i in layout.images if i.start <= j < i.start + i.length), None)


def distance(layout: Layout, i: int, j: int) -> int:
    """Return the steps between two positions: on the patch grid of an image, or in the sequence."""
    image = image_of(layout, i)
    if image is None or image != image_of(layout, j) or image.grid is None:
        return abs(i - j)
    (row, column), (other_row, other_column) = (
        divmod(x - image.start, image.grid[1]) for x in (i, j)
    )
    return abs(row - other_row) + abs(column - other_column)


def roots_of(
    absorbed: Sequence[int], scores: Sequence[float], number: int, earlier: Sequence[int] = ()
) -> list[int]:
    """Return at most `number` roots, in their order.

    First come every other root that there is, then the best of the absorbed positions (of equal
    ones, the first), then the other roots, the last one first.

    Args:
        earlier: roots that there are, ascending.
    """
    best = sorted(absorbed, key=lambda j: (-scores[j], j))
    return sorted([*earlier[::2], *best, *reversed(earlier[1::2])][:number])


def root_of(layout: Layout, j: int, roots: Sequence[int]) -> int:
    """Return the index of a token's root: the nearest one of its image, or of the text.

    If there is none of them, the nearest of all. The first, of equally near ones.
    """
    image = image_of(layout, j)
    own = [r for r in roots if image_of(layout, r) == image]
    near = own or list(roots)
    steps = [distance(layout, j, r) for r in near]
    return roots.index(near[steps.index(min(steps))])


def summary(
    keys: Tensor,
    values: Tensor,
    evicted: Sequence[int],
    scores: Sequence[float],
    layout: Layout,
    rules: Rules,
    earlier: Sequence[Row] = (),
) -> list[Row]:
    """Return what some positions of one head leave, in the order of their roots.

    Args:
        keys, values: [P, D] of the head.
        evicted: the positions that this cut evicts, of those that this summary is of.
        scores: of all positions.
        earlier: the rows that earlier cuts left.
    """
    mean = sum(scores[j] for j in evicted) / len(evicted) if evicted else 1.0
    weights = dict.fromkeys(evicted, rules.gate)
    if rules.weight == "score" and mean > 0:
        weights = {j: rules.gate * scores[j] / mean for j in evicted}
    absorbed = [j for j in evicted if weights[j] > 0]
    roots = roots_of(absorbed, scores, rules.rows, [row.root for row in earlier])
    items = [(j, weights[j], keys[j].double(), values[j].double()) for j in absorbed]
    items += [(row.root, row.mass, row.key, row.value) for row in earlier]
    rows = [Row(r, 0.0, torch.zeros(()), torch.zeros(())) for r in roots]
    for place, weight, key, value in items:
        index = root_of(layout, place, roots)
        if layout.vision[place]:
            weight *= rules.decay ** distance(layout, place, roots[index])
        rows[index].absorb(weight, key, value)
    return rows


def summaries(
    keys: Tensor,
    values: Tensor,
    evicted: Tensor,
    scores: Sequence[float],
    layout: Layout,
    rules: Rules,
    blocks: int,
    earlier: Sequence[Sequence[Row]] = (),
) -> list[list[Row]]:
    """Return the rows of each summary of one head; there are at most `blocks` summaries.

    Those of `earlier` that find no block are lost.

    Args:
        evicted: bool [P], the positions that this cut evicts.
        earlier: the summaries that the last cut left.
    """
    found = []
    for number, kind in enumerate(rules.kinds(layout)[:blocks]):
        absorbed = [
            j
            for j in evicted.nonzero().flatten().tolist()
            if kind in ("all", "vision" if layout.vision[j] else "text")
        ]
        before = earlier[number] if number < len(earlier) else ()
        found.append(summary(keys, values, absorbed, scores, layout, rules, before))
    return found


def _log(mass: float) -> float:
    return math.log(mass) if mass > 0 else -math.inf


@dataclass(frozen=True)
class Absorbed:
    """Summaries of all heads as attention reads them: rows of all heads are as many as the most.

    Attributes:
        keys, values: [L, H, n, D].
        log_masses: [L, H, n], -inf where a head has fewer rows.
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor

    @classmethod
    def of_heads(cls, heads: Sequence[Sequence[Sequence[Row]]], head_size: int) -> Absorbed:
        """Stack the rows of each layer's heads."""
        most = max((len(rows) for layer in heads for rows in layer), default=0)
        shape = (len(heads), len(heads[0]), most)
        keys, values = (torch.zeros(*shape, head_size, dtype=torch.float64) for _ in range(2))
        log_masses = torch.full(shape, -math.inf, dtype=torch.float64)
        for layer, of_layer in enumerate(heads):
            for head, rows in enumerate(of_layer):
                for i, row in enumerate(rows):
                    keys[layer, head, i], values[layer, head, i] = row.key, row.value
                    log_masses[layer, head, i] = _log(row.mass)
        return cls(keys, values, log_masses)
