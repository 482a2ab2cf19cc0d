# SPDX-License-Identifier: Apache-2.0
"""Apportionment on Triton: the same integers as the PyTorch code and exact fractions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from oracle import kernels as reference
from tests.gpu import pytorch_on_cpu
from tests.unit.test_apportion import ANY_SHARE, PLAIN_SHARE, capped_dealings, dealings
from vllm_tgvkv.kernels.apportion import apportion

pytest.importorskip("triton", reason="Triton is not installed")


def assert_same(
    device: str,
    shares: torch.Tensor,
    total: int | torch.Tensor,
    floor: int,
    cap: int | torch.Tensor,
    most: int | None = None,
) -> list:
    on_device = cap.to(device) if isinstance(cap, torch.Tensor) else cap
    counts = apportion(shares.to(device), total, floor, on_device, most)
    with pytorch_on_cpu():
        total = total.cpu() if isinstance(total, torch.Tensor) else total
        expected = apportion(shares, total, floor, cap, most)
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected.tolist()
    return counts.tolist()


@settings(max_examples=15)
@given(dealings(ANY_SHARE))
def test_any_shares(device: str, dealing: tuple[list[float], int, int, int]) -> None:
    """Zeros, NaN, infinities, 1e30 together with 5e-324."""
    shares, total, floor, cap = dealing
    counts = assert_same(device, torch.tensor(shares, dtype=torch.float64), total, floor, cap)
    assert sum(counts) == total


@settings(max_examples=15)
@given(capped_dealings(ANY_SHARE))
def test_own_caps(device: str, dealing: tuple[list[float], int, int, list[int], int]) -> None:
    """Caps at the floor and above, with a bound of them that is not tight."""
    values, total, floor, caps, most = dealing
    shares = torch.tensor(values, dtype=torch.float64)
    counts = assert_same(device, shares, total, floor, torch.tensor(caps), most)
    assert sum(counts) == total
    assert all(floor <= count <= cap for count, cap in zip(counts, caps, strict=True))


@settings(max_examples=8)
@given(dealings(PLAIN_SHARE))
def test_equals_exact_fractions(device: str, dealing: tuple[list[float], int, int, int]) -> None:
    shares = torch.tensor(dealing[0], dtype=torch.float64, device=device)
    assert apportion(shares, *dealing[1:]).tolist() == reference.apportion(*dealing)


@pytest.mark.parametrize("size", [1, 36, 2048])
def test_random_rows(device: str, size: int) -> None:
    """Rows of one launch: even, uneven, few distinct values, periodic, extreme."""
    rows = torch.stack(
        (
            torch.rand(size),
            torch.rand(size) ** 20,
            torch.randint(0, 4, (size,)).float(),
            torch.arange(size) % 7 == 3,
            torch.randn(size).mul(200).double().exp(),
        )
    )
    shares = rows.view(5, 1, size)
    assert_same(device, shares, int(torch.randint(13 * size + 1, ())), 0, 13)
    assert_same(device, shares, torch.tensor(3 * size, device=device), 1, 8192)
    caps = torch.randint(2, 14, shares.shape, dtype=torch.int32)
    for cap in (caps, caps.long().transpose(0, 2).contiguous().transpose(0, 2)):
        assert_same(device, shares, torch.tensor(2 * size, device=device), 1, cap, 13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_of_shares_and_total(device: str, dtype: torch.dtype) -> None:
    shares = torch.rand(6, 2).to(dtype).T
    total = torch.tensor(15, dtype=torch.int32, device=device)
    assert_same(device, shares, total, 1, 20)


def test_bounds_that_leave_no_choice(device: str) -> None:
    shares = torch.tensor([3.0, 0.0, 1.0])
    assert assert_same(device, shares, 0, 0, 0) == [0, 0, 0]
    assert assert_same(device, shares, 6, 2, 2) == [2, 2, 2]
    assert assert_same(device, shares, 3, 1, 9) == [1, 1, 1]
    assert assert_same(device, shares, 27, 1, 9) == [9, 9, 9]
