# SPDX-License-Identifier: Apache-2.0
"""Copy of kept tokens into fresh pages."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
    workspace_bytes: int = 64 << 20,
) -> None:
    """Copy the selected tokens of all layers and heads from their old blocks to new ones.

    With M = L*H, page r of the compressed region is pool page ``new_blocks[r // M]*M + r % M``. It
    belongs to pair p = l*H + h with ``offsets[p] <= r < offsets[p + 1]``; the token at position j
    comes from pool page ``old_blocks[j // N]*M + p``, slot ``j % N``. Bits are copied unchanged,
    for any dtype. Only the new blocks are written. Pages from ``offsets[M]`` on belong to no pair;
    their contents are undefined.

    Scratch memory is at most ``workspace_bytes``, or the size of one page's tokens if that is more;
    on CUDA there is none.

    Args:
        key_pages: ``[num_pool_pages, N, D]``, logical view of the whole pool; any strides.
        value_pages: ``[num_pool_pages, N, D_v]``, likewise.
        positions: int32 ``[k*M, N]`` from :func:`~vllm_tgvkv.kernels.select.select_tokens`.
        offsets: int32 ``[M + 1]`` from :func:`~vllm_tgvkv.kernels.select.page_offsets`.
        old_blocks: int32 or int64 ``[t0]``, the prompt's full blocks in order.
        new_blocks: int32 or int64 ``[k]``, disjoint from ``old_blocks``.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    pairs = num_layers * num_heads
    _check(key_pages, value_pages, positions, offsets, old_blocks, new_blocks, pairs)
    if gpu.runs(key_pages):
        from vllm_tgvkv.kernels.gpu import copy as triton_copy

        triton_copy.copy_kept(
            key_pages,
            value_pages,
            positions,
            offsets,
            old_blocks,
            new_blocks,
            num_layers,
            num_heads,
        )
        return
    block_size = key_pages.shape[1]
    pools = [pool.view(_INTEGER_OF_SIZE[pool.element_size()]) for pool in (key_pages, value_pages)]
    token_bytes = max(pool.shape[2] * pool.element_size() for pool in pools)
    # Each token also needs six int64 of addresses.
    step = max(1, workspace_bytes // (block_size * (token_bytes + 48)))
    for start in range(0, positions.shape[0], step):
        chunk = positions[start : start + step].long()
        region = torch.arange(start, start + chunk.shape[0], device=positions.device)
        pair = torch.searchsorted(offsets, region, right=True).sub_(1).clamp_(max=pairs - 1)
        source = old_blocks.long()[chunk // block_size] * pairs + pair[:, None]
        slots = chunk % block_size
        target = new_blocks.long()[region // pairs] * pairs + region % pairs
        for pool in pools:
            pool[target] = pool[source, slots]


def _check(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    pairs: int,
) -> None:
    if key_pages.dim() != 3:
        raise ValueError(f"key_pages must be [num_pages, N, D], got {list(key_pages.shape)}")
    if value_pages.dim() != 3 or value_pages.shape[:2] != key_pages.shape[:2]:
        raise ValueError(
            f"value_pages must be {list(key_pages.shape[:2])} + [D], got {list(value_pages.shape)}"
        )
    expected = {
        "old_blocks": (old_blocks, (old_blocks.numel(),)),
        "new_blocks": (new_blocks, (new_blocks.numel(),)),
        "positions": (positions, (new_blocks.numel() * pairs, key_pages.shape[1])),
        "offsets": (offsets, (pairs + 1,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} must be int32 or int64 {list(shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
