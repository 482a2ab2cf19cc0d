# SPDX-License-Identifier: Apache-2.0
"""Pooling over windows in one launch, without scratch.

A program reads its tile's windows offset by offset, mostly from the cache: with the 258 of `reach`,
288 heads of 8,000 tokens take 0.6e9 comparisons, which an H100 makes in a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_TILE = 512


@triton.jit(
    do_not_specialize=["num_tokens", "forward", "back"],
    do_not_specialize_on_alignment=["first", "last"],
)
def _pool_kernel(
    scores,
    first,
    last,
    pooled,
    num_tokens,
    forward,
    back,
    rate,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE positions of one row. A NaN makes all windows that hold it NaN, as in PyTorch."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = position < num_tokens
    begin = tl.load(first + position, mask=exists, other=0)
    end = tl.load(last + position, mask=exists, other=-1)
    scores += row * num_tokens
    found = tl.full([TILE], 0.0 if MEAN else float("-inf"), tl.float64 if MEAN else tl.float32)
    for step in range(forward + back + 1):
        offset = step - forward
        other = position + offset
        inside = (other >= begin) & (other <= end)
        score = tl.load(scores + other, mask=inside, other=0.0 if MEAN else float("-inf"))
        if WEIGHTED:
            score = tl.maximum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score *= tl.exp2(tl.minimum(offset, 0).to(tl.float32) * rate)
        if MEAN:
            found += score.to(tl.float64)
        else:
            found = tl.maximum(found, score, propagate_nan=tl.PropagateNan.ALL)
    if MEAN:
        found = found / tl.maximum(end - begin + 1, 1)
    tl.store(pooled + row * num_tokens + position, found.to(tl.float32), mask=exists)


def pool_windows(
    scores: Tensor, windows: Tensor, forward: int, back: int, is_mean: bool, halve: int | None
) -> Tensor:
    """Return pooled scores, float32 `[S, P]`; see `kernels.pooling.window_pooling`.

    Args:
        scores: float32 `[S, P]`.
        windows: first and last position of each position's window, int32 `[2, P]`.
        forward, back: no window begins more positions before its own, or ends more after it.
    """
    num_sets, num_tokens = scores.shape
    scores = scores.contiguous()
    pooled = torch.empty_like(scores)
    if scores.numel():
        _pool_kernel[(num_sets, triton.cdiv(num_tokens, _TILE))](
            scores,
            *windows,
            pooled,
            num_tokens,
            forward,
            back,
            1 / (halve or 1),
            MEAN=is_mean,
            WEIGHTED=halve is not None,
            TILE=_TILE,
            num_warps=4,
        )
    return pooled


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    scores, windows = torch.empty(2, 5), torch.zeros(2, 5, dtype=torch.int32)
    for name, is_mean, halve in (
        ("max", False, None),
        ("mean", True, None),
        ("weighted", False, 3),
    ):
        call = partial(pool_windows, scores, windows, 1, 1, is_mean, halve)
        yield from launches(__name__, name, call)
