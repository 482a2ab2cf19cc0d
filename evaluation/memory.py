# SPDX-License-Identifier: Apache-2.0
"""The memory of a request over its life: blocks held in each of its steps.

Blocks are counted as those of one (layer, head), on average. Step n computes the answer's token n;
step 0 is the prefill, taken as one step, which computes the prompt. The last token of an answer is
never computed, so an answer of A tokens takes the steps 0 to A - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.cuts import plan_cuts

Cut = tuple[int, int, int]
"""Computed tokens of the answer, blocks held before it and after it, from a request's report."""


def planned_cuts(
    prompt_tokens: int, steps: Sequence[tuple[int, float]], block_size: int
) -> list[Cut]:
    """Return the cuts of a request whose answer is longer than its schedule.

    Args:
        steps: tokens of the answer, and the share of the prompt that is kept from then on.
    """
    blocks = [
        (after, Budget(fraction=share).retained_blocks(prompt_tokens, block_size))
        for after, share in steps
    ]
    longest = prompt_tokens + max(after for after, _ in steps) + 2
    cuts: list[Cut] = []
    num_spared = 0
    for cut in plan_cuts(prompt_tokens, blocks, None, block_size, longest).scheduled:
        full = -(-cut.at // block_size)
        before, num_spared = num_spared, cut.num_replaced - cut.num_retained
        cuts.append((cut.at - prompt_tokens, full - before, full - num_spared))
    return cuts


def mean_held(
    prompt_tokens: int, answer_tokens: int, cuts: Sequence[Cut], block_size: int
) -> float:
    """Return the blocks held, summed over the steps that decode, as a share of the full cache's.

    An answer of one token has no step that decodes; its share is 1.
    """
    held, full = held_blocks(prompt_tokens, answer_tokens, cuts, block_size)
    return float(held[1:].sum() / full[1:].sum()) if answer_tokens > 1 else 1.0


def held_blocks(
    prompt_tokens: int, answer_tokens: int, cuts: Sequence[Cut], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of each step, int ``[A]``, and those that the full cache would hold.

    A cut comes at the end of its step. In this step the request holds its old blocks and the fresh
    ones to which the kept tokens are copied.

    Args:
        answer_tokens: A, its end included.
        cuts: evictions of the prompt, in order.
    """
    full = -(-(prompt_tokens + np.arange(answer_tokens)) // block_size)
    held = full.copy()
    for after, _, num_left in cuts:
        if after < answer_tokens:
            held[after] += num_left - (full[after] - prompt_tokens // block_size)
            held[after + 1 :] = full[after + 1 :] - (full[after] - num_left)
    return held, full
