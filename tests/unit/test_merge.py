# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted tokens against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import kernels as reference
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.ragged import kept_slots, whole_tables
from vllm_tgvkv.kernels.select import page_offsets, select_tokens

LAYERS, HEADS, BLOCK_SIZE, HEAD_SIZE = 2, 3, 4, 5
PAIRS = LAYERS * HEADS


@dataclass
class Case:
    """Random pages of a prompt, in a pool whose other blocks are NaN."""

    dealt: torch.Tensor
    num_old: int
    dtype: torch.dtype = torch.float32
    spare: int = 2
    """Blocks that are neither read nor written."""

    def __post_init__(self) -> None:
        num_new = -(-int(self.dealt.sum()) // PAIRS)
        scores = torch.randn(LAYERS, HEADS, self.num_old * BLOCK_SIZE)
        tiers = torch.zeros(self.num_old * BLOCK_SIZE, dtype=torch.int32)
        positions = select_tokens(scores, tiers, self.dealt, num_new * PAIRS, BLOCK_SIZE)
        offsets = page_offsets(self.dealt)
        self.blocks = torch.randperm(self.num_old + num_new + self.spare)
        old, self.new = self.blocks[: self.num_old], self.blocks[self.num_old :][:num_new]
        shape = (2, len(self.blocks) * PAIRS, BLOCK_SIZE, HEAD_SIZE)
        self.pools = torch.randn(shape).to(self.dtype).unbind()
        for pool in self.pools:  # fresh blocks before the copy, too
            pool.view(len(self.blocks), -1)[self.blocks[self.num_old :]] = float("nan")
        self.region = (positions, offsets, old, self.new, LAYERS, HEADS)
        sources = kept_slots(positions, offsets, whole_tables(old.int(), PAIRS), None, 1 << 20)
        self.copied = (sources, offsets, self.new, LAYERS, HEADS)
        page = torch.arange(int(offsets[-1]))
        self.written = self.new[page // PAIRS] * PAIRS + page % PAIRS

    def expected(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the pools as the oracle leaves them."""
        whole = tuple(pool.to(dtype, copy=True) for pool in self.pools)
        reference.copy_kept(*whole, *self.copied)
        reference.merge_evicted(*whole, *self.region)
        return whole


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 1, 1], [1, 1, 1]],
        [[0, 2, 1], [3, 0, 0]],  # heads without a page, first and last
        [[0, 0, 6], [0, 0, 0]],  # one head with the whole prompt
        [[1, 0, 1], [0, 2, 0]],  # fewer pages than the region has
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_kept_tokens_become_means_of_the_nearest(
    counts: list[list[int]], dtype: torch.dtype
) -> None:
    case = Case(torch.tensor(counts), 6, dtype)
    expected = case.expected(dtype)
    copy_kept(*case.pools, *case.copied)
    merge_evicted(*case.pools, *case.region)
    # Sums of a few fp8 numbers are exact in float32, so both means are rounded equally.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(dtype, 0)
    untouched = case.blocks[~torch.isin(case.blocks, case.new)]
    for pool, whole in zip(case.pools, expected, strict=True):
        found, wanted = pool.float(), whole.float()
        assert not found[case.written].isnan().any()
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(found[case.written], wanted[case.written], **close)
        by_block = [x.view(len(case.blocks), -1)[untouched].nan_to_num(7) for x in (found, wanted)]
        assert torch.equal(*by_block)


class NoUnorderedSums(TorchDispatchMode):
    """Raises on every operation that adds floats in an order that CUDA does not fix."""

    FORBIDDEN = frozenset(
        {
            *("index_add", "index_add_", "scatter_add", "scatter_add_", "index_reduce_"),
            *("scatter_reduce", "scatter_reduce_", "put_", "bincount", "cumsum", "histc"),
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args):
            assert name not in self.FORBIDDEN, f"{name} adds in any order on CUDA"
            if name in ("index_put", "index_put_", "_index_put_impl_"):
                accumulates = args[3] if len(args) > 3 else (kwargs or {}).get("accumulate")
                assert not accumulates, f"{name} adds in any order on CUDA"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_no_order_of_execution_changes_a_bit(deterministic: None) -> None:
    """No sum is shared by two programs; slices of any size give the same bits."""
    num_old = 30
    dealt = torch.randint(0, 8, (LAYERS, HEADS))
    dealt[0, 0] = max(0, 4 * PAIRS - int(dealt.sum()))
    case = Case(dealt.clamp(max=num_old), num_old, spare=0)
    expected = case.expected(torch.float64)
    copy_kept(*case.pools, *case.copied)
    results = []
    for workspace_bytes in (1 << 20, 2 * num_old * BLOCK_SIZE * HEAD_SIZE * 4, 0):
        merged = [pool.clone() for pool in case.pools]
        with NoUnorderedSums():
            merge_evicted(*merged, *case.region, workspace_bytes=workspace_bytes)
        results.append(merged)
        for pool, whole in zip(merged, expected, strict=True):
            found = pool[case.written].double()
            torch.testing.assert_close(found, whole[case.written], rtol=1e-5, atol=1e-6)
    for merged in results[1:]:
        # Pages that nobody was dealt keep their NaN.
        pairs = zip(merged, results[0], strict=True)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)
