# SPDX-License-Identifier: Apache-2.0
"""Sketches, exchanges and tiers against slow references."""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oracle import recall as reference
from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.kernels.copy import as_integers
from vllm_tgvkv.kernels.exchange import Exchange, exchange
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.sketch import BITS, read_sketches, sketch_bytes, sketch_keys
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.recall import tier as tier_module
from vllm_tgvkv.recall.sketches import SketchPages
from vllm_tgvkv.recall.tier import FileTier, MemoryTier, PinnedTier, Tier, TierError
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


def make_pool(
    pages_first: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PagePool:
    num_pages, width = NUM_BLOCKS * SHAPE.num_pairs, SHAPE.head_size
    raw = torch.randn(num_pages, 2 * SHAPE.block_size * width).to(device, dtype)
    if pages_first:
        keys, values = raw.view(num_pages, SHAPE.block_size, 2 * width).split(width, dim=2)
    else:
        keys, values = raw.view(num_pages, 2, -1).unbind(1)
        keys = keys.unflatten(1, (width, SHAPE.block_size)).transpose(1, 2)
        values = values.unflatten(1, (SHAPE.block_size, width))
    return PagePool(raw, keys, values, SHAPE)


class LateCuda:
    """Streams of a GPU, pretended: copies on another one end as late as events allow.

    The current stream works at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        # For the tier alone: vLLM has stand-ins of its own on a CPU.
        monkeypatch.setattr(tier_module, "torch", SimpleNamespace(**{**vars(torch), "cuda": self}))
        monkeypatch.setattr(tier_module, "get_accelerator_view_from_cpu_tensor", lambda x: x)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
        self._waiting: deque[Callable[[], Any]] = deque()
        self._done = self._submitted = 0
        self._refuses = refuses

    def Stream(self, device: torch.device) -> LateCuda:
        return self

    def current_stream(self) -> LateCuda:
        return self

    def wait_stream(self, other: LateCuda) -> None:
        pass

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(after=0)
        event.record = lambda: setattr(event, "after", self._submitted)
        return event

    def wait_event(self, event: SimpleNamespace) -> None:
        while self._done < event.after:
            self._waiting.popleft()()
            self._done += 1

    @contextmanager
    def stream(self, stream: LateCuda) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            copy = torch.Tensor.copy_

            def later(out: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
                assert non_blocking
                self._waiting.append(partial(copy, out, source))
                self._submitted += 1

            patch.setattr(torch.Tensor, "copy_", later)
            yield

    def cudart(self) -> SimpleNamespace:
        result = SimpleNamespace(value=2 * self._refuses)
        return SimpleNamespace(
            cudaHostRegister=lambda *_: result, cudaHostUnregister=lambda _: None
        )


TIERS: dict[str, Callable[[PagePool, int, Path], Tier]] = {
    "memory": lambda pool, blocks, _: MemoryTier(pool, blocks),
    "file": lambda pool, blocks, folder: FileTier(pool, blocks, str(folder)),
    "pinned": lambda pool, blocks, _: PinnedTier(pool, blocks),
}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tier_gives_back_what_it_got(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "pinned":
        LateCuda(monkeypatch)
    # Some parts at a time, or one for each block: more than there are buffers.
    monkeypatch.setattr(tier_module, "_WORKSPACE_BYTES", random.choice((1, 20_000, 16 << 20)))
    pool = make_pool(False, dtype)
    assert_gives_back(TIERS[kind](pool, 12, tmp_path), pool)


def assert_gives_back(tier: Tier, pool: PagePool) -> None:
    """Write a prompt of 12 blocks to a tier, lose it, and bring half of a region's tokens back."""
    size, pairs, device = SHAPE.block_size, SHAPE.num_pairs, pool.raw.device
    before = [as_integers(each).clone() for each in (pool.keys, pool.values)]
    blocks, old = torch.randperm(12).int().numpy(), torch.randperm(NUM_BLOCKS)
    on_device = old.to(device)
    tier.write(on_device[:5], blocks[:5])
    tier.write(on_device[5:12], blocks[5:])
    pool.raw.fill_(float("nan"))
    stored = torch.full((NUM_BLOCKS * pairs, size), -1, dtype=torch.int32, device=device)
    region = old[12:18]
    counts = torch.full((SHAPE.num_layers, SHAPE.num_heads), 6)
    tokens = torch.cat([torch.randperm(12 * size)[: 6 * size] for _ in range(pairs)])
    comes = torch.rand(len(tokens)) < 0.5
    after = tokens.view(-1, size).int()
    held = torch.where(comes.view_as(after), (after + 1) % (12 * size), after)
    parts = held, after, page_offsets(counts), region, torch.from_numpy(blocks).long()
    tier.exchange(Exchange(*(part.to(device) for part in parts)), stored)()
    row = torch.arange(6 * pairs)[:, None].expand(-1, size)
    slots = torch.arange(size).expand(6 * pairs, -1)
    pages = region[row // pairs] * pairs + row % pairs
    sources = old[after.long() // size] * pairs + row // 6
    moved = comes.view_as(after)
    to, of = (pages[moved], slots[moved]), (sources[moved], after.long()[moved] % size)
    for found, wanted in zip((pool.keys, pool.values), before, strict=True):
        assert torch.equal(as_integers(found)[to], wanted[of])
    assert torch.equal(stored[to].cpu(), after[moved])
    # Nothing but these slots was written.
    is_written = torch.zeros(len(pool.raw), size, dtype=torch.bool)
    is_written[to] = True
    assert pool.keys.float().cpu()[~is_written].isnan().all()
    assert (stored.cpu()[~is_written] == -1).all()


def test_no_token_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LateCuda(monkeypatch)
    for make in TIERS.values():
        pool = make_pool(True)
        tier, before = make(pool, 4, tmp_path), pool.raw.clone()
        tier.write(torch.arange(3), np.arange(3))
        tier.exchange(*no_exchange())()
        assert torch.equal(pool.raw, before)


def no_exchange() -> tuple[Exchange, torch.Tensor]:
    """Return an exchange of a region of one block, all of whose tokens stay, and positions."""
    positions = torch.zeros(SHAPE.num_pairs, SHAPE.block_size, dtype=torch.int32)
    offsets = torch.arange(SHAPE.num_pairs + 1, dtype=torch.int32)
    stored = torch.zeros(NUM_BLOCKS * SHAPE.num_pairs, SHAPE.block_size, dtype=torch.int32)
    return Exchange(positions, positions, offsets, torch.tensor([7]), torch.arange(3)), stored


def test_tier_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(True)
    with pytest.raises(UnsupportedByEvictionError, match=r"recall.gib asks for .* give less"):
        MemoryTier(pool, 1 << 40)
    LateCuda(monkeypatch, refuses=True)
    with pytest.raises(UnsupportedByEvictionError, match=r"of pinned memory .* give less"):
        PinnedTier(pool, 4)
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
    tier.write(torch.arange(3), np.arange(3))
    moves, stored = no_exchange()
    with pytest.raises(TierError, match="Input/output error"):
        tier.exchange(replace(moves, after=moves.after + 1), stored)()
    assert not stored.any()


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
