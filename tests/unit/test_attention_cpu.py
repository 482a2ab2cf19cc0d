# SPDX-License-Identifier: Apache-2.0
"""State that the CPU backend keeps from step to step, against state made from scratch."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_tgvkv.attention.cpu import PageTables
from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.cache.regions import Regions

BLOCK_SIZE = 4
SHAPE = CacheShape(num_layers=2, num_heads=2, group_size=1, head_size=8, block_size=BLOCK_SIZE)
ROW_BLOCKS = 24


@pytest.mark.parametrize("seed", range(20))
def test_page_tables_follow_rows_that_grow_and_go_back(seed: int) -> None:
    """Rejected drafts leave a row with blocks that it grows into in a later step."""
    dice = random.Random(seed)
    num_rows = 4
    ids = torch.randperm(num_rows * ROW_BLOCKS, generator=torch.Generator().manual_seed(0)) + 1
    rows = ids.int().view(num_rows, ROW_BLOCKS)
    regions = Regions(len(ids) + 1, SHAPE, torch.device("cpu"))
    held, lengths = [1] * num_rows, [1, 9, 6, 11]
    for row, counts in ((0, [1, 0, 2, 5]), (2, [3, 3, 1, 1])):
        rows[row, 2:6] = 0
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        regions.add(f"r{row}", int(rows[row, 0]), 2, 6, offsets)
        held[row], lengths[row] = 6, 6 * BLOCK_SIZE
    page_tables = PageTables(regions)

    tables = torch.empty(0)
    order, steps, kept = list(range(num_rows)), 0, 0
    while max(lengths) + 4 <= ROW_BLOCKS * BLOCK_SIZE:
        steps += 1
        drafts = [dice.randint(0, 3) for _ in range(num_rows)]
        seen = [length + 1 + n for length, n in zip(lengths, drafts, strict=True)]
        held = [max(have, -(-n // BLOCK_SIZE)) for have, n in zip(held, seen, strict=True)]
        table = torch.randint(1, len(ids), rows.shape, dtype=torch.int32)  # what others left
        for row, have in enumerate(held):
            table[row, :have] = rows[row, :have]
        if not dice.randrange(4):
            regions.version += 1
        if not dice.randrange(4):
            dice.shuffle(order)
        table, seq_lens = table[order], torch.tensor(seen, dtype=torch.int32)[order]
        ends = torch.empty(SHAPE.num_layers, num_rows, SHAPE.num_heads, dtype=torch.int32)
        regions.write_lengths(table, seq_lens, ends)
        before, tables = tables, page_tables.update(table, seq_lens, ends)
        kept += tables is before
        new = torch.empty_like(tables)
        regions.write_page_tables(table, seq_lens, 0, new)
        is_read = torch.arange(new.shape[-1]) * BLOCK_SIZE < ends.unsqueeze(-1)
        assert torch.equal(tables[is_read], new[is_read]), f"step {steps}"
        lengths = [
            length + 1 + dice.choice((0, 0, n)) for length, n in zip(lengths, drafts, strict=True)
        ]
    assert kept > steps / 3
