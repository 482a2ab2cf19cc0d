# SPDX-License-Identifier: Apache-2.0
"""Apportionment of pages, one program per row of shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.apportion import GRID_BITS, SMALLEST_SHARE
from vllm_tgvkv.kernels.gpu.compile import Variant, launches


@triton.jit
def _counts_at(level, shares, floor, cap):
    """Real-valued counts at one level."""
    return tl.minimum(tl.maximum(level * shares, floor), cap)


@triton.jit
def _sum_in_units(counts, unit, exists):
    """Integer sum of the counts, each rounded to a multiple of 1 / `unit`."""
    return tl.sum(tl.where(exists, (counts * unit + 0.5).to(tl.int64), 0))


@triton.jit(do_not_specialize=["size", "floor", "cap", "unit_bits"])
def _apportion_kernel(
    shares,
    total,
    counts,
    size,
    floor,
    cap,
    unit_bits,
    BLOCK: tl.constexpr,
    RANK_BITS: tl.constexpr,
    SMALLEST_SHARE: tl.constexpr,
    GRID_BITS: tl.constexpr,
    OWN_CAPS: tl.constexpr,
):
    """Counts of one row; `cap` is a number, or with OWN_CAPS a pointer to one for each share."""
    index = tl.arange(0, BLOCK)
    exists = index < size
    row = tl.program_id(0).to(tl.int64) * size
    share = tl.load(shares + row + index, mask=exists, other=0).to(tl.float64)
    total = tl.load(total).to(tl.int64)
    floor = tl.full((), 0, tl.float64) + floor
    if OWN_CAPS:
        cap = tl.load(cap + row + index, mask=exists, other=0).to(tl.float64)
    else:
        cap = tl.full((), 0, tl.float64) + cap

    finite = tl.abs(share) < float("inf")
    largest = tl.max(tl.where(finite, share, 0.0))
    usable = (tl.sum((~finite).to(tl.int32)) == 0) & (largest > 0)
    share = tl.where(usable, tl.maximum(share, 0.0) / tl.where(usable, largest, 1.0), 1.0)
    share = tl.maximum(share, SMALLEST_SHARE)

    # The greatest level whose counts do not exceed the total. Non-negative floats are ordered like
    # their bits, and a higher level never has a smaller sum.
    unit = (tl.full((), 1, tl.int64) << unit_bits).to(tl.float64)
    target = total << unit_bits
    leaves = floor / share
    fills = cap / share
    low_bits = floor.to(tl.int64, bitcast=True)
    high_bits = tl.max(tl.where(exists, fills, 0.0)).to(tl.int64, bitcast=True) + 1
    for _ in range(63):
        bits = low_bits + ((high_bits - low_bits) >> 1)
        level = bits.to(tl.float64, bitcast=True)
        fits = _sum_in_units(_counts_at(level, share, floor, cap), unit, exists) <= target
        low_bits = tl.where(fits, bits, low_bits)
        high_bits = tl.where(fits, high_bits, bits)
    level = low_bits.to(tl.float64, bitcast=True)

    # The breakpoints around it. If there is none above, all counts are full.
    below = tl.maximum(
        tl.max(tl.where(exists & (leaves <= level), leaves, 0.0)),
        tl.max(tl.where(exists & (fills <= level), fills, 0.0)),
    )
    above = tl.minimum(
        tl.min(tl.where(exists & (leaves > level), leaves, float("inf"))),
        tl.min(tl.where(exists & (fills > level), fills, float("inf"))),
    )
    above = tl.where(above < float("inf"), above, below)
    low = _counts_at(below, share, floor, cap)
    high = _counts_at(above, share, floor, cap)
    low_sum = _sum_in_units(low, unit, exists)
    span = _sum_in_units(high, unit, exists) - low_sum
    missing = (target - low_sum).to(tl.float64)
    fraction = tl.where(span > 0, missing / tl.maximum(span, 1).to(tl.float64), 0.0)
    fraction = tl.minimum(tl.maximum(fraction, 0.0), 1.0)
    real = low + fraction * (high - low)

    # Largest remainders, found bit by bit; of equal ones, the first.
    fixed = (real * (1 << GRID_BITS) + 0.5).to(tl.int64)
    whole = fixed >> GRID_BITS
    left = total - tl.sum(tl.where(exists, whole, 0))
    rank = (fixed & ((1 << GRID_BITS) - 1)) * BLOCK + (BLOCK - 1 - index)
    rank = tl.where(exists, rank, -1)
    threshold = tl.full((), 0, tl.int64)
    for step in range(RANK_BITS):
        raised = threshold | (tl.full((), 1, tl.int64) << (RANK_BITS - 1 - step))
        enough = tl.sum((rank >= raised).to(tl.int32)) >= left
        threshold = tl.where(enough, raised, threshold)
    whole += (rank >= threshold).to(tl.int64)
    tl.store(counts + row + index, whole, mask=exists)


def apportion(
    shares: Tensor, total: Tensor, floor: int, cap: int | Tensor, unit_bits: int
) -> Tensor:
    """Return counts that sum to `total`; see `kernels.apportion.apportion`.

    The integers equal the PyTorch code's, which explains why the order of summation does not
    matter. Multiplications and additions are not fused, as they are not there. One program handles
    a row, with M padded to a power of two; it is tuned for M up to 2048 and correct for more. Two
    bisections of about sixty sums each take a few microseconds.

    Args:
        unit_bits: counts are rounded to multiples of `2**-unit_bits` before they are summed.
    """
    shares = shares.contiguous()
    size = shares.shape[-1]
    counts = torch.empty(shares.shape, dtype=torch.int64, device=shares.device)
    block = triton.next_power_of_2(size)
    # A threshold above every remainder has one bit more than remainder and index.
    if counts.numel():
        _apportion_kernel[(counts.numel() // size,)](
            shares,
            total,
            counts,
            size,
            floor,
            cap if isinstance(cap, int) else cap.contiguous(),
            unit_bits,
            BLOCK=block,
            RANK_BITS=GRID_BITS + block.bit_length(),
            SMALLEST_SHARE=SMALLEST_SHARE,
            GRID_BITS=GRID_BITS,
            OWN_CAPS=isinstance(cap, Tensor),
            num_warps=4 if block <= 1024 else 8,
            enable_fp_fusion=False,
        )
    return counts


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    total = torch.empty((), dtype=torch.int64, device="meta")
    for size, own_caps in itertools.product((64, 1024, 2048), (False, True)):
        shares = torch.empty(1, size, dtype=torch.float64, device="meta")
        call = partial(apportion, shares, total, 1, shares.long() if own_caps else 9, 30)
        # A value that is needed once, which some compilers spill for capability 8.0.
        yield from launches(__name__, f"M{size}" + " own caps" * own_caps, call, spill_limit=8)
