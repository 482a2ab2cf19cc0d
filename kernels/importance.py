# SPDX-License-Identifier: Apache-2.0
"""Importance of past keys (R-KV): how much the last tokens look at each key before theirs."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 8
"""Last rows that R-KV's importance comes from."""

KERNEL = 7
"""Keys over which R-KV's importance is pooled. They are neighbours in the cache, whatever tokens
between them were evicted."""


def importance(keys: Tensor, queries: Tensor, num_past: Tensor, scale: float | Tensor) -> Tensor:
    """Return the mean over the rows of their softmax over past keys, after maximum pooling.

    The logit of a row and a key is the greatest of the group's query heads. Keys from the window on
    are in no softmax, and neither are learned sinks.

    Args:
        keys: `[H, S, D]`, rotated, any float dtype. What comes after a head's past keys never
            affects a result, NaN included.
        queries: `[H, w, G, D]`, rotated, any float dtype.
        num_past: integer `[H]`, keys before the window of each head.
        scale: factor of the products; float32 `[H]` if it differs.

    Returns:
        float32 `[H, S]`, 0 from the window on.
    """
    num_rows, size = queries.shape[1], keys.shape[1]
    is_past = torch.arange(size, device=keys.device) < num_past[:, None]  # [H, S]
    past = keys.to(torch.float32, copy=True).masked_fill_(~is_past[..., None], 0)
    if isinstance(scale, Tensor):
        scale = scale[:, None, None]
    logits = torch.bmm(queries.flatten(1, 2).float() * scale, past.transpose(1, 2))
    greatest = logits.unflatten(1, (num_rows, -1)).amax(2)  # [H, w, S]
    del past, logits
    rows = greatest.masked_fill_(~is_past[:, None], float("-inf")).softmax(-1)
    # A row without past keys has a softmax of nothing, which is NaN.
    mean = rows.mean(1).masked_fill_(~is_past, 0)
    pooled = torch.nn.functional.max_pool1d(mean, KERNEL, 1, KERNEL // 2)
    return pooled.masked_fill_(~is_past, 0)
