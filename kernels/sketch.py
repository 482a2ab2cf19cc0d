# SPDX-License-Identifier: Apache-2.0
"""Sketches of keys: a few bits a number, enough to find the tokens that a row looks at.

In every channel, `GROUP` consecutive tokens of a head share a range: a number is `low + step *
code`. With more bits the codes divide the range evenly between the group's extremes, as KIVI does
(Liu et al., arXiv 2402.02750). With 1 bit the code is the sign, and both values lie at the group's
mean magnitude.

The sketch of C tokens of a head, in bytes:

    codes    [C, D * bits / 8]          byte i of a token holds channels i, i + D * bits / 8, ...
    ranges   [ceil(C / GROUP), 2, D]    low and step of each channel, float16
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tgvkv.kernels.checks import check

GROUP = 32
"""Tokens that share a range."""
BITS = (1, 2, 4, 8)

_LARGEST = torch.finfo(torch.float16).max
_RANGE_BYTES = 4
"""Of a channel of a group: low and step."""


def sketch_bytes(num_tokens: int, head_size: int, bits: int) -> int:
    """Return the bytes of a head's sketch of some tokens."""
    num_groups = -(-num_tokens // GROUP)
    return num_tokens * head_size * bits // 8 + num_groups * _RANGE_BYTES * head_size


def sketch_keys(keys: Tensor, bits: int) -> Tensor:
    """Return the sketches of some heads' keys.

    Args:
        keys: `[M, C, D]`, any float dtype but fp8; D is a multiple of `8 / bits`.
        bits: one of `BITS`.

    Returns:
        uint8 `[M, sketch_bytes(C, D, bits)]`.

    Raises:
        ValueError: if the keys or bits do not fit.
    """
    check("keys", keys, ("M", "C", "D"))
    _, num_tokens, head_size = keys.shape
    if bits not in BITS or head_size * bits % 8:
        raise ValueError(f"keys of {head_size} channels have no sketch of {bits} bits a number")
    groups = _groups(keys.float())  # [M, g, GROUP, D]
    if bits == 1:
        missing = -num_tokens % GROUP
        sums = groups.abs().sum(dim=2)
        if missing:  # the last token was repeated to fill the last group
            sums[:, -1] -= missing * groups[:, -1, -1].abs()
            sums[:, -1] *= GROUP / (GROUP - missing)
        step = sums * (2 / GROUP)
        low = step / -2
    else:
        low, high = groups.aminmax(dim=2)
        step = (high - low) / (2**bits - 1)
    ranges = torch.stack((low, step), dim=2).clamp_(-_LARGEST, _LARGEST).half()
    low, step = (part.float().unsqueeze(2) for part in ranges.unbind(2))
    if bits == 1:
        codes = groups >= 0
    else:  # the range in float16 decides, so that an extreme is not cut off by rounding
        codes = ((groups - low) / step).nan_to_num_(0, 0, 0).round_().clamp_(0, 2**bits - 1)
    planes = codes.to(torch.uint8).flatten(1, 2)[:, :num_tokens].unflatten(2, (8 // bits, -1))
    packed = planes[:, :, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, :, plane] << (bits * plane)
    return torch.cat((packed.flatten(1), ranges.view(torch.uint8).flatten(1)), dim=1)


def read_sketches(sketches: Tensor, bits: int, out: Tensor) -> None:
    """Write the keys that sketches stand for to `out`, float32 `[M, C, D]`.

    Args:
        sketches: uint8 `[M, B]`, from `sketch_keys`; further bytes may follow.
    """
    check("out", out, ("M", "C", "D"), (torch.float32,))
    num_pairs, num_tokens, head_size = out.shape
    check("sketches", sketches, (num_pairs, "B"), (torch.uint8,))
    num_codes, num_groups = num_tokens * head_size * bits // 8, -(-num_tokens // GROUP)
    packed = sketches[:, :num_codes].unflatten(1, (num_tokens, -1))
    width, mask = packed.shape[2], 2**bits - 1
    for plane in range(8 // bits):
        codes = out[:, :, plane * width : (plane + 1) * width]
        codes.copy_((packed >> (bits * plane)).bitwise_and_(mask))
    ranges = sketches[:, num_codes : num_codes + num_groups * _RANGE_BYTES * head_size]
    ranges = ranges.contiguous().view(torch.float16).view(num_pairs, num_groups, 2, head_size)
    low, step = ranges.float().unsqueeze(3).unbind(2)  # [M, g, 1, D]
    whole = num_tokens // GROUP
    groups = out[:, : whole * GROUP].unflatten(1, (whole, GROUP))
    torch.addcmul(low[:, :whole], groups, step[:, :whole], out=groups)
    if num_tokens % GROUP:
        last = out[:, whole * GROUP :]
        torch.addcmul(low[:, -1], last, step[:, -1], out=last)


def _groups(keys: Tensor) -> Tensor:
    """Return `[M, g, GROUP, D]`; the last token stands for those that the last group lacks."""
    missing = -keys.shape[1] % GROUP
    if missing:
        keys = F.pad(keys.transpose(1, 2), (0, missing), mode="replicate").transpose(1, 2)
    return keys.unflatten(1, (-1, GROUP))
