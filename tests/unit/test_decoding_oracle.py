# SPDX-License-Identifier: Apache-2.0
"""`oracle.decoding` against the same rules written as loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from oracle.decoding import importance, redundancy, similarity


def test_a_cosine_of_the_threshold_is_not_similar() -> None:
    keys = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    assert similarity(keys)[0, 1] == pytest.approx(0.5)
    keys[1, 1] = 0.9
    assert similarity(keys)[0, 1] == 0


def parts_in_loops(queries: Tensor, keys: Tensor, scale: float) -> tuple[list[float], list[float]]:
    """Return importance and redundancy, number by number."""

    def dot(one: list[float], other: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(one, other, strict=True))

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp(logit - max(logits)) for logit in logits]
        return [weight / math.fsum(weights) for weight in weights]

    cached, total = keys.double().tolist(), len(keys)
    past = range(total - len(queries))
    rows = [
        softmax([max(dot(query, cached[j]) for query in group) * scale for j in past])
        for group in queries.double().tolist()
    ]
    means = [math.fsum(row[j] for row in rows) / len(rows) for j in past]
    important = [max(means[max(0, j - 3) : j + 4]) for j in past]

    lengths = [math.sqrt(dot(key, key)) for key in cached]
    totals = [0.0] * total
    for i in range(total):
        cosines = [dot(cached[i], cached[j]) / (lengths[i] * lengths[j]) for j in range(total)]
        newest = max((j for j in range(total) if j != i and cosines[j] > 0.5), default=None)
        for j in range(total):
            if j not in (i, newest):
                totals[j] += cosines[j]
    return important, softmax([amount / total for amount in totals])


@pytest.mark.parametrize("trial", range(6))
def test_parts_in_loops(trial: int) -> None:
    window, group, size = random.choice([1, 4, 8]), random.choice([1, 2, 5]), 6
    total = window + random.choice([1, 2, 3, 8, 40])
    centres = torch.randn(3, size)
    keys = centres[torch.randint(3, (total,))] + 0.5 * torch.randn(total, size)
    queries = 3 * torch.randn(window, group, size)
    important, redundant = parts_in_loops(queries, keys, 0.4)
    for found, wanted in (
        (importance(queries, keys, 0.4), important),
        (redundancy(keys), redundant),
    ):
        torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)
