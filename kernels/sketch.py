# SPDX-License-Identifier: Apache-2.0
"""Sketches of keys: a few bits a number, enough to find the tokens that a row looks at.

A head's keys are standardised by channel, so that no channel outweighs the others, and each token's
numbers then share a step: `key = mean + scale * step * (code - (2^bits - 1) / 2)`. The step is the
one that loses least for normally distributed numbers (Max, "Quantizing for minimum distortion",
1960), times the token's root mean square. It leaves the product of queries and codes a plain matrix
product: means and scales go into the queries, steps into the logits.

The sketch of a head's C tokens, in bytes:

    codes    [D, C * bits / 8]    byte i of a channel holds tokens i, i + C * bits / 8, ...
    steps    [C]                  float16
    means    [D]                  float16
    scales   [D]                  float16
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import check
from vllm_tgvkv.kernels.statistics import Scratch

STEPS = {1: 1.596, 2: 0.9957, 4: 0.3352, 8: 0.0308}
"""Best step of a normal distribution's standard deviation, by bits."""
BITS = tuple(STEPS)

_KEY_BYTES = 4 << 20
"""Bound of the codes that are read at a time, or one head's. Starting threads for more and smaller
parts takes longer than what a cache saves."""
_LEAST, _LARGEST = 1e-4, torch.finfo(torch.float16).max


class _Sketches(NamedTuple):
    """Views of the parts of some heads' sketches."""

    codes: Tensor
    """uint8 [M, D, C * bits / 8]."""
    steps: Tensor
    """float16 [M, C]."""
    means: Tensor
    """float16 [M, D]."""
    scales: Tensor
    """float16 [M, D]."""


def sketch_bytes(num_tokens: int, head_size: int, bits: int) -> int:
    """Return the bytes of a head's sketch of some tokens."""
    return num_tokens * head_size * bits // 8 + 2 * num_tokens + 4 * head_size


def sketch_keys(keys: Tensor, bits: int) -> Tensor:
    """Return the sketches of some heads' keys.

    Args:
        keys: `[M, C, D]`, any float dtype but fp8; C is a multiple of 16.
        bits: one of `BITS`.

    Returns:
        uint8 `[M, sketch_bytes(C, D, bits)]`.

    Raises:
        ValueError: if the keys or bits do not fit.
    """
    check("keys", keys, ("M", "C, a multiple of 16", "D"), fits=keys.shape[1] % 16 == 0)
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    numbers = keys.float().transpose(1, 2)  # [M, D, C]
    means = _half(numbers.mean(dim=2))
    numbers = numbers - means.float().unsqueeze(2)
    scales = _half(numbers.square().mean(dim=2).sqrt_().clamp_(min=_LEAST))
    numbers /= scales.float().unsqueeze(2)
    steps = _half(numbers.square().mean(dim=1).sqrt_().mul_(STEPS[bits]).clamp_(min=_LEAST))
    numbers /= steps.float().unsqueeze(1)
    codes = numbers.add_((2**bits - 1) / 2).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    planes = codes.unflatten(2, (8 // bits, -1))
    packed = planes[:, :, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, :, plane] << (bits * plane)
    parts = (packed.flatten(1), *(part.view(torch.uint8) for part in (steps, means, scales)))
    return torch.cat(parts, dim=1)


def read_sketches(sketches: Tensor, bits: int, num_tokens: int, head_size: int) -> Tensor:
    """Return the keys that sketches stand for, float32 `[M, C, D]`.

    Args:
        sketches: uint8 `[M, B]`, from `sketch_keys`; further bytes may follow.
    """
    parts = _parts(sketches, bits, num_tokens, head_size)
    codes = parts.means.new_empty(len(sketches), head_size, num_tokens, dtype=torch.float32)
    _read_codes(parts.codes, bits, codes)
    numbers = (codes - (2**bits - 1) / 2) * parts.steps.float().unsqueeze(1)
    return (numbers * parts.scales.float().unsqueeze(2) + parts.means.unsqueeze(2)).transpose(1, 2)


def sketch_logits(
    sketches: Tensor, bits: int, queries: Tensor, num_tokens: int, out: Tensor, scratch: Scratch
) -> None:
    """Write the products of queries and the keys that sketches stand for.

    Args:
        sketches: uint8 `[M, B]`, from `sketch_keys`; further bytes may follow.
        queries: float32 `[M, Q, D]`, scaled.
        num_tokens: C.
        out: float32 `[M, Q, P]` with P >= C; the first C columns are written. Its last stride is 1.
    """
    check("queries", queries, ("M", "Q", "D"), (torch.float32,))
    num_pairs, num_queries, head_size = queries.shape
    has_room = out.dim() == 3 and out.shape[2] >= num_tokens
    check("out", out, (num_pairs, num_queries, "P"), (torch.float32,), has_room)
    parts = _parts(sketches, bits, num_tokens, head_size)
    if gpu.runs(out):
        from vllm_tgvkv.kernels.gpu import sketch as triton_sketch

        triton_sketch.sketch_logits(*parts, bits, queries.contiguous(), out)
        return
    steps = parts.steps.float().unsqueeze(1)  # [M, 1, C]
    shift = torch.bmm(queries, parts.means.float().unsqueeze(2))  # [M, Q, 1]
    scaled = queries * parts.scales.float().unsqueeze(1)
    # Codes are not negative; what that adds is taken off again.
    excess = scaled.sum(dim=2, keepdim=True).mul_((1 - 2**bits) / 2)
    most = max(1, _KEY_BYTES // (4 * head_size * num_tokens))
    for first in range(0, num_pairs, most):
        part = slice(first, first + most)
        asked = scaled[part]
        codes = scratch.take("codes", (len(asked), head_size, num_tokens), out.device)
        products = scratch.take("products", (len(asked), num_queries, num_tokens), out.device)
        _read_codes(parts.codes[part], bits, codes)
        torch.baddbmm(excess[part].expand_as(products), asked, codes, out=products)
        torch.addcmul(shift[part], products, steps[part], out=out[part, :, :num_tokens])


def _read_codes(packed: Tensor, bits: int, out: Tensor) -> None:
    """Write codes, uint8 `[M, D, C * bits / 8]`, to `out`, float32 `[M, D, C]`."""
    width = packed.shape[2]
    for plane in range(8 // bits):
        codes = packed >> (bits * plane) if plane else packed
        if plane < 8 // bits - 1:
            codes = codes & (2**bits - 1)
        out[:, :, plane * width : (plane + 1) * width].copy_(codes)


def _parts(sketches: Tensor, bits: int, num_tokens: int, head_size: int) -> _Sketches:
    num_bytes = sketch_bytes(num_tokens, head_size, bits)
    has_all = sketches.shape[-1] >= num_bytes
    check("sketches", sketches, ("M", f"B >= {num_bytes}"), (torch.uint8,), has_all)
    sizes = num_tokens * head_size * bits // 8, 2 * num_tokens, 2 * head_size, 2 * head_size
    codes, *ranges = sketches[:, :num_bytes].split(sizes, dim=1)
    halves = (part.contiguous().view(torch.float16) for part in ranges)
    return _Sketches(codes.unflatten(1, (head_size, -1)), *halves)


def _half(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_LARGEST, _LARGEST).half()
