# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted tokens against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import kernels as reference
from vllm_tgvkv.kernels.copy import copy_kept, slots_of_positions
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.select import page_offsets, select_tokens

LAYERS, HEADS, BLOCK_SIZE, HEAD_SIZE = 2, 3, 4, 5
PAIRS = LAYERS * HEADS


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
    num_old, num_new = 6, 1
    dealt = torch.tensor(counts)
    num_new = -(-int(dealt.sum()) // PAIRS)
    scores = torch.randn(LAYERS, HEADS, num_old * BLOCK_SIZE)
    tiers = torch.zeros(num_old * BLOCK_SIZE, dtype=torch.int32)
    positions = select_tokens(scores, tiers, dealt, num_new * PAIRS, BLOCK_SIZE)
    offsets = page_offsets(dealt)
    blocks = torch.randperm(num_old + num_new + 2)
    old, new = blocks[:num_old], blocks[num_old : num_old + num_new]
    keys, values = torch.randn(2, len(blocks) * PAIRS, BLOCK_SIZE, HEAD_SIZE).to(dtype)
    # Blocks outside the prompt are NaN, including fresh blocks before the copy.
    for pool in (keys, values):
        pool.view(len(blocks), -1)[blocks[num_old:]] = float("nan")
    expected = (keys.clone(), values.clone())
    region = (positions, offsets, old, new, LAYERS, HEADS)
    copied = (slots_of_positions(*region[:3], PAIRS), offsets, *region[3:])
    copy_kept(keys, values, *copied)
    merge_evicted(keys, values, *region)
    reference.copy_kept(*expected, *copied)
    reference.merge_evicted(*expected, *region)
    num_pages = int(offsets[-1])
    page = torch.arange(num_pages)
    written = new[page // PAIRS] * PAIRS + page % PAIRS
    # Sums of a few fp8 numbers are exact in float32, so both means are rounded equally.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(dtype, 0)
    for pool, whole in zip((keys.float(), values.float()), expected, strict=True):
        whole = whole.float()
        assert not pool[written].isnan().any()
        torch.testing.assert_close(pool[written], whole[written], rtol=tolerance, atol=tolerance)
        untouched = blocks[[*range(num_old), *range(num_old + num_new, len(blocks))]]
        by_block = pool.view(len(blocks), -1)[untouched]
        assert torch.equal(
            by_block.nan_to_num(7), whole.view(len(blocks), -1)[untouched].nan_to_num(7)
        )


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
    num_old, num_new = 30, 4
    dealt = torch.randint(0, 8, (LAYERS, HEADS))
    dealt[0, 0] = max(0, num_new * PAIRS - int(dealt.sum()))
    dealt = dealt.clamp(max=num_old)
    num_new = -(-int(dealt.sum()) // PAIRS)
    scores = torch.randn(LAYERS, HEADS, num_old * BLOCK_SIZE)
    tiers = torch.zeros(num_old * BLOCK_SIZE, dtype=torch.int32)
    positions = select_tokens(scores, tiers, dealt, num_new * PAIRS, BLOCK_SIZE)
    blocks = torch.randperm(num_old + num_new)
    region = (positions, page_offsets(dealt), blocks[:num_old], blocks[num_old:], LAYERS, HEADS)
    keys, values = torch.randn(2, len(blocks) * PAIRS, BLOCK_SIZE, HEAD_SIZE)
    copied = (slots_of_positions(*region[:3], PAIRS), region[1], *region[3:])
    expected = (keys.double(), values.double())
    reference.copy_kept(*expected, *copied)
    reference.merge_evicted(*expected, *region)
    copy_kept(keys, values, *copied)
    results = []
    for workspace_bytes in (1 << 20, 2 * num_old * BLOCK_SIZE * HEAD_SIZE * 4, 0):
        merged = (keys.clone(), values.clone())
        with NoUnorderedSums():
            merge_evicted(*merged, *region, workspace_bytes=workspace_bytes)
        results.append(merged)
        for pool, whole in zip(merged, expected, strict=True):
            page = torch.arange(int(dealt.sum()))
            written = region[3][page // PAIRS] * PAIRS + page % PAIRS
            torch.testing.assert_close(pool[written].double(), whole[written], rtol=1e-5, atol=1e-6)
    for merged in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(merged, results[0], strict=True))
