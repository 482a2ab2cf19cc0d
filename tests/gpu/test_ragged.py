# SPDX-License-Identifier: Apache-2.0
"""Columns of compressed rows and slots of kept tokens, in PyTorch and on Triton."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from vllm_tgvkv.kernels.ragged import (
    column_positions,
    kept_slots,
    position_columns,
    whole_tables,
)
from vllm_tgvkv.kernels.select import page_offsets

pytest.importorskip("triton", reason="Triton is not installed")


@settings(max_examples=25, deadline=None)
@given(
    num_pairs=st.integers(1, 5),
    block_size=st.sampled_from([3, 16, 40]),
    num_candidates=st.integers(1, 4),
    num_tail=st.integers(1, 70),
    num_spare=st.integers(0, 600),
    seed=st.integers(0, 2**31),
)
def test_columns_and_positions(
    kernels: str,
    num_pairs: int,
    block_size: int,
    num_candidates: int,
    num_tail: int,
    num_spare: int,
    seed: int,
) -> None:
    """Of regions in any order of tokens, with pairs that kept none; columns may be too many."""
    generator = torch.Generator().manual_seed(seed)
    first_tail, num_pages = num_candidates * block_size, 200
    num_tokens = first_tail + num_tail
    num_kept = torch.randint(0, num_candidates + 1, (num_pairs,), generator=generator) * block_size
    lengths = (num_kept + num_tail).int()
    num_columns = int(lengths.max()) + num_spare
    width = -(-num_columns // block_size)
    tables = torch.randint(1, num_pages, (num_pairs, width), generator=generator).int()
    ids = torch.randperm(num_pages, generator=generator)[: num_pairs * num_candidates].int()
    in_pages = torch.full((num_pages, block_size), -7, dtype=torch.int32)
    positions = torch.full((num_pairs, num_columns), num_tokens)
    columns = torch.full((num_pairs, num_tokens), num_tokens)
    for pair, kept in enumerate(num_kept.tolist()):
        of_region = torch.randperm(first_tail, generator=generator)[:kept]
        pages = ids[pair * num_candidates :][: kept // block_size]
        tables[pair, : len(pages)] = pages
        in_pages[pages.long()] = of_region.int().view(-1, block_size)
        own = torch.cat((of_region, torch.arange(first_tail, num_tokens)))
        positions[pair, : len(own)] = own
        columns[pair, own] = torch.arange(len(own))
    tail = torch.tensor([first_tail], dtype=torch.int32)
    tensors = [each.to(kernels) for each in (tables, lengths, in_pages, tail)]
    sizes = num_tokens, num_columns
    found = [find(*tensors, *sizes) for find in (column_positions, position_columns)]
    for one, expected in zip(found, (positions, columns), strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one.cpu().long(), expected)
    # Every token of every pair is found where the columns say.
    kept = torch.stack(
        [torch.randperm(num_tail, generator=generator)[:1] for _ in range(num_pairs)]
    )
    kept = (kept + first_tail).expand(-1, block_size).int()
    counts = torch.ones(num_pairs, 1, dtype=torch.int64)
    region = kept.to(kernels), page_offsets(counts).to(kernels), tensors[0]
    slots = kept_slots(*region, found[1], num_pages * block_size).cpu().long()
    column = columns.gather(1, kept.long())
    pages = tables.gather(1, column // block_size).long()
    assert torch.equal(slots, pages * block_size + column % block_size)


@pytest.mark.parametrize("num_pairs", [1, 2, 17, 65])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_an_uncompressed_prompt(kernels: str, num_pairs: int, dtype: torch.dtype) -> None:
    """Pairs without pages, and pages without a pair, whose slots exist all the same."""
    block_size, num_old, num_pages = 3, 4, 2 * num_pairs
    dealt = torch.multinomial(torch.rand(num_pairs) ** 4, num_pages - 1, replacement=True)
    offsets = page_offsets(dealt.bincount(minlength=num_pairs))
    blocks = torch.randperm(1 << 20)[:num_old].int()
    size = (num_pages, block_size)
    positions = torch.randint(0, num_old * block_size, size, dtype=torch.int32)
    num_slots = (1 << 20) * block_size * num_pairs if dtype == torch.int32 else 1 << 40
    region = positions.to(kernels), offsets.to(kernels)
    slots = kept_slots(*region, whole_tables(blocks, num_pairs).to(kernels), None, num_slots)
    assert slots.dtype == dtype
    expected = reference.slots_of_positions(positions, offsets, blocks, num_pairs)
    assert len(expected) == num_pages - 1
    assert slots[:-1].tolist() == expected
    assert 0 <= int(slots[-1].min()) <= int(slots[-1].max()) < num_slots
