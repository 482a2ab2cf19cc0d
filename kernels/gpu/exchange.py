# SPDX-License-Identifier: Apache-2.0
"""Copy of the tokens that come, from the tier to the slots of those that go, in one launch.

The tier may be host memory that the GPU reads: only what comes crosses the bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.exchange import Exchange
from vllm_tgvkv.kernels.gpu.compile import Variant, launches
from vllm_tgvkv.kernels.gpu.copy import BYTES_PER_PROGRAM, as_words, whole_slots


@triton.jit
def _fetch_kernel(
    tier,
    pool,
    stored,
    before,
    after,
    offsets,
    blocks,
    tier_blocks,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    TIER_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WORD_STRIDE: tl.constexpr,
):
    """Fill those of SLOTS slots of one page of the region to which another token comes.

    Strides are constants, so that the compiler can use accesses of 16 bytes.
    """
    page = tl.program_id(0)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    exists = slot < BLOCK_SIZE
    place = page.to(tl.int64) * BLOCK_SIZE + slot
    position = tl.load(after + place, mask=exists, other=0)
    comes = position != tl.load(before + place, mask=exists, other=0)
    if tl.max(comes.to(tl.int32)) > 0:
        end = tl.arange(0, PAIRS)
        # A page belongs to the pair after all whose pages end before it.
        ends = tl.load(offsets + 1 + end, mask=end < NUM_PAIRS, other=2147483647)
        pair = tl.sum((ends <= page).to(tl.int32))
        block = tl.load(tier_blocks + position // BLOCK_SIZE, mask=comes, other=0)
        source = (block * NUM_PAIRS + pair) * BLOCK_SIZE + position % BLOCK_SIZE
        target = tl.load(blocks + page // NUM_PAIRS) * NUM_PAIRS + page % NUM_PAIRS
        word = tl.arange(0, WORDS)[None, :]
        written = comes[:, None] & (word < NUM_WORDS)
        content = tl.load(tier + source[:, None] * TIER_STRIDE + word, mask=written)
        places = target * PAGE_STRIDE + slot[:, None] * SLOT_STRIDE + word * WORD_STRIDE
        tl.store(pool + places, content, mask=written)
        tl.store(stored + target * BLOCK_SIZE + slot, position, mask=comes)


def fetch_tokens(
    tier: Tensor, key_pages: Tensor, value_pages: Tensor, stored: Tensor, exchange: Exchange
) -> None:
    """Copy the tokens that come; see `kernels.exchange.fetch_tokens`."""
    num_pages, block_size = exchange.after.shape
    num_pairs = len(exchange.offsets) - 1
    for part, pool in enumerate(whole_slots(key_pages, value_pages)):
        words = as_words(pool)
        num_words = words.shape[2]
        padded = triton.next_power_of_2(num_words)
        slots = min(
            triton.next_power_of_2(block_size),
            max(1, BYTES_PER_PROGRAM // (padded * words.element_size())),
        )
        content = tier.view(words.dtype)
        _fetch_kernel[(num_pages, triton.cdiv(block_size, slots))](
            content[..., part * content.shape[2] // 2 :],
            words,
            stored,
            exchange.before.contiguous(),
            exchange.after.contiguous(),
            exchange.offsets.contiguous(),
            exchange.blocks.contiguous(),
            exchange.tier_blocks.contiguous(),
            NUM_PAIRS=num_pairs,
            PAIRS=triton.next_power_of_2(num_pairs),
            BLOCK_SIZE=block_size,
            NUM_WORDS=num_words,
            SLOTS=slots,
            WORDS=padded,
            TIER_STRIDE=content.stride(1),
            PAGE_STRIDE=words.stride(0),
            SLOT_STRIDE=words.stride(1),
            WORD_STRIDE=words.stride(2),
            num_warps=4,
        )


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    for size, block_size, pairs in ((128, 16, 1024), (64, 128, 28), (80, 32, 288), (256, 16, 112)):
        pages = torch.empty(2, block_size, 2 * size, dtype=torch.bfloat16)
        tier = torch.empty(1, pairs * block_size, 2 * size, dtype=torch.int16)
        stored, before, after = torch.empty(3, 2, block_size, dtype=torch.int32).unbind()
        offsets = torch.empty(pairs + 1, dtype=torch.int32)
        moves = Exchange(before, after, offsets, *torch.empty(2, 1, dtype=torch.int64).unbind())
        call = partial(fetch_tokens, tier, pages[..., :size], pages[..., size:], stored, moves)
        yield from launches(__name__, f"16-bit D{size} N{block_size} M{pairs}", call)
