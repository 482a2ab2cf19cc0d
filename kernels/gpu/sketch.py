# SPDX-License-Identifier: Apache-2.0
"""Products of queries and sketched keys, of all pairs in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_CODES_PER_PROGRAM = 4096
"""Of each plane of bits: 32 a thread."""


_ROWS = 16
"""Queries of a program, the least that tensor cores multiply."""


# A variant for each size of a prompt would be compiled while requests wait.
@triton.jit(do_not_specialize=["num_queries", "width", "out_pair_stride", "out_row_stride"])
def _sketch_logits_kernel(
    codes,
    steps,
    means,
    scales,
    queries,
    out,
    num_queries,
    width,
    pair_stride,
    out_pair_stride,
    out_row_stride,
    BITS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Logits of the tokens in TILE bytes of each channel, for ROWS queries of one pair.

    Codes are expanded in registers, and the planes of a byte share one read.
    """
    width = tl.multiple_of(width, 2 * BITS)  # of 16 tokens
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, dim = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)
    asked, real, exists = row < num_queries, dim < HEAD_SIZE, column < width
    queries += pair * num_queries * HEAD_SIZE
    query = tl.load(
        queries + row[:, None] * HEAD_SIZE + dim[None, :],
        mask=asked[:, None] & real[None, :],
        other=0.0,
    )
    mean = tl.load(means + pair * HEAD_SIZE + dim, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(scales + pair * HEAD_SIZE + dim, mask=real, other=0.0).to(tl.float32)
    shift = tl.sum(query * mean[None, :], axis=1)
    scaled = query * scale[None, :] * 0.5
    # Twice a code's distance from the middle is exact in bfloat16, and 16 bits of a query are more
    # than a sketch is worth.
    high = scaled.to(tl.bfloat16)
    low = (scaled - high.to(tl.float32)).to(tl.bfloat16)
    packed = tl.load(
        codes + pair * pair_stride + dim[:, None] * width + column[None, :],
        mask=real[:, None] & exists[None, :],
        other=0,
    )
    steps += pair * width * (8 // BITS)
    out += pair * out_pair_stride + row[:, None] * out_row_stride
    for plane in tl.static_range(8 // BITS):
        code = ((packed >> (BITS * plane)) & ((1 << BITS) - 1)).to(tl.float32)
        doubled = (2 * code - ((1 << BITS) - 1)).to(tl.bfloat16)
        products = tl.dot(high, doubled, tl.dot(low, doubled))
        token = plane * width + column
        step = tl.load(steps + token, mask=exists, other=0.0).to(tl.float32)
        logits = products * step[None, :] + shift[:, None]
        tl.store(out + token[None, :], logits, mask=asked[:, None] & exists[None, :])


def sketch_logits(
    codes: Tensor,
    steps: Tensor,
    means: Tensor,
    scales: Tensor,
    bits: int,
    queries: Tensor,
    out: Tensor,
) -> None:
    """Write logits; see `kernels.sketch.sketch_logits`.

    Nothing is allocated, and the launch depends on shapes and strides.

    Args:
        codes: uint8 `[M, D, C * bits / 8]`; only the pairs' stride may be any.
        steps, means, scales: float16 `[M, C]`, `[M, D]`, `[M, D]`, contiguous.
        queries: float32 `[M, Q, D]`, contiguous.
        out: float32 `[M, Q, P]`, whose last stride is 1.
    """
    num_pairs, num_queries, head_size = queries.shape
    width = codes.shape[2]
    dims = triton.next_power_of_2(max(16, head_size))
    tile = max(16, _CODES_PER_PROGRAM // dims)
    grid = num_pairs, triton.cdiv(width, tile), triton.cdiv(num_queries, _ROWS)
    _sketch_logits_kernel[grid](
        codes,
        steps,
        means,
        scales,
        queries,
        out,
        num_queries,
        width,
        codes.stride(0),
        out.stride(0),
        out.stride(1),
        BITS=bits,
        HEAD_SIZE=head_size,
        DIMS=dims,
        ROWS=_ROWS,
        TILE=tile,
        num_warps=4,
    )


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    for bits, size in ((4, 128), (2, 64), (1, 80), (8, 256)):
        codes = torch.empty(2, size, 1024 * bits // 8, dtype=torch.uint8)
        steps, means, scales = (torch.empty(2, n, dtype=torch.float16) for n in (1024, size, size))
        asked, out = torch.empty(2, 12, size), torch.empty(2, 12, 1040)
        call = partial(sketch_logits, codes, steps, means, scales, bits, asked, out)
        # The largest heads take all registers for their queries, which are read once.
        limit = 32 if size == 256 else 0
        yield from launches(__name__, f"{bits} bits D{size}", call, limit)
