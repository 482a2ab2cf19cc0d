# SPDX-License-Identifier: Apache-2.0
"""The steps that follow a decision: fill the fresh blocks of a region, and store its state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_tgvkv.cache.header import Headers
from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.shared.plan import Eviction
from vllm_tgvkv.summaries.blocks import CutTokens, SummaryBlocks
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt
from vllm_tgvkv.worker.due import DueEviction

SLOT_BYTES = 32 << 20
"""Bound of the slots that kept tokens are copied from at a time, in 4 or 8 bytes each."""


class RegionWriter:
    """Writes regions of one worker's layers and heads, all of them at once."""

    def __init__(
        self, context: ObserverContext, summaries: SummaryBlocks, headers: Headers
    ) -> None:
        self._context = context
        self._summaries = summaries
        self._headers = headers

    def copy(self, due: DueEviction, decision: Decision) -> torch.Tensor:
        """Copy the kept tokens to fresh blocks, with what later cuts need of them.

        Returns:
            The tokens' positions in the order of their slots, int32 [pages, N].
        """
        context, pool = self._context, self._context.pool
        blocks = due.new_blocks[: due.num_token_blocks]
        sizes, offsets = (pool.shape.num_layers, pool.shape.num_heads), decision.offsets
        positions = due.keys.arranged(decision.positions, offsets, due.is_ordered)
        num_slots = pool.keys.shape[0] * pool.keys.shape[1]
        for part in _parts(len(blocks), pool.shape):
            first, last = part.start * pool.shape.num_pairs, part.stop * pool.shape.num_pairs
            of_part = offsets
            if last - first < len(positions):
                of_part = (offsets - first).clamp_(0, last - first)
            sources = due.keys.slots(positions[first:last], of_part, num_slots)
            copy_kept(pool.keys, pool.values, sources, of_part, blocks[part], *sizes)
            if context.gate_outputs is not None and context.regions.keeps_positions:
                context.gate_outputs.move(sources, blocks[part])
            if context.carried is not None and due.policy.score.accumulates:
                context.carried.move(sources, blocks[part])
        if due.policy.merge and due.eviction.is_whole:
            replaced = due.keys.blocks[: due.eviction.num_replaced]
            merge_evicted(pool.keys, pool.values, positions, offsets, replaced, blocks, *sizes)
        if context.regions.keeps_positions:
            context.regions.store_positions(blocks, positions)
        return positions

    def summarise(
        self, due: DueEviction, scored: ScoredPrompt, positions: torch.Tensor, offsets: torch.Tensor
    ) -> None:
        """Write summaries of the tokens that are not at `positions`, if the method has any."""
        if due.policy.summaries is None:
            return
        tokens = CutTokens(
            due.keys,
            due.prompt.is_vision[: due.prompt.num_candidates],
            due.prompt.images,
            scored.scores[:, scored.own_sets],
            positions,
            offsets,
        )
        earlier = due.keys.blocks[self._summaries.columns(int(due.eviction.old_blocks[0]))]
        blocks = due.new_blocks[due.num_token_blocks :]
        self._summaries.write(due.policy.summaries, due.summary_kinds, tokens, earlier, blocks)

    def store(self, due: DueEviction, offsets: torch.Tensor) -> None:
        """Store the region, whose pages start at `offsets`, int32 [L * H + 1]."""
        eviction, num_token_blocks = due.eviction, due.num_token_blocks
        self._add(eviction, num_token_blocks, len(due.summary_kinds), offsets)
        if self._context.carried is not None:
            self._context.carried.end_cut(int(eviction.new_blocks[0]), due.keys.num_tokens)
        if (header := eviction.header) is not None:
            blocks = eviction.new_blocks[:num_token_blocks].tolist()
            self._headers.write(header.blocks, header.nonce, blocks, eviction.num_replaced)

    def _add(
        self, eviction: Eviction, num_token_blocks: int, num_summaries: int, offsets: torch.Tensor
    ) -> None:
        name, first_block = eviction.request_id, int(eviction.new_blocks[0])
        self._context.regions.add(
            name, first_block, num_token_blocks, eviction.num_replaced, offsets
        )
        self._summaries.add(first_block, num_token_blocks, num_summaries)

    def store_failed(self, eviction: Eviction) -> None:
        """Store a region of valid shape for an eviction that failed.

        Its row may be compressed already, and a step that is scheduled ahead may still read it:
        pages of any content, which nobody sees.
        """
        shape, num_blocks = self._context.shape, eviction.num_retained
        size = (shape.num_layers, shape.num_heads)
        pages = torch.full(size, num_blocks, device=self._context.device)
        self._add(eviction, num_blocks, 0, page_offsets(pages))


def _parts(num_blocks: int, shape: CacheShape) -> Iterator[slice]:
    """Yield slices of a region's blocks that are copied one after the other."""
    step = max(1, SLOT_BYTES // (8 * shape.num_pairs * shape.block_size))
    for first in range(0, num_blocks, step):
        yield slice(first, min(first + step, num_blocks))
