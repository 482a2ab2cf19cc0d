# SPDX-License-Identifier: Apache-2.0
"""Apportionment of a fixed number of pages to competing shares."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import FLOATS, INTEGERS, check

# Shares are at least this fraction of the largest: a zero share still gets pages once all others
# are full, and no quotient of two shares overflows float64.
SMALLEST_SHARE = 1e-290
# Real-valued counts are rounded to multiples of 2^-32, so that rounding errors neither turn 3.0
# into 2 plus a remainder nor break ties of remainders.
GRID_BITS = 32


def apportion(
    shares: Tensor, total: int | Tensor, floor: int, cap: int | Tensor, most: int | None = None
) -> Tensor:
    """Return integer counts in proportion to `shares` that sum to exactly `total`.

    Water filling: the real-valued count of share s is clip(level * s, floor, cap), with the cap of
    s, at the level at which the counts sum to `total`. So pages that a full share cannot take go
    to the others in proportion. Then the largest remainders are rounded up; remainders closer than
    2^-32 tie, and the first wins. All work is on the shares' device, without synchronisation.

    Numbers are float64, but sums are of integers: counts are rounded to multiples of a unit that is
    as small as int64 allows, at most 2^-32 for `most * M` below 2^30. So a sum does not depend on
    the order of its terms, a higher level never has a smaller sum, and every device that follows
    IEEE 754 for single float64 operations gives the same counts.

    A row of shares that are all zero, or not all finite, counts as all equal; a negative share
    counts as zero.

    Args:
        shares: float `[..., M]`; rows are independent.
        total: sum of each row; an integer scalar tensor is not checked, since that would wait for
            the device.
        floor: least count.
        cap: greatest count; or the greatest count of each share, integer `[..., M]`. The values
            of a tensor are not checked, since that would wait for the device: each must be at
            least `floor` and at most `most`, and each row must sum to at least `total`.
        most: bound of the caps, known on the host; given if and only if `cap` is a tensor. The
            closer it is, the smaller the unit. An integer cap is its own bound, and a tensor
            filled with `most` gives the same counts.

    Returns:
        int64 `[..., M]`.

    Raises:
        ValueError: unless 0 <= floor <= most and floor*M <= total <= most*M, with an integer cap
            as `most`, or if a shape or dtype does not fit.
    """
    fits = shares.dim() > 0 and shares.shape[-1] > 0
    check("shares", shares, ("M",) * max(1, shares.dim()), FLOATS, fits)
    size = shares.shape[-1]
    most = _bound(shares, cap, most)
    if not 0 <= floor <= most:
        raise ValueError(f"floor and cap must satisfy 0 <= floor <= cap, got {floor} and {most}")
    if isinstance(total, int):
        if not floor * size <= total <= most * size:
            raise ValueError(
                f"total must be between floor*M = {floor * size} and cap*M = {most * size}, "
                f"got {total}"
            )
        total = torch.full((), total, dtype=torch.int64, device=shares.device)
    # The sum of all counts, each at most `most`, stays below 2^62 units.
    unit_bits = 62 - (most * size).bit_length()
    if gpu.runs(shares):
        from vllm_tgvkv.kernels.gpu import apportion as triton_apportion

        return triton_apportion.apportion(shares, total, floor, cap, unit_bits)
    total, shares = total.long(), _normalise(shares.double())
    caps = torch.full_like(shares, cap) if isinstance(cap, int) else cap.double()
    return _round(_water_fill(shares, total, floor, caps, unit_bits), total)


def _bound(shares: Tensor, cap: int | Tensor, most: int | None) -> int:
    """Return the bound of all caps."""
    if isinstance(cap, int):
        if most is not None:
            raise ValueError(f"most must be left out with an integer cap, got {most}")
        return cap
    check("cap", cap, shares.shape, INTEGERS)
    if most is None:
        raise ValueError("most must be given with a tensor of caps: the greatest that any can be")
    return most


def _normalise(shares: Tensor) -> Tensor:
    """Scale each row of shares to [SMALLEST_SHARE, 1], its largest being 1."""
    largest = shares.amax(dim=-1, keepdim=True)
    finite = shares.isfinite().all(dim=-1, keepdim=True)
    relative = shares.clamp(min=0) / largest
    uniform = torch.ones_like(relative)
    return torch.where(finite & (largest > 0), relative, uniform).clamp(min=SMALLEST_SHARE)


def _water_fill(shares: Tensor, total: Tensor, floor: int, caps: Tensor, unit_bits: int) -> Tensor:
    """Return clip(level * shares, floor, caps) at the level at which it sums to `total`.

    The sum is piecewise linear in the level, with a breakpoint where a share leaves the floor or
    reaches its cap. Interpolating between the counts at the two breakpoints around `total` is
    exact over any range of shares, unlike solving for the level.
    """

    bounds = torch.full_like(shares, floor), caps

    def counts_at(level: Tensor) -> Tensor:
        return (level * shares).clamp(*bounds)

    def in_units(counts: Tensor) -> Tensor:
        return (counts * 2.0**unit_bits + 0.5).long().sum(dim=-1, keepdim=True)

    levels = torch.cat([bound / shares for bound in bounds], dim=-1).sort(dim=-1).values
    num_levels = levels.shape[-1]
    target = total << unit_bits
    # At the lowest breakpoint all counts are at the floor, so their sum is at most the total. After
    # the last, all are full.
    below = torch.zeros(*shares.shape[:-1], 1, dtype=torch.int64, device=shares.device)
    above = torch.full_like(below, num_levels)
    for _ in range(num_levels.bit_length()):
        middle = (below + above) >> 1
        fits = in_units(counts_at(levels.gather(-1, middle))) <= target
        below, above = torch.where(fits, middle, below), torch.where(fits, above, middle)
    low = counts_at(levels.gather(-1, below))
    high = counts_at(levels.gather(-1, above.clamp(max=num_levels - 1)))
    low_sum = in_units(low)
    span = in_units(high) - low_sum
    missing = (target - low_sum).double()
    fraction = torch.where(span > 0, missing / span.clamp(min=1).double(), 0.0).clamp(0, 1)
    return low + fraction * (high - low)


def _round(counts: Tensor, total: Tensor) -> Tensor:
    """Round `counts` to integers with the same sum `total`, by largest remainders."""
    fixed = (counts * 2.0**GRID_BITS + 0.5).long()
    whole = fixed >> GRID_BITS
    left = total - whole.sum(dim=-1, keepdim=True)
    order = (fixed - (whole << GRID_BITS)).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return whole + (rank < left)
