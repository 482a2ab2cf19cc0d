# SPDX-License-Identifier: Apache-2.0
"""Sketches, exchanges and tiers against slow references."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import recall as reference
from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.kernels.copy import as_integers
from vllm_tgvkv.kernels.exchange import exchange
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.sketch import BITS, read_sketches, sketch_bytes, sketch_keys
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.recall.sketches import SketchPages
from vllm_tgvkv.recall.tier import FileTier, MemoryTier, Tier, TierError
from vllm_tgvkv.scheduler.recalls import Recalls
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

SHAPE = CacheShape(num_layers=2, num_heads=3, group_size=2, head_size=24, block_size=16)
NUM_BLOCKS = 40


def keys_like_real_ones(pairs: int, tokens: int, size: int = 24) -> torch.Tensor:
    """Return keys whose channels differ in mean and range; one of them is constant."""
    keys = torch.randn(pairs, tokens, size) * torch.rand(size) * 4 + torch.randn(size) * 3
    keys[..., 5] = 1.5
    return keys


def assert_sketched(found: torch.Tensor, keys: torch.Tensor, bits: int) -> None:
    """Assert that keys equal the oracle's sketch.

    A mean or step that rounds to another float16 moves a few numbers to the next code.
    """
    wanted = torch.stack([reference.sketched(head, bits) for head in keys])
    steps = 4 * reference.STEPS[bits] * keys.std(dim=1, keepdim=True).double() + 1e-3
    assert ((found - wanted).abs() <= steps).all()
    differs = (found - wanted).abs() > 1e-3 * steps
    assert differs.double().mean() < 0.05


def test_sketch_is_the_oracles() -> None:
    for bits in BITS:
        for tokens in (16, 80, 96):
            keys = keys_like_real_ones(4, tokens)
            sketches = sketch_keys(keys, bits)
            assert sketches.shape == (4, sketch_bytes(tokens, 24, bits))
            more = torch.randint(255, (4, 9), dtype=torch.uint8)
            found = read_sketches(torch.cat((sketches, more), dim=1), bits, tokens, 24)
            assert_sketched(found, keys, bits)


def test_more_bits_lose_less() -> None:
    """As Max computed for normally distributed numbers: 36, 12, 1.2 and 0.01 % of the variance."""
    keys = torch.randn(3, 512, 64) * 3 + 2
    for bits, most in zip(BITS, (0.39, 0.14, 0.015, 2e-4), strict=True):
        lost = read_sketches(sketch_keys(keys, bits), bits, 512, 64) - keys
        assert float(lost.square().mean()) / 9 < most


def test_sketch_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="bits must be one of 1, 2, 4, 8, got 3"):
        sketch_keys(torch.zeros(1, 32, 24), 3)
    with pytest.raises(ValueError, match=r"C, a multiple of 16, D., got .* .1, 33, 24."):
        sketch_keys(torch.zeros(1, 33, 24), 4)
    with pytest.raises(ValueError, match=r"sketches must be uint8 .M, B >= 352., got .* .1, 351."):
        read_sketches(torch.zeros(1, 351, dtype=torch.uint8), 2, 32, 24)


@pytest.mark.parametrize("pages_first", [True, False], ids=["[N, D]", "[D, N]"])
def test_sketch_in_pages(pages_first: bool) -> None:
    pool = make_pool(pages_first)
    sketches = SketchPages(pool, 2)
    num_tokens = 6 * SHAPE.block_size
    blocks = torch.randperm(NUM_BLOCKS)
    old, own, other = blocks[:6], blocks[6:8], blocks[8:10]
    tables = torch.arange(SHAPE.num_pairs)[:, None] + old * SHAPE.num_pairs
    before = pool.raw.clone()
    sketches.write(tables, num_tokens, own)
    sketches.move(own, other)
    untouched = blocks[~torch.isin(blocks, torch.cat((own, other)))]
    by_block = (NUM_BLOCKS, -1)
    assert not pool.raw.view(by_block)[own].any()
    assert torch.equal(pool.raw.view(by_block)[untouched], before.view(by_block)[untouched])
    for layer in range(SHAPE.num_layers):
        pairs = slice(layer * SHAPE.num_heads, (layer + 1) * SHAPE.num_heads)
        each = torch.eye(SHAPE.head_size).expand(SHAPE.num_heads, -1, -1).contiguous()
        found = torch.empty(SHAPE.num_heads, SHAPE.head_size, num_tokens)
        sketches.logits(other, pairs.start, num_tokens, each, found, Scratch())
        keys = pool.keys[tables[pairs]].flatten(1, 2)
        assert_sketched(found.transpose(1, 2), keys, 2)


def test_exchange_moves_as_little_as_it_can() -> None:
    size, num_candidates = 4, 40
    for _ in range(20):
        counts = torch.randint(0, num_candidates // size + 1, (2, 3))
        offsets = page_offsets(counts)
        sets = [
            [torch.randperm(num_candidates)[: n * size] for n in counts.flatten().tolist()]
            for _ in range(2)
        ]
        current, wanted = (torch.cat(each).view(-1, size).int() for each in sets)
        found = exchange(current, wanted, offsets, num_candidates)
        for pair, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            tokens, before = (x[first:end].flatten().tolist() for x in (found, current))
            asked = set(sets[1][pair].tolist())
            assert sorted(tokens) == sorted(asked)
            stays = [(a, b) for a, b in zip(before, tokens, strict=True) if a in asked]
            assert all(a == b for a, b in stays)


def make_pool(pages_first: bool, dtype: torch.dtype = torch.float32) -> PagePool:
    num_pages, width = NUM_BLOCKS * SHAPE.num_pairs, SHAPE.head_size
    raw = torch.randn(num_pages, 2 * SHAPE.block_size * width).to(dtype)
    if pages_first:
        keys, values = raw.view(num_pages, SHAPE.block_size, 2 * width).split(width, dim=2)
    else:
        keys, values = raw.view(num_pages, 2, -1).unbind(1)
        keys = keys.unflatten(1, (width, SHAPE.block_size)).transpose(1, 2)
        values = values.unflatten(1, (SHAPE.block_size, width))
    return PagePool(raw, keys, values, SHAPE)


TIERS: dict[str, Callable[[PagePool, int, Path], Tier]] = {
    "memory": lambda pool, blocks, _: MemoryTier(pool, blocks),
    "file": lambda pool, blocks, folder: FileTier(pool, blocks, str(folder)),
}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tier_gives_back_what_it_got(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pool = make_pool(False, dtype)
    before = [as_integers(each).clone() for each in (pool.keys, pool.values)]
    tier = TIERS[kind](pool, 12, tmp_path)
    blocks = torch.randperm(12)
    old, size = torch.randperm(NUM_BLOCKS), SHAPE.block_size
    tier.write(old[:5], blocks[:5])
    tier.write(old[5:12], blocks[5:])
    pool.raw.copy_(torch.full_like(pool.raw, torch.nan, dtype=torch.float32).to(dtype))
    pairs = torch.randint(SHAPE.num_pairs, (300,))
    positions = torch.randint(12 * size, (300,))
    tokens = tier.fetch(tier.slots(blocks, pairs, positions))()
    pages = old[positions // size] * SHAPE.num_pairs + pairs
    tier.put(tokens, pages * size + positions % size)
    slots = positions % size
    for found, wanted in zip((pool.keys, pool.values), before, strict=True):
        assert torch.equal(as_integers(found)[pages, slots], wanted[pages, slots])
    # Nothing but these slots was written.
    is_written = torch.zeros(len(pool.raw), size, dtype=torch.bool)
    is_written[pages, slots] = True
    assert pool.keys.float()[~is_written].isnan().all()


def test_tier_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(True)
    with pytest.raises(UnsupportedByEvictionError, match=r"recall.gib asks for .* give less"):
        MemoryTier(pool, 1 << 40)
    for folder in (tmp_path / "missing", Path("/proc")):
        with pytest.raises(UnsupportedByEvictionError, match=f"recall.folder {folder}: .*another"):
            FileTier(pool, 4, str(folder))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnsupportedByEvictionError, match="No space left on device"):
        FileTier(pool, 4, str(tmp_path))


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_disk_that_fails(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(make_pool(True), 4, str(tmp_path))

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    tier.write(torch.arange(3), torch.arange(3))
    with pytest.raises(TierError, match="Input/output error"):
        tier.fetch(torch.arange(10))()


def test_who_recalled_longest_ago_loses_the_tier() -> None:
    recalls = Recalls(10)
    for name, number in (("a", 4), ("b", 3), ("c", 3)):
        blocks, losing = recalls.begin(name, number)
        assert blocks is not None
        assert (len(blocks), losing) == (number, [])
    assert recalls.begin("d", 1) == (None, ["d"])  # the others are written in this step
    assert recalls.drain() == []
    recalls.recalled("a")
    blocks, losing = recalls.begin("d", 5)
    assert blocks is not None
    assert (len(set(blocks.tolist())), losing) == (5, ["b", "c"])
    assert recalls.drain() == ["b", "c"]
    recalls.check({"a", "d"})
    assert (recalls.has("a"), recalls.has("b"), recalls.num_held) == (True, False, 9)
    assert recalls.begin("e", 11) == (None, ["e"])
    recalls.end("a")
    recalls.end("a")
    assert (recalls.drain(), recalls.num_held) == (["a"], 5)
    with pytest.raises(AssertionError, match="whole request"):
        recalls.check(set())
