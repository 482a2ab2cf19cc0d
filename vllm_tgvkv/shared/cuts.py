# SPDX-License-Identifier: Apache-2.0
"""When a request's cache is cut, and to how many blocks: plain numbers, known before they happen.

The first cut evicts the prompt, at the end of the prefill or after some tokens of the answer. Later
ones make the cache smaller while the answer grows: a schedule evicts more of the prompt at given
tokens of the answer; a ceiling evicts from prompt and answer whenever they have grown by a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

When = Literal["pressure", "always"]
"""`always`: at a token that is known before. `pressure`: once memory is short, if ever."""

STAGES = (0.5, 0.2, 0.1, 0.05, 0.02)
"""Shares of the prompt that a request is cut to under pressure, as long as its budget is less."""


@dataclass(frozen=True)
class Cut:
    """One eviction of a request; blocks are counted for one (layer, head), on average."""

    at: int
    """Tokens of the request, its answer included, that are computed when it is made."""
    num_retained: int
    """k, blocks of the region that it leaves; an upper bound if there is a guard."""
    num_replaced: int
    """t, full blocks of the row, from its start, that the region replaces."""


@dataclass(frozen=True)
class Ceiling:
    """Most tokens that the full blocks of a decoding request hold, rounded to whole blocks."""

    max_tokens: int
    """Tokens that a cut leaves."""
    buffer: int
    """Tokens that may be added before the next cut; at least one block."""

    @classmethod
    def of(cls, max_tokens: int) -> Ceiling:
        """Return a ceiling with a buffer of a quarter of it.

        A cut copies `max_tokens` tokens, so its cost for each new token does not depend on them.
        """
        return cls(max_tokens, max(max_tokens // 4, 1))

    def at_least(self, num_tokens: int) -> Ceiling:
        """Return the ceiling, or a higher one if it is below a number of tokens."""
        return self if self.max_tokens >= num_tokens else Ceiling.of(num_tokens)

    def least_blocks(self, block_size: int) -> int:
        """Return the blocks that a cut leaves."""
        return max(self.max_tokens // block_size, 1)


@dataclass(frozen=True)
class Cuts:
    """All cuts of one request."""

    scheduled: Sequence[Cut]
    """The first cut and the scheduled ones, in order, each with fewer blocks than the last."""
    ceiling: Ceiling | None
    block_size: int
    longest: int
    """Tokens that the request may have in the end. A cut at the last ones would serve no token."""

    @property
    def first(self) -> Cut | None:
        """The first cut; None if only pressure cuts the request."""
        return self.scheduled[0] if self.scheduled else None

    def after(self, cut: Cut) -> Cut | None:
        """Return the cut that follows `cut`, or None."""
        if self.ceiling is None:
            later = next((later for later in self.scheduled if later.at > cut.at), None)
        else:
            later = self._under_ceiling(self.ceiling, cut)
        return later if later is not None and later.at + 1 < self.longest else None

    def peaks(self) -> Iterator[int]:
        """Yield the blocks that the request holds at each cut, fresh ones included.

        Under a ceiling, the cuts after the third are like the third and left out.
        """
        cut = self.first
        num_spared = 0
        for _ in range(max(len(self.scheduled), 3)):
            if cut is None:
                return
            yield -(-cut.at // self.block_size) - num_spared + cut.num_retained
            num_spared = cut.num_replaced - cut.num_retained
            cut = self.after(cut)

    def _under_ceiling(self, ceiling: Ceiling, cut: Cut) -> Cut:
        size, least = self.block_size, ceiling.least_blocks(self.block_size)
        most = max((ceiling.max_tokens + ceiling.buffer) // size, least + 1)
        # The first number of full blocks in the row with which more than `most` are held.
        num_full = cut.num_replaced - cut.num_retained + most + 1
        num_full = max(num_full, cut.at // size + 1)
        return Cut(num_full * size, least, num_full)


def plan_cuts(
    num_prompt_tokens: int,
    scheduled: Sequence[tuple[int, int]],
    ceiling: Ceiling | None,
    block_size: int,
    longest: int,
) -> Cuts:
    """Return a request's cuts.

    Args:
        scheduled: for each cut of the prompt, tokens of the answer and retained blocks. Cuts that
            would come no later than the one before, or retain no fewer blocks, are left out.
        ceiling: bounds the first cut, too; there is no schedule then.
        longest: tokens that the request may have in the end.
    """
    num_full = num_prompt_tokens // block_size
    cuts: list[Cut] = []
    for num_answer, num_retained in scheduled:
        if ceiling is not None:
            num_retained = min(num_retained, ceiling.least_blocks(block_size))
        at = num_prompt_tokens + num_answer
        if not cuts or (at > cuts[-1].at and num_retained < cuts[-1].num_retained):
            cuts.append(Cut(at, num_retained, num_full))
    return Cuts(cuts, ceiling, block_size, longest)
