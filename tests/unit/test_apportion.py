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


@st.composite
def capped_dealings(
    draw: st.DrawFn, share: st.SearchStrategy[float]
) -> tuple[list[float], int, int, list[int], int]:
    """Draw shares, total, floor, the cap of each share and a bound of the caps."""
    shares = draw(st.lists(share, min_size=1, max_size=12))
    floor = draw(st.integers(0, 5))
    cap = st.one_of(st.just(floor), st.integers(floor, floor + 40))
    caps = draw(st.lists(cap, min_size=len(shares), max_size=len(shares)))
    total = draw(st.integers(floor * len(shares), sum(caps)))
    return shares, total, floor, caps, draw(st.integers(max(caps), 3 * max(caps) + 1))


def deal(shares: list[float], total: int, floor: int, cap: int) -> list[int]:
    return apportion(torch.tensor(shares, dtype=torch.float64), total, floor, cap).tolist()


def deal_capped(
    shares: list[float], total: int, floor: int, caps: list[int], most: int
) -> list[int]:
    shares_of = torch.tensor(shares, dtype=torch.float64)
    return apportion(shares_of, total, floor, torch.tensor(caps), most).tolist()


@settings(max_examples=300)
@given(dealings(PLAIN_SHARE))
def test_equals_exact_fractions(dealing: tuple[list[float], int, int, int]) -> None:
    assert deal(*dealing) == reference.apportion(*dealing)


@given(capped_dealings(ANY_SHARE))
def test_own_caps_are_kept(dealing: tuple[list[float], int, int, list[int], int]) -> None:
    shares, total, floor, caps, _ = dealing
    counts = deal_capped(*dealing)
    assert sum(counts) == total
    assert all(floor <= count <= cap for count, cap in zip(counts, caps, strict=True))
    if all(map(math.isfinite, shares)):
        least = 1e-290 * max(shares)
        by_share = sorted(zip((max(s, least) for s in shares), counts, caps, strict=True))
        for (less, count, _), (more, other, cap) in itertools.combinations(by_share, 2):
            ties = math.isclose(less, more, rel_tol=1e-9)
            assert other >= min(count - ties, cap), "a greater share gets no fewer, or is full"


@settings(max_examples=300)
@given(capped_dealings(PLAIN_SHARE))
def test_own_caps_equal_exact_fractions(
    dealing: tuple[list[float], int, int, list[int], int],
) -> None:
    assert deal_capped(*dealing) == reference.apportion(*dealing[:4])


@given(dealings(ANY_SHARE), st.sampled_from([torch.int32, torch.int64]))
def test_equal_caps_are_one_cap(
    dealing: tuple[list[float], int, int, int], dtype: torch.dtype
) -> None:
    shares, total, floor, cap = dealing
    caps = torch.full((len(shares),), cap, dtype=dtype)
    counts = apportion(torch.tensor(shares, dtype=torch.float64), total, floor, caps, cap)
    assert counts.tolist() == deal(*dealing)


def test_a_full_share_leaves_its_excess_to_the_others() -> None:
    assert deal_capped([100.0, 2.0, 1.0], 16, 0, [10, 3, 10], 10) == [10, 3, 3]
    assert deal_capped([1.0, 1.0, 1.0], 9, 0, [1, 9, 9], 9) == [1, 4, 4]
    assert deal_capped([4.0, 1.0], 3, 0, [0, 9], 9) == [0, 3]


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


def test_large_dealings_with_own_caps_match_the_reference() -> None:
    for shares in (torch.rand(128), torch.rand(128) ** 20, torch.randn(128).mul(30).exp()):
        caps = torch.randint(1, 100, (128,)).tolist()
        total = (128 + sum(caps)) // 2
        counts = deal_capped(shares.tolist(), total, 1, caps, 99)
        assert counts == reference.apportion(shares.tolist(), total, 1, caps)


def test_rows_of_a_batch_have_their_own_caps() -> None:
    shares, caps = torch.rand(3, 2, 7), torch.randint(6, 20, (3, 2, 7))
    counts = apportion(shares, 40, 1, caps, 19)
    for i in range(3):
        for j in range(2):
            alone = apportion(shares[i, j], 40, 1, caps[i, j], 19)
            assert counts[i, j].tolist() == alone.tolist()


def test_order_of_the_shares_does_not_matter() -> None:
    """Sums are exact; order matters only for equal remainders, which are unlikely here."""
    for shares in (torch.rand(2048), torch.rand(2048) ** 20, torch.randn(2048).mul(30).exp()):
        order = torch.randperm(len(shares))
        counts = apportion(shares, 5 * len(shares), 1, 100)
        assert torch.equal(apportion(shares[order], 5 * len(shares), 1, 100), counts[order])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_total_on_the_device_is_the_same(dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(
    ("cap", "most", "word"),
    [
        (torch.ones(2, dtype=torch.int64), 1, "cap must be"),
        (torch.ones(3), 1, "cap must be"),
        (torch.ones(3, dtype=torch.int64), None, "most must be given"),
        (9, 9, "most must be left out"),
        (torch.ones(3, dtype=torch.int64), 0, "floor"),
        (torch.ones(3, dtype=torch.int64), 1, "total"),
    ],
)
def test_unfit_caps_are_refused(cap: int | torch.Tensor, most: int | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        apportion(torch.ones(3), 4, 1, cap, most)
