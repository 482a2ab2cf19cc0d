# SPDX-License-Identifier: Apache-2.0
"""Compressed regions of running requests, found by the first block of their row.

A region is k fresh blocks. The pages of those that hold tokens are dealt to the (layer, head) pairs
in prefix-sum order. The whole state of a region is their number, the number t of blocks that it
replaced, and L * H + 1 offsets. A row of vLLM's block table starts with the region's first block,
which no other request shares. So the state is indexed by that block's id, and a decode step needs
no request ids and no batch order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.kernels import page_tables


class Regions:
    """Region state on the device, one slot for each block of the pool.

    `num_token_blocks`, int32 [num_blocks], is the number of blocks that hold tokens, or 0 where no
    region starts; `num_replaced`, int32 [num_blocks], is t; `offsets` is int32
    [num_blocks, L * H + 1]. Blocks of summaries follow blocks of tokens, see `SummaryBlocks`.
    """

    def __init__(
        self,
        num_blocks: int,
        shape: CacheShape,
        device: torch.device,
        keeps_positions: bool = False,
    ) -> None:
        """Make the state of an empty pool; regions may be cut again if it `keeps_positions`."""
        num_pairs, block_size = shape.num_pairs, shape.block_size if keeps_positions else 0
        self.shape = shape
        self.keeps_positions = keeps_positions
        self.num_token_blocks = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.num_replaced = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(num_blocks, num_pairs + 1, dtype=torch.int32, device=device)
        self.positions = torch.empty(
            num_blocks * num_pairs, block_size, dtype=torch.int32, device=device
        )
        """Positions of the tokens in the pages of all regions, int32 [num_pages, N]; in pages of
        summaries, positions of the roots."""
        self._owners: dict[int, str] = {}
        self._first_blocks: dict[str, int] = {}
        self.version = 0
        """Grows with every change; data derived from an older version is stale."""

    @property
    def num_live(self) -> int:
        return len(self._owners)

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.num_token_blocks, self.num_replaced, self.offsets

    def owns(self, request_id: str) -> bool:
        """Return whether a request is compressed."""
        return request_id in self._first_blocks

    def add(
        self,
        request_id: str,
        first_block: int,
        num_token_blocks: int,
        num_replaced: int,
        offsets: torch.Tensor,
    ) -> None:
        """Record a request's region; `offsets` is int32 [L * H + 1] on the device."""
        self._owners[first_block] = request_id
        self._first_blocks[request_id] = first_block
        self.num_token_blocks[first_block].fill_(num_token_blocks)
        self.num_replaced[first_block].fill_(num_replaced)
        self.offsets[first_block] = offsets
        self.version += 1

    def store_positions(self, blocks: torch.Tensor, positions: torch.Tensor) -> None:
        """Store where the tokens of a region's pages were, int32 [k * L * H, N], for later cuts.

        `blocks` are the region's blocks, int32 [k].
        """
        of_blocks = self.positions.view(len(self.num_token_blocks), -1)
        of_blocks.index_copy_(0, blocks.long(), positions.reshape(len(blocks), -1))

    def release(self, first_blocks: Sequence[int]) -> None:
        """Drop the regions that start with these blocks, which went back to the pool."""
        for block in first_blocks:
            self.num_token_blocks[block] = 0
            self.num_replaced[block] = 0
            owner = self._owners.pop(block)
            if self._first_blocks.get(owner) == block:
                del self._first_blocks[owner]
        self.version += bool(first_blocks)

    def write_lengths(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Write how many keys each row of a block table attends to, see `page_tables`."""
        size = self.shape.block_size
        page_tables.write_lengths(block_table, seq_lens, *self.state, size, lengths)

    def write_page_tables(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        first_layer: int,
        tables: torch.Tensor,
    ) -> None:
        """Write the pages that each row of a block table attends to, see `page_tables`."""
        size = self.shape.block_size
        page_tables.write_page_tables(block_table, seq_lens, *self.state, size, first_layer, tables)
