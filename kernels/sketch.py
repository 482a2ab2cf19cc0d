# SPDX-License-Identifier: Apache-2.0
"""Sketches of keys: a few bits a number, enough to find the tokens that a row looks at.

In every channel, `GROUP` consecutive tokens of a head share a range: a number is `low + step *
code`. With more bits the codes divide the range evenly between the group's extremes, as KIVI does
(Liu et al., arXiv 2402.02750). With 1 bit the code is the sign, and both values lie at the group's
mean magnitude.

The sketch of a head's C tokens, in bytes, with C rounded up to a whole number g of groups:

    codes    [D, C * bits / 8]    byte i of a channel holds tokens i, i + C * bits / 8, ...
    low      [D, g]               float16
    step     [D, g]               float16

A last group with fewer tokens has the last one repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.kernels.checks import check
from vllm_tgvkv.kernels.statistics import Scratch

GROUP = 32
"""Tokens that share a range."""
BITS = (1, 2, 4, 8)

_KEY_BYTES = 1 << 20
"""Bound of the keys that are read at a time, or one head's, so that they fit a cache."""
_LARGEST = torch.finfo(torch.float16).max


def sketch_bytes(num_tokens: int, head_size: int, bits: int) -> int:
    """Return the bytes of a head's sketch of some tokens."""
    return _num_groups(num_tokens) * head_size * (GROUP * bits // 8 + 4)


def sketch_keys(keys: Tensor, bits: int) -> Tensor:
    """Return the sketches of some heads' keys.

    Args:
        keys: `[M, C, D]`, any float dtype but fp8.
        bits: one of `BITS`.

    Returns:
        uint8 `[M, sketch_bytes(C, D, bits)]`.

    Raises:
        ValueError: if the keys or bits do not fit.
    """
    check("keys", keys, ("M", "C", "D"))
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    missing = -keys.shape[1] % GROUP
    padded = F.pad(keys.float().transpose(1, 2), (0, missing), mode="replicate")
    groups = padded.unflatten(2, (-1, GROUP))  # [M, D, g, GROUP]
    if bits == 1:
        sums = groups.abs().sum(dim=3)
        if missing:  # repetitions do not count
            last = groups[:, :, -1, : GROUP - missing].abs().sum(dim=2)
            sums[:, :, -1] = last * (GROUP / (GROUP - missing))
        step = sums * (2 / GROUP)
        low = step / -2
    else:
        low, high = groups.aminmax(dim=3)
        step = (high - low) / (2**bits - 1)
    ranges = torch.stack((low, step), dim=1).clamp_(-_LARGEST, _LARGEST).half()  # [M, 2, D, g]
    low, step = (part.float().unsqueeze(3) for part in ranges.unbind(1))
    if bits == 1:
        codes = groups >= 0
    else:  # the range in float16 decides, so that an extreme is not cut off by rounding
        codes = ((groups - low) / step).nan_to_num_(0, 0, 0).round_().clamp_(0, 2**bits - 1)
    planes = codes.to(torch.uint8).flatten(2).unflatten(2, (8 // bits, -1))
    packed = planes[:, :, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, :, plane] << (bits * plane)
    return torch.cat((packed.flatten(1), ranges.view(torch.uint8).flatten(1)), dim=1)


def read_sketches(sketches: Tensor, bits: int, out: Tensor) -> None:
    """Write the keys that sketches stand for to `out`, float32 `[M, D, C]`.

    C is a multiple of `GROUP`; what is there for tokens that a last group lacks has no meaning.

    Args:
        sketches: uint8 `[M, B]`, from `sketch_keys`; further bytes may follow.
    """
    check("out", out, ("M", "D", "C"), (torch.float32,), out.shape[-1] % GROUP == 0)
    num_pairs, head_size, num_tokens = out.shape
    num_bytes = sketch_bytes(num_tokens, head_size, bits)
    has_all = sketches.shape[-1] >= num_bytes
    check("sketches", sketches, (num_pairs, f"B >= {num_bytes}"), (torch.uint8,), has_all)
    width, mask = num_tokens * bits // 8, 2**bits - 1
    packed = sketches[:, : head_size * width].unflatten(1, (head_size, width))
    for plane in range(8 // bits):
        codes = out[:, :, plane * width : (plane + 1) * width]
        codes.copy_((packed >> (bits * plane)).bitwise_and_(mask))
    ranges = sketches[:, head_size * width : num_bytes].contiguous().view(torch.float16)
    low, step = ranges.float().view(num_pairs, 2, head_size, -1, 1).unbind(1)
    # On a CPU, `addcmul` with such strides takes four times as long.
    out.unflatten(2, (-1, GROUP)).mul_(step).add_(low)


def sketch_logits(
    sketches: Tensor, bits: int, queries: Tensor, num_tokens: int, out: Tensor, scratch: Scratch
) -> None:
    """Write the products of queries and the keys that sketches stand for.

    Args:
        sketches: uint8 `[M, B]`, from `sketch_keys`; further bytes may follow.
        queries: float32 `[M, Q, D]`, scaled.
        num_tokens: C.
        out: float32 `[M, Q, P]` with P >= C; the first C columns are written.
    """
    check("queries", queries, ("M", "Q", "D"), (torch.float32,))
    num_pairs, num_queries, head_size = queries.shape
    has_room = out.dim() == 3 and out.shape[2] >= num_tokens
    check("out", out, (num_pairs, num_queries, "P"), (torch.float32,), has_room)
    size = _num_groups(num_tokens) * GROUP
    most = max(1, _KEY_BYTES // (4 * head_size * size))
    for first in range(0, num_pairs, most):
        part = slice(first, first + most)
        asked = queries[part]
        keys = scratch.take("sketched keys", (len(asked), head_size, size), out.device)
        read_sketches(sketches[part], bits, keys)
        torch.bmm(asked, keys[..., :num_tokens], out=out[part, :, :num_tokens])


def _num_groups(num_tokens: int) -> int:
    return -(-num_tokens // GROUP)
