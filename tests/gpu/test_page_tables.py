# SPDX-License-Identifier: Apache-2.0
"""Page tables and lengths on Triton equal the oracle, entry by entry."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu import pytorch_on_cpu
from tests.unit.test_page_tables import POISON, Batch, batches, check_tables
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables


@settings(max_examples=40)
@given(batches(), st.integers(0, 2), st.integers(0, 3))
def test_tables_and_lengths_equal_the_reference(
    device: str, batch: Batch, first: int, number: int
) -> None:
    """Entries after the last page are not written."""
    first = min(first, batch.layers - 1)
    check_tables(batch, first, min(first + number, batch.layers), device, padding=POISON)


@pytest.mark.parametrize("block_size", [16, 48])
def test_long_sequences_take_several_tiles(device: str, block_size: int) -> None:
    """One head has nearly all pages of the region; buffers are wider than their rows."""
    layers, heads, width, num_blocks = 2, 3, 700, 2000
    pairs = layers * heads
    retained, replaced = torch.zeros(2, num_blocks, dtype=torch.int32)
    offsets = torch.randint(-9, 9, (num_blocks, pairs + 1), dtype=torch.int32)
    table = torch.randint(-9, 9, (3, width + 5), dtype=torch.int32)
    ids = torch.randperm(num_blocks - 1).int() + 1
    k, start, blocks = 80, 500, 640
    table[0, :blocks], ids = ids[:blocks], ids[blocks:]  # not compressed
    table[1, :k], ids = ids[:k], ids[k:]
    table[1, start:blocks] = ids[: blocks - start]
    first = table[1, 0]
    retained[first], replaced[first] = k, start
    counts = torch.tensor([0, 1, 0, k * pairs - 1, 0, 0], dtype=torch.int32)
    offsets[first] = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    seq_lens = torch.tensor([blocks * block_size, blocks * block_size - 1, 0], dtype=torch.int32)
    state = (table[:, :width], seq_lens, retained, replaced, offsets)
    expected = torch.full((layers, 3, heads, width), POISON, dtype=torch.int32)
    lengths = torch.full((layers, 3, heads), POISON, dtype=torch.int32)
    with pytorch_on_cpu():
        write_page_tables(*state, block_size, 0, expected)
        write_lengths(*state, block_size, lengths)
    needed = (lengths + block_size - 1) // block_size
    assert int(needed[1, 1, 0]) == k * pairs - 1 + blocks - start  # 5 tiles, 4 of them region
    assert not needed[:, 2].any()

    on_device = (table.to(device)[:, :width], *(tensor.to(device) for tensor in state[1:]))
    got = torch.full((layers, 4, heads, width + 3), POISON, dtype=torch.int32, device=device)
    got_lengths = torch.full((layers, 4, heads + 1), POISON, dtype=torch.int32, device=device)
    write_page_tables(*on_device, block_size, 0, got[:, :3, :, :width])
    write_lengths(*on_device, block_size, got_lengths[:, :3, :heads])
    after = torch.arange(width) >= needed.unsqueeze(-1)
    assert torch.equal(got[:, :3, :, :width].cpu(), expected.masked_fill(after, POISON))
    assert torch.equal(got_lengths[:, :3, :heads].cpu(), lengths)
    assert (got[:, 3] == POISON).all()
    assert (got[..., width:] == POISON).all()
    assert (got_lengths[:, 3] == POISON).all()
    assert (got_lengths[..., heads:] == POISON).all()


def test_nothing_is_written_after_a_narrow_table(device: str) -> None:
    """Too narrow a table loses entries, but they are never written to the next row."""
    table = torch.arange(1, 9, dtype=torch.int32, device=device).view(1, 8)
    zeros = torch.zeros(9, dtype=torch.int32, device=device)
    offsets = torch.zeros(9, 3, dtype=torch.int32, device=device)
    seq_lens = torch.tensor([8 * 16], dtype=torch.int32, device=device)
    tables = torch.full((1, 1, 2, 8), POISON, dtype=torch.int32, device=device)
    write_page_tables(table, seq_lens, zeros, zeros, offsets, 16, 0, tables[..., :5])
    assert (tables[..., 5:] == POISON).all()
    assert tables[0, 0, 1, :5].tolist() == [b * 2 + 1 for b in range(1, 6)]


@pytest.mark.gpu
def test_a_graph_follows_its_inputs() -> None:
    """A captured launch, replayed after the buffers changed, writes the same as a new launch."""
    layers, heads, block_size, num_blocks = 2, 4, 16, 40
    retained, replaced, seq_lens = (
        torch.zeros(size, dtype=torch.int32, device="cuda") for size in (num_blocks, num_blocks, 2)
    )
    offsets = torch.zeros(num_blocks, layers * heads + 1, dtype=torch.int32, device="cuda")
    table = torch.arange(1, 2 * 12 + 1, dtype=torch.int32, device="cuda").view(2, 12)
    tables = torch.zeros(layers, 2, heads, 12, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(layers, 2, heads, dtype=torch.int32, device="cuda")
    state = (table, seq_lens, retained, replaced, offsets, block_size)

    def launch() -> None:
        write_page_tables(*state, 0, tables)
        write_lengths(*state, lengths)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    seq_lens.copy_(torch.tensor([12 * block_size - 3, 100], dtype=torch.int32))
    retained[1], replaced[1] = 2, 5
    offsets[1] = torch.tensor([0, 3, 3, 4, 6, 9, 12, 14, 16], dtype=torch.int32)
    tables.fill_(POISON)
    graph.replay()
    got = tables.clone(), lengths.clone()
    tables.fill_(POISON)
    launch()
    assert math.prod(lengths.shape) == int((lengths > 0).sum())
    assert torch.equal(got[0], tables)
    assert torch.equal(got[1], lengths)
