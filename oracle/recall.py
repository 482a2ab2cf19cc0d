# SPDX-License-Identifier: Apache-2.0
"""Recall from its definition: a sketch of a prompt's keys, and choices out of all of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.pooling import Pool

ROWS = 8
"""Newest rows whose votes count."""
STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352, 8: 0.0308}
"""Max's uniform quantisers of a normal distribution."""


@dataclass(frozen=True)
class Recall:
    """When tokens are chosen again, and by what.

    Attributes:
        every: answer tokens between two choices, and from a cut to the first choice.
        bits: of a number in the sketch.
    """

    every: int
    bits: int

    def voters(self, length: int, age: int) -> tuple[int, ...]:
        """Return the rows that vote at a choice among `length` tokens, `age` after the last cut.

        Every choice has as many new rows. The rows of earlier choices count while these are less
        than `ROWS` tokens old.
        """
        rows = set[int]()
        for ago in range(0, min(age, ROWS), self.every):
            rows.update(range(length - ago - min(self.every, ROWS), length - ago))
        return tuple(sorted(rows))


def served(pool: Pool, recall: Recall) -> Pool:
    """Return the pooling of scores at a choice.

    A choice serves the `every` tokens after it, and the one that is chosen from them. A score
    counts half after as many positions at the latest, and for twice as many at most.
    """
    if pool.forward is None:
        return pool
    ahead = recall.every + 1
    halve = None if pool.halve is None else min(pool.halve, ahead)
    return replace(pool, forward=min(pool.forward, 2 * ahead), halve=halve)


def sketched(keys: Tensor, bits: int) -> Tensor:
    """Return the keys that a sketch of one head's keys [C, D] stands for, float64 [C, D]."""
    numbers = keys.double()
    mean = numbers.mean(0).half().double()
    scale = (numbers - mean).square().mean(0).sqrt().clamp(min=1e-4).half().double()
    normal = (numbers - mean) / scale
    of_token = normal.square().mean(1, keepdim=True).sqrt()
    step = (of_token * STEPS[bits]).clamp(min=1e-4).half().double()
    middle = (2**bits - 1) / 2
    code = (normal / step + middle).round().clamp(0, 2**bits - 1)
    return mean + scale * step * (code - middle)


def attention(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    candidates: int,
    bits: int,
    rows: Sequence[int],
    sinks: Tensor | None = None,
) -> Tensor:
    """Return A of some rows, float64 [L, Q, n, n]; all other rows are zero.

    Args:
        queries: [L, Q, n, D]; `keys` are [L, H, n, D].
        candidates: C, the first tokens; only a sketch of their keys is read.
        sinks: [L, Q], the logit of one more key of each query head, which is left out of A.
    """
    keys = keys.double().clone()
    for layer, head in itertools.product(*map(range, keys.shape[:2])):
        keys[layer, head, :candidates] = sketched(keys[layer, head, :candidates], bits)
    group, length = queries.shape[1] // keys.shape[1], keys.shape[2]
    result = torch.zeros(*queries.shape[:2], length, length, dtype=torch.float64)
    for row in rows:
        seen = keys[:, :, : row + 1].repeat_interleave(group, dim=1)
        logits = (seen @ queries[:, :, row].double().unsqueeze(-1)).squeeze(-1) * scale
        if sinks is not None:
            logits = torch.cat((logits, sinks.double().unsqueeze(-1)), dim=-1)
        result[:, :, row, : row + 1] = logits.softmax(-1)[..., : row + 1]
    return result
