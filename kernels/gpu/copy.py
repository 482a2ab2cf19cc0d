# SPDX-License-Identifier: Apache-2.0
"""Copy of the kept tokens of all layers and heads in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import Variant, launches

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
BYTES_PER_PROGRAM = 8192
"""Total size of a program's tokens: with 128 threads, four accesses of 16 bytes are in flight."""


@triton.jit(do_not_specialize_on_alignment=["new_blocks"])
def _copy_kernel(
    pool,
    sources,
    offsets,
    new_blocks,
    NUM_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WORD_STRIDE: tl.constexpr,
):
    """Fill SLOTS slots of one page of the region, unless no pair owns the page.

    Strides are constants, so that the compiler can use accesses of 16 bytes.
    """
    page = tl.program_id(0)
    if page < tl.load(offsets + NUM_PAIRS):
        slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
        exists = slot < BLOCK_SIZE
        place = page.to(tl.int64) * BLOCK_SIZE + slot
        source = tl.load(sources + place, mask=exists, other=0).to(tl.int64)
        source = source // BLOCK_SIZE * PAGE_STRIDE + source % BLOCK_SIZE * SLOT_STRIDE
        block = tl.load(new_blocks + page // NUM_PAIRS).to(tl.int64)
        target = (block * NUM_PAIRS + page % NUM_PAIRS) * PAGE_STRIDE + slot * SLOT_STRIDE
        word = tl.arange(0, WORDS)[None, :]
        written = exists[:, None] & (word < NUM_WORDS)
        word *= WORD_STRIDE
        content = tl.load(pool + source[:, None] + word, mask=written)
        tl.store(pool + target[:, None] + word, content, mask=written)


def copy_kept(
    key_pages: Tensor,
    value_pages: Tensor,
    sources: Tensor,
    offsets: Tensor,
    new_blocks: Tensor,
    num_pairs: int,
) -> None:
    """Copy the selected tokens; see `kernels.copy.copy_kept`.

    Exact: bits are moved as integers. One launch if each slot's value follows its key, as in pages
    `[N, 2D]`, otherwise one for keys and one for values. Pages that belong to no pair are not
    touched. There is no scratch memory and no synchronisation: the launch depends on shapes,
    strides and the number of pages.
    """
    num_pages, block_size = sources.shape
    if num_pages == 0:
        return
    for pool in whole_slots(key_pages, value_pages):
        words = as_words(pool)
        num_words = words.shape[2]
        padded = triton.next_power_of_2(num_words)
        slots = min(
            triton.next_power_of_2(block_size),
            max(1, BYTES_PER_PROGRAM // (padded * words.element_size())),
        )
        _copy_kernel[(num_pages, triton.cdiv(block_size, slots))](
            words,
            sources.contiguous(),
            offsets.contiguous(),
            new_blocks.contiguous(),
            NUM_PAIRS=num_pairs,
            BLOCK_SIZE=block_size,
            NUM_WORDS=num_words,
            SLOTS=slots,
            WORDS=padded,
            PAGE_STRIDE=words.stride(0),
            SLOT_STRIDE=words.stride(1),
            WORD_STRIDE=words.stride(2),
            num_warps=4,
        )


def whole_slots(keys: Tensor, values: Tensor) -> list[Tensor]:
    """Return one view of keys and values if each value follows its key, otherwise the two."""
    size = keys.shape[2]
    if (
        keys.dtype == values.dtype
        and keys.stride() == values.stride()
        and keys.stride(2) == 1
        and values.data_ptr() == keys.data_ptr() + size * keys.element_size()
    ):
        whole = (*keys.shape[:2], size + values.shape[2])
        return [keys.as_strided(whole, keys.stride())]
    return [keys, values]


def as_words(pool: Tensor) -> Tensor:
    """Return the pool as the widest integers that its strides allow."""
    size = pool.element_size()
    if pool.stride(2) == 1:
        in_bytes = [size * n for n in (pool.shape[2], *pool.stride()[:2], pool.storage_offset())]
        for dtype in _INTEGERS:
            if dtype.itemsize >= size and not any(n % dtype.itemsize for n in in_bytes):
                return pool.view(dtype)
    return pool.view(next(dtype for dtype in _INTEGERS if dtype.itemsize == size))


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    for size, block_size, pairs in ((128, 16, 1024), (64, 128, 28), (80, 32, 288), (256, 16, 112)):
        pages = torch.empty(2, block_size, 2 * size, dtype=torch.bfloat16)
        sources = torch.empty(pairs, block_size, dtype=torch.int32)
        region = torch.empty(pairs + 1, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        call = partial(copy_kept, pages[..., :size], pages[..., size:], sources, *region, pairs)
        yield from launches(__name__, f"16-bit D{size} N{block_size} M{pairs}", call)
