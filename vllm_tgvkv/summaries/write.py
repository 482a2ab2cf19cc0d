# SPDX-License-Identifier: Apache-2.0
"""Summaries of an eviction's tokens, in the last blocks of its region.

A block is one page of every (layer, head), so a block holds one summary of each. Blocks of
summaries are the last of the k blocks that a cut leaves; the others hold tokens. A later cut reads
the summaries of the region that it replaces, and writes those of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.kernels.summaries import (
    WORKSPACE_BYTES,
    Places,
    Rooted,
    absorb,
    bytes_per_token,
    load,
    num_rows,
    store,
)
from vllm_tgvkv.shared.prompt import VisionSpan
from vllm_tgvkv.summaries.options import Kind, Summaries


class CutPrompt(Protocol):
    """What a summary needs to know of a prompt: `policies.Prompt` is one."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_candidates(self) -> int: ...
    @property
    def is_vision(self) -> Tensor: ...
    @property
    def images(self) -> tuple[VisionSpan, ...]: ...


def rows_of(pool: PagePool) -> int:
    """Return the rows of a summary in the pages of a pool."""
    return num_rows(pool.block_size, pool.head_size)


@dataclass(frozen=True)
class KeysOfRow:
    """The keys of a row before its cut, of M pairs of a layer and a head."""

    tables: Tensor
    """Pages, int64 ``[M, W]``."""
    positions: Tensor
    """Position of each key, int64 ``[M, n]``; no candidate's where a pair has fewer."""
    summaries: Tensor
    """Blocks of the summaries that the row has, int32 ``[m]``."""

    @classmethod
    def of_blocks(cls, blocks: Tensor, num_pairs: int, block_size: int) -> KeysOfRow:
        """Return those of a row that was never cut, from the blocks of its candidates, int32."""
        pairs = torch.arange(num_pairs, device=blocks.device)
        positions = torch.arange(len(blocks) * block_size, device=blocks.device)
        tables = blocks.long() * num_pairs + pairs[:, None]
        return cls(tables, positions.expand(num_pairs, -1), blocks[:0])

    @classmethod
    def of_ragged(cls, keys: RaggedKeys, row: Tensor, columns: slice) -> KeysOfRow:
        """Return those of a compressed row of the block table, int32 ``[W']``.

        `columns` of it are blocks of summaries.
        """
        return cls(keys.tables.long(), keys.positions, row[columns])


def write_summaries(
    summaries: Summaries,
    kinds: Sequence[Kind],
    prompt: CutPrompt,
    scores: Tensor,
    positions: Tensor,
    offsets: Tensor,
    keys: KeysOfRow,
    new_blocks: Tensor,
    pool: PagePool,
    regions: Regions,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Absorb what is evicted, and the summaries that there are, into pages of fresh blocks.

    A summary of an earlier cut goes to that of the same kind; kinds are in the same order at every
    cut. It is dropped where this cut has no such kind.

    Args:
        kinds: what each block's summaries are of.
        scores: float32 ``[L, S, C]``, of this rank's heads.
        positions: kept positions, int32 ``[pages, N]``; ``offsets`` are those of their pages.
        new_blocks: a block for each kind, int32.
        regions: has the positions of the roots, for later cuts.
        workspace_bytes: bound of what is absorbed at a time.
    """
    num_pairs, num_candidates = pool.pages_per_block, prompt.num_candidates
    rows, device = rows_of(pool), scores.device
    kept = _kept(positions, offsets, num_pairs, num_candidates)
    candidates_are_vision = prompt.is_vision[:num_candidates]
    grid = _places(prompt, device)
    decays = torch.where(candidates_are_vision, summaries.decay, 1.0)
    pairs = torch.arange(num_pairs, device=device)
    sets = pairs // pool.num_heads * scores.shape[1]
    sets += pairs % pool.num_heads * scores.shape[1] // pool.num_heads
    of_pair = bytes_per_token(rows, pool.head_size, num_candidates) * keys.positions.shape[1]
    step = max(1, workspace_bytes // of_pair)
    for first in range(0, num_pairs, step):
        part = slice(first, first + step)
        places = keys.positions[part].clamp(max=num_candidates - 1)
        of_keys = scores.flatten(0, 1)[sets[part]].gather(1, places)
        is_evicted = ~kept[part].gather(1, places) & (keys.positions[part] < num_candidates)
        for number, kind in enumerate(kinds):
            is_absorbed = is_evicted
            if kind != "all":
                is_absorbed = is_evicted & (candidates_are_vision[places] == (kind == "vision"))
            earlier = None
            if number < len(keys.summaries):
                pages = _pages(keys.summaries, number, pairs[part], num_pairs)
                summary = load(pool.keys, pool.values, pages, rows)
                earlier = Rooted(summary, regions.positions[pages, :rows].long())
            found = absorb(
                pool.keys,
                pool.values,
                keys.tables[part],
                places,
                summaries.weights(of_keys, is_absorbed),
                of_keys,
                grid,
                decays,
                rows,
                earlier,
            )
            pages = _pages(new_blocks, number, pairs[part], num_pairs)
            store(found.summary, pool.keys, pool.values, pages)
            if regions.keeps_positions:
                regions.positions[pages, :rows] = found.roots.int()


def _pages(blocks: Tensor, number: int, pairs: Tensor, num_pairs: int) -> Tensor:
    """Return the pages of some pairs in a block, int64 ``[q]``."""
    # Indexing by a tensor of no dimension would wait for its value.
    return blocks[number : number + 1].long() * num_pairs + pairs


def _kept(positions: Tensor, offsets: Tensor, num_pairs: int, num_candidates: int) -> Tensor:
    """Return whether each pair keeps each candidate, bool ``[M, C]``."""
    page = torch.arange(len(positions), device=positions.device)
    pair = torch.searchsorted(offsets.long(), page, right=True).sub_(1).clamp_(max=num_pairs - 1)
    kept = torch.zeros(num_pairs * num_candidates, dtype=torch.bool, device=positions.device)
    kept.index_fill_(0, positions.long().add_(pair[:, None] * num_candidates).flatten(), True)
    return kept.view(num_pairs, num_candidates)


def _places(prompt: CutPrompt, device: torch.device) -> Places:
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
