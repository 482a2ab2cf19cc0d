# SPDX-License-Identifier: Apache-2.0
"""Selection of the tokens of every (layer, KV head) in one launch, and thresholds of given keys.

The least kept key of a row is found digit by digit: each pass counts how often each value of the
next eight bits occurs among the keys that agree with the digits found so far.

One program handles a whole row. Compiled for an H100, a counting pass takes 31 instructions for 32
candidates and the last pass, which writes, 87: about 240 in all. So 1024 rows of 128k candidates
are 1e9 instructions, about 1.1 ms on 132 multiprocessors that issue four per cycle, as long as
reading the scores six times. 28 rows occupy only 28 multiprocessors but still need only 0.2 to 0.4
ms, compared to seconds of prefill for such a prompt. Rows are therefore not divided among programs,
which would take a launch or a grid-wide barrier for every digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_TILE = 2048
_LONG_ROW = 1 << 18
"""Keys of a row from which on one program would take longer than all launches, about 2 ms."""
_NUM_WARPS = 8


@triton.jit
def _narrow(bins, wanted):
    """Digit of the `wanted`-th largest of the counted keys, and its rank among those with it."""
    at_least = tl.cumsum(bins, reverse=True)
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32)) - 1, 0)
    greater = tl.arange(0, bins.shape[0]) > digit
    return digit, wanted - tl.sum(tl.where(greater, bins, 0))


@triton.jit
def _ranks(scores, tiers, candidate, exists, score_stride, tier_stride):
    """40 bits of int64 that order candidates as (tier, score) do; equal where these are equal."""
    score = tl.load(scores + candidate * score_stride, mask=exists, other=0.0)
    tier = tl.load(tiers + candidate * tier_stride, mask=exists, other=0)
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Reversing the magnitude of negative floats makes their bits order like the floats.
    ordered = tl.where(bits < 0, -magnitude, bits)  # and -0 becomes +0
    ordered = tl.where(magnitude > 0x7F800000, -0x7FFFFFFF, ordered)  # NaN, below -infinity
    # 1 .. 2^32 - 1; four more bits make five digits of it.
    return (tier.to(tl.int64) << 36) | ((ordered.to(tl.int64) + 0x80000000) << 4)


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_candidates",
        "num_slots",
        "score_layer_stride",
        "score_row_stride",
        "tier_layer_stride",
        "tier_row_stride",
    ]
)
def _select_kernel(
    scores,
    tiers,
    counts,
    selected,
    num_heads,
    num_candidates,
    num_slots,
    score_layer_stride,
    score_row_stride,
    score_stride,
    tier_layer_stride,
    tier_row_stride,
    tier_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ascending kept positions of one (layer, head), written to its pages in `selected`."""
    pair = tl.program_id(0)
    layer, head = (pair // num_heads).to(tl.int64), pair % num_heads
    scores += layer * score_layer_stride + head * score_row_stride
    tiers += layer * tier_layer_stride + head * tier_row_stride
    in_tile = tl.arange(0, TILE)
    wanted = (tl.load(counts + pair) * BLOCK_SIZE).to(tl.int32)
    if wanted > 0:
        slot = tl.full((), 0, tl.int64)
        for tile in range(0, pair, 1024):
            other = tile + tl.arange(0, 1024)
            slot += tl.sum(tl.load(counts + other, mask=other < pair, other=0)) * BLOCK_SIZE

        selected += slot
        room = tl.minimum(num_slots - slot, num_candidates).to(tl.int32)

        prefix = tl.full((), 0, tl.int64)
        for digit in range(5):
            shift = 32 - 8 * digit
            bins = tl.zeros([256], tl.int32)
            for tile in range(0, num_candidates, TILE):
                candidate = tile + in_tile
                exists = candidate < num_candidates
                rank = _ranks(scores, tiers, candidate, exists, score_stride, tier_stride) >> shift
                agrees = exists & ((rank >> 8) == prefix)
                bins += tl.histogram((rank & 255).to(tl.int32), 256, mask=agrees)
            value, wanted = _narrow(bins, wanted)
            prefix = (prefix << 8) | value

        # Keep all candidates above the least kept rank, and the first `wanted` that have it.
        num_above = 0
        num_equal = 0
        for tile in range(0, num_candidates, TILE):
            candidate = tile + in_tile
            exists = candidate < num_candidates
            rank = _ranks(scores, tiers, candidate, exists, score_stride, tier_stride)
            # Both running counts of a tile in one scan, 16 bits each.
            one = tl.where(rank > prefix, 1 << 16, (rank == prefix).to(tl.int32))
            one = tl.where(exists, one, 0)
            earlier = tl.cumsum(one) - one
            equal_earlier = num_equal + (earlier & 0xFFFF)
            place = num_above + (earlier >> 16) + tl.minimum(equal_earlier, wanted)
            kept = (one == 1 << 16) | ((one == 1) & (equal_earlier < wanted))
            tl.store(selected + place, candidate, mask=kept & (place < room))
            total = tl.sum(one)
            num_above += total >> 16
            num_equal += total & 0xFFFF


@triton.jit(do_not_specialize=["num_keys", "num_digits", "above_all"])
def _thresholds_kernel(
    keys, wanted, thresholds, num_keys, num_digits, above_all, TILE: tl.constexpr
):
    """The threshold of one row of keys."""
    row = tl.program_id(0).to(tl.int64)
    keys += row * num_keys
    in_tile = tl.arange(0, TILE)
    left = tl.load(wanted + row)
    threshold = tl.full((), 0, tl.int64) + above_all
    if left > 0:
        threshold = tl.full((), 0, tl.int64)
        for digit in range(num_digits):
            shift = 8 * (num_digits - 1 - digit)
            bins = tl.zeros([256], tl.int32)
            for tile in range(0, num_keys, TILE):
                place = tile + in_tile
                exists = place < num_keys
                key = tl.load(keys + place, mask=exists, other=0) >> shift
                agrees = exists & ((key >> 8) == threshold)
                bins += tl.histogram((key & 255).to(tl.int32), 256, mask=agrees)
            value, left = _narrow(bins, left)
            threshold = (threshold << 8) | value
    tl.store(thresholds + row, threshold)


@triton.jit(do_not_specialize=["num_keys", "shift"])
def _count_kernel(keys, prefixes, bins, num_keys, shift, TILE: tl.constexpr):
    """Count the values of a digit in a tile of a row, of keys that begin with its prefix."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = place < num_keys
    key = tl.load(keys + row * num_keys + place, mask=exists, other=0) >> shift
    agrees = exists & ((key >> 8) == tl.load(prefixes + row))
    counts = tl.histogram((key & 255).to(tl.int32), 256, mask=agrees)
    tl.atomic_add(bins + row * 256 + tl.arange(0, 256), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["above_all"])
def _narrow_kernel(bins, wanted, left, prefixes, above_all):
    """Add a digit to the prefix of a row, and empty its bins."""
    row = tl.program_id(0)
    bins += row * 256 + tl.arange(0, 256)
    counts = tl.load(bins)
    tl.store(bins, tl.zeros_like(counts))
    value, rank = _narrow(counts, tl.load(left + row))
    prefix = (tl.load(prefixes + row) << 8) | value
    tl.store(left + row, rank)
    tl.store(prefixes + row, tl.where(tl.load(wanted + row) > 0, prefix, above_all))


def select_tokens(
    scores: Tensor, tiers: Tensor, counts: Tensor, num_pages: int, block_size: int
) -> Tensor:
    """Return the kept positions; see `kernels.select.select_tokens`.

    Exact, including ties: all arithmetic is on integers. Slots after the last dealt page are 0. One
    launch, plus the one that fills with 0. Heads that share a ranking each search it: it is in the
    cache, and their counts may differ.
    """
    shape = (*counts.shape, scores.shape[-1])
    scores, tiers = scores.expand(shape), tiers.expand(shape)
    selected = torch.zeros(num_pages, block_size, dtype=torch.int32, device=scores.device)
    if selected.numel() and counts.numel():
        _select_kernel[(counts.numel(),)](
            scores,
            tiers,
            counts.contiguous(),
            selected,
            shape[1],
            shape[2],
            selected.numel(),
            *scores.stride(),
            *tiers.stride(),
            BLOCK_SIZE=block_size,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )
    return selected


def thresholds(keys: Tensor, wanted: Tensor, num_bits: int) -> Tensor:
    """Return the `wanted`-th largest keys; see `kernels.select.thresholds`.

    Exact. One launch; keys whose rows are broadcast or not contiguous are copied first. Long rows
    are counted by many programs, in two launches for each digit.
    """
    keys, wanted = keys.expand(*wanted.shape, keys.shape[-1]).contiguous(), wanted.contiguous()
    num_digits, above_all = triton.cdiv(num_bits, 8), 2**num_bits - 1
    if keys.shape[-1] > _LONG_ROW:
        found, left, num_rows = torch.zeros_like(wanted), wanted.clone(), wanted.numel()
        bins = torch.zeros(num_rows, 256, dtype=torch.int32, device=keys.device)
        grid = (triton.cdiv(keys.shape[-1], _TILE), num_rows)
        for shift in range(8 * (num_digits - 1), -1, -8):
            _count_kernel[grid](keys, found, bins, keys.shape[-1], shift, TILE=_TILE)
            _narrow_kernel[(num_rows,)](bins, wanted, left, found, above_all)
        return found
    found = torch.empty_like(wanted)
    if found.numel():
        _thresholds_kernel[(found.numel(),)](
            keys,
            wanted,
            found,
            keys.shape[-1],
            num_digits,
            above_all,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )
    return found


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    scores = torch.empty(36, 8, 1000, device="meta")
    counts = torch.empty(36, 8, dtype=torch.int64, device="meta")
    for tiers in (scores.int(), scores.to(torch.uint8)):
        call = partial(select_tokens, scores, tiers, counts, 288, 16)
        yield from launches(__name__, f"tiers {str(tiers.dtype).removeprefix('torch.')}", call)
    for size in (1000, _LONG_ROW + 1):
        keys = torch.empty(36, 8, size, dtype=torch.int64, device="meta")
        yield from launches(__name__, "", partial(thresholds, keys, counts, 63))
