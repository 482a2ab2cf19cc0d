# SPDX-License-Identifier: Apache-2.0
"""Apportionment of pages: conservation, floors and caps, ties, extreme shares.

In PyTorch and on Triton: the same integers, by exact fractions.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

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


Dealing = tuple[list[float], int, int, int | list[int], int | None]
"""Shares, total, floor, a cap or the cap of each share, and a bound of the latter."""


@st.composite
def dealings(draw: st.DrawFn, share: st.SearchStrategy[float], own_caps: bool = True) -> Dealing:
    shares = draw(st.lists(share, min_size=1, max_size=12))
    floor = draw(st.integers(0, 5))
    cap = st.one_of(st.just(floor), st.integers(floor, floor + 40))
    if not own_caps:
        caps = [draw(cap)] * len(shares)
    else:
        caps = draw(st.lists(cap, min_size=len(shares), max_size=len(shares)))
    total = draw(st.integers(floor * len(shares), sum(caps)))
    if not own_caps:
        return shares, total, floor, caps[0], None
    return shares, total, floor, caps, draw(st.integers(max(caps), 3 * max(caps) + 1))


def deal(
    kernels: str,
    shares: list[float],
    total: int,
    floor: int,
    cap: int | list[int],
    most: int | None = None,
) -> list[int]:
    """Deal with one cap, or with one of each share that `most` bounds."""
    of_shares = torch.tensor(shares, dtype=torch.float64, device=kernels)
    caps = cap if isinstance(cap, int) else torch.tensor(cap, device=kernels)
    return apportion(of_shares, total, floor, caps, most).tolist()


@settings(max_examples=60)
@given(st.one_of(dealings(PLAIN_SHARE), dealings(PLAIN_SHARE, own_caps=False)))
def test_equals_exact_fractions(kernels: str, dealing: Dealing) -> None:
    assert deal(kernels, *dealing) == reference.apportion(*dealing[:4])


@settings(max_examples=20)
@given(dealings(ANY_SHARE), st.sampled_from([torch.int32, torch.int64]))
def test_any_shares(kernels: str, dealing: Any, dtype: torch.dtype) -> None:
    """Zeros, NaN, infinities, 1e30 together with 5e-324; caps at the floor and above."""
    shares, total, floor, caps, _ = dealing
    counts = deal(kernels, *dealing)
    assert sum(counts) == total
    assert all(floor <= count <= cap for count, cap in zip(counts, caps, strict=True))
    if all(map(math.isfinite, shares)):
        # Shares this far below the largest are equal, as `apportion` documents.
        least = 1e-290 * max(shares)
        by_share = sorted(zip((max(s, least) for s in shares), counts, caps, strict=True))
        for (less, count, _), (more, other, cap) in itertools.combinations(by_share, 2):
            # Counts that differ by less than 2^-32 tie, as `apportion` documents.
            ties = math.isclose(less, more, rel_tol=1e-9)
            assert other >= min(count - ties, cap), "a greater share gets no fewer, or is full"
    of_shares = torch.tensor(shares, dtype=torch.float64, device=kernels)
    equal = torch.full((len(shares),), max(caps), dtype=dtype, device=kernels)
    found = apportion(of_shares, total, floor, equal, max(caps)).tolist()
    assert found == deal(kernels, shares, total, floor, max(caps)), "equal caps are one cap"


@pytest.mark.parametrize(
    ("dealing", "wanted"),
    [
        # A full share leaves its excess to the others.
        (([100.0, 2.0, 1.0], 16, 0, [10, 3, 10], 10), [10, 3, 3]),
        (([1.0, 1.0, 1.0], 9, 0, [1, 9, 9], 9), [1, 4, 4]),
        (([4.0, 1.0], 3, 0, [0, 9], 9), [0, 3]),
        (([100.0, 2.0, 1.0], 16, 0, 10), [10, 4, 2]),
        # Shares that cannot be used count as equal, and ties go to the first.
        (([0.0] * 5, 12, 0, 10), [3, 3, 2, 2, 2]),
        (([1.0, NAN, 3.0, 0.0, 9.0], 12, 0, 10), [3, 3, 2, 2, 2]),
        (([INFINITY, 1.0, 1.0, 1.0, 1.0], 12, 0, 10), [3, 3, 2, 2, 2]),
        (([0.0, 1.0, 0.0], 5, 1, 3), [1, 3, 1]),
        (([0.0, 1.0, 0.0], 9, 1, 5), [2, 5, 2]),
        # Bounds leave no choice.
        (([3.0, 0.0, 1.0], 0, 0, 0), [0, 0, 0]),
        (([3.0, 0.0, 1.0], 6, 2, 2), [2, 2, 2]),
        (([3.0, 0.0, 1.0], 27, 1, 9), [9, 9, 9]),
    ],
    ids=str,
)
def test_by_hand(kernels: str, dealing: Any, wanted: list[int]) -> None:
    assert deal(kernels, *dealing) == wanted


@pytest.mark.parametrize("size", [1, 36, 1000])
def test_random_rows(kernels: str, size: int) -> None:
    """Rows of one launch: even, uneven, few distinct values, periodic, extreme."""
    rows = torch.stack(
        (
            torch.rand(size),
            torch.rand(size) ** 20,
            torch.randint(0, 4, (size,)).float(),
            torch.arange(size) % 7 == 3,
            torch.randn(size).mul(30).double().exp(),
        )
    )
    shares, total = rows.view(5, 1, size), 3 * size
    caps = torch.randint(3, 14, shares.shape, dtype=torch.int32)
    strided = caps.long().transpose(0, 2).contiguous().transpose(0, 2)
    of_shares = shares.to(kernels)
    for cap, most in ((13, None), (caps, 13), (strided, 13)):
        given_cap = cap.to(kernels) if isinstance(cap, torch.Tensor) else cap
        found = apportion(of_shares, total, 1, given_cap, most)
        assert found.dtype == torch.int64
        on_device = torch.tensor(total, device=kernels, dtype=torch.int32)
        assert torch.equal(apportion(of_shares, on_device, 1, given_cap, most), found)
        for row in range(5):
            of_row = cap[row, 0].tolist() if isinstance(cap, torch.Tensor) else cap
            wanted = reference.apportion(shares[row, 0].tolist(), total, 1, of_row)
            assert found[row, 0].tolist() == wanted
    # Sums are exact; order matters only for equal remainders, which are unlikely here.
    order = torch.randperm(size)
    plain = apportion(of_shares[:2], total, 1, 100)
    assert torch.equal(apportion(of_shares[:2, :, order], total, 1, 100), plain[..., order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_of_shares(kernels: str, dtype: torch.dtype) -> None:
    shares = torch.rand(6, 2).to(dtype).T
    found = apportion(shares.to(kernels), 15, 1, 20)
    assert found.tolist() == [reference.apportion(row, 15, 1, 20) for row in shares.tolist()]


ONES = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("total", "floor", "cap", "most", "word"),
    [
        (10, 3, 2, None, "floor"),
        (10, -1, 5, None, "floor"),
        (2, 1, 9, None, "total"),
        (28, 0, 9, None, "total"),
        (4, 1, ONES[1:], 1, "cap must be"),
        (4, 1, ONES.float(), 1, "cap must be"),
        (4, 1, ONES, None, "most must be given"),
        (4, 1, 9, 9, "most must be left out"),
        (4, 1, ONES, 0, "floor"),
        (4, 1, ONES, 1, "total"),
    ],
)
def test_impossible_dealings_are_refused(
    total: int, floor: int, cap: int | torch.Tensor, most: int | None, word: str
) -> None:
    with pytest.raises(ValueError, match=f"^{word}"):
        apportion(torch.ones(3), total, floor, cap, most)
