# SPDX-License-Identifier: Apache-2.0
"""Rules that evict while decoding, as their official code has them, for one cache in float64.

R-KV (github.com/Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`, `rkv/utils.py`) works on one KV head: n
cached keys of D values in order of position, and the queries of the last w tokens by the G query
heads of its group. TGV-KV (`kv_caches/tgv_kv.py`) works on one layer with n cached tokens.

Where scores are equal, the lower position is kept; the official code leaves that to `topk`.
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

SINKS = 4
"""First tokens of a layer that TGV-KV never evicts while decoding."""


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


def similarity(keys: Tensor, first_key: bool = False) -> Tensor:
    """Return the matrix [n, n] of cosines that redundancy is the mean of.

    The diagonal is zero. In each row, so is the similar key with the highest position, since the
    newest copy of a piece of text is the one to keep.

    Args:
        keys: [n, D], rotated.
        first_key: whether rows without a similar key have key 0 zeroed. The official code does so:
            its search for the highest index starts at 0.
    """
    directions = keys.double()
    directions = directions / (directions.norm(dim=-1, keepdim=True) + 1e-8)
    cosines = directions @ directions.T
    cosines.fill_diagonal_(0)
    for row in cosines:
        similar = (row > SIMILAR).nonzero().flatten()
        if len(similar) > 0:
            row[similar[-1]] = 0
        elif first_key:
            row[0] = 0
    return cosines


def redundancy(keys: Tensor, first_key: bool = False) -> Tensor:
    """Return R, float64 [n]: the softmax over keys of their mean similarity to all keys."""
    return similarity(keys, first_key).mean(0).softmax(-1)


def rkv_scores(
    queries: Tensor, keys: Tensor, scale: float, mix: float = MIX, first_key: bool = False
) -> Tensor:
    """Return R-KV's scores of the keys before the window, float64 [n - w]."""
    past = len(keys) - len(queries)
    redundant = redundancy(keys, first_key)[:past]
    return mix * importance(queries, keys, scale) - (1 - mix) * redundant


def rkv_kept(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    budget: int,
    mix: float = MIX,
    first_key: bool = False,
) -> list[int]:
    """Return the ascending positions in the cache that R-KV keeps: `budget`, or all of fewer.

    Raises:
        ValueError: if the window fills the budget.
    """
    window = len(queries)
    if budget <= window:
        raise ValueError(f"budget {budget} must be greater than the window of {window} tokens")
    if len(keys) <= budget:
        return list(range(len(keys)))
    scores = rkv_scores(queries, keys, scale, mix, first_key).tolist()
    best = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: budget - window]
    return sorted(best) + list(range(len(scores), len(keys)))


def tgv_evicted(row: Tensor, keep: float, num_tokens: int, protected: int) -> int | None:
    """Return the index in the cache of the token that a layer evicts after a step, None for none.

    Args:
        row: [n], attention of the step's token, mean over the query heads. It sees itself.
        keep: the layer's budget as a fraction of all tokens, L * (1 - ratio) * its share.
        num_tokens: P + t, prompt and generated tokens that the model has processed.
        protected: number of last tokens that are not evicted: what the prefill left from the end
            of the image on, at least 1. They are counted from the present end, so once the answer
            is that long, the prompt's text is no longer protected.
    """
    excess = int(len(row) - keep * num_tokens)
    end = len(row) - protected
    if keep >= 1 or excess < 1 or end <= SINKS:
        return None
    return SINKS + int(row[SINKS:end].argmin())
