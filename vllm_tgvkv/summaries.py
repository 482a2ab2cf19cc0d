# SPDX-License-Identifier: Apache-2.0
"""Summaries of an eviction's tokens, in the last blocks of its region.

A block is one page of every (layer, head), so a block holds one summary of each. Blocks of
summaries are the last of the k blocks that a cut leaves; the others hold tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.kernels.summaries import Places, absorb, num_rows, store
from vllm_tgvkv.pages import CacheShape, PagePool
from vllm_tgvkv.policies import Prompt
from vllm_tgvkv.policies.summaries import Kind, Summaries


def rows_of(pool: PagePool) -> int:
    """Return the rows of a summary in the pages of a pool."""
    return num_rows(pool.block_size, pool.head_size, pool.values.element_size())


def write_summaries(
    summaries: Summaries,
    kinds: Sequence[Kind],
    prompt: Prompt,
    scores: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    pool: PagePool,
    shape: CacheShape,
) -> None:
    """Absorb what is evicted into pages of fresh blocks.

    Args:
        kinds: what each block's summaries are of.
        scores: float32 ``[L, S, C]``, of this rank's heads.
        positions: kept positions, int32 ``[pages, N]``; ``offsets`` are those of their pages.
        old_blocks: blocks of the candidates, int32 ``[C / N]``.
        new_blocks: a block for each kind, int32.
    """
    num_pairs, num_candidates = shape.num_pairs, prompt.num_candidates
    of_pairs = scores.expand(-1, shape.num_heads, -1).reshape(num_pairs, num_candidates)
    is_evicted = ~_kept(positions, offsets, num_pairs, num_candidates)
    is_vision = prompt.is_vision[:num_candidates]
    pairs = torch.arange(num_pairs, device=scores.device)
    tables = old_blocks.long() * num_pairs + pairs[:, None]
    places = _places(prompt, scores.device)
    decays = torch.where(is_vision, summaries.decay, 1.0)
    log_gate = math.log(summaries.gate) if summaries.gate > 0 else -math.inf
    for number, kind in enumerate(kinds):
        is_absorbed = is_evicted
        if kind != "all":
            is_absorbed = is_evicted & (is_vision if kind == "vision" else ~is_vision)
        weights = summaries.weights(of_pairs, is_absorbed)
        rows = (tables, weights, of_pairs, places, decays, rows_of(pool))
        summary = absorb(pool.keys, pool.values, *rows)
        summary.log_masses.add_(log_gate)
        # Indexing by a tensor of no dimension would wait for its value.
        pages = new_blocks[number : number + 1].long() * num_pairs + pairs
        store(summary, pool.keys, pool.values, pages)


def _kept(positions: Tensor, offsets: Tensor, num_pairs: int, num_candidates: int) -> Tensor:
    """Return whether each pair keeps each candidate, bool ``[M, C]``."""
    page = torch.arange(len(positions), device=positions.device)
    pair = torch.searchsorted(offsets.long(), page, right=True).sub_(1).clamp_(max=num_pairs - 1)
    kept = torch.zeros(num_pairs * num_candidates, dtype=torch.bool, device=positions.device)
    kept.index_fill_(0, (pair[:, None] * num_candidates + positions.long()).flatten(), True)
    return kept.view(num_pairs, num_candidates)


def _places(prompt: Prompt, device: torch.device) -> Places:
    """Return where a prompt's candidates are; images without a known grid have one row."""
    run = np.zeros(prompt.num_tokens, np.int64)
    row, column = np.zeros_like(run), np.arange(prompt.num_tokens)
    for number, image in enumerate(prompt.images, start=1):
        part = slice(image.start, image.start + image.length)
        run[part] = number
        if image.grid is not None:
            row[part], column[part] = np.divmod(np.arange(image.length), image.grid[1])
    places = np.stack((run, row, column))[:, : prompt.num_candidates]
    return Places(*async_tensor_h2d(np.ascontiguousarray(places), device).unbind())
