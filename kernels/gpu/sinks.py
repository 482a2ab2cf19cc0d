# SPDX-License-Identifier: Apache-2.0
"""Attention over keys alone, scaled by what learned sinks leave of its softmax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import TYPES, Variant, launches


@triton.jit(do_not_specialize=["num_heads"])
def _sinks_kernel(
    outputs,
    log_sum_exp,
    sinks,
    num_heads,
    sequence_stride,
    member_stride,
    lse_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """Scale the outputs of one sequence's query heads."""
    sequence = tl.program_id(0)
    member, dim = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
    exists = member < GROUP
    of_keys = tl.load(log_sum_exp + member * lse_stride + sequence, mask=exists, other=0.0)
    place = sequence % num_heads * GROUP + member
    sink = tl.load(sinks + place, mask=exists, other=0.0).to(tl.float32)
    has_keys = tl.abs(of_keys) < float("inf")
    factor = tl.where(has_keys, tl.sigmoid(of_keys - sink), 1.0)
    target = outputs + tl.cast(sequence, tl.int64) * sequence_stride
    target += member[:, None] * member_stride + dim[None, :]
    mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    values = tl.load(target, mask=mask, other=0.0)
    scaled = values.to(tl.float32) * factor[:, None]
    tl.store(target, scaled.to(outputs.dtype.element_ty), mask=mask)


def apply_sinks(outputs: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> None:
    """Scale the outputs in one launch; see `kernels.sinks.apply_sinks`."""
    num_sequences, group, head_size = outputs.shape
    if log_sum_exp.stride(1) != 1:
        raise ValueError(f"log_sum_exp must be contiguous, got strides {log_sum_exp.stride()}")
    _sinks_kernel[(num_sequences,)](
        outputs,
        log_sum_exp,
        sinks,
        sinks.numel() // group,
        *outputs.stride()[:2],
        log_sum_exp.stride(0),
        GROUP=group,
        HEAD_SIZE=head_size,
        GROUP_TILE=triton.next_power_of_2(group),
        HEAD_TILE=triton.next_power_of_2(head_size),
        num_warps=4 if group * head_size > 512 else 1,
    )


def variants() -> Iterator[Variant]:
    """Yield the kernels of gpt-oss, and of another group and head size."""
    for dtype, heads, group, head_size in (
        (torch.bfloat16, 8, 8, 64),
        (torch.float16, 4, 7, 80),
    ):
        empty = partial(torch.empty, device="meta")
        outputs = empty(9 * heads, group, head_size, dtype=dtype)
        given = outputs, empty(group, 9 * heads), empty(heads * group, dtype=dtype)
        name = f"{TYPES[dtype]} D{head_size} G{group}"
        yield from launches(__name__, name, partial(apply_sinks, *given))
