# SPDX-License-Identifier: Apache-2.0
"""Learned attention sinks behind a kernel that does not know of them.

A sink is one more key of a query head, with a learned logit and the value zero. So it only takes a
part of the softmax: attention over keys alone, times `sigmoid(l - sink)`, where l is the logarithm
of the keys' softmax denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import FLOATS, check


def apply_sinks(outputs: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> None:
    """Turn attention over keys alone into that over keys and sinks, in place.

    On CUDA it is one launch, nothing is allocated and the host reads no device value, so the call
    works in a CUDA graph. Outputs are rounded to their dtype once more.

    Args:
        outputs: `[R * H, G, D]`, ordered by row, then KV head, contiguous in D; changed in place.
        log_sum_exp: float32 `[G, R * H]`, the softmax denominators, as FlashAttention returns them.
            Where one is infinite or NaN, the sequence has no keys, and its outputs stay.
        sinks: float `[H * G]`, contiguous.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    fits = outputs.dim() == 3 and outputs.stride(2) == 1
    check("outputs", outputs, ("R * H", "G", "D, contiguous"), fits=fits)
    num_sequences, group, _ = outputs.shape
    check("log_sum_exp", log_sum_exp, (group, num_sequences), (torch.float32,))
    num_heads = max(1, sinks.numel() // group)
    fits = sinks.is_contiguous() and num_sequences % num_heads == 0
    check("sinks", sinks, (num_heads * group,), FLOATS, fits)
    if gpu.runs(outputs):
        from vllm_tgvkv.kernels.gpu import sinks as triton_sinks

        triton_sinks.apply_sinks(outputs, log_sum_exp, sinks)
        return
    by_row = log_sum_exp.T.unflatten(0, (-1, num_heads))  # [R, H, G]
    factors = (by_row - sinks.view(num_heads, group).float()).sigmoid()
    factors = torch.where(by_row.isfinite(), factors, 1)
    outputs.copy_(outputs.float() * factors.flatten(0, 1).unsqueeze(2))
