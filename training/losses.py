# SPDX-License-Identifier: Apache-2.0
"""Objectives of training gates: a target for KVzap, and the terms of TrimKV's loss.

Sources: arXiv 2601.07891 and github.com/NVIDIA/kvpress for KVzap, arXiv 2605.09649 and
github.com/ngocbh/trimkv for TrimKV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def visible(documents: Tensor) -> Tensor:
    """Return which keys each token attends to, bool `[S, S]`: its document's, up to itself.

    Args:
        documents: number of each token's document, int64 `[S]`.
    """
    return (documents[:, None] == documents).tril()


def ages(documents: Tensor) -> Tensor:
    """Return t - j where token t sees token j, otherwise 0: int64 `[S, S]`."""
    tokens = torch.arange(len(documents), device=documents.device)
    return (tokens[:, None] - tokens) * visible(documents)


def repeat_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    output_weight: Tensor,
    scaling: float,
    keys: slice,
    rows: slice,
) -> Tensor:
    """Return KVzip+'s scores of some keys, which KVzap predicts: `[H, n]`.

    `log max over t of a[t, j] * norm(W_o v[j]) / norm(x[t])`, t being the rows in which the text
    is repeated, in all query heads of a group; a is their attention over all keys that they see.

    Args:
        query, key, value: `[Q, S, D]`, and `[H, S, D]` twice, rotated.
        hidden: hidden states x behind the input norm, `[S, d]`.
        output_weight: the output projection, `[d, Q * D]`.
    """
    num_tokens, group = key.shape[1], query.shape[0] // key.shape[0]
    columns = torch.arange(num_tokens, device=key.device)
    hidden_norms = hidden[rows].norm(dim=-1).log()
    found = []
    for head, (queries, weight) in enumerate(
        zip(query, output_weight.unflatten(1, (len(query), -1)).unbind(1), strict=True)
    ):
        logits = queries[rows] @ key[head // group].T * scaling
        logits = logits.masked_fill(columns > columns[rows, None], -math.inf)
        norms = (value[head // group, keys] @ weight.T).norm(dim=-1).log()
        logs = logits[:, keys] - logits.logsumexp(-1, keepdim=True) - hidden_norms[:, None]
        found.append(logs.amax(0) + norms)
    return torch.stack(found).unflatten(0, (-1, group)).amax(1)


def retained(log_betas: Tensor, documents: Tensor) -> Tensor:
    """Return what is left of all tokens at each token t, the sum of `beta[i] ** (t - i)`.

    Both `[H, S]`; the sum is over tokens of the same document.
    """

    def add(log_betas: Tensor) -> Tensor:
        return ((log_betas[:, None] * ages(documents)).exp() * visible(documents)).sum(-1)

    # The [H, S, S] powers are computed again for the gradient instead of kept for all layers.
    return checkpoint(add, log_betas, use_reentrant=False)


def capacity(log_betas: Sequence[Tensor], documents: Tensor, memory: float, shared: bool) -> Tensor:
    """Return how far the retained tokens exceed the memory, relative to what they could exceed.

    For n heads with a memory of M tokens each, `relu(S[t] - n M) / max(t n - n M, 1)`, averaged
    over the tokens where it is not 0. t counts the tokens of a document. DBTrimKV's memory is
    shared by all heads of all layers; in TrimKV each has its own, n = 1.

    Args:
        log_betas: of each layer, `[H, S]`.
    """
    sums = torch.cat([retained(layer, documents) for layer in log_betas])
    counts = visible(documents).sum(-1)
    num_heads = len(sums) if shared else 1
    if shared:
        sums = sums.sum(0, keepdim=True)
    most = (num_heads * (counts - memory)).clamp(min=1)
    excess = functional.relu(sums - num_heads * memory) / most
    return excess.sum() / (excess > 0).sum().clamp(min=1)


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return `sum of p (log p - log q)`, averaged over rows of logits `[n, V]`."""
    wanted, found = teacher.log_softmax(-1), student.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean()
