# SPDX-License-Identifier: Apache-2.0
"""Sketches of prompts in blocks of the pool: some pages of every (layer, head)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.kernels.sketch import sketch_keys, sketch_logits
from vllm_tgvkv.kernels.statistics import Scratch

_WORKSPACE_BYTES = 16 << 20
"""Most bytes of keys that are sketched at a time; one pair is always done whole."""


class SketchPages:
    """The pool's pages as bytes of sketches."""

    def __init__(self, pool: PagePool, bits: int) -> None:
        self.bits = bits
        self._pool = pool
        self._bytes = pool.raw.view(torch.uint8)  # [num_pages, bytes of a page]

    def write(self, tables: Tensor, num_tokens: int, blocks: Tensor) -> None:
        """Write the sketch of a prompt's first tokens.

        Args:
            tables: pages of these tokens in every (layer, head), int64 `[M, W]`.
            num_tokens: C, a multiple of the block size.
            blocks: blocks of the sketch, int64 `[s]`.
        """
        num_pairs, head_size = len(tables), self._pool.shape.head_size
        tables = tables[:, : num_tokens // self._pool.shape.block_size]
        step = max(1, _WORKSPACE_BYTES // (4 * num_tokens * head_size))
        pages = self._pages(blocks)
        for first in range(0, num_pairs, step):
            part = tables[first : first + step]
            keys = self._pool.keys.index_select(0, part.flatten()).float()
            sketches = sketch_keys(keys.view(len(part), num_tokens, head_size), self.bits)
            padded = self._bytes.new_empty(len(part), len(blocks) * self._bytes.shape[1])
            padded[:, : sketches.shape[1]] = sketches
            own = pages[first : first + step]
            self._bytes[own.flatten()] = padded.view(own.numel(), -1)

    def move(self, old_blocks: Tensor, new_blocks: Tensor) -> None:
        """Move a sketch to other blocks, both int64 `[s]`."""
        self._bytes[self._pages(new_blocks)] = self._bytes[self._pages(old_blocks)]
        self.clear(old_blocks)

    def clear(self, blocks: Tensor) -> None:
        """Clear blocks, int64 `[s]`, before somebody else gets them.

        As keys and values, bytes of a sketch may be NaN. Attention reads slots that are not written
        yet with a weight of 0, and 0 times NaN is NaN.
        """
        self._bytes[self._pages(blocks)] = 0

    def logits(
        self,
        blocks: Tensor,
        first: int,
        num_tokens: int,
        queries: Tensor,
        out: Tensor,
        scratch: Scratch,
    ) -> None:
        """Write the products of queries and the sketched keys of some pairs, from one on.

        See `kernels.sketch.sketch_logits`.
        """
        pages = self._pages(blocks)[first : first + len(queries)]
        sketches = self._bytes.index_select(0, pages.flatten()).view(len(pages), -1)
        sketch_logits(sketches, self.bits, queries, num_tokens, out, scratch)

    def _pages(self, blocks: Tensor) -> Tensor:
        """Return the pages of blocks `[s]` in every (layer, head), int64 `[M, s]`."""
        num_pairs = self._pool.shape.num_pairs
        return torch.arange(num_pairs, device=blocks.device)[:, None] + blocks * num_pairs
