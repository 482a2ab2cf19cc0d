# SPDX-License-Identifier: Apache-2.0
"""`oracle.decoding` by hand-made cases, and against the same rules written as loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from oracle.decoding import importance, redundancy, similarity

# -- R-KV: importance ---------------------------------------------------------------------------


def test_importance_by_hand() -> None:
    """Logits ln 1, ln 3 of one head and ln 2, ln 1 of the other: the greater are ln 2, ln 3."""
    keys = torch.tensor([[1.0, 0], [0, 1], [9, 9]])
    query = torch.tensor([[[math.log(1), math.log(3)], [math.log(2), math.log(1)]]])
    # The softmax of the two past keys is 2/5, 3/5. The pool of 7 reaches both from either.
    wanted = torch.tensor([0.6, 0.6]).double()
    torch.testing.assert_close(importance(query, keys, 1.0), wanted, atol=1e-6, rtol=0)


def test_importance_is_the_mean_over_the_window_after_the_softmax() -> None:
    keys = torch.zeros(12, 2)
    keys[0], keys[9] = torch.tensor([1.0, 0]), torch.tensor([0, 1.0])
    queries = torch.tensor([[[math.log(11), 0.0]], [[0.0, math.log(31)]]])
    # 10 past keys. The first row: 11 of 20 for key 0, 1 of 20 for others. The second: 31 of 40 for
    # key 9, 1 of 40 for others. So key 0 gets (11/20 + 1/40) / 2, key 9 (1/20 + 31/40) / 2, and
    # the others (1/20 + 1/40) / 2, but all are within 3 of key 0 or 9 except 4 and 5.
    first, last, rest = 23 / 80, 33 / 80, 3 / 80
    wanted = torch.tensor([first] * 4 + [rest] * 2 + [last] * 4).double()
    torch.testing.assert_close(importance(queries, keys, 1.0), wanted, atol=1e-6, rtol=0)


# -- R-KV: redundancy ---------------------------------------------------------------------------


def test_similarity_by_hand() -> None:
    """Keys 0, 1 and 3 have one direction; 2 is orthogonal to them; 4 has cosine 0.6 with 2."""
    keys = torch.tensor([[1.0, 0], [5, 0], [0, 2], [0.1, 0], [0.8, 0.6]])
    # Cosines, with zero diagonal:
    #   0: 0 1 0 1 .8    1: 1 0 0 1 .8    2: 0 0 0 0 .6    3: 1 1 0 0 .8    4: .8 .8 .6 .8 0
    # The last one above 0.5 in each row is zeroed: 4 in rows 0 to 3, and 3 in row 4.
    wanted = torch.tensor(
        [
            [0, 1, 0, 1, 0],
            [1, 0, 0, 1, 0],
            [0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0.8, 0.8, 0.6, 0, 0],
        ]
    ).double()
    torch.testing.assert_close(similarity(keys), wanted, atol=1e-6, rtol=0)
    means = torch.tensor([2.8, 2.8, 0.6, 2.0, 0]).double() / 5
    torch.testing.assert_close(redundancy(keys), means.exp() / means.exp().sum(), atol=1e-6, rtol=0)


def test_a_cosine_of_the_threshold_is_not_similar() -> None:
    keys = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    assert similarity(keys)[0, 1] == pytest.approx(0.5)
    keys[1, 1] = 0.9
    assert similarity(keys)[0, 1] == 0


# -- both ---------------------------------------------------------------------------------------


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
