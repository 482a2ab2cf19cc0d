# SPDX-License-Identifier: Apache-2.0
"""Dealing a fixed number of pages out to competing shares."""

from __future__ import annotations

import torch
from torch import Tensor

# Shares below this fraction of the largest count as this fraction of it: a zero share still takes
# part once everybody else is full, and no quotient of two shares overflows float64.
_SMALLEST_SHARE = 1e-290
# Real-valued counts are rounded to this grid, so that rounding errors neither turn 3.0 into 2 plus
# a remainder nor decide between equal remainders.
_GRID = 2.0**32


def apportion(shares: Tensor, total: int | Tensor, floor: int, cap: int) -> Tensor:
    """Integer counts in proportion to ``shares`` that sum to exactly ``total``.

    Water filling: the real-valued count of share s is clip(level * s, floor, cap), with the one
    level at which the counts sum to ``total``; so what a full share cannot take goes to the others
    in proportion. Then the largest remainders are rounded up, ties by index. Everything is float64
    and on the shares' device, without synchronisation; memory is 16 M^2 bytes a row.

    A row of shares that sums to zero or holds a NaN or an infinity counts as all equal; a negative
    share counts as zero.

    Args:
        shares: float ``[..., M]``; each row is dealt on its own.
        total: what each row sums to; an integer scalar tensor is not checked, which would wait
            for the device.
        floor: least count.
        cap: greatest count.

    Returns:
        int64 ``[..., M]``.

    Raises:
        ValueError: unless 0 <= floor <= cap and floor*M <= total <= cap*M.
    """
    if shares.dim() < 1 or shares.shape[-1] < 1 or not shares.is_floating_point():
        raise ValueError(
            f"shares must be floating [..., M], got {shares.dtype} {list(shares.shape)}"
        )
    size = shares.shape[-1]
    if not 0 <= floor <= cap:
        raise ValueError(f"floor and cap must satisfy 0 <= floor <= cap, got {floor} and {cap}")
    if isinstance(total, int) and not floor * size <= total <= cap * size:
        raise ValueError(
            f"total must be between floor*M = {floor * size} and cap*M = {cap * size}, got {total}"
        )
    return _round(_water_fill(_normalise(shares.double()), total, floor, cap), total)


def _normalise(shares: Tensor) -> Tensor:
    """Shares in [_SMALLEST_SHARE, 1], the largest of each row being 1."""
    largest = shares.amax(dim=-1, keepdim=True)
    finite = shares.isfinite().all(dim=-1, keepdim=True)
    relative = shares.clamp(min=0) / largest
    uniform = torch.ones_like(relative)
    return torch.where(finite & (largest > 0), relative, uniform).clamp(min=_SMALLEST_SHARE)


def _water_fill(shares: Tensor, total: int | Tensor, floor: int, cap: int) -> Tensor:
    """clip(level * shares, floor, cap) with the level at which it sums to ``total``.

    The sum is piecewise linear in the level with a breakpoint where a share leaves the floor or
    reaches the cap. Interpolating between the counts at the two breakpoints around ``total``,
    rather than solving for the level, stays exact over any range of shares.
    """
    levels = torch.cat((floor / shares, cap / shares), dim=-1)  # [..., 2M]
    counts_at = (levels.unsqueeze(-1) * shares.unsqueeze(-2)).clamp(floor, cap)  # [..., 2M, M]
    sums = counts_at.sum(dim=-1)
    infinity = float("inf")
    # Rounding must not lift the lowest breakpoint, where all are at the floor, above the total.
    not_above = (sums <= total) | (levels == levels.amin(dim=-1, keepdim=True))
    below = levels.masked_fill(~not_above, -infinity).argmax(dim=-1, keepdim=True)
    above = levels.masked_fill(not_above, infinity).argmin(dim=-1, keepdim=True)
    low = _take_row(counts_at, below)
    high = _take_row(counts_at, above)
    span = (sums.gather(-1, above) - sums.gather(-1, below)).clamp(min=0)
    missing = total - sums.gather(-1, below)
    fraction = torch.where(span > 0, missing / span, torch.zeros_like(span)).clamp(0, 1)
    # Where nothing is above, all are full and `above` is arbitrary.
    return torch.where(not_above.all(dim=-1, keepdim=True), low, torch.lerp(low, high, fraction))


def _take_row(matrix: Tensor, row: Tensor) -> Tensor:
    index = row.unsqueeze(-1).expand(*row.shape[:-1], 1, matrix.shape[-1])
    return matrix.gather(-2, index).squeeze(-2)


def _round(counts: Tensor, total: int | Tensor) -> Tensor:
    """Largest remainder: rounds ``counts``, which sum to ``total``, to integers that do."""
    counts = (counts * _GRID).round() / _GRID
    whole = counts.floor()
    left = total - whole.sum(dim=-1, keepdim=True)
    order = (counts - whole).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return (whole + (rank < left)).to(torch.int64)
