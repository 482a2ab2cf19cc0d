# SPDX-License-Identifier: Apache-2.0
"""Attention statistics by their definitions, in float64, one row of one query head at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedSet:
    """A of the query heads that share a token set, and its statistics."""

    attention: Tensor
    """float64 [query heads, O, n]; zero where a row does not see a key."""
    num_visible: Sequence[int]
    """Number of first keys that each of the O rows sees."""

    @property
    def row_averages(self) -> Tensor:
        """Mean over the query heads, [O, n]."""
        return self.attention.mean(dim=0)

    def weighted_column_sums(self, weights: Sequence[float]) -> Tensor:
        """Return the sum of the rows, each times its weight, [n]."""
        total = torch.zeros(self.attention.shape[2], dtype=torch.float64)
        for weight, row in zip(weights, self.row_averages, strict=True):
            total += weight * row
        return total

    @property
    def column_sums(self) -> Tensor:
        """Sum of the rows, [n]."""
        return self.weighted_column_sums([1.0] * len(self.num_visible))

    @property
    def column_maxima(self) -> Tensor:
        """Maximum of the rows, [n]."""
        largest = torch.zeros(self.attention.shape[2], dtype=torch.float64)
        for row in self.row_averages:
            largest = largest.maximum(row)
        return largest

    def share_below(self, threshold: float) -> float:
        """Return the share of visible entries below `threshold` times their row's maximum."""
        below = 0
        for head in self.attention:
            for row, seen in zip(head, self.num_visible, strict=True):
                if seen > 0:
                    below += int((row[:seen] < threshold * row.max()).sum())
        visible = sum(max(seen, 0) for seen in self.num_visible)
        return below / (visible * len(self.attention))

    @property
    def row_entropies(self) -> Tensor:
        """Entropy of each row in nats, mean over the query heads, [O]."""
        return torch.special.entr(self.attention).sum(dim=2).mean(dim=0)

    def renormalised_column_sums(self, keys: Tensor, weights: Sequence[float]) -> Tensor:
        """Return weighted column sums of the softmax over a subset of the keys, bool [n]."""
        total = torch.zeros(self.attention.shape[2], dtype=torch.float64)
        for head in self.attention:
            for weight, row in zip(weights, head, strict=True):
                part = row * keys
                if part.sum() > 0:
                    total += weight * part / part.sum() / len(self.attention)
        return total


def shared_sets(attention: Tensor, num_visible: Sequence[int], per_head: bool) -> list[SharedSet]:
    """Return the token sets of one layer from A of its query heads, [H, G, O, P]."""
    if per_head:
        return [SharedSet(head, num_visible) for head in attention]
    return [SharedSet(attention.flatten(0, 1), num_visible)]


def paged_sets(
    queries: Tensor,
    pool: Tensor,
    tables: Tensor,
    lengths: Sequence[int],
    num_hidden: Sequence[int],
    scales: Sequence[float],
    per_head: bool,
    sinks: Tensor | None = None,
) -> list[SharedSet]:
    """Return the token sets of several layers, whose keys are found through page tables.

    Args:
        queries: [L, O, H, G, D].
        pool: [num_pages, N, D].
        tables: [L * H, W], pages of each (layer, head).
        lengths: keys of each (layer, head).
        num_hidden: last keys that each row does not see.
        scales: of each layer.
        per_head: whether each head has a token set; if not, a layer's heads have equal lengths.
        sinks: [L, H, G], the logit of one more key of each query head, which is no column.
    """
    num_layers, _, num_heads, _, _ = queries.shape
    sets = []
    for layer in range(num_layers):
        heads = []
        for head in range(num_heads):
            pair = layer * num_heads + head
            pages, length = tables[pair].tolist(), lengths[pair]
            size = pool.shape[1]
            keys = torch.stack([pool[pages[j // size], j % size] for j in range(length)])
            seen = [length - hidden for hidden in num_hidden]
            of_sinks = None if sinks is None else sinks[layer, head].tolist()
            heads.append(_attention(queries[layer, :, head], keys, seen, scales[layer], of_sinks))
            if per_head:
                sets.append(SharedSet(heads[-1], seen))
        if not per_head:
            sets.append(SharedSet(torch.cat(heads), seen))
    return sets


def _attention(
    queries: Tensor,
    keys: Tensor,
    num_visible: Sequence[int],
    scale: float,
    sinks: Sequence[float] | None,
) -> Tensor:
    """Return A of the query heads of one KV head, [G, O, n], from [O, G, D] and [n, D]."""
    attention = torch.zeros(queries.shape[1], len(queries), len(keys), dtype=torch.float64)
    for member in range(queries.shape[1]):
        for row, seen in enumerate(num_visible):
            if seen > 0:
                logits = keys[:seen].double() @ queries[row, member].double() * scale
                more = logits.new_tensor([sinks[member]] if sinks else [])
                attention[member, row, :seen] = torch.cat((logits, more)).softmax(0)[:seen]
    return attention
