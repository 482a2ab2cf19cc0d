# SPDX-License-Identifier: Apache-2.0
"""Compressed regions of running requests, found by the first block of their row.

A region is k fresh blocks whose k * L * H pages are dealt to the (layer, head) pairs in prefix-sum
order. Its whole state is k, the number t0 of prompt blocks it replaced, L * H + 1 offsets, and the
number of blocks of summaries, which follow the k blocks. A row of vLLM's block table starts with
the region's first block, which no other request shares. So the state is indexed by that block's id,
and a decode step needs no request ids and no batch order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_tgvkv.kernels import page_tables
from vllm_tgvkv.kernels.summaries import merge_rows


class Regions:
    """Region state on the device, one slot for each block of the pool.

    `num_retained`, int32 [num_blocks], is k, or 0 where no region starts; `num_replaced`, int32
    [num_blocks], is t0; `num_summaries`, int32 [num_blocks], is the number of blocks of summaries,
    which follow the k blocks in the row; `offsets` is int32 [num_blocks, L * H + 1].
    """

    def __init__(
        self,
        num_blocks: int,
        num_pairs: int,
        device: torch.device,
        block_size: int = 0,
    ) -> None:
        """Make the state of an empty pool.

        Args:
            block_size: N, if regions may be cut again, for which positions are needed; otherwise 0.
        """
        self.num_retained = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.num_replaced = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.num_summaries = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(num_blocks, num_pairs + 1, dtype=torch.int32, device=device)
        self.positions = torch.empty(
            num_blocks * num_pairs, block_size, dtype=torch.int32, device=device
        )
        """Positions of the tokens in the pages of all regions, int32 [num_pages, N]; in pages of
        summaries, those of the roots."""
        self._owners: dict[int, str] = {}
        self._first_blocks: dict[str, int] = {}
        self._summary_columns: dict[int, slice] = {}
        """By first block, where a row has blocks of summaries, if it has any."""
        self.version = 0
        """Grows with every change; data derived from an older version is stale."""

    @property
    def num_live(self) -> int:
        return len(self._owners)

    @property
    def keeps_positions(self) -> bool:
        """Whether regions may be cut again."""
        return self.positions.shape[1] > 0

    def owns(self, request_id: str) -> bool:
        """Return whether a request is compressed."""
        return request_id in self._first_blocks

    def add(
        self,
        request_id: str,
        first_block: int,
        num_retained: int,
        num_replaced: int,
        offsets: torch.Tensor,
        num_summaries: int = 0,
    ) -> None:
        """Record a request's region; `offsets` is int32 [L * H + 1] on the device."""
        self._owners[first_block] = request_id
        self._first_blocks[request_id] = first_block
        self.num_retained[first_block] = num_retained
        self.num_replaced[first_block] = num_replaced
        self.num_summaries[first_block] = num_summaries
        self.offsets[first_block] = offsets
        if num_summaries:
            end = num_retained + num_summaries
            self._summary_columns[first_block] = slice(num_retained, end)
        self.version += 1

    def store_positions(self, blocks: torch.Tensor, positions: torch.Tensor) -> None:
        """Store where the tokens of a region's pages were, int32 [k * L * H, N], for later cuts.

        `blocks` are the region's blocks, int32 [k].
        """
        of_blocks = self.positions.view(len(self.num_retained), -1)
        of_blocks.index_copy_(0, blocks.long(), positions.reshape(len(blocks), -1))

    def summary_columns(self, request_id: str) -> slice:
        """Return which columns of a compressed request's row are blocks of summaries.

        It does not wait for the device, which `num_summaries` is on.
        """
        return self._summary_columns.get(self._first_blocks[request_id], slice(0))

    def release(self, first_blocks: Sequence[int]) -> None:
        """Drop the regions that start with these blocks, which went back to the pool."""
        for block in first_blocks:
            self.num_retained[block] = 0
            self.num_replaced[block] = 0
            self.num_summaries[block] = 0
            self._summary_columns.pop(block, None)
            owner = self._owners.pop(block)
            if self._first_blocks.get(owner) == block:
                del self._first_blocks[owner]
        self.version += bool(first_blocks)

    def write_lengths(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_size: int,
        lengths: torch.Tensor,
    ) -> None:
        """Write how many keys each row of a block table attends to, see `page_tables`."""
        page_tables.write_lengths(
            block_table,
            seq_lens,
            self.num_retained,
            self.num_replaced,
            self.offsets,
            block_size,
            lengths,
        )

    def write_page_tables(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        block_size: int,
        first_layer: int,
        tables: torch.Tensor,
    ) -> None:
        """Write the pages that each row of a block table attends to, see `page_tables`."""
        page_tables.write_page_tables(
            block_table,
            seq_lens,
            self.num_retained,
            self.num_replaced,
            self.offsets,
            block_size,
            first_layer,
            tables,
        )

    def merge_summaries(
        self,
        outputs: torch.Tensor,
        log_sum_exp: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        layer: int,
        scale: float,
    ) -> None:
        """Merge what the rows' summaries add into attention over keys alone, see `merge_rows`."""
        merge_rows(
            outputs,
            log_sum_exp,
            queries,
            keys,
            values,
            block_table,
            seq_lens,
            self.num_retained,
            self.num_summaries,
            self.offsets.shape[1] - 1,
            layer,
            scale,
        )
