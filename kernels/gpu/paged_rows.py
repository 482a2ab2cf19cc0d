# SPDX-License-Identifier: Apache-2.0
"""Rows of queries over paged keys, as the kernels of the attention statistics take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import CAPABILITIES
from vllm_tgvkv.kernels.statistics import ObservedRows


@triton.jit
def without_fp8(values):
    """The same values, those in fp8 as bfloat16, which holds them.

    Products of fp8 itself are summed with fewer bits than float32's on Hopper.
    """
    if values.dtype.is_fp8():
        values = values.to(tl.bfloat16)
    return values


@triton.jit
def load_vectors(pointer, offsets, valid, dim_stride, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors of HEAD_SIZE values, padded with zeros; all zero where not valid."""
    dims = tl.arange(0, WIDTH)
    mask = valid[:, None]
    if HEAD_SIZE < WIDTH:
        mask = mask & (dims < HEAD_SIZE)[None, :]
    places = pointer + offsets[:, None] + dims[None, :] * dim_stride
    return without_fp8(tl.load(places, mask=mask, other=0.0))


@triton.jit
def load_keys(
    pool,
    table,
    columns,
    limit,
    page_stride,
    slot_stride,
    dim_stride,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys in these columns, zero from `limit` on, where entries of the table may be garbage."""
    pages = tl.load(table + columns // PAGE_SIZE, mask=columns < limit, other=0)
    # int64, since pools are large.
    slots = pages.to(tl.int64) * page_stride + (columns % PAGE_SIZE) * slot_stride
    return load_vectors(pool, slots, columns < limit, dim_stride, HEAD_SIZE, WIDTH)


@triton.jit
def products(rows, columns):
    """float32 `rows @ columns^T`. Products of 16-bit values are exact, others are IEEE's."""
    if rows.dtype != columns.dtype:
        rows = rows.to(tl.float32)
        columns = columns.to(tl.float32)
    return tl.dot(rows, tl.trans(columns), input_precision="ieee")


@dataclass(frozen=True)
class PagedRows:
    """O rows in L layers of H KV heads, Q = L * H; see `ObservedRows`."""

    queries: Tensor
    """`[L, O, H, G, D]`."""
    pool: Tensor
    """`[num_pages, N, D]`."""
    tables: Tensor
    """`[Q, W]`; the columns' stride is 1."""
    num_visible: Tensor
    """int32 `[Q or 1, O]`; the rows' stride is 1."""
    scales: Tensor
    """float32 `[L or 1]`."""
    num_keys: int
    """P."""
    sinks: Tensor | None = None
    """float32 `[L, H, G]`, contiguous; None for none."""

    @staticmethod
    def of(rows: ObservedRows) -> PagedRows:
        """Return all of the observed rows."""
        queries, tables, scale = rows.queries, rows.tables, rows.scale
        if not isinstance(scale, Tensor):
            scale = torch.full((1,), scale, dtype=torch.float32, device=queries.device)
        return PagedRows(
            queries.float() if queries.dtype == torch.float64 else queries,
            rows.pool,
            tables if tables.stride(1) == 1 else tables.contiguous(),
            rows.num_visible.contiguous(),
            scale,
            rows.num_keys,
            rows.sinks,
        )

    def from_row(self, first: int) -> PagedRows:
        """Return the rows from `first` on."""
        queries, num_visible = self.queries[:, first:], self.num_visible[:, first:]
        return replace(self, queries=queries, num_visible=num_visible)

    @property
    def number(self) -> int:
        """O."""
        return self.queries.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.queries.shape[2]

    @property
    def num_pairs(self) -> int:
        """Q."""
        return self.queries.shape[0] * self.queries.shape[2]

    @property
    def group_size(self) -> int:
        """G."""
        return self.queries.shape[3]

    @property
    def head_size(self) -> int:
        """D."""
        return self.queries.shape[4]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides that all kernels take, in the order of their arguments."""
        return (
            *self.queries.stride(),
            *self.pool.stride(),
            self.tables.stride(0),
            stride_of_sets(self.num_visible),
            stride_of_sets(self.scales),
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a new tensor on the device of the rows."""
        return torch.empty(shape, dtype=dtype, device=self.queries.device)


@dataclass(frozen=True)
class Tiles:
    """Sizes of the matrix products, for one model on one type of GPU."""

    width: int
    """D, padded to a power of two."""
    padded_group: int
    """G, likewise."""
    softmax_rows: int
    softmax_keys: int
    softmax_stages: int
    columns_vectors: int
    """Rows times padded group."""
    columns_keys: int
    columns_warps: int
    columns_stages: int

    @staticmethod
    def of(head_size: int, group_size: int, element_size: int, shared_bytes: int) -> Tiles:
        """Return sizes that fit the shared memory of a program."""
        width = max(16, triton.next_power_of_2(head_size))
        padded_group = triton.next_power_of_2(group_size)
        side = 128 if width * element_size <= 256 else 64
        if shared_bytes < 160 * 1024:
            side //= 2
        return Tiles(
            width=width,
            padded_group=padded_group,
            softmax_rows=side,
            softmax_keys=min(side, 64),
            softmax_stages=3 if side == 128 else 2,
            # The mean over a small group is nearly as large as its input.
            columns_vectors=side if padded_group > 2 else min(side, 64),
            columns_keys=side,
            columns_warps=8 if width * element_size > 256 or side == 128 else 4,
            columns_stages=2 if width * element_size <= 512 else 1,
        )

    @staticmethod
    def for_rows(rows: PagedRows) -> Tiles:
        """Return the sizes for rows on their device."""
        # Those in fp8 are multiplied as bfloat16.
        element_size = max(2, rows.queries.element_size(), rows.pool.element_size())
        shared = shared_bytes(rows.queries.device)
        return Tiles.of(rows.head_size, rows.group_size, element_size, shared)

    def rows_of_columns(self, has_row_statistics: bool) -> int:
        """Return the rows of a columns tile: fewer if a probability needs more registers."""
        vectors = min(self.columns_vectors, 64) if has_row_statistics else self.columns_vectors
        return vectors // self.padded_group


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 1 << 20
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def stride_of_sets(tensor: Tensor) -> int:
    """Return the stride of the first dimension: 0 if it has size 1, for all sets to share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def bytes_of(subset: Tensor | None) -> Tensor | None:
    """Return a bool tensor as bytes, which kernels load."""
    return None if subset is None else subset.contiguous().view(torch.uint8)


# -- variants -----------------------------------------------------------------------------

# A few load addresses, used once per tile, which some compilers spill for some GPUs.
SPILL_LIMIT = 128


def served_by_vllm(dtype: torch.dtype, head_size: int) -> tuple[int, ...]:
    """Return the capabilities of GPUs on which vLLM's FlashAttention reads such a cache."""
    if head_size > 256:
        return (90,)
    return CAPABILITIES if dtype.itemsize > 1 else (90, 100)


def example(dtype: torch.dtype, head_size: int, group: int, heads: int) -> PagedRows:
    """Return rows without values, as launches of a model of this shape have them."""
    empty = partial(torch.empty, device="meta")
    return PagedRows(
        empty(36, 64, heads, group, head_size, dtype=dtype),
        empty(99, 16, 2 * head_size, dtype=dtype)[..., :head_size],
        empty(36 * heads, 64, dtype=torch.int32),
        empty(36 * heads, 64, dtype=torch.int32),
        empty(36),
        1024,
    )
