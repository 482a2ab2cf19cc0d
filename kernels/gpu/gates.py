# SPDX-License-Identifier: Apache-2.0
"""The parts of a gate that torch does not compute in one launch.

Gates of two projections: the first one is a matrix product of torch's, and one launch does all
that follows it. Of three: the second one is as large as its weights, which one program would read
slowly. So several programs compute some columns of it each, and what these give of the outputs. The
program that comes last adds their parts up, in the order of the programs: outputs do not depend on
the order in which they run. Of one: programs take parts of the hidden state, and the launch that
stores the outputs adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

if TYPE_CHECKING:
    from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate

_PART = 512
"""Values of a hidden state that one program reads."""

_COLUMNS = 64
"""Values that a program multiplies at a time, or computes of a second projection."""

_SUMMED_TOKENS = 64


class _Tile(NamedTuple):
    """Tokens of one program."""

    tokens: int
    num_warps: int


_DECODE = _Tile(16, 4)
_PREFILL = _Tile(64, 8)
"""Of three projections: the second one's weights are read by a quarter of the programs. With more
columns than `_COLUMNS` its sums would not fit the registers beside 32 heads."""

_DECODE_TOKENS = 256


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """A value after the activation, float32."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_pytorch_tanh":
        # A half of 1 + tanh(y) is the sigmoid of 2 * y.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x * tl.sigmoid(x)
    return y


@triton.jit
def _log_sigmoid(x):
    """The logarithm of the sigmoid, to the relative accuracy of float32.

    It is min(x, 0) - log(1 + y), and y may be far less than the steps of numbers near 1. With
    s = y / (2 + y), at most 1 / 3, the logarithm is 2 * (s + s^3 / 3 + s^5 / 5 ...).
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 1.0 / 15 + tl.zeros_like(x)
    for n in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * n)
    return tl.minimum(x, 0.0) - 2.0 * s * series


@triton.jit
def _store_outputs(
    found,
    bias,
    token,
    head,
    slots,
    pages,
    num_tokens,
    IS_LOG: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    """Add the bias to the last projection and store the outputs, but not of padding."""
    found += tl.load(bias + head, mask=head < NUM_HEADS, other=0.0)[None, :]
    if IS_LOG:
        found = _log_sigmoid(found)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE
    written = (slot >= 0)[:, None] & (head < NUM_HEADS)[None, :]
    tl.store(pages + place[:, None] + head[None, :] * BLOCK_SIZE, found, mask=written)


@triton.jit
def _summed(
    sums,
    token,
    head,
    num_tokens,
    PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The sum of all parts of the last projection."""
    found = tl.zeros([TOKENS, HEADS], tl.float32)
    place = sums + token.to(tl.int64)[:, None] * (PARTS * NUM_HEADS) + head[None, :]
    exists = (token < num_tokens)[:, None] & (head < NUM_HEADS)[None, :]
    for part in range(PARTS):
        # Other programs wrote them: not to be taken from a cache of this one's.
        found += tl.load(place + part * NUM_HEADS, mask=exists, other=0.0, cache_modifier=".cg")
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def _project_kernel(
    hidden,
    weight,
    sums,
    num_tokens,
    SIZE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    INNER: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The only projection, of PART values of the hidden states of TOKENS tokens."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HEADS)
    part = tl.program_id(1)
    exists, is_head = token < num_tokens, head < NUM_HEADS
    hidden += token.to(tl.int64)[:, None] * ROW_STRIDE
    found = tl.zeros([TOKENS, HEADS], tl.float32)
    for start in range(0, PART, INNER):
        column = part * PART + start + tl.arange(0, INNER)
        real = column < SIZE
        x = tl.load(hidden + column[None, :], mask=exists[:, None] & real[None, :], other=0.0)
        w = tl.load(
            weight + head[None, :] * SIZE + column[:, None],
            mask=is_head[None, :] & real[:, None],
            other=0.0,
        )
        found = tl.dot(x.to(tl.float32), w, found, input_precision="ieee")
    row = (token.to(tl.int64) * PARTS + part)[:, None] * NUM_HEADS
    tl.store(sums + row + head[None, :], found, mask=exists[:, None] & is_head[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    sums,
    bias,
    slots,
    pages,
    num_tokens,
    IS_LOG: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Outputs of a gate of one projection, from its parts."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HEADS)
    found = _summed(sums, token, head, num_tokens, PARTS, NUM_HEADS, TOKENS, HEADS)
    _store_outputs(
        found,
        bias,
        token,
        head,
        slots,
        pages,
        num_tokens,
        IS_LOG,
        NUM_HEADS,
        BLOCK_SIZE,
        BLOCK_STRIDE,
    )


@triton.jit
def _first(projected, bias, column, exists, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """Some columns of the first projection after its bias and activation, float32."""
    real = column < WIDTH
    x = tl.load(projected + column[None, :], mask=exists[:, None] & real[None, :], other=0.0)
    offset = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    return _activated(x.to(tl.float32) + offset[None, :], ACTIVATION)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    projected,
    first_bias,
    middle,
    middle_bias,
    last,
    last_bias,
    sums,
    arrived,
    slots,
    pages,
    num_tokens,
    ACTIVATION: tl.constexpr,
    IS_LOG: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
):
    """All that follows the first projection, for PART of the values that the last one reads."""
    tile, part = tl.program_id(0), tl.program_id(1)
    token, head = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, HEADS)
    exists, is_head = token < num_tokens, head < NUM_HEADS
    projected += token.to(tl.int64)[:, None] * WIDTH
    found = tl.zeros([TOKENS, HEADS], tl.float32)
    for start in range(0, PART, COLUMNS):
        column = part * PART + start + tl.arange(0, COLUMNS)
        real = column < WIDTH
        if middle is None:
            x = _first(projected, first_bias, column, exists, WIDTH, ACTIVATION)
        else:
            x = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for begin in range(0, WIDTH, INNER):
                inner = begin + tl.arange(0, INNER)
                y = _first(projected, first_bias, inner, exists, WIDTH, ACTIVATION)
                w = tl.load(
                    middle + column[None, :] * WIDTH + inner[:, None],
                    mask=real[None, :] & (inner < WIDTH)[:, None],
                    other=0.0,
                )
                x = tl.dot(y.to(middle.dtype.element_ty), w, x, input_precision="ieee")
            offset = tl.load(middle_bias + column, mask=real, other=0.0).to(tl.float32)
            x = _activated(x + offset[None, :], ACTIVATION)
        w = tl.load(
            last + head[None, :] * WIDTH + column[:, None],
            mask=is_head[None, :] & real[:, None],
            other=0.0,
        )
        found = tl.dot(x, w, found, input_precision="ieee")
    is_last = True
    if PARTS > 1:
        row = (token.to(tl.int64) * PARTS + part)[:, None] * NUM_HEADS
        tl.store(sums + row + head[None, :], found, mask=exists[:, None] & is_head[None, :])
        # All of this program's threads have written when one of them tells.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if is_last:
            tl.store(arrived + tile, 0)  # for the next layer
            found = _summed(sums, token, head, num_tokens, PARTS, NUM_HEADS, TOKENS, HEADS)
    if is_last:
        _store_outputs(
            found,
            last_bias,
            token,
            head,
            slots,
            pages,
            num_tokens,
            IS_LOG,
            NUM_HEADS,
            BLOCK_SIZE,
            BLOCK_STRIDE,
        )


def parts_and_tiles(gate: LayerGate, num_tokens: int) -> tuple[int, int]:
    """Return the parts of the last projection, and the most groups of tokens that have parts."""
    if not gate.width:
        return triton.cdiv(gate.linears[0][0].shape[1], _PART), 0
    if len(gate.linears) == 2:
        return 0, 0
    return triton.cdiv(gate.width, _COLUMNS), triton.cdiv(num_tokens, _DECODE.tokens)


def project(hidden: Tensor, weight: Tensor, sums: Tensor) -> None:
    """Write parts of the only projection of hidden states `[T, d]`; see `kernels.gates.project`."""
    num_tokens, size = hidden.shape
    num_parts, num_heads = sums.shape[1:]
    tokens = _DECODE.tokens
    _project_kernel[(triton.cdiv(num_tokens, tokens), num_parts)](
        hidden,
        weight,
        sums,
        num_tokens,
        SIZE=size,
        ROW_STRIDE=hidden.stride(0),
        PARTS=num_parts,
        PART=_PART,
        INNER=_COLUMNS,
        NUM_HEADS=num_heads,
        TOKENS=tokens,
        HEADS=_padded(num_heads),
        num_warps=4,
    )


def store(gate: LayerGate, buffers: GateBuffers, slots: Tensor, pages: Tensor) -> None:
    """Store the outputs of T tokens in one launch; see `kernels.gates.store`."""
    num_tokens, num_heads = len(slots), gate.num_heads
    of_pages = {"BLOCK_SIZE": pages.shape[2], "BLOCK_STRIDE": pages.stride(0)}
    of_heads = {"NUM_HEADS": num_heads, "HEADS": _padded(num_heads)}
    last, last_bias = gate.linears[-1]
    if not gate.width:
        _sum_kernel[(triton.cdiv(num_tokens, _SUMMED_TOKENS),)](
            buffers.sums,
            last_bias,
            slots,
            pages,
            num_tokens,
            IS_LOG=gate.is_log,
            PARTS=buffers.sums.shape[1],
            TOKENS=_SUMMED_TOKENS,
            num_warps=4,
            **of_pages,
            **of_heads,
        )
        return
    (_, first_bias), *middles = gate.linears[:-1]
    tile, (middle, middle_bias) = _DECODE, (None, None)
    part = triton.cdiv(gate.width, _COLUMNS) * _COLUMNS
    if middles:
        ((middle, middle_bias),) = middles
        # Without tensor cores, sums of a float32 model would not fit the registers.
        if num_tokens > _DECODE_TOKENS and middle.dtype != torch.float32:
            tile = _PREFILL
        part = _COLUMNS
    num_parts = triton.cdiv(gate.width, part)
    _gate_kernel[(triton.cdiv(num_tokens, tile.tokens), num_parts)](
        buffers.projected,
        first_bias,
        middle,
        middle_bias,
        last,
        last_bias,
        buffers.sums,
        buffers.arrived,
        slots,
        pages,
        num_tokens,
        ACTIVATION=gate.activation,
        IS_LOG=gate.is_log,
        WIDTH=gate.width,
        PARTS=num_parts,
        PART=part,
        TOKENS=tile.tokens,
        COLUMNS=_COLUMNS,
        INNER=_COLUMNS,
        num_warps=tile.num_warps,
        **of_pages,
        **of_heads,
    )


def _padded(num_heads: int) -> int:
    """Return the heads that a matrix product computes, the wanted ones first."""
    return max(16, triton.next_power_of_2(num_heads))


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate

    for num_linears, activation, dtype, num_tokens, num_heads in (
        (1, "gelu", torch.bfloat16, 1, 8),
        (1, "gelu", torch.float32, 1, 32),
        (2, "gelu", torch.bfloat16, 1, 8),
        (2, "gelu_pytorch_tanh", torch.float16, 1, 32),
        (3, "silu", torch.bfloat16, 1, 8),
        (3, "silu", torch.bfloat16, 1024, 8),
        (3, "relu", torch.float16, 1024, 32),
        (3, "silu", torch.float32, 1024, 32),
    ):
        sizes = (*(4096, 512, 512)[:num_linears], num_heads)
        kinds = [dtype] * (num_linears - 1) + [torch.float32]
        linears = tuple(
            (torch.empty(n_out, n_in, dtype=kind), torch.empty(n_out, dtype=kind))
            for n_in, n_out, kind in zip(sizes, sizes[1:], kinds, strict=False)
        )
        gate = LayerGate(num_linears > 1, activation, linears)
        num_parts, num_tiles = parts_and_tiles(gate, num_tokens)
        buffers = GateBuffers(
            torch.empty(num_tokens, gate.width, dtype=dtype),
            torch.empty(num_tokens, num_parts, num_heads),
            torch.empty(num_tiles, dtype=torch.int32),
        )
        slots = torch.empty(num_tokens, dtype=torch.int64)
        pages = torch.empty(2, 36, num_heads, 16)[:, 3]
        name = f"{num_linears} linears {str(dtype)[6:]} H{num_heads} T{num_tokens}"
        if num_linears == 1:
            hidden = torch.empty(num_tokens, 4096, dtype=dtype)
            call = partial(project, hidden, linears[0][0], buffers.sums)
            yield from launches(__name__, name, call)
        yield from launches(__name__, name, partial(store, gate, buffers, slots, pages))
