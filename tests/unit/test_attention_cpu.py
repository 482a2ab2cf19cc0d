# SPDX-License-Identifier: Apache-2.0
"""Ragged rows of the CPU backend against float64, and its state against state from scratch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.inputs import random_sinks
from tests.unit.test_page_tables import NUM_BLOCKS, Row, make_batch
from vllm_tgvkv.attention.cpu import EvictingCPUImpl, EvictingCPUMetadataBuilder, PageTables
from vllm_tgvkv.cache.pages import CacheShape, page_pool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.kernels.decode import DecodePlan, decode

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


RAGGED = [
    Row(70),
    Row(127, 2, 6, (6, 0, 1, 2, 3, 0)),  # pages, pair by pair
    Row(64, 1, 3, (0, 3, 0, 0, 1, 2)),
    Row(5),
]


def make_backend(
    shape: CacheShape, regions: Regions, pool: Any, dtype: torch.dtype, sinks: list[Any]
) -> tuple[Any, list[Any]]:
    """Return a metadata builder and the attention of all layers, with the fields they need."""
    builder: Any = EvictingCPUMetadataBuilder.__new__(EvictingCPUMetadataBuilder)
    summaries = SimpleNamespace(are_used=False)
    builder.__dict__.update(
        _observer=SimpleNamespace(regions=regions, pool=pool, summaries=summaries),
        _has_sinks=any(x is not None for x in sinks),
        _tables=PageTables(regions),
        _starts=torch.arange(99, dtype=torch.int32),
        _last=None,
        reorder_batch_threshold=1,
        block_size=shape.block_size,
        head_dim=shape.head_size,
        dtype=dtype,
        isa="vec" if shape.block_size % 32 == 0 else "vec16",
        kv_cache_dtype="auto",
    )
    impls = []
    for layer in range(shape.num_layers):
        impl: Any = EvictingCPUImpl.__new__(EvictingCPUImpl)
        heads = {"num_kv_heads": shape.num_heads, "num_queries_per_kv": shape.group_size}
        of_layer = {"scale": 0.2, "head_size": shape.head_size, "sinks": sinks[layer]}
        impl.__dict__.update(heads, **of_layer, kv_cache_dtype="auto")
        impl.bind(layer, pool)
        impls.append(impl)
    return builder, impls


@pytest.mark.parametrize(
    ("lengths", "advances"),
    [([1, 1, 1, 1], True), ([1, 3, 2], False)],
    ids=["decodes", "drafts"],
)
@pytest.mark.parametrize(
    ("group", "head_size", "block_size", "dtype", "sinks_in"),
    [
        (8, 64, 16, torch.bfloat16, (True, True)),
        (3, 32, 32, torch.float32, (False, True)),
        (1, 80, 16, torch.float32, (True, True)),
        (16, 64, 16, torch.float32, (True, False)),
        (2, 32, 16, torch.float32, (False, False)),
    ],
)
def test_ragged_rows_equal_the_reference(
    lengths: list[int],
    advances: bool,
    group: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    sinks_in: tuple[bool, bool],
) -> None:
    """With learned sinks in all layers, in some or in none; with one token a row and several."""
    current_platform.import_kernels()
    rows = [
        Row(row.seq_len * block_size // 16, row.retained, row.replaced, row.counts)
        for row in RAGGED[: len(lengths)]
    ]
    batch = make_batch(2, 3, block_size, rows)
    shape = CacheShape(2, 3, group, head_size, block_size)
    regions = Regions(NUM_BLOCKS, shape, torch.device("cpu"))
    table, seq_lens, *_, offsets = batch.pooled
    for number, row in enumerate(rows):
        first = int(table[number, 0])
        if row.retained:
            regions.add(f"r{number}", first, row.retained, row.replaced, offsets[first])
    raw = torch.randn(NUM_BLOCKS, 2, 3, block_size, 2 * head_size).to(dtype)
    pool = page_pool([raw[:, 0], raw[:, 1]], group, slots_first=False)
    sinks = [random_sinks(3 * group).to(dtype) if has else None for has in sinks_in]
    builder, impls = make_backend(shape, regions, pool, dtype, sinks)
    table[:, batch.width :] = 0  # as in vLLM's block tables
    starts = torch.tensor([0, *lengths]).cumsum(0).int()

    def metadata(seq_lens: torch.Tensor) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.clone(),
            num_reqs=len(lengths),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=999,
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
        )

    # A step that only makes rows longer takes much of its metadata from the last one.
    steps = [seq_lens - 1, seq_lens] if advances else [seq_lens]
    for step in steps:
        (ragged,), (rest, _) = builder.split(metadata(step))
        assert rest is None
    assert {len(calls) for calls in ragged.schedules} == {3 if any(sinks_in) else 1}
    query = torch.randn(sum(lengths), 3 * group, head_size).to(dtype)
    of_row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    hidden = starts[of_row + 1] - 1 - torch.arange(len(of_row))
    wanted = torch.empty(2, len(lengths), 3, dtype=torch.int32)
    regions.write_lengths(table, seq_lens, wanted)
    wanted = (wanted[:, of_row] - hidden[:, None]).int()
    assert (wanted > 0).all()
    plan = DecodePlan.allocate(2, len(of_row), 3, group, head_size, 16, 1, "cpu")
    keys, values = pool.keys.double(), pool.values.double()
    scales = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    for layer, impl in enumerate(impls):
        output = torch.full_like(query, float("nan"))
        impl.attend_ragged(ragged, scales, query, output)
        expected = torch.full(query.shape, float("nan"), dtype=torch.float64)
        more = sinks[layer] if sinks[layer] is None else sinks[layer].double()
        given = (table[of_row], wanted, *regions.state, layer, 0.2, plan, expected, more)
        decode(query.double(), keys, values, *given)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
