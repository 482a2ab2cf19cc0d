# SPDX-License-Identifier: Apache-2.0
"""Random inputs of tests: seeds, and keys in the pages of a pool."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from vllm_tgvkv.head_scores import HeadScores


def fresh_seed() -> int:
    """Seed torch with a new seed and print it; set TGVKV_SEED to repeat a failure."""
    seed = int(os.environ.get("TGVKV_SEED") or int.from_bytes(os.urandom(4), "little"))
    torch.manual_seed(seed)
    print(f"TGVKV_SEED={seed}")
    return seed


def head_scores(layers: int, kv_heads: int, group: int = 1) -> HeadScores:
    """Return scores of query heads that differ a lot, with KV heads that have none."""
    scores = torch.rand(layers, kv_heads * group, dtype=torch.float64) ** 6
    scores[-1, :group] = 0
    return HeadScores("file", "a model", kv_heads, tuple(map(tuple, scores.tolist())))


def paged(keys: Tensor, block_size: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Lay out keys ``[P, H, D]`` in shuffled blocks of a pool that is NaN everywhere else.

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
