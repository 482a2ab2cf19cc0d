# SPDX-License-Identifier: Apache-2.0
"""`oracle.decoding` by hand-made cases, and against the same rules written as loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from oracle.decoding import (
    MIX,
    importance,
    redundancy,
    rkv_kept,
    rkv_scores,
    similarity,
    tgv_evicted,
)

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


def test_importance_of_one_past_key() -> None:
    assert importance(torch.randn(8, 2, 4), torch.randn(9, 4), 0.5).tolist() == [1]


def test_keys_of_the_window_change_no_importance() -> None:
    queries, keys = torch.randn(8, 2, 4), torch.randn(20, 4)
    before = importance(queries, keys, 0.5)
    keys[12:] = 100 * torch.randn(8, 4)
    assert torch.equal(importance(queries, keys, 0.5), before)


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


def test_the_newest_of_several_copies_is_not_redundant() -> None:
    """Of three copies each row zeroes the newest: 2 in rows 0 and 1, and 1 in row 2."""
    keys = torch.tensor([[0.0, 3]] * 3)
    matrix = [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
    torch.testing.assert_close(similarity(keys), torch.tensor(matrix).double())
    weights = [math.exp(2 / 3), math.exp(1 / 3), 1]
    assert redundancy(keys).tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_two_copies_excuse_each_other() -> None:
    keys = torch.tensor([[0.0, 3]] * 2)
    assert not similarity(keys).any()
    assert redundancy(keys).tolist() == [0.5, 0.5]


def test_a_cosine_of_the_threshold_is_not_similar() -> None:
    keys = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    assert similarity(keys)[0, 1] == pytest.approx(0.5)
    keys[1, 1] = 0.9
    assert similarity(keys)[0, 1] == 0


def test_opposite_keys_are_not_similar() -> None:
    keys = torch.tensor([[1.0, 0], [-1, 0]])
    torch.testing.assert_close(similarity(keys), torch.tensor([[0.0, -1], [-1, 0]]).double())


def test_keys_of_zero_are_similar_to_nothing() -> None:
    assert not similarity(torch.tensor([[0.0, 0], [1, 0], [0, 0]])).any()


def test_one_key() -> None:
    assert redundancy(torch.randn(1, 4)).tolist() == [1]


def test_the_first_key_in_rows_without_a_similar_one() -> None:
    """The published code zeroes key 0 there. Row 2 has a similar key and is the same in both."""
    keys = torch.tensor([[1.0, 0], [0.3, 1], [0.3, 1]])
    cosine = 0.3 / math.sqrt(1.09)
    plain = [[0, cosine, cosine], [cosine, 0, 0], [cosine, 0, 0]]
    torch.testing.assert_close(similarity(keys), torch.tensor(plain).double())
    torch.testing.assert_close(similarity(keys, True), torch.tensor(plain).double())
    keys[2] = torch.tensor([1.0, -1])
    cosines = [cosine, math.sqrt(0.5), -0.7 / math.sqrt(1.09 * 2)]
    plain = [[0, cosines[0], 0], [cosines[0], 0, cosines[2]], [0, cosines[2], 0]]
    torch.testing.assert_close(similarity(keys), torch.tensor(plain).double())
    plain[1][0] = 0
    torch.testing.assert_close(similarity(keys, True), torch.tensor(plain).double())


# -- R-KV: what is kept -------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    """One query that looks at nothing in particular: importance 1/2 for both past keys."""
    keys = torch.tensor([[1.0, 0], [0, 1], [1, 0]])
    queries = torch.zeros(1, 1, 2)
    # Rows 0 and 2 zero each other, so all means are 0 and R is 1/3 for every key of the three.
    wanted = torch.full((2,), 0.1 * 0.5 - 0.9 / 3).double()
    torch.testing.assert_close(rkv_scores(queries, keys, 1.0), wanted)


def test_equal_scores_keep_the_lower_positions() -> None:
    assert rkv_kept(torch.zeros(2, 1, 4), torch.zeros(10, 4), 1.0, 5) == [0, 1, 2, 8, 9]


def test_duplicates_go_first() -> None:
    """Positions 1, 2 and 3 are copies; nothing else is similar, and no key is looked at more.

    Of the copies, the oldest two have the greater mean similarity: 1 has 2/9, 2 has 1/9.
    """
    keys = torch.eye(9, 9)
    keys[2] = keys[3] = keys[1]
    queries = torch.zeros(2, 1, 9)
    assert rkv_kept(queries, keys, 1.0, 8) == [0, 2, 3, 4, 5, 6, 7, 8]
    assert rkv_kept(queries, keys, 1.0, 7) == [0, 3, 4, 5, 6, 7, 8]


def test_importance_may_outweigh_redundancy() -> None:
    keys = torch.eye(20, 20)
    keys[1] = keys[2] = keys[0]
    queries = 50 * keys[:1].expand(8, 20)[:, None]
    assert rkv_kept(queries, keys, 1.0, 9, mix=1.0)[0] == 0
    assert 0 not in rkv_kept(queries, keys, 1.0, 19, mix=0.0)
    with_both = rkv_scores(queries, keys, 1.0)
    assert with_both[0] > with_both[11]


def test_small_caches_are_kept() -> None:
    queries, keys = torch.randn(8, 2, 4), torch.randn(20, 4)
    assert rkv_kept(queries, keys, 0.5, 20) == list(range(20))
    assert rkv_kept(queries, keys, 0.5, 100) == list(range(20))
    assert len(rkv_kept(queries, keys, 0.5, 19)) == 19
    with pytest.raises(ValueError, match="budget 8 must be greater than the window of 8 tokens"):
        rkv_kept(queries, keys, 0.5, 8)


def rkv_scores_in_loops(queries: Tensor, keys: Tensor, scale: float, mix: float) -> list[float]:
    """Return R-KV's scores, number by number."""

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
    redundant = softmax([amount / total for amount in totals])
    return [mix * important[j] - (1 - mix) * redundant[j] for j in past]


@pytest.mark.parametrize("trial", range(6))
def test_scores_in_loops(trial: int) -> None:
    window, group, size = random.choice([1, 4, 8]), random.choice([1, 2, 5]), 6
    total = window + random.choice([2, 3, 8, 40])
    centres = torch.randn(3, size)
    keys = centres[torch.randint(3, (total,))] + 0.5 * torch.randn(total, size)
    queries, mix = 3 * torch.randn(window, group, size), random.choice([MIX, 0.5, 1.0])
    wanted = rkv_scores_in_loops(queries, keys, 0.4, mix)
    found = rkv_scores(queries, keys, 0.4, mix)
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)
    for budget in {window + 1, total - 1}:
        kept = rkv_kept(queries, keys, 0.4, budget, mix)
        assert len(kept) == budget
        assert kept == sorted(set(kept))
        assert kept[-window:] == list(range(total - window, total))
        lost = [wanted[j] for j in range(total - window) if j not in kept]
        held = [wanted[j] for j in kept if j < total - window]
        assert max(lost) <= min(held) + 1e-9


# -- TGV-KV -------------------------------------------------------------------------------------

ROW = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.1, 0.2, 0.1, 0.05, 0.25])
"""Attention to ten cached tokens. The first four are protected, whatever they get."""


@pytest.mark.parametrize(
    ("keep", "num_tokens", "protected", "evicted"),
    [
        (0.5, 18, 1, 8),  # target 9, one too many; the last token is protected
        (0.5, 18, 2, 5),  # 8 is protected as well; 5 and 7 are equal
        (0.5, 18, 5, 4),  # only 4 is left
        (0.5, 18, 6, None),  # nothing is left
        (0.5, 18, 60, None),
        (0.5, 19, 1, None),  # target 9.5: half a token too many is none
        (0.5, 4, 1, 8),  # eight too many; still one per step
        (0.5, 21, 1, None),  # below the target
        (0.0, 18, 1, 8),
        (1.0, 9, 1, None),  # never
        (1.2, 1, 1, None),
    ],
)
def test_tgv_by_hand(keep: float, num_tokens: int, protected: int, evicted: int | None) -> None:
    assert tgv_evicted(ROW, keep, num_tokens, protected) == evicted


@pytest.mark.parametrize("length", [1, 4, 5])
def test_tgv_with_little_more_than_the_sinks(length: int) -> None:
    assert tgv_evicted(torch.ones(length) / length, 0.1, 10, 1) is None
    assert tgv_evicted(torch.ones(6) / 6, 0.1, 10, 1) == 4


def test_tgv_cache_grows_at_the_rate_it_retains() -> None:
    """From 30 of 100 prompt tokens on, a quarter of the answer's 200 tokens is added.

    The first 20 steps evict what they add, since the target is below 30 then: 0.25 * 120.
    """
    lengths, cached = [], list(range(30))
    for t in range(1, 201):
        cached.append(100 + t)
        gone = tgv_evicted(torch.rand(len(cached)), 0.25, 100 + t, 5)
        if gone is not None:
            del cached[gone]
        lengths.append(len(cached))
    assert lengths[:20] == [30] * 20
    assert lengths[19::4] == list(range(30, 76))
    assert cached[:4] == [0, 1, 2, 3]
    assert cached[-1] == 300


def tgv_in_loops(row: list[float], keep: float, num_tokens: int, protected: int) -> int | None:
    if keep >= 1 or len(row) - keep * num_tokens < 1:
        return None
    best: int | None = None
    for j, a in enumerate(row):
        if j < 4 or j >= len(row) - protected:
            continue
        if best is None or a < row[best]:
            best = j
    return best


def test_tgv_in_loops() -> None:
    found = set()
    for _ in range(300):
        row = [random.choice([0.1, 0.2, random.random()]) for _ in range(random.randint(1, 20))]
        keep, tokens = random.uniform(0, 1.1), random.randint(1, 30)
        protected = random.randint(1, 12)
        result = tgv_evicted(torch.tensor(row).double(), keep, tokens, protected)
        assert result == tgv_in_loops(row, keep, tokens, protected)
        found.add(result)
    assert None in found
    assert len(found) > 5
