# SPDX-License-Identifier: Apache-2.0
"""Summaries of an eviction's tokens, in the last blocks of its region.

A block is one page of every (layer, head), so a block holds one summary of each. Blocks of
summaries are the last of the k blocks that a cut leaves; the others hold tokens. A later cut reads
the summaries of the region that it replaces, and writes its own.

This is the room's door: the evictor writes summaries through it, attention reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.kernels.summaries import (
    WORKSPACE_BYTES,
    Places,
    Rooted,
    absorb,
    bytes_per_token,
    load,
    merge_rows,
    num_rows,
    store,
)
from vllm_tgvkv.shared.prompt import VisionSpan
from vllm_tgvkv.summaries.options import Kind, Summaries


@dataclass(frozen=True)
class CutTokens:
    """The C candidates of a cut in this worker's M pairs of a layer and a head."""

    keys: RowKeys
    """The keys of the row before the cut."""
    is_vision: Tensor
    """bool `[C]`."""
    images: Sequence[VisionSpan]
    """The images of the prompt; some may end after the candidates."""
    scores: Tensor
    """float32 `[L, S, C]`, of this rank's heads."""
    positions: Tensor
    """Kept positions, int32 `[pages, N]`, see `select_tokens`."""
    offsets: Tensor
    """int32 `[M + 1]`, the first of these pages of each pair."""

    def are_kept(self) -> Tensor:
        """Return whether each pair keeps each candidate, bool `[M, C]`."""
        num_pairs, num_candidates = self.keys.shape.num_pairs, len(self.is_vision)
        page = torch.arange(len(self.positions), device=self.positions.device)
        pair = torch.searchsorted(self.offsets.long(), page, right=True).sub_(1)
        first = pair.clamp_(max=num_pairs - 1).mul_(num_candidates)
        kept = torch.zeros(num_pairs * num_candidates, dtype=torch.bool, device=page.device)
        kept.index_fill_(0, self.positions.long().add_(first[:, None]).flatten(), True)
        return kept.view(num_pairs, num_candidates)

    def places(self) -> Places:
        """Return where the candidates are; images without a known grid have one row."""
        num_candidates = len(self.is_vision)
        run = np.zeros(num_candidates, np.int64)
        row, column = np.zeros_like(run), np.arange(num_candidates)
        for number, image in enumerate(self.images, start=1):
            length = min(image.length, num_candidates - image.start)
            if length <= 0:
                continue
            part = slice(image.start, image.start + length)
            run[part] = number
            if image.grid is not None:
                row[part], column[part] = np.divmod(np.arange(length), image.grid[1])
        places = np.stack((run, row, column))
        return Places(*async_tensor_h2d(places, self.is_vision.device).unbind())


class SummaryBlocks:
    """The summaries of all compressed rows."""

    def __init__(self, pool: PagePool, regions: Regions, are_used: bool) -> None:
        self.are_used = are_used
        """Whether rows may have summaries; attention looks for them in every step then."""
        self.pool = pool
        self.regions = regions
        self.num_rows = num_rows(pool.shape.block_size, pool.shape.head_size)
        """Rows of a summary."""
        self.counts = torch.zeros(pool.num_blocks, dtype=torch.int32, device=pool.raw.device)
        """By the first block of a region: its number of blocks of summaries, int32."""
        self._columns: dict[int, slice] = {}
        """By first block: where a row has blocks of summaries, if it has any."""

    def add(self, first_block: int, num_token_blocks: int, number: int) -> None:
        """Record that blocks of summaries follow the blocks of tokens of a region."""
        self.counts[first_block].fill_(number)
        if number:
            self._columns[first_block] = slice(num_token_blocks, num_token_blocks + number)

    def release(self, first_blocks: Sequence[int]) -> None:
        """Forget the summaries of regions that start with these blocks."""
        for block in first_blocks:
            self.counts[block] = 0
            self._columns.pop(block, None)

    def columns(self, first_block: int) -> slice:
        """Return which columns of a row are blocks of summaries, without asking the device."""
        return self._columns.get(first_block, slice(0))

    def write(
        self,
        part: Summaries,
        kinds: Sequence[Kind],
        tokens: CutTokens,
        earlier: Tensor,
        blocks: Tensor,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Absorb what is evicted, and the summaries that there are, into pages of fresh blocks.

        A summary of an earlier cut goes to the one of the same kind; kinds are in the same order at
        every cut. It is dropped where this cut has no such kind.

        Args:
            kinds: what each block's summaries are of.
            earlier: blocks of the summaries that the row has, int32 `[m]`.
            blocks: a fresh block for each kind, int32.
            workspace_bytes: bound of what is absorbed at a time.
        """
        pool, regions, shape = self.pool, self.regions, self.pool.shape
        num_pairs, num_candidates = shape.num_pairs, len(tokens.is_vision)
        scores, is_vision, kept = tokens.scores, tokens.is_vision, tokens.are_kept()
        places, tables_and_positions = tokens.places(), tokens.keys.candidates(num_candidates)
        decays = torch.where(is_vision, part.decay, 1.0)
        pairs = torch.arange(num_pairs, device=scores.device)
        sets = pairs // shape.num_heads * scores.shape[1]
        sets += pairs % shape.num_heads * scores.shape[1] // shape.num_heads
        of_token = bytes_per_token(self.num_rows, shape.head_size, num_candidates)
        step = max(1, workspace_bytes // (of_token * tables_and_positions[1].shape[1]))
        for first in range(0, num_pairs, step):
            some = slice(first, first + step)
            tables, positions = (of_all[some].long() for of_all in tables_and_positions)
            candidates = positions.clamp(max=num_candidates - 1)
            of_keys = scores.flatten(0, 1)[sets[some]].gather(1, candidates)
            is_evicted = ~kept[some].gather(1, candidates) & (positions < num_candidates)
            for number, kind in enumerate(kinds):
                is_absorbed = is_evicted
                if kind != "all":
                    is_absorbed = is_evicted & (is_vision[candidates] == (kind == "vision"))
                found = absorb(
                    pool.keys,
                    pool.values,
                    tables,
                    candidates,
                    part.weights(of_keys, is_absorbed),
                    of_keys,
                    places,
                    decays,
                    self.num_rows,
                    self._load(earlier, number, pairs[some]),
                )
                pages = self._pages(blocks, number, pairs[some])
                store(found.summary, pool.keys, pool.values, pages)
                if regions.keeps_positions:
                    regions.positions[pages, : self.num_rows] = found.roots.int()

    def merge(
        self,
        outputs: Tensor,
        log_sum_exp: Tensor,
        queries: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        layer: int,
        scale: float,
    ) -> None:
        """Merge what the rows' summaries add into attention over keys alone, see `merge_rows`."""
        merge_rows(
            outputs,
            log_sum_exp,
            queries,
            self.pool.keys,
            self.pool.values,
            block_table,
            seq_lens,
            self.regions.num_token_blocks,
            self.counts,
            self.pool.shape.num_pairs,
            layer,
            scale,
        )

    def _load(self, blocks: Tensor, number: int, pairs: Tensor) -> Rooted | None:
        """Return an earlier cut's summaries of some pairs, or None if there are not as many."""
        if number >= len(blocks):
            return None
        pages = self._pages(blocks, number, pairs)
        summary = load(self.pool.keys, self.pool.values, pages, self.num_rows)
        return Rooted(summary, self.regions.positions[pages, : self.num_rows].long())

    def _pages(self, blocks: Tensor, number: int, pairs: Tensor) -> Tensor:
        """Return the pages of some pairs in a block, int64 `[q]`."""
        # Indexing by a tensor of no dimension would wait for its value.
        return blocks[number : number + 1].long() * self.pool.shape.num_pairs + pairs


def bytes_of_writing(shape: CacheShape, num_tokens: int) -> int:
    """Return what kept positions, the sources of their copy and absorbing the others take."""
    of_token = bytes_per_token(
        num_rows(shape.block_size, shape.head_size), shape.head_size, num_tokens
    )
    of_pair = of_token * num_tokens
    at_once = min(max(WORKSPACE_BYTES, of_pair), shape.num_pairs * of_pair)
    return 14 * shape.num_pairs * num_tokens + max(8 * shape.num_pairs * num_tokens, at_once)
