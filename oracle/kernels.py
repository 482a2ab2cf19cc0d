# SPDX-License-Identifier: Apache-2.0
"""Slow, simple versions of the kernels: loops over Python numbers, exact fractions, float64.

Arguments are those of the kernels with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor

SMALLEST_SHARE = Fraction(1e-290)


def apportion(
    shares: Sequence[float], total: int, floor: int, cap: int | Sequence[int]
) -> list[int]:
    """Return counts for one row of shares that sum to `total`; `cap` may differ between them.

    Remainders within 2^-32 are equal; of these, the lower index wins.
    """
    counts = [
        Fraction(round(count * 2**32), 2**32) for count in water_fill(shares, total, floor, cap)
    ]
    whole = [math.floor(count) for count in counts]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - counts[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def water_fill(
    shares: Sequence[float], total: int, floor: int, cap: int | Sequence[int]
) -> list[Fraction]:
    """Return x with x[p] = clip(level * shares[p], floor, cap[p]) that sums to `total`.

    Shares that are all zero, or not all finite, are equal; a zero among others is tiny. The counts
    that violate a bound are fixed at it, first those of the bound that is violated more in sum.
    """
    size = len(shares)
    caps = [cap] * size if isinstance(cap, int) else cap
    exact = [Fraction(1)] * size
    if all(map(math.isfinite, shares)) and max(shares) > 0:
        largest = Fraction(max(shares))
        exact = [max(Fraction(share) / largest, SMALLEST_SHARE) for share in shares]
    counts: dict[int, Fraction] = {}
    while len(counts) < size:
        free = [i for i in range(size) if i not in counts]
        level = (total - sum(counts.values())) / sum((exact[i] for i in free), Fraction(0))
        above = [i for i in free if level * exact[i] > caps[i]]
        below = [i for i in free if level * exact[i] < floor]
        excess = sum(level * exact[i] - caps[i] for i in above)
        lack = sum(floor - level * exact[i] for i in below)
        if not above and not below:
            counts |= {i: level * exact[i] for i in free}
        if excess >= lack:
            counts |= {i: Fraction(caps[i]) for i in above}
        if lack >= excess:
            counts |= dict.fromkeys(below, Fraction(floor))
    return [counts[i] for i in range(size)]


def ranking(scores: Tensor, tiers: Sequence[int], num_candidates: int) -> list[int]:
    """Return the candidates, best first: by tier, then score, then lower position; NaN is lowest.

    Args:
        scores: [P].
        tiers: of all positions; a higher tier comes first.
    """
    values = [-math.inf if math.isnan(score) else score for score in scores.tolist()]
    is_nan = scores.isnan().tolist()
    return sorted(range(num_candidates), key=lambda j: (-tiers[j], is_nan[j], -values[j], j))


def select_tokens(
    scores: Tensor, tiers: Tensor, counts: Tensor, num_pages: int, block_size: int
) -> list[list[int]]:
    """Return the positions of the kept tokens, a list per page."""
    pages = []
    for layer in range(counts.shape[0]):
        for head in range(counts.shape[1]):
            row = scores[layer, head if scores.shape[1] > 1 else 0]
            number = int(counts[layer, head])
            kept = sorted(ranking(row, tiers.tolist(), len(row))[: number * block_size])
            pages += [kept[i * block_size : (i + 1) * block_size] for i in range(number)]
    assert len(pages) == num_pages
    return pages


def slots_of_positions(
    positions: Tensor, offsets: Tensor, old_blocks: Tensor, num_pairs: int
) -> list[list[int]]:
    """Return the slots of the tokens on each page that a pair owns."""
    bounds, size = offsets.tolist(), positions.shape[1]
    return [
        [(int(old_blocks[j // size]) * num_pairs + pair) * size + j % size for j in page]
        for pair in range(num_pairs)
        for page in positions[bounds[pair] : bounds[pair + 1]].tolist()
    ]


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    sources: Tensor,
    offsets: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
) -> None:
    """Copy token by token, on the pages that pairs own."""
    pairs = num_layers * num_heads
    block_size = key_pages.shape[1]
    for r in range(int(offsets[-1])):
        target = int(new_blocks[r // pairs]) * pairs + r % pairs
        for slot, source in enumerate(sources[r].tolist()):
            for pool in (key_pages, value_pages):
                pool[target, slot] = pool[source // block_size, source % block_size]


def fetch_tokens(
    tier: Tensor, key_pages: Tensor, value_pages: Tensor, stored: Tensor, exchange: Any
) -> None:
    """Copy token by token where another one comes."""
    pairs, size, width = len(exchange.offsets) - 1, key_pages.shape[1], key_pages.shape[2]
    bounds = exchange.offsets.tolist()
    for pair in range(pairs):
        for r in range(bounds[pair], bounds[pair + 1]):
            page = int(exchange.blocks[r // pairs]) * pairs + r % pairs
            for slot, position in enumerate(exchange.after[r].tolist()):
                if position == int(exchange.before[r, slot]):
                    continue
                block = int(exchange.tier_blocks[position // size])
                token = tier[block, pair * size + position % size]
                key_pages[page, slot] = token[:width]
                value_pages[page, slot] = token[width:]
                stored[page, slot] = position


def merge_evicted(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
) -> None:
    """Replace kept tokens by means over the candidates nearest to them, head by head."""
    pairs = num_layers * num_heads
    size = key_pages.shape[1]
    bounds = offsets.tolist()
    for pair in range(pairs):
        places = positions[bounds[pair] : bounds[pair + 1]].flatten().tolist()
        kept = [j in places for j in range(len(old_blocks) * size)]
        for pool in (key_pages, value_pages):
            states = pool[old_blocks.long() * pairs + pair].flatten(0, 1).double()
            means = merged(states, kept, len(kept))
            for place, j in enumerate(places):
                r = bounds[pair] + place // size
                target = int(new_blocks[r // pairs]) * pairs + r % pairs
                pool[target, place % size] = means[j].to(pool.dtype)


def merge_targets(kept: Sequence[bool], num_candidates: int) -> list[int]:
    """Return the kept candidate that each candidate is merged into; a kept one is its own target.

    It is the nearest one by position, the lower of two.
    """
    places = [j for j in range(num_candidates) if kept[j]]
    return [min(places, key=lambda p: (abs(p - j), p)) for j in range(num_candidates)]


def merged(states: Tensor, kept: Sequence[bool], num_candidates: int) -> Tensor:
    """Return keys or values [P, D] of one head, kept ones being the means of their clusters."""
    result = states.clone()
    # A head that keeps no candidate has no target.
    targets = merge_targets(kept, num_candidates) if any(kept[:num_candidates]) else []
    for place in set(targets):
        result[place] = states[[j for j, t in enumerate(targets) if t == place]].mean(0)
    return result


def page_tables(
    block_table: Tensor,
    seq_lens: Tensor,
    region_blocks: Tensor,
    region_start: Tensor,
    offsets: Tensor,
    block_size: int,
    num_layers: int,
    num_heads: int,
) -> tuple[list[list[list[list[int]]]], list[list[list[int]]]]:
    """Return pages and lengths of all virtual sequences, both indexed by layer, request, head.

    The region state is given per request.
    """
    pairs = num_layers * num_heads

    def sequence(layer: int, b: int, head: int) -> tuple[list[int], int]:
        pair = layer * num_heads + head
        row, seq_len = block_table[b].tolist(), int(seq_lens[b])
        pages: list[int] = []
        start = 0
        if int(region_blocks[b]) > 0:
            start = int(region_start[b])
            region = range(int(offsets[b, pair]), int(offsets[b, pair + 1]))
            pages = [row[r // pairs] * pairs + r % pairs for r in region]
        length = len(pages) * block_size + seq_len - start * block_size
        tail = range(start, math.ceil(seq_len / block_size))
        pages += [row[column] * pairs + pair for column in tail]
        return pages, length

    requests = range(block_table.shape[0])
    both = [
        [[sequence(layer, b, head) for head in range(num_heads)] for b in requests]
        for layer in range(num_layers)
    ]
    tables = [[[pages for pages, _ in heads] for heads in layer] for layer in both]
    lengths = [[[length for _, length in heads] for heads in layer] for layer in both]
    return tables, lengths
