# SPDX-License-Identifier: Apache-2.0
"""Copy of kept tokens, in PyTorch and on Triton: every bit, every page format, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.ragged import kept_slots, whole_tables
from vllm_tgvkv.kernels.select import page_offsets

pytest.importorskip("triton", reason="Triton is not installed")
triton_copy = pytest.importorskip("vllm_tgvkv.kernels.gpu.copy")

FORMATS = ("joint", "cpu", "apart", "swapped")


@dataclass
class Case:
    """A pool on the device, and the tokens to copy."""

    keys: torch.Tensor
    values: torch.Tensor
    sources: torch.Tensor
    """Any slots outside the new blocks; numbers without meaning on pages without an owner."""
    counts: torch.Tensor
    new_blocks: torch.Tensor

    def copy(self, workspace_bytes: int) -> None:
        tensors = (self.sources, page_offsets(self.counts), self.new_blocks)
        on_device = [tensor.to(self.keys.device) for tensor in tensors]
        copy_kept(self.keys, self.values, *on_device, *self.counts.shape, workspace_bytes)


def pools_of(
    page_format: str,
    num_pages: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[num_pages, N, D]`` of random bytes."""
    size = num_pages * block_size * head_size * dtype.itemsize
    raw = torch.randint(0, 256, (2 * size,), dtype=torch.uint8).to(device).view(dtype)
    if page_format in ("joint", "swapped"):
        keys, values = raw.view(num_pages, block_size, 2, head_size).unbind(2)
        return (keys, values) if page_format == "joint" else (values, keys)
    if page_format == "apart":
        keys, values = raw.view(2, num_pages, block_size, head_size).unbind(0)
        return keys.clone(), values
    keys, values = raw.view(num_pages, 2, -1).unbind(1)
    keys = keys.unflatten(1, (head_size, block_size)).transpose(1, 2)
    return keys, values.unflatten(1, (block_size, head_size))


def make_case(
    page_format: str,
    counts: torch.Tensor,
    num_retained: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: str,
    num_moved: int = 10**6,
) -> Case:
    """Return random sources; all but `num_moved` keep their slots in whole pages."""
    pairs = counts.numel()
    num_blocks = num_retained + 6
    blocks = torch.randperm(num_blocks)
    slots = torch.arange(num_blocks * pairs * block_size).view(num_blocks, pairs, block_size)
    readable = slots[blocks[num_retained:]].flatten(0, 1)
    size = (num_retained * pairs, block_size)
    sources = readable[torch.randint(0, len(readable), size[:1])]
    moved = torch.randperm(sources.numel())[:num_moved]
    tokens = readable.flatten()
    sources.view(-1)[moved] = tokens[torch.randint(0, len(tokens), moved.shape)]
    sources[int(counts.sum()) :] = torch.tensor([-1, -(2**63), 2**63 - 1])[
        torch.randint(0, 3, (size[0] - int(counts.sum()), block_size))
    ]
    return Case(
        *pools_of(page_format, num_blocks * pairs, block_size, head_size, dtype, device),
        sources,
        counts,
        blocks[:num_retained],
    )


def assert_copied(case: Case, workspace_bytes: int = 1 << 20) -> None:
    """Compare all bits of the pool with the oracle, which writes no page without an owner."""
    expected = [pool.cpu().clone().view(_integer(pool)) for pool in (case.keys, case.values)]
    offsets = page_offsets(case.counts)
    reference.copy_kept(*expected, case.sources, offsets, case.new_blocks, *case.counts.shape)
    case.copy(workspace_bytes)
    for pool, want in zip((case.keys, case.values), expected, strict=True):
        assert torch.equal(pool.view(want.dtype).cpu(), want)


def _integer(pool: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[pool.element_size()]


@settings(max_examples=40)
@given(
    page_format=st.sampled_from(FORMATS),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    unowned=st.integers(0, 1),
    block_size=st.sampled_from([1, 3, 4]),
    head_size=st.sampled_from([1, 4, 5, 12]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    num_moved=st.sampled_from([0, 1, 3, 10**6]),
    workspace_bytes=st.sampled_from([0, 300, 1 << 20]),
)
def test_every_format(
    kernels: str,
    page_format: str,
    counts: list[int],
    heads: int,
    unowned: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    num_moved: int,
    workspace_bytes: int,
) -> None:
    """Some tokens keep their slots, none or all; some pages have no owner."""
    dealt = torch.tensor(counts[: max(1, len(counts) // heads) * heads])
    dealt = dealt.view(-1, heads if len(dealt) % heads == 0 else 1)
    retained = -(-int(dealt.sum()) // dealt.numel()) + unowned
    sizes = retained, block_size, head_size, dtype
    assert_copied(make_case(page_format, dealt, *sizes, kernels, num_moved), workspace_bytes)


@pytest.mark.parametrize(
    ("block_size", "head_size", "dtype"),
    [
        (16, 128, torch.bfloat16),
        (48, 80, torch.float16),
        (128, 64, torch.bfloat16),
        (16, 256, torch.float32),
    ],
)
@pytest.mark.parametrize("page_format", ["joint", "cpu"])
def test_real_sizes(
    kernels: str, page_format: str, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    """Pages of one and of several programs; heads without a page."""
    counts = torch.tensor([[0, 3, 0], [1, 0, 1]])
    for num_moved in (9, 10**6):
        case = make_case(page_format, counts, 1, block_size, head_size, dtype, kernels, num_moved)
        assert_copied(case)


def test_whole_slots_are_moved_as_the_widest_integers() -> None:
    def launches(page_format: str, head_size: int) -> list[tuple[list[int], torch.dtype]]:
        pools = pools_of(page_format, 3, 4, head_size, torch.bfloat16)
        words = map(triton_copy.as_words, triton_copy.whole_slots(*pools))
        return [(list(pool.shape), pool.dtype) for pool in words]

    assert launches("joint", 80) == [([3, 4, 40], torch.int64)]
    assert launches("joint", 5) == [([3, 4, 5], torch.int32)]
    assert launches("swapped", 80) == [([3, 4, 20], torch.int64)] * 2
    assert launches("cpu", 80) == [([3, 4, 80], torch.int16), ([3, 4, 20], torch.int64)]


def test_nothing_to_copy(kernels: str) -> None:
    counts = torch.zeros(2, 2, dtype=torch.int64)
    assert_copied(make_case("joint", counts, 0, 4, 8, torch.bfloat16, kernels))


def test_wrong_arguments_are_named() -> None:
    case = make_case("joint", torch.ones(1, 2).long(), 1, 4, 8, torch.float32, "cpu")
    good: dict[str, torch.Tensor] = {
        "key_pages": case.keys,
        "value_pages": case.values,
        "sources": case.sources,
        "offsets": page_offsets(case.counts),
        "new_blocks": case.new_blocks,
    }
    for name, value in (
        ("sources", case.sources[:1]),
        ("sources", case.sources.float()),
        ("offsets", good["offsets"][:2]),
        ("new_blocks", case.new_blocks.float()),
        ("value_pages", case.values[1:]),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            copy_kept(**{**good, name: value}, num_layers=1, num_heads=2)


@pytest.mark.gpu
def test_pools_of_more_than_2_to_the_31_values() -> None:
    counts = torch.tensor([[1, 1], [0, 2]])
    block_size, head_size, num_old = 128, 256, 4
    positions = torch.randint(0, num_old * block_size, (4, block_size), dtype=torch.int32)
    block_values = counts.numel() * block_size * 2 * head_size
    num_blocks = 2**31 // block_values + 10
    pool = torch.zeros(
        num_blocks * 4, block_size, 2, head_size, dtype=torch.bfloat16, device="cuda"
    )
    keys, values = pool.unbind(2)
    old = torch.randperm(num_old) + num_blocks - 9
    new = torch.tensor([num_blocks - 1])
    source = torch.randn(4 * 4, block_size, 2, head_size, dtype=torch.bfloat16)
    for i, block in enumerate(old.tolist()):
        pool[block * 4 : block * 4 + 4] = source[i * 4 : i * 4 + 4].to("cuda")
    offsets = page_offsets(counts)
    on_device = [tensor.to("cuda") for tensor in (positions, offsets, old)]
    tables = whole_tables(on_device[2].int(), counts.numel())
    sources = kept_slots(*on_device[:2], tables, None, len(pool) * block_size)
    assert int(sources.max()) * 2 * head_size > 2**31
    copy_kept(keys, values, sources, on_device[1], new.to("cuda"), *counts.shape)
    small = torch.cat((source, torch.zeros(4, block_size, 2, head_size, dtype=torch.bfloat16)))
    slots = torch.tensor(
        reference.slots_of_positions(positions, offsets, torch.arange(4), counts.numel())
    )
    reference.copy_kept(*small.unbind(2), slots, offsets, torch.tensor([4]), *counts.shape)
    assert torch.equal(pool[-4:].cpu(), small[-4:])
