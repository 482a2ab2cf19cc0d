# SPDX-License-Identifier: Apache-2.0
"""Tables and lengths of the decode step equal the oracle's, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import kernels as reference
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.select import page_offsets

NUM_BLOCKS, POISON = 200, -7


@dataclass
class Batch:
    """Random decode requests: compressed, uncompressed, and rows without tokens."""

    layers: int
    heads: int
    block_size: int
    gathered: tuple[torch.Tensor, ...]
    """Block table, lengths and region state by row, as in the oracle."""
    pooled: tuple[torch.Tensor, ...]
    """The same with region state by block."""
    extra_width: int

    @property
    def width(self) -> int:
        """The least documented width, the blocks of the longest sequence, plus `extra_width`."""
        return math.ceil(int(self.gathered[1].max()) / self.block_size) + self.extra_width

    def expected(self, width: int, padding: int) -> tuple[list[Any], list[Any]]:
        """Return tables, padded after the last page, and lengths."""
        pages, lengths = reference.page_tables(
            *self.gathered, self.block_size, self.layers, self.heads
        )
        return [
            [[row + [padding] * (width - len(row)) for row in heads] for heads in layer]
            for layer in pages
        ], lengths


@dataclass
class Row:
    """A row of a batch: tokens, retained and replaced prompt blocks, pages of each pair."""

    seq_len: int
    retained: int = 0
    replaced: int = 0
    counts: Sequence[int] = ()


def garbage(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


def make_batch(
    layers: int, heads: int, block_size: int, rows: Sequence[Row], extra_width: int = 0
) -> Batch:
    """Return a batch whose state is garbage wherever it must not be read."""
    retained, replaced = garbage(2, NUM_BLOCKS)
    retained[0] = replaced[0] = 0
    offsets = garbage(NUM_BLOCKS, layers * heads + 1)
    blocks = [math.ceil(row.seq_len / block_size) for row in rows]
    table = garbage(len(rows), max(1, *blocks) + 2)
    ids = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    firsts = []
    for b, row in enumerate(rows):
        own, ids = ids[: blocks[b]], ids[blocks[b] :]
        # The current token is never part of the region, so there is a tail.
        entries = [*own[: row.retained], *[0] * (row.replaced - row.retained)]
        entries += own[row.retained :][: blocks[b] - row.replaced]
        firsts.append(entries[0] if entries else 0)
        if not entries:
            continue
        table[b, : len(entries)] = torch.tensor(entries)
        retained[entries[0]], replaced[entries[0]] = row.retained, row.replaced
        if row.retained:
            offsets[entries[0]] = page_offsets(torch.tensor(row.counts))
    lens = torch.tensor([row.seq_len for row in rows], dtype=torch.int32)
    gathered = table, lens, retained[firsts], replaced[firsts], offsets[firsts]
    pooled = table, lens, retained, replaced, offsets
    return Batch(layers, heads, block_size, gathered, pooled, extra_width)


@st.composite
def rows_of(draw: st.DrawFn, pairs: int, block_size: int) -> list[Row]:
    """Draw rows, half of which end at a page's border; some without tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        blocks, over = draw(st.integers(0, 7)), draw(st.sampled_from([0, 0, 1, block_size - 1]))
        seq_len = blocks * block_size + over
        replaced = draw(st.integers(0, max(0, (seq_len - 1) // block_size)))
        retained = draw(st.integers(0, replaced))
        shares = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=pairs, max_size=pairs))
        counts = reference.apportion(shares, retained * pairs, 0, replaced)
        rows.append(Row(seq_len, retained, replaced if retained else 0, counts))
    return rows


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([1, 4, 16]))
    rows = draw(rows_of(layers * heads, block_size))
    if not any(row.seq_len for row in rows):
        rows.append(Row(3))
    return make_batch(layers, heads, block_size, rows, draw(st.integers(0, 3)))


def check_tables(batch: Batch, first: int, end: int, device: str, padding: int) -> None:
    """Compare the tables of some layers and all lengths; what is not written is `padding`."""
    expected_tables, expected_lengths = batch.expected(batch.width, padding)
    shape = (end - first, len(batch.gathered[1]), batch.heads, batch.width)
    tables = torch.full(shape, POISON, dtype=torch.int32, device=device)
    lengths = torch.full((batch.layers, *shape[1:3]), POISON, dtype=torch.int32, device=device)
    state = [tensor.to(device) for tensor in batch.pooled]
    write_page_tables(*state, batch.block_size, first, tables)
    write_lengths(*state, batch.block_size, lengths)
    assert lengths.tolist() == expected_lengths
    assert tables.tolist() == expected_tables[first:end]


@given(batches(), st.integers(0, 2), st.integers(0, 3))
def test_tables_and_lengths_equal_the_reference(batch: Batch, first: int, number: int) -> None:
    first = min(first, batch.layers - 1)
    check_tables(batch, first, min(first + number, batch.layers), "cpu", padding=0)


def test_wrong_arguments_are_named() -> None:
    table, one = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    offsets = torch.zeros(1, 5, dtype=torch.int32)
    tables = torch.zeros(2, 1, 2, 2, dtype=torch.int32)
    state = (table, one, one, one, offsets, 4)
    for first_layer in (-1, 1):
        with pytest.raises(ValueError, match="first_layer"):
            write_page_tables(*state, first_layer, tables)
    for words, call in (
        ("tables", lambda: write_page_tables(*state, 0, torch.zeros(1, 1, 3, 2).int())),
        ("lengths", lambda: write_lengths(*state, tables[:1, :, :, 0])),
        ("lengths", lambda: write_lengths(*state, tables)),
        ("seq_lens", lambda: write_lengths(table, one.long(), *state[2:], tables[..., 0])),
        ("offsets", lambda: write_lengths(*state[:4], offsets.expand(2, 5), 4, tables[..., 0])),
    ):
        with pytest.raises(ValueError, match=words):
            call()
