# SPDX-License-Identifier: Apache-2.0
"""Redundancy of keys (R-KV): how similar each is to the others of its head."""

from __future__ import annotations

import torch
from torch import Tensor

SIMILAR = 0.5
"""Keys with a higher cosine are similar."""
GROUP = 64
"""Keys that one maximum of cosines stands for."""
BYTES_PER_ENTRY = 4 + 1  # a cosine; for each group a maximum, a truth value and a number
"""Workspace for each pair of keys."""
_UNIT = 2.0**40
"""Cosines are subtracted as integers of 1 / _UNIT, whose sum does not depend on their order."""


def redundancy(keys: Tensor, lengths: Tensor, workspace_bytes: int = 64 << 20) -> Tensor:
    """Return the softmax over each head's keys of their mean similarity to all of its keys.

    The similarity of key j to key i is their cosine, but zero for i = j, and zero if j is the last
    key whose cosine with i exceeds `SIMILAR`: of several copies, the newest is not redundant.
    The sum of all cosines with key j is its product with the sum of all keys, so cosines are needed
    only to find each key's last similar one. Only some rows i of them exist at a time, for all
    heads. Otherwise it takes the keys in float32.

    Args:
        keys: `[H, S, D]`, rotated, ascending by position in each head, any float dtype. What is
            after a head's length never affects a result, NaN included.
        lengths: integer `[H]`, number of keys of each head, 0 to S.
        workspace_bytes: bound of the rows' memory; one row of all heads is the least.

    Returns:
        float32 `[H, S]`; each head's sum is 1, and 0 after its length.

    Raises:
        ValueError: if a shape does not fit.
    """
    if keys.dim() != 3 or lengths.shape != keys.shape[:1]:
        raise ValueError(
            f"keys must be [H, S, D] and lengths [H], not {list(keys.shape)}, {list(lengths.shape)}"
        )
    heads, size, dim = keys.shape
    num_groups = -(-size // GROUP)
    is_key = torch.arange(size, device=keys.device) < lengths[:, None]  # [H, S]
    # Slots after the length are zero vectors: their cosines are 0, so they are never similar.
    directions = keys.new_zeros((heads, num_groups * GROUP, dim), dtype=torch.float32)
    directions[:, :size] = keys
    directions[:, :size].masked_fill_(~is_key[..., None], 0)
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    directions /= norms + 1e-8
    own = (norms / (norms + 1e-8)).square()[:, :size, 0]
    subtracted = torch.zeros((heads, size), dtype=torch.int64, device=keys.device)
    step = max(1, workspace_bytes // max(1, heads * num_groups * GROUP * BYTES_PER_ENTRY))
    for start in range(0, size, step):
        rows = directions[:, start : min(start + step, size)]
        cosines = rows @ directions.transpose(1, 2)  # [H, R, S']
        cosines.diagonal(start, 1, 2).fill_(0)
        last = last_above(cosines, SIMILAR)  # [H, R]
        of_last = cosines.gather(-1, last.clamp(min=0)[..., None])[..., 0]
        del cosines  # before the next rows have theirs
        of_last = of_last.masked_fill(last < 0, 0).double().mul(_UNIT).round().long()
        subtracted.scatter_add_(1, last.clamp(min=0), of_last)
    sums = (directions @ directions.sum(1)[..., None])[:, :size, 0] - own
    means = (sums - (subtracted / _UNIT).float()) / lengths[:, None].clamp(min=1)
    # A head without keys has a softmax of nothing, which is NaN.
    return means.masked_fill(~is_key, float("-inf")).softmax(-1).masked_fill(~is_key, 0)


def last_above(values: Tensor, threshold: float) -> Tensor:
    """Return the last index of each row whose value exceeds the threshold, -1 if none does.

    Args:
        values: `[H, R, S']`, S' a multiple of `GROUP`, contiguous. It is read once.

    Returns:
        int64 `[H, R]`.
    """
    groups = values.unflatten(-1, (-1, GROUP))  # [H, R, S' / GROUP, GROUP]
    numbers = torch.arange(max(groups.shape[2], GROUP), device=values.device)
    exceeds = groups.amax(-1) > threshold
    group = torch.where(exceeds, numbers[: groups.shape[2]], -1).amax(-1)
    index = group.clamp(min=0)[..., None, None].expand(*group.shape, 1, GROUP)
    found = groups.gather(2, index)[:, :, 0] > threshold
    slot = torch.where(found, numbers[:GROUP], -1).amax(-1)
    return torch.where(group < 0, -1, group * GROUP + slot)
