# SPDX-License-Identifier: Apache-2.0
"""The parts of R-KV's score, as its official code has them, for one KV head in float64.

The code (github.com/Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`, `rkv/utils.py`) works on n cached
keys of D values in order of position, and the queries of the last w tokens by the G query heads of
the group. A score is `MIX * importance - (1 - MIX) * redundancy`.
"""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 8
"""w: last queries, whose tokens are always kept."""

POOLING = 7
"""Kernel of the maximum pooling of the importance."""

SIMILAR = 0.5
"""Keys with a higher cosine are similar."""

MIX = 0.1
"""lambda: weight of the importance. The redundancy has weight 1 - lambda."""


def importance(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return I, float64 [n - w]: how much the last queries look at each key before theirs.

    Of the group's heads, the greatest logit counts. The softmax is over past keys only.

    Args:
        queries: [w, G, D], rotated.
        keys: [n, D], rotated, with n > w.
        scale: factor of the products.
    """
    past = len(keys) - len(queries)
    logits = torch.einsum("igd,jd->igj", queries.double(), keys[:past].double()) * scale
    mean = logits.amax(1).softmax(-1).mean(0)
    return torch.nn.functional.max_pool1d(mean[None], POOLING, 1, POOLING // 2)[0]


def similarity(keys: Tensor) -> Tensor:
    """Return the matrix [n, n] of cosines that redundancy is the mean of.

    The diagonal is zero. In each row, so is the similar key with the highest position, since the
    newest copy of a piece of text is the one to keep. (In rows without one, the official code
    zeroes key 0, where its search for the highest index starts.)

    Args:
        keys: [n, D], rotated.
    """
    directions = keys.double()
    directions = directions / (directions.norm(dim=-1, keepdim=True) + 1e-8)
    cosines = directions @ directions.T
    cosines.fill_diagonal_(0)
    for row in cosines:
        similar = (row > SIMILAR).nonzero().flatten()
        if len(similar) > 0:
            row[similar[-1]] = 0
    return cosines


def redundancy(keys: Tensor) -> Tensor:
    """Return R, float64 [n]: the softmax over keys of their mean similarity to all keys."""
    return similarity(keys).mean(0).softmax(-1)
