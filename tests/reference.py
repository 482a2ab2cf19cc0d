# SPDX-License-Identifier: Apache-2.0
"""What tests compare with: attention and TGV-KV from their definitions, in loops and float64."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


def fresh_seed() -> int:
    """Seeds torch anew and prints the seed; set TGVKV_SEED to repeat a failure."""
    seed = int(os.environ.get("TGVKV_SEED") or int.from_bytes(os.urandom(4), "little"))
    torch.manual_seed(seed)
    print(f"TGVKV_SEED={seed}")
    return seed


def paged(keys: Tensor, block_size: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Keys ``[P, H, D]`` laid out in shuffled blocks of a pool that is NaN everywhere else.

    Returns:
        The pool's logical view ``[num_blocks, H, N, D]`` (stored ``[D, N]`` if ``transposed``)
        and the block ids.
    """
    num_tokens, heads, head_size = keys.shape
    num_blocks = math.ceil(num_tokens / block_size)
    shape = (num_blocks + 3, heads, block_size, head_size)
    pool = torch.full(shape, float("nan"), dtype=keys.dtype)
    if transposed:
        pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    ids = torch.randperm(num_blocks + 3)[:num_blocks]
    for j in range(num_tokens):
        pool[ids[j // block_size], :, j % block_size] = keys[j]
    return pool, ids


def causal_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """A of one layer over all rows: queries ``[P, H, G, D]``, keys ``[P, H, D]``.

    Returns:
        float64 ``[H, G, P, P]``.
    """
    num_tokens, heads, group, _ = queries.shape
    attention = torch.zeros(heads, group, num_tokens, num_tokens, dtype=torch.float64)
    for h in range(heads):
        for g in range(group):
            for i in range(num_tokens):
                logits = keys[: i + 1, h].double() @ queries[i, h, g].double() * scale
                attention[h, g, i, : i + 1] = logits.softmax(dim=0)
    return attention


def heads_of(attention: Tensor, granularity: str) -> list[list[list[float]]]:
    """A[l, h] for each KV head, or the one A[l], from A ``[H, G, P, P]`` of all query heads."""
    if granularity == "layer":
        return [attention.mean(dim=(0, 1)).tolist()]
    return attention.mean(dim=1).tolist()


def tgv_score(attention: list[list[float]], vision: set[int], rows: list[int]) -> list[float]:
    """s[j] of TWR from the matrix A of one layer or head."""
    weights = []
    for rank, j in enumerate(rows, start=1):
        received = sum(attention[i][j] for i in rows if i >= j)
        weights.append(received / (len(rows) - rank + 1))
    weights = [weight / sum(weights) for weight in weights]
    scores = []
    for j in range(len(attention)):
        if j in vision:
            scores.append(sum(w * attention[i][j] for w, i in zip(weights, rows, strict=True)))
        else:
            scores.append(sum(attention[i][j] for i in rows if i >= j))
    return scores


def tgv_strength(attention: list[list[float]], vision: set[int], rows: list[int]) -> float:
    """t of TVB from the matrix A of one layer or head."""
    return sum(attention[i][j] for i in rows for j in vision)


def tgv_kept(
    scores: list[float], vision: set[int], sinks: int, num_candidates: int, budget: int
) -> list[int]:
    """TPR in words: sinks, then all text if it fits and the best vision, else the best text."""

    def best(positions: list[int], number: int) -> list[int]:
        return sorted(positions, key=lambda j: (-scores[j], j))[:number]

    first = [j for j in range(num_candidates) if j < sinks]
    text = [j for j in range(num_candidates) if j >= sinks and j not in vision]
    images = [j for j in range(num_candidates) if j >= sinks and j in vision]
    if budget <= len(first):
        return sorted(best(first, budget))
    if budget <= len(first) + len(text):
        return sorted(first + best(text, budget - len(first)))
    return sorted(first + text + best(images, budget - len(first) - len(text)))
