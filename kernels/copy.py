# SPDX-License-Identifier: Apache-2.0
"""Copy of kept tokens into fresh pages."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import INTEGERS, check

WORKSPACE_BYTES = 4 << 20
"""On CPU fresh memory takes longer to map than to copy. Buffers of this size are used again."""

_MOST_MOVED = 0.25
"""Share of tokens up to which whole pages are copied first, and then the others one by one."""

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view whose elements can be copied and indexed: some floats of 8 bits cannot."""
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    sources: Tensor,
    offsets: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Copy the selected tokens of all layers and heads to new blocks.

    With M = L*H, page r of the compressed region is pool page `new_blocks[r // M]*M + r % M`. It
    belongs to pair p = l*H + h with `offsets[p] <= r < offsets[p + 1]`; its slot i gets the key
    and the value of pool page `sources[r, i] // N`, slot `sources[r, i] % N`. Bits are copied
    unchanged, for any dtype. Only the new blocks change. Pages from `offsets[M]` on belong to no
    pair: they keep their contents, and their sources may be any numbers.

    Scratch memory is at most `workspace_bytes`, or the size of one page's tokens if that is more;
    on CUDA there is none.

    Args:
        key_pages: `[num_pool_pages, N, D]`, logical view of the whole pool; any strides.
        value_pages: `[num_pool_pages, N, D_v]`, likewise.
        sources: int32 or int64 `[k*M, N]`, slots of the pool outside the new blocks, from
            `kept_slots`.
        offsets: int32 or int64 `[M + 1]` from
            `page_offsets`.
        new_blocks: int32 or int64 `[k]`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    pairs = num_layers * num_heads
    check("key_pages", key_pages, ("num_pages", "N", "D"))
    num_pages, block_size, _ = key_pages.shape
    check("value_pages", value_pages, (num_pages, block_size, "D"))
    check("new_blocks", new_blocks, ("k",), INTEGERS)
    check("sources", sources, (len(new_blocks) * pairs, block_size), INTEGERS)
    check("offsets", offsets, (pairs + 1,), INTEGERS)
    if gpu.runs(key_pages):
        from vllm_tgvkv.kernels.gpu import copy as triton_copy

        triton_copy.copy_kept(key_pages, value_pages, sources, offsets, new_blocks, pairs)
        return
    pools = [as_integers(pool) for pool in (key_pages, value_pages)]
    token_bytes = max(pool.shape[2] * pool.element_size() for pool in pools)
    slots = torch.arange(block_size, device=sources.device)
    # Each token also needs four int64 of addresses.
    step = max(1, workspace_bytes // (block_size * (token_bytes + 32)))
    for start in range(0, sources.shape[0], step):
        chunk = sources[start : start + step]
        region = torch.arange(start, start + chunk.shape[0], device=sources.device)
        target = new_blocks.long()[region // pairs] * pairs + region % pairs
        # How many pages pairs own is known on the device only: the others are copied to themselves.
        is_owned = (region < offsets[-1])[:, None]
        chunk = torch.where(is_owned, chunk.long(), target[:, None] * block_size + slots)
        source = chunk // block_size, chunk % block_size
        # How many tokens change their slots is known from the data only: this is for CPUs.
        if sources.is_cpu and _copy_pages(pools, target, *source):
            continue
        for pool in pools:
            pool[target] = pool[source]


def _copy_pages(pools: list[Tensor], target: Tensor, pages: Tensor, slots: Tensor) -> bool:
    """Copy whole pages, then the tokens that come from others; return false if they are many.

    Args:
        target: int64 `[R]`, pages to write.
        pages, slots: int64 `[R, N]`, where their tokens are.
    """
    block_size = slots.shape[1]
    base, moved = _whole_pages(pages, slots, torch.arange(block_size))
    if len(moved) > _MOST_MOVED * slots.numel():
        return False
    base = torch.where(base < 0, target, base)
    rows = moved // block_size, moved % block_size
    source = pages.flatten()[moved], slots.flatten()[moved]
    for pool in pools:
        # Copy pages in storage order, [D, N] or [N, D].
        stored = pool.transpose(1, 2) if pool.stride(1) == 1 else pool
        stored[target] = stored.index_select(0, base)
        pool[target[rows[0]], rows[1]] = pool[source]
    return True


def _whole_pages(pages: Tensor, slots: Tensor, own_slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the page that each row of tokens can be copied from as a whole, and all other tokens.

    Args:
        pages, slots: int64 `[R, N]`, where the tokens are.
        own_slots: int64 `[N]`, where they go.

    Returns:
        int64 `[R]`, -1 where none keeps its slot; int64, indices of the other tokens in the
        flattened rows.
    """
    keeps_slot = slots == own_slots
    base = torch.where(keeps_slot, pages, -1).amax(dim=1)
    moved = ~(keeps_slot & (pages == base[:, None]))
    return base, moved.flatten().nonzero().squeeze(1)
