# SPDX-License-Identifier: Apache-2.0
"""A pool of pages with compressed requests, for timing kernels alone."""

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
    num_layers: int
    num_heads: int
    block_size: int

    @classmethod
    def build(
        cls,
        requests: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        retained: int,
        replaced: int,
        ragged: bool,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int = 16,
        tail_tokens: int = 8,
        seed: int = 0,
    ) -> CompressedCache:
        """Deal `retained` blocks of every request to its heads.

        Evenly, or if `ragged` by exponentially distributed shares (coefficient of variation 1).
        """
        torch.manual_seed(seed)
        pairs = num_layers * num_heads
        num_blocks = 1 + requests * (retained + 1)
        ids = (torch.randperm(num_blocks - 1) + 1).view(requests, retained + 1).int()
        table = torch.zeros(requests, replaced + 1, dtype=torch.int32)
        table[:, :retained], table[:, replaced] = ids[:, :retained], ids[:, retained]
        shares = torch.ones(requests, pairs)
        if ragged:
            shares.exponential_()
        counts = apportion(shares, retained * pairs, floor=min(1, retained), cap=replaced)
        per_block = torch.zeros(num_blocks, 2, dtype=torch.int32)
        per_block[ids[:, 0].long(), 0], per_block[ids[:, 0].long(), 1] = retained, replaced
        offsets = torch.zeros(num_blocks, pairs + 1, dtype=torch.int32)
        for request in range(requests):
            offsets[int(ids[request, 0])] = page_offsets(counts[request])
        pages = torch.empty(
            num_blocks * pairs, block_size, 2 * head_size, dtype=dtype, device=device
        ).normal_()
        keys, values = pages.split(head_size, dim=2)
        tokens = replaced * block_size + tail_tokens
        return cls(
            keys,
            values,
            table.to(device),
            torch.full((requests,), tokens, dtype=torch.int32, device=device),
            per_block[:, 0].contiguous().to(device),
            per_block[:, 1].contiguous().to(device),
            offsets.to(device),
            num_layers,
            num_heads,
            block_size,
        )

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """Return the first arguments of the functions in `vllm_tgvkv.kernels.page_tables`."""
        return (
            self.block_table,
            self.seq_lens,
            self.retained,
            self.replaced,
            self.offsets,
            self.block_size,
        )

    def new_lengths(self) -> Tensor:
        """Return an unwritten tensor for the lengths, int32 [L, R, H]."""
        shape = (self.num_layers, len(self.seq_lens), self.num_heads)
        return torch.zeros(shape, dtype=torch.int32, device=self.keys.device)

    def lengths(self) -> Tensor:
        """Return the tokens of every virtual sequence, int32 [L, R, H]."""
        lengths = self.new_lengths()
        write_lengths(*self.state, lengths)
        return lengths

    def new_tables(self) -> Tensor:
        """Return an unwritten tensor for the page tables, int32 [L, R, H, W]."""
        return torch.zeros(
            *self.new_lengths().shape,
            self.block_table.shape[1],
            dtype=torch.int32,
            device=self.keys.device,
        )

    def tables(self) -> Tensor:
        """Return the page tables of all layers, int32 [L, R, H, W]."""
        tables = self.new_tables()
        write_page_tables(*self.state, 0, tables)
        return tables

    def token_bytes(self) -> int:
        """Return the bytes of a key and its value in one head."""
        return 2 * self.keys.shape[2] * self.keys.element_size()
