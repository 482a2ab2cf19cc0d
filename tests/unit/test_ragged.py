# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a second region go. What cuts decide with it is in `test_later_cuts.py`."""

from __future__ import annotations

import pytest
import torch

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.kernels.select import page_offsets

SHAPE = CacheShape(num_layers=2, num_heads=3, group_size=1, head_size=4, block_size=4)
TOKENS = 90
UNUSED_PAGES = 2


def random_keys() -> RaggedKeys:
    """Return keys of pairs that differ in length, each at some of the positions in any order."""
    pairs, size = SHAPE.num_pairs, SHAPE.block_size
    lengths = torch.randint(size, TOKENS // 2, (pairs,), dtype=torch.int32)
    columns = int(lengths.max())
    positions = torch.full((pairs, columns), TOKENS, dtype=torch.int32)
    of_positions = torch.full((pairs, TOKENS), TOKENS, dtype=torch.int32)
    for pair, length in enumerate(lengths.tolist()):
        order = torch.randperm(TOKENS)[:length]
        positions[pair, :length] = order
        of_positions[pair, order] = torch.arange(length, dtype=torch.int32)
    width = -(-columns // size)
    tables = torch.randperm(pairs * width).view(pairs, width).int()
    in_pages = torch.zeros(pairs * width, size, dtype=torch.int32)
    padded = torch.nn.functional.pad(positions, (0, width * size - columns))
    in_pages[tables.long()] = padded.view(pairs, width, size)
    where = in_pages, torch.tensor([TOKENS], dtype=torch.int32), columns, of_positions
    return RaggedKeys(tables[:, 0], tables, lengths, TOKENS, SHAPE, *where)


@pytest.mark.parametrize("number", range(8))
def test_tokens_keep_their_slots_unless_these_are_cut_off(number: int) -> None:
    """Any tokens are kept, in any number of pages, none included; the last pages are of no pair."""
    keys, size = random_keys(), SHAPE.block_size
    counts = (torch.rand(SHAPE.num_pairs) * (keys.lengths // size + 1)).long()
    offsets = page_offsets(counts)
    kept = []
    for pair, count in enumerate(counts.tolist()):
        own = keys.positions()[pair, : keys.lengths[pair]]
        kept.append(own[torch.randperm(len(own))[: count * size]].sort().values)
    unused = torch.full((UNUSED_PAGES * size,), 7)
    positions = torch.cat([*kept, unused]).view(-1, size).int()
    settled = keys.arranged(positions, offsets, False)
    sources = keys.slots(settled, offsets, 1 << 20)
    assert settled.dtype == positions.dtype
    assert torch.equal(settled[-UNUSED_PAGES:], positions[-UNUSED_PAGES:])
    for pair, (first, count) in enumerate(zip(offsets.tolist(), counts.tolist(), strict=False)):
        found = settled[first : first + count].flatten().long()
        assert torch.equal(found.sort().values, kept[pair])
        own = keys.positions()[pair, : count * size]
        stays = torch.isin(own, kept[pair])
        assert torch.equal(found[stays], own[stays])
        # The source of each is the slot in which the pair has the token.
        slots = torch.arange(keys.num_columns)
        slots = keys.tables[pair, slots // size].long() * size + slots % size
        column = (keys.positions()[pair] == found[:, None]).int().argmax(dim=1)
        assert torch.equal(sources[first : first + count].flatten(), slots[column])
