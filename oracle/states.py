# SPDX-License-Identifier: Apache-2.0
"""RetentiveKV's states of evicted tokens as they are printed, token by token in float64.

`S' = H S + A k v^T` absorbs a token, and attention is `Attn(q, kept tokens) + q S`. A state of
vision and one of text are a matrix [D, D] each. Source: Liu, "RetentiveKV: State-Space Memory for
Uncertainty-Aware Multimodal KV Cache Eviction", Findings of ACL 2026, arXiv 2605.04075. It does not
print the entropy of one token, how H and A follow from entropy and attention, the roots, or the
scale of q: these are choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oracle.methods import Layout
from oracle.summaries import distance, root_of, roots_of


def cross_entropies(heads: Tensor, voters: Sequence[int], vision: Sequence[bool]) -> list[float]:
    """Return H of every token: the mean entropy of the text rows' attention to vision.

    A row's attention to vision is divided by its sum, and its entropy by the entropy of a uniform
    row. A row counts by its attention to the token, and all heads of the group count alike.

    Args:
        heads: A of a group's query heads, [G, P, P].
        voters: text rows.
        vision: of every token; two tokens at least.
    """
    columns = [j for j, each in enumerate(vision) if each]
    sums, weighted = torch.zeros(2, heads.shape[-1], dtype=torch.float64)
    for i in voters:
        entropies = []
        for row in heads.double()[:, i]:
            seen = row[columns]
            if seen.sum() > 0:
                entropies.append(float(torch.special.entr(seen / seen.sum()).sum()))
            else:
                entropies.append(0.0)
        entropy = sum(entropies) / len(entropies) / math.log(len(columns))
        mean = heads.double()[:, i].mean(0)
        sums += mean
        weighted += entropy * mean
    return [float(w / s) if s > 0 else 0.0 for w, s in zip(weighted, sums, strict=True)]


def absorptions(
    attention: Sequence[float],
    evicted: Sequence[int],
    scores: Sequence[float],
    layout: Layout,
    decay: float,
    roots: int,
) -> list[float]:
    """Return A of each evicted token: its attention, for vision times `decay` per step to its root.

    Roots are the evicted tokens with the best scores, as many as `roots`.

    Args:
        attention: of all tokens, mean over the rows that vote.
        evicted: of one modality.
    """
    places = roots_of(evicted, scores, roots)
    found = []
    for j in evicted:
        steps = distance(layout, j, places[root_of(layout, j, places)])
        found.append(attention[j] * decay**steps if layout.vision[j] else attention[j])
    return found


def state(
    keys: Tensor, values: Tensor, retained: Sequence[float], absorbed: Sequence[float]
) -> Tensor:
    """Return S [D, D] after some tokens, keys and values [n, D], with H and A of each."""
    result = torch.zeros(keys.shape[1], values.shape[1], dtype=torch.float64)
    for key, value, h, a in zip(keys.double(), values.double(), retained, absorbed, strict=True):
        result = h * result + a * torch.outer(key, value)
    return result
