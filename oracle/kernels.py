# SPDX-License-Identifier: Apache-2.0
"""Slow, obvious versions of every kernel of this package: loops over Python numbers, float64.

They say what the kernels compute; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

SMALLEST_SHARE = Fraction(1e-290)


def attention_probabilities(
    queries: Tensor,
    key_pages: Tensor,
    block_ids: Tensor,
    row_positions: Tensor,
    num_keys: int,
    scale: float,
) -> Tensor:
    """A of every query head, float64 ``[H, G, O, num_keys]``; arguments as in ``observe``."""
    num_rows, heads, group, _ = queries.shape
    block_size = key_pages.shape[2]
    result = torch.zeros(heads, group, num_rows, num_keys, dtype=torch.float64)
    for h in range(heads):
        keys = [key_pages[block_ids[j // block_size], h, j % block_size] for j in range(num_keys)]
        for i, position in enumerate(row_positions.tolist()):
            visible = torch.stack(keys[: position + 1]).double()
            for g in range(group):
                logits = visible @ queries[i, h, g].double() * scale
                result[h, g, i, : position + 1] = torch.softmax(logits, dim=0)
    return result


def apportion(shares: Sequence[float], total: int, floor: int, cap: int) -> list[int]:
    """Counts for one row of shares, in exact fractions; remainders within 2^-32 are equal."""
    size = len(shares)
    exact = [Fraction(1)] * size
    if all(math.isfinite(s) for s in shares) and max(shares) > 0:
        largest = max(shares)
        exact = [max(Fraction(s) / Fraction(largest), SMALLEST_SHARE) for s in shares]
    real = _water_fill(exact, total, floor, cap)
    counts = [Fraction(round(count * 2**32), 2**32) for count in real]
    whole = [math.floor(count) for count in counts]
    by_remainder = sorted(range(size), key=lambda i: (whole[i] - counts[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _water_fill(shares: list[Fraction], total: int, floor: int, cap: int) -> list[Fraction]:
    """Deals freely, then fixes whichever bound is violated more in sum, until none is."""
    counts: dict[int, Fraction] = {}
    while True:
        free = [i for i in range(len(shares)) if i not in counts]
        if not free:
            break
        level = (total - sum(counts.values())) / sum((shares[i] for i in free), Fraction(0))
        too_many = [i for i in free if level * shares[i] > cap]
        too_few = [i for i in free if level * shares[i] < floor]
        excess = sum(level * shares[i] - cap for i in too_many)
        lack = sum(floor - level * shares[i] for i in too_few)
        if not too_many and not too_few:
            counts |= {i: level * shares[i] for i in free}
        if excess >= lack:
            counts |= dict.fromkeys(too_many, Fraction(cap))
        if lack >= excess:
            counts |= dict.fromkeys(too_few, Fraction(floor))
    return [counts[i] for i in range(len(shares))]


def select_tokens(
    scores: Tensor, tiers: Tensor, counts: Tensor, num_pages: int, block_size: int
) -> list[list[int]]:
    """Positions of the kept tokens, a list per page."""
    pages = []
    for layer in range(counts.shape[0]):
        for head in range(counts.shape[1]):
            row = scores[layer, head if scores.shape[1] > 1 else 0].tolist()

            def rank(j: int, row: list[float] = row) -> tuple[int, bool, float, int]:
                is_nan = math.isnan(row[j])
                return -int(tiers[j]), is_nan, 0.0 if is_nan else -row[j], j

            number = int(counts[layer, head])
            kept = sorted(sorted(range(len(row)), key=rank)[: number * block_size])
            pages += [kept[i * block_size : (i + 1) * block_size] for i in range(number)]
    assert len(pages) == num_pages
    return pages


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
) -> None:
    """Copies token by token."""
    pairs = num_layers * num_heads
    block_size = key_pages.shape[1]
    bounds = offsets.tolist()
    for pair in range(pairs):
        for r in range(bounds[pair], bounds[pair + 1]):
            target = int(new_blocks[r // pairs]) * pairs + r % pairs
            for slot, j in enumerate(positions[r].tolist()):
                source = int(old_blocks[j // block_size]) * pairs + pair
                for pool in (key_pages, value_pages):
                    pool[target, slot] = pool[source, j % block_size]


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
    """Means over the candidates nearest to each kept token, cluster by cluster."""
    pairs = num_layers * num_heads
    block_size = key_pages.shape[1]
    bounds = offsets.tolist()
    for pair in range(pairs):
        kept = positions[bounds[pair] : bounds[pair + 1]].flatten().tolist()
        clusters: dict[int, list[int]] = {j: [] for j in kept}
        for candidate in range(len(old_blocks) * block_size if kept else 0):
            _, nearest = min((abs(j - candidate), j) for j in kept)
            clusters[nearest].append(candidate)
        for place, j in enumerate(kept):
            r = bounds[pair] + place // block_size
            target = int(new_blocks[r // pairs]) * pairs + r % pairs
            for pool in (key_pages, value_pages):
                tokens = [
                    pool[int(old_blocks[i // block_size]) * pairs + pair, i % block_size].double()
                    for i in clusters[j]
                ]
                pool[target, place % block_size] = torch.stack(tokens).mean(0).to(pool.dtype)


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
    """Pages and length of every virtual sequence, both indexed layer, request, head."""
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
