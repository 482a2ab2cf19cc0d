# SPDX-License-Identifier: Apache-2.0
"""Recall from its definition: a sketch of a prompt's keys, and choices out of all of its tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.pooling import Pool

GROUP = 32
"""Tokens that share a range in each channel."""


@dataclass(frozen=True)
class Recall:
    """When tokens are chosen again, and by what.

    Attributes:
        every: answer tokens between two choices, and from a cut to the first choice.
        bits: of a number in the sketch.
        rows: last rows of the answer that vote.
        delay: answer tokens after a choice whose rows do not see it yet.
    """

    every: int
    bits: int
    rows: int
    delay: int = 1


def served(pool: Pool, recall: Recall) -> Pool:
    """Return the pooling of scores at a choice.

    A choice is in force from `delay + 1` tokens after it, for `every` tokens. A score counts half
    after as many positions at the latest, and for twice as many at most.
    """
    if pool.forward is None:
        return pool
    ahead = recall.delay + 1 + recall.every
    halve = None if pool.halve is None else min(pool.halve, ahead)
    return replace(pool, forward=min(pool.forward, 2 * ahead), halve=halve)


def sketched(keys: Tensor, bits: int) -> Tensor:
    """Return the keys that a sketch of one head's keys [C, D] stands for, float64 [C, D]."""
    result = torch.empty(keys.shape, dtype=torch.float64)
    for start, channel in itertools.product(range(0, len(keys), GROUP), range(keys.shape[1])):
        numbers = keys[start : start + GROUP, channel].double()
        if bits == 1:
            mean = numbers.abs().mean()
            low, step = -mean, 2 * mean
        else:
            low, step = numbers.min(), (numbers.max() - numbers.min()) / (2**bits - 1)
        low, step = low.half().double(), step.half().double()
        codes = (numbers >= 0).double()
        if bits > 1:
            codes = torch.zeros_like(numbers)
            if step > 0:
                codes = ((numbers - low) / step).round().clamp(0, 2**bits - 1)
        result[start : start + GROUP, channel] = low + step * codes
    return result


def attention(
    queries: Tensor, keys: Tensor, scale: float, candidates: int, recall: Recall
) -> Tensor:
    """Return A of the last rows, float64 [L, Q, n, n]; all other rows are zero.

    Args:
        queries: [L, Q, n, D]; `keys` are [L, H, n, D].
        candidates: C, the first tokens; only a sketch of their keys is read.
    """
    keys = keys.double().clone()
    for layer, head in itertools.product(*map(range, keys.shape[:2])):
        keys[layer, head, :candidates] = sketched(keys[layer, head, :candidates], recall.bits)
    group, length = queries.shape[1] // keys.shape[1], keys.shape[2]
    result = torch.zeros(*queries.shape[:2], length, length, dtype=torch.float64)
    for row in range(length - recall.rows, length):
        seen = keys[:, :, : row + 1].repeat_interleave(group, dim=1)
        logits = (seen @ queries[:, :, row].double().unsqueeze(-1)).squeeze(-1) * scale
        result[:, :, row, : row + 1] = logits.softmax(-1)
    return result
