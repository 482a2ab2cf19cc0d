# SPDX-License-Identifier: Apache-2.0
"""How much each key of a head is like the others (MixKV): the mean of its cosines to them."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_cosines(keys: Tensor, lengths: Tensor) -> Tensor:
    """Return each key's mean cosine to all other keys of its head.

    The sum of cosines to all keys is one product with the sum of their directions, so the cost is
    proportional to reading the keys, not to the square of their number.

    Args:
        keys: `[H, S, D]`, rotated, any float dtype. What comes after a head's length never affects
            a result, NaN included. A key of zeros has the cosine 0 to every other.
        lengths: integer `[H]`, number of keys of each head, 0 to S.

    Returns:
        float32 `[H, S]`, 0 after a head's length and for a head's only key.

    Raises:
        ValueError: if a shape does not fit.
    """
    if keys.dim() != 3 or lengths.shape != keys.shape[:1]:
        raise ValueError(
            f"keys must be [H, S, D] and lengths [H], not {list(keys.shape)}, {list(lengths.shape)}"
        )
    is_key = torch.arange(keys.shape[1], device=keys.device) < lengths[:, None]  # [H, S]
    directions = keys.to(torch.float32, copy=True).masked_fill_(~is_key[..., None], 0)
    norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    directions /= norms.clamp(min=torch.finfo(torch.float32).tiny)
    to_all = torch.bmm(directions, directions.sum(1).unsqueeze(-1)).squeeze(-1)
    to_others = to_all - torch.linalg.vector_norm(directions, dim=-1).square()
    return torch.where(is_key, to_others, 0) / (lengths[:, None] - 1).clamp(min=1)


def norms(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the norm of each value, float32 `[H, S]`, 0 after a head's length.

    Arguments as in `mean_cosines`.
    """
    found = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
    is_value = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    return torch.where(is_value, found, 0)
