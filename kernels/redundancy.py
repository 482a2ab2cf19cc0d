# SPDX-License-Identifier: Apache-2.0
"""Redundancy of keys (R-KV): how similar each is to the others of its head."""

from __future__ import annotations

import torch
from torch import Tensor

BYTES_PER_ENTRY = 4 + 4 + 1  # a cosine, a slot number and a truth value
"""Workspace for each pair of keys."""


def redundancy(
    keys: Tensor,
    lengths: Tensor,
    threshold: float = 0.5,
    first_key: bool = False,
    workspace_bytes: int = 64 << 20,
) -> Tensor:
    """Return the softmax over each head's keys of their mean similarity to all of its keys.

    The similarity of key j to key i is their cosine, but zero for i = j, and zero if j is the last
    key whose cosine with i exceeds the threshold: of several copies, the newest is not redundant.
    Only some rows i exist at a time, for all heads. Besides them, memory is that of the keys in
    float32.

    Args:
        keys: ``[H, S, D]``, rotated, ascending by position in each head, any float dtype. What is
            behind a head's length never affects a result, NaN included.
        lengths: integer ``[H]``, number of keys of each head, 0 to S.
        threshold: cosine above which keys are similar, not negative.
        first_key: whether the first key counts as zero in rows without a similar key, as in R-KV's
            published code.
        workspace_bytes: bound of the rows' memory; one row of all heads is the least.

    Returns:
        float32 ``[H, S]``; each head's sum is 1, and 0 behind its length.

    Raises:
        ValueError: if a shape does not fit or the threshold is negative.
    """
    if keys.dim() != 3 or lengths.shape != keys.shape[:1]:
        raise ValueError(
            f"keys must be [H, S, D] and lengths [H], not {list(keys.shape)}, {list(lengths.shape)}"
        )
    if threshold < 0:
        raise ValueError(f"threshold {threshold} is negative; use 0 to 1")
    heads, size, _ = keys.shape
    slots = torch.arange(size, dtype=torch.int32, device=keys.device)
    is_key = slots < lengths[:, None]  # [H, S]
    directions = torch.where(is_key[..., None], keys, 0).float()
    directions /= torch.linalg.vector_norm(directions, dim=-1, keepdim=True) + 1e-8
    sums = directions.new_zeros(heads, size)
    step = max(1, workspace_bytes // max(1, heads * size * BYTES_PER_ENTRY))
    for start in range(0, size, step):
        rows = slots[start : start + step, None]
        # Slots behind the length are zero vectors: their cosines are 0, so they are never similar.
        cosines = directions[:, start : start + step] @ directions.transpose(1, 2)  # [H, R, S]
        cosines.masked_fill_(rows == slots, 0)
        last = torch.where(cosines > threshold, slots, -1).amax(-1, keepdim=True)
        if first_key:
            last.clamp_(min=0)
        sums += cosines.masked_fill_(last == slots, 0).sum(1)
    means = sums / lengths[:, None].clamp(min=1)
    # A head without keys has a softmax of nothing, which is NaN.
    return means.masked_fill(~is_key, float("-inf")).softmax(-1).masked_fill(~is_key, 0)
