# SPDX-License-Identifier: Apache-2.0
"""A compressed cache, as evictions leave it, for the kernels' benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.select import page_offsets


@dataclass(frozen=True)
class CompressedCache:
    """R requests whose prompts of t0 blocks were compressed to k blocks, each with a tail block.

    The pool's blocks are in random order, as after hours of serving.
    """

    keys: Tensor
    """[num_pages, N, D], with the values a view of slots of 2 D."""
    values: Tensor
    block_table: Tensor
    seq_lens: Tensor
    retained: Tensor
    replaced: Tensor
    offsets: Tensor
    shape: tuple[int, int, int]
    """Layers, requests, KV heads."""
    block_size: int

    @classmethod
    def build(
        cls,
        shape: tuple[int, int, int],
        head_size: int,
        retained: int,
        replaced: int,
        ragged: bool,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int = 16,
        tail_tokens: int = 8,
    ) -> CompressedCache:
        """Deal `retained` blocks of every request to its heads.

        Evenly, or if `ragged` by exponentially distributed shares (coefficient of variation 1).
        """
        torch.manual_seed(0)
        num_layers, requests, num_heads = shape
        pairs = num_layers * num_heads
        num_blocks = 1 + requests * (retained + 1)
        ids = (torch.randperm(num_blocks - 1) + 1).view(requests, retained + 1).int()
        table = torch.zeros(requests, replaced + 1, dtype=torch.int32)
        table[:, :retained], table[:, replaced] = ids[:, :retained], ids[:, retained]
        shares = torch.ones(requests, pairs)
        if ragged:
            shares.exponential_()
        counts = apportion(shares, retained * pairs, floor=min(1, retained), cap=replaced)
        first, per_block = ids[:, 0].long(), torch.zeros(2, num_blocks, dtype=torch.int32)
        per_block[0, first], per_block[1, first] = retained, replaced
        offsets = torch.zeros(num_blocks, pairs + 1, dtype=torch.int32)
        for request in range(requests):
            offsets[first[request]] = page_offsets(counts[request])
        pages = torch.empty(
            num_blocks * pairs, block_size, 2 * head_size, dtype=dtype, device=device
        ).normal_()
        keys, values = pages.split(head_size, dim=2)
        lengths = torch.full((requests,), replaced * block_size + tail_tokens, dtype=torch.int32)
        state = (each.to(device) for each in (table, lengths, *per_block, offsets))
        return cls(keys, values, *state, shape, block_size)

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """Return the first arguments of the functions in `vllm_tgvkv.kernels.page_tables`."""
        state = (self.block_table, self.seq_lens, self.retained, self.replaced, self.offsets)
        return *state, self.block_size

    def lengths(self) -> Tensor:
        """Return the tokens of every virtual sequence, int32 [L, R, H]."""
        lengths = torch.zeros(self.shape, dtype=torch.int32, device=self.keys.device)
        write_lengths(*self.state, lengths)
        return lengths

    def tables(self) -> Tensor:
        """Return the page tables of all layers, int32 [L, R, H, W]."""
        shape = (*self.shape, self.block_table.shape[1])
        tables = torch.zeros(shape, dtype=torch.int32, device=self.keys.device)
        write_page_tables(*self.state, 0, tables)
        return tables
