# SPDX-License-Identifier: Apache-2.0
"""Headers: blocks of the pool that describe a region to another server.

A region's state lies beside the pool (`regions.py`), and a connector moves blocks. So the server
that cuts a prompt writes the state into blocks of its own, and the other one reads it from the
blocks that arrive. Both do so for the heads of each rank, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.shared.handover import NONCE_INTS, header_fields, num_header_ints

_NUM_FIXED = NONCE_INTS + len(header_fields(0, 0, 0))


class Headers:
    """Headers in the blocks of one worker's pool."""

    def __init__(self, pool: PagePool, regions: Regions) -> None:
        self._shape, self._regions = pool.shape, regions
        self._blocks = pool.raw.view(torch.int32).view(pool.num_blocks, -1)
        """The pool as numbers, int32 [num_blocks, numbers of a block]."""

    def write(
        self,
        header_blocks: Sequence[int],
        nonce: Sequence[int],
        region_blocks: Sequence[int],
        num_replaced: int,
    ) -> None:
        """Describe a stored region.

        Args:
            region_blocks: the k blocks of the region that hold tokens.
            num_replaced: t, the blocks that it replaces.
        """
        regions, num_pairs, device = self._regions, self._shape.num_pairs, self._blocks.device
        fixed = [*nonce, *header_fields(len(region_blocks), num_replaced, num_pairs)]
        parts = [async_tensor_h2d(fixed, device, torch.int32), regions.offsets[region_blocks[0]]]
        if regions.keeps_positions:
            blocks = async_tensor_h2d(list(region_blocks), device)
            of_blocks = regions.positions.view(len(regions.num_token_blocks), -1)
            parts.append(of_blocks[blocks].flatten())
        numbers = torch.cat(parts)
        width = self._blocks.shape[1]
        for index, block in enumerate(header_blocks):
            part = numbers[index * width : (index + 1) * width]
            self._blocks[block, : len(part)] = part

    def is_intact(
        self,
        header_blocks: Sequence[int],
        nonce: Sequence[int],
        num_token_blocks: int,
        num_replaced: int,
    ) -> bool:
        """Return whether a header that has arrived is the one that was sent.

        Reads a few numbers on the host. The transfer is over, so on CUDA a stream of its own need
        not wait for the step that runs.
        """
        expected = [*nonce, *header_fields(num_token_blocks, num_replaced, self._shape.num_pairs)]
        first = self._blocks[header_blocks[0], :_NUM_FIXED]
        if not first.is_cuda:
            return bool(first.tolist() == expected)
        with torch.cuda.stream(torch.cuda.Stream(first.device)):
            return bool(first.tolist() == expected)

    def read(
        self,
        header_blocks: Sequence[int],
        request_id: str,
        region_blocks: Sequence[int],
        num_replaced: int,
    ) -> None:
        """Store the region that a header describes; `region_blocks` are as in `write`."""
        regions, shape, num_blocks = self._regions, self._shape, len(region_blocks)
        positions = regions.keeps_positions
        size = num_header_ints(shape.num_pairs, num_blocks, shape.block_size, positions)
        numbers = torch.cat([self._blocks[block] for block in header_blocks])[_NUM_FIXED:size]
        offsets, positions_of = numbers.split(
            [shape.num_pairs + 1, len(numbers) - shape.num_pairs - 1]
        )
        # What arrived is not trusted with the bounds of the region, or of the row.
        offsets = offsets.clamp(0, num_blocks * shape.num_pairs)
        positions_of = positions_of.clamp(0, num_replaced * shape.block_size - 1)
        regions.add(request_id, region_blocks[0], num_blocks, num_replaced, offsets)
        if positions:
            blocks = async_tensor_h2d(list(region_blocks), self._blocks.device)
            regions.store_positions(blocks, positions_of)
