# SPDX-License-Identifier: Apache-2.0
"""Page arithmetic: tables and lengths of the decode step, and the copy into fresh pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import kernels as reference
from tests.inputs import product
from vllm_tgvkv.kernels.copy import copy_kept, slots_of_positions
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.select import page_offsets

GARBAGE = st.integers(-(2**31), 2**31 - 1)


NUM_BLOCKS = 200


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


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pairs, block_size = layers * heads, draw(st.sampled_from([1, 4, 16]))
    ids = iter(draw(st.permutations(range(1, NUM_BLOCKS))))
    garbage = draw(st.lists(GARBAGE, min_size=3, max_size=3))
    retained, replaced, offsets = (
        torch.full((NUM_BLOCKS, *shape), value, dtype=torch.int32)
        for shape, value in zip(((), (), (pairs + 1,)), garbage, strict=True)
    )
    retained[0] = replaced[0] = 0
    rows, seq_lens, firsts = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        seq_len = draw(st.integers(1, 8 * block_size))
        num_blocks = math.ceil(seq_len / block_size)
        # The current token is never part of the region.
        start = draw(st.integers(0, (seq_len - 1) // block_size))
        k = draw(st.integers(0, start))
        if k == 0:
            start = 0
        fresh, tail = [next(ids) for _ in range(k)], [next(ids) for _ in range(num_blocks - start)]
        row = fresh + [0] * (start - k) + tail
        retained[row[0]], replaced[row[0]] = k, start
        if k:
            counts = reference.apportion(
                draw(st.lists(st.floats(0, 1), min_size=pairs, max_size=pairs)), k * pairs, 0, start
            )
            offsets[row[0]] = page_offsets(torch.tensor(counts))
        firsts.append(row[0])
        rows.append(row)
        seq_lens.append(seq_len)
    for _ in range(draw(st.integers(0, 2))):  # rows without tokens or blocks
        place = draw(st.integers(0, len(rows)))
        for values, value in ((rows, []), (seq_lens, 0), (firsts, 0)):
            values.insert(place, value)
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    stale = draw(GARBAGE)
    table, lens = (
        torch.tensor(values, dtype=torch.int32)
        for values in ([row + [stale] * (width - len(row)) for row in rows], seq_lens)
    )
    return Batch(
        layers,
        heads,
        block_size,
        (table, lens, retained[firsts], replaced[firsts], offsets[firsts]),
        (table, lens, retained, replaced, offsets),
        draw(st.integers(0, 3)),
    )


@given(batches(), st.data())
def test_tables_and_lengths_equal_the_reference(batch: Batch, data: st.DataObject) -> None:
    width, requests = batch.width, len(batch.gathered[1])
    expected_tables, expected_lengths = batch.expected(width, padding=0)
    first = data.draw(st.integers(0, batch.layers - 1))
    end = data.draw(st.integers(first, batch.layers))
    tables = torch.full((end - first, requests, batch.heads, width), -7, dtype=torch.int32)
    lengths = torch.full((batch.layers, requests, batch.heads), -7, dtype=torch.int32)
    write_page_tables(*batch.pooled, batch.block_size, first, tables)
    write_lengths(*batch.pooled, batch.block_size, lengths)
    assert lengths.tolist() == expected_lengths
    assert tables.tolist() == expected_tables[first:end]


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


@dataclass
class Pool:
    """A pool with numbers in the prompt's blocks and NaN everywhere else."""

    keys: torch.Tensor
    values: torch.Tensor
    old_blocks: torch.Tensor
    new_blocks: torch.Tensor


def make_pool(dtype: torch.dtype, pairs: int, block_size: int, num_old: int, num_new: int) -> Pool:
    head_size, blocks = 8, num_old + num_new + 2
    # All ones is NaN in every floating format, float8 included.
    storage = torch.full((blocks * pairs, 2, block_size * head_size), -1, dtype=torch.int8)
    storage = storage.repeat(1, 1, dtype.itemsize).view(dtype)
    keys = storage[:, 0].unflatten(1, (head_size, block_size)).transpose(1, 2)
    values = storage[:, 1].unflatten(1, (block_size, head_size))
    ids = torch.randperm(blocks)
    old, new = ids[:num_old], ids[num_old : num_old + num_new]
    for block in old.tolist():
        for page in range(block * pairs, (block + 1) * pairs):
            keys[page] = torch.randn(block_size, head_size).to(dtype)
            values[page] = torch.randn(block_size, head_size).to(dtype)
    return Pool(keys, values, old.int(), new.int())


@pytest.mark.parametrize(
    ("dtype", "num_moved", "workspace_bytes"),
    product(
        [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn],
        [0, 1, 30, 10**6],
        [0, 300, 3000, 1 << 20],
    ),
)
def test_copy_writes_the_kept_tokens_and_nothing_else(
    dtype: torch.dtype, num_moved: int, workspace_bytes: int
) -> None:
    """Some tokens keep their slots, none or all; the last pages have no owner and stay NaN."""
    layers, heads, block_size, num_old, k = 2, 3, 8, 6, 5
    pairs = layers * heads
    pool = make_pool(dtype, pairs, block_size, num_old, k)
    owned = k * pairs - 4
    counts = torch.full((pairs,), owned // pairs)
    counts[: owned % pairs] += 1
    offsets = page_offsets(counts.view(layers, heads))
    pages = (pool.old_blocks.long()[:, None] * pairs + torch.arange(pairs)).flatten()
    slots = torch.arange(block_size)
    sources = pages[torch.randint(0, len(pages), (k * pairs, 1))] * block_size + slots
    tokens = (pages[:, None] * block_size + slots).flatten()
    moved = torch.randperm(owned * block_size)[:num_moved]
    sources.view(-1)[moved] = tokens[torch.randint(0, len(tokens), moved.shape)]
    if num_moved:
        sources[0] = sources[0].roll(1)  # no token keeps its slot
    sources[owned:] = torch.randint(-(2**62), 2**62, (k * pairs - owned, block_size))
    expected = [part.float() for part in (pool.keys, pool.values)]
    target = (offsets, pool.new_blocks, layers, heads)
    reference.copy_kept(*expected, sources, *target)
    copy_kept(pool.keys, pool.values, sources, *target, workspace_bytes)
    for got, want in zip((pool.keys, pool.values), expected, strict=True):
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)
        new_pages = (pool.new_blocks.long()[:, None] * pairs + torch.arange(pairs)).flatten()
        assert not got.float()[new_pages[:owned]].isnan().any()
        assert got.float()[new_pages[owned:]].isnan().all()


@pytest.mark.parametrize("num_pairs", [1, 2, 17, 65])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_of_an_uncompressed_prompt(num_pairs: int, dtype: torch.dtype) -> None:
    """Pairs without pages, and pages without a pair, whose slots have no meaning."""
    block_size, num_old, num_pages = 3, 4, 2 * num_pairs
    dealt = torch.multinomial(torch.rand(num_pairs) ** 4, num_pages - 1, replacement=True)
    offsets = page_offsets(dealt.bincount(minlength=num_pairs))
    blocks = torch.randperm(1 << 20)[:num_old].to(dtype)
    size = (num_pages, block_size)
    positions = torch.randint(0, num_old * block_size, size, dtype=torch.int32)
    slots = slots_of_positions(positions, offsets, blocks, num_pairs)
    assert slots.dtype == torch.int64
    expected = reference.slots_of_positions(positions, offsets, blocks, num_pairs)
    assert len(expected) == num_pages - 1
    assert slots[:-1].tolist() == expected


def test_copy_names_wrong_arguments() -> None:
    pool = make_pool(torch.float32, 2, 4, 3, 1)
    sources, offsets = torch.zeros(2, 4).long(), torch.zeros(3).int()
    new = pool.new_blocks
    for unfit in (sources[:1], sources.int()):
        with pytest.raises(ValueError, match="sources"):
            copy_kept(pool.keys, pool.values, unfit, offsets, new, 1, 2)
    with pytest.raises(ValueError, match="offsets"):
        copy_kept(pool.keys, pool.values, sources, offsets[:2], new, 1, 2)
    with pytest.raises(ValueError, match="value_pages"):
        copy_kept(pool.keys, pool.values[1:], sources, offsets, new, 1, 2)
