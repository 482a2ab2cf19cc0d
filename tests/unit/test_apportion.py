# SPDX-License-Identifier: Apache-2.0
"""Apportionment of pages: conservation, floors and caps, ties, extreme shares."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from tests.inputs import fresh_seed
from vllm_tgvkv.kernels.apportion import apportion

NAN, INFINITY = float("nan"), float("inf")
ANY_SHARE = st.one_of(
    st.floats(min_value=0, max_value=1e30),
    st.sampled_from([0.0, 1.0, 1e-30, 1e30, 5e-324, NAN, INFINITY]),
)
# Ratios of these are either small fractions or too large for rounding to matter.
PLAIN_SHARE = st.builds(
    lambda digits, scale: digits * scale, st.integers(0, 50), st.sampled_from([1e-30, 1.0, 1e30])
)


@st.composite
def dealings(draw: st.DrawFn, share: st.SearchStrategy[float]) -> tuple[list[float], int, int, int]:
    shares = draw(st.lists(share, min_size=1, max_size=12))
    floor = draw(st.integers(0, 5))
    cap = draw(st.integers(floor, floor + 40))
    return shares, draw(st.integers(floor * len(shares), cap * len(shares))), floor, cap


def deal(shares: list[float], total: int, floor: int, cap: int) -> list[int]:
    return apportion(torch.tensor(shares, dtype=torch.float64), total, floor, cap).tolist()


@given(dealings(ANY_SHARE))
def test_sums_to_total_within_bounds(dealing: tuple[list[float], int, int, int]) -> None:
    shares, total, floor, cap = dealing
    counts = deal(*dealing)
    assert sum(counts) == total
    assert all(floor <= count <= cap for count in counts)
    if all(map(math.isfinite, shares)):
        # Shares this far below the largest are equal, as `apportion` documents.
        least = 1e-290 * max(shares)
        by_share = sorted(zip((max(s, least) for s in shares), counts, strict=True))
        for (less, count), (more, other) in itertools.pairwise(by_share):
            # Counts that differ by less than 2^-32 tie, as `apportion` documents.
            ties = math.isclose(less, more, rel_tol=1e-9)
            assert other >= count - ties, "a greater share gets no fewer"


@settings(max_examples=300)
@given(dealings(PLAIN_SHARE))
def test_equals_exact_fractions(dealing: tuple[list[float], int, int, int]) -> None:
    assert deal(*dealing) == reference.apportion(*dealing)


@pytest.mark.parametrize("bad", [[0.0] * 5, [1.0, NAN, 3.0, 0.0, 9.0], [INFINITY, 1, 1, 1, 1]])
def test_unusable_shares_count_as_equal(bad: list[float]) -> None:
    assert deal(bad, 12, 0, 10) == [3, 3, 2, 2, 2]


def test_ties_go_to_the_first() -> None:
    assert deal([1.0, 1.0, 1.0, 1.0], 6, 0, 9) == [2, 2, 1, 1]


def test_excess_goes_to_the_others_in_proportion() -> None:
    assert deal([100.0, 2.0, 1.0], 16, 0, 10) == [10, 4, 2]


def test_one_hot_share_fills_up_then_the_others_are_equal() -> None:
    assert deal([0.0, 1.0, 0.0], 5, 1, 3) == [1, 3, 1]
    assert deal([0.0, 1.0, 0.0], 9, 1, 5) == [2, 5, 2]


def test_rows_of_a_batch_are_independent() -> None:
    fresh_seed()
    shares = torch.rand(3, 2, 7)
    counts = apportion(shares, 40, 1, 20)
    assert counts.dtype == torch.int64
    for i in range(3):
        for j in range(2):
            assert counts[i, j].tolist() == apportion(shares[i, j], 40, 1, 20).tolist()


def test_large_dealings_match_the_reference() -> None:
    fresh_seed()
    for shares in (torch.rand(128), torch.rand(128) ** 20, torch.randn(128).mul(30).exp()):
        shares = shares.double()
        assert deal(shares.tolist(), 2560, 1, 100) == reference.apportion(
            shares.tolist(), 2560, 1, 100
        )


def test_order_of_the_shares_does_not_matter() -> None:
    """Sums are exact; order matters only for equal remainders, which are unlikely here."""
    fresh_seed()
    for shares in (torch.rand(2048), torch.rand(2048) ** 20, torch.randn(2048).mul(30).exp()):
        order = torch.randperm(len(shares))
        counts = apportion(shares, 5 * len(shares), 1, 100)
        assert torch.equal(apportion(shares[order], 5 * len(shares), 1, 100), counts[order])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_total_on_the_device_is_the_same(dtype: torch.dtype) -> None:
    fresh_seed()
    shares = torch.rand(3, 70)
    counts = apportion(shares, torch.tensor(500, dtype=dtype), 1, 8192)
    assert torch.equal(counts, apportion(shares, 500, 1, 8192))


@pytest.mark.parametrize(
    ("total", "floor", "cap", "word"),
    [(10, 3, 2, "floor"), (10, -1, 5, "floor"), (2, 1, 9, "total"), (28, 0, 9, "total")],
)
def test_impossible_totals_are_refused(total: int, floor: int, cap: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        apportion(torch.ones(3), total, floor, cap)
