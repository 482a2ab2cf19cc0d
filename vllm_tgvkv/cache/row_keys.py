# SPDX-License-Identifier: Apache-2.0
"""The keys of a request's row: their pages, and which token each of them belongs to.

A head's keys are *columns*, in the order of its pages. In a row that was never cut, column and
position are the same; `RaggedKeys` describe a compressed row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.kernels.ragged import kept_slots, whole_tables
from vllm_tgvkv.kernels.statistics import Attention, ObservedAttention


@dataclass(frozen=True)
class RowKeys:
    """The keys of a row that was never cut; L layers, H KV heads, n tokens of the request."""

    blocks: Tensor
    """Block ids of the row, int32 [W']."""
    tables: Tensor
    """Pages of every (layer, head), int32 [L * H, W]."""
    lengths: Tensor
    """Keys of every (layer, head), int32 [L * H], or [1] if all have the same number."""
    num_tokens: int
    """n."""
    shape: CacheShape

    @classmethod
    def of_blocks(cls, blocks: Tensor, num_tokens: int, shape: CacheShape) -> RowKeys:
        """Return the keys of a row that was never cut, whose blocks are int32 [W]."""
        tables = whole_tables(blocks, shape.num_pairs)
        lengths = torch.full((1,), num_tokens, dtype=torch.int32, device=blocks.device)
        return RowKeys(blocks, tables, lengths, num_tokens, shape)

    @property
    def num_columns(self) -> int:
        """Width of what is computed for every key: no head has more of them."""
        return self.num_tokens

    def of_layers(self, first: int, num_layers: int, num_sets: int) -> slice:
        """Return the pairs that stand for the token sets of some layers, `num_sets` in each."""
        num_heads = self.shape.num_heads
        return slice(first * num_heads, (first + num_layers) * num_heads, num_heads // num_sets)

    def present_in(self, first: int, num_layers: int, num_sets: int) -> Tensor | None:
        """Return whether each position still has a key in some layers, bool [num_layers * S, n].

        None is returned if all have.
        """
        return None

    def attention(self, observed: ObservedAttention, layer: int, rows: Tensor) -> Attention:
        """Return attention over columns as attention over positions, from `layer` on.

        `rows` are the positions of the rows, int64 [O].
        """
        return observed

    def arranged(self, positions: Tensor, offsets: Tensor, in_order: bool) -> Tensor:
        """Return the tokens of a new region in the order of its slots.

        Args:
            positions: int32 [pages, N]; `offsets` belong to the region, see `select_tokens`.
            in_order: whether they have to ascend in every head.

        Returns:
            int32 [pages, N].
        """
        return positions

    def slots(self, positions: Tensor, offsets: Tensor, num_slots: int) -> Tensor:
        """Return where the tokens of some pages are in a pool of `num_slots`, see `kept_slots`."""
        return kept_slots(positions, offsets, self.tables, None, num_slots)

    def candidates(self, num_candidates: int) -> tuple[Tensor, Tensor]:
        """Return the pages of keys that hold the first tokens, and the position of each key.

        Both are int32, [L * H, W'] and [L * H, C']. Keys of later tokens may be among them.
        """
        width = num_candidates // self.shape.block_size
        positions = torch.arange(num_candidates, dtype=torch.int32, device=self.blocks.device)
        return self.tables[:, :width], positions.expand(self.shape.num_pairs, -1)

    def places(self, layer: int, num_layers: int) -> Tensor:
        """Return where the keys of some layers are in the pool, int64 [num_layers * H, n].

        That is page * N + slot by position; 0, a place in the null block, without a key.
        """
        size, pairs = self.shape.block_size, self.of_layers(layer, num_layers, self.shape.num_heads)
        positions = torch.arange(self.num_tokens, device=self.blocks.device)
        pages = self.tables[pairs].index_select(1, positions // size).long()
        return pages.mul_(size).add_(positions % size)

    def read(self, numbers: Tensor, layer: int, num_layers: int) -> Tensor:
        """Return numbers of some layers' keys by position, float32 [num_layers * H, n].

        They lie as the keys do, [num_blocks, L, H, N]. Positions without a key get 0.
        """
        found = numbers[:, layer : layer + num_layers].index_select(0, self.blocks)
        return found.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)[:, : self.num_tokens]
