# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def causal_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return A of one layer, float64 [H * G, P, P], from queries [P, H, G, D], keys [P, H, D]."""
    return _attention(queries, keys, torch.arange(len(keys)), scale).flatten(0, 1)


def attention_probabilities(
    queries: Tensor,
    key_pages: Tensor,
    block_ids: Tensor,
    row_positions: Tensor,
    num_keys: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return A of some rows, float64 [H, G, O, num_keys]; arguments as in the kernel `observe`.

    Sinks [H, G] are one more key of each query head, which is left out of the result.
    """
    block_size = key_pages.shape[2]
    keys = [key_pages[block_ids[j // block_size], :, j % block_size] for j in range(num_keys)]
    return _attention(queries, torch.stack(keys), row_positions, scale, sinks)


def _attention(
    queries: Tensor,
    keys: Tensor,
    row_positions: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    logits = torch.einsum("ihgd,jhd->hgij", queries.double(), keys.double()) * scale
    future = torch.arange(len(keys)) > row_positions[:, None]
    logits = logits.masked_fill(future, -math.inf)
    if sinks is None:
        return logits.softmax(-1)
    of_sinks = sinks.double()[:, :, None, None].expand(*logits.shape[:3], 1)
    return torch.cat((logits, of_sinks), dim=-1).softmax(-1)[..., :-1]
