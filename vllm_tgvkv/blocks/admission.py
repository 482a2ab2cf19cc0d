# SPDX-License-Identifier: Apache-2.0
"""The order in which prompts that prefill together finish: a banker's order, in plain numbers.

A prompt needs all of its blocks and the fresh ones of its eviction before it shrinks. Prompts in
flight would take these from each other, be preempted and start again. So they finish in the order
in which they were admitted: the first can take all it still needs from the free blocks, the second
once the first has given back its own, and so on. What decoding requests take meanwhile is not in
these sums; vLLM preempts for it as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Prefill:
    """An admitted prompt, counted in blocks."""

    num_prompt: int
    """Blocks of the prompt; of the whole request, if it is not evicted."""
    num_replayed: int = 0
    """Blocks of tokens that it generated before a preemption and computes again."""
    num_fresh: int = 0
    """Blocks that its eviction copies into; 0 if there is no eviction, or after it."""
    num_returned: int = 0
    """Blocks that its eviction gives back; those that other requests share are not counted."""
    num_shared: int = 0
    """Blocks of its prefix that other requests hold as well."""
    num_tokens: int = 0
    """Tokens at its end; its windows hold the last of them."""
    num_left: int = field(default=0, init=False)
    """Blocks that it still takes, including blocks of windows."""
    num_passing: int = field(default=0, init=False)
    """Blocks of windows that it gives back by its end."""
    number: int = field(default=0, init=False)
    """Place in the order of admission."""
    last_step: int = field(default=0, init=False)
    """Step in which it advanced last."""


@dataclass
class Sums:
    """Prefills that finish one after the other."""

    needed: int | None = None
    """Free blocks without which one of them could not finish; None if there are no prefills."""
    change: int = 0
    """Net change in free blocks after these prefills finish."""

    @classmethod
    def of(cls, prefills: Iterable[Prefill]) -> Sums:
        sums = cls()
        for prefill in prefills:
            sums.add(prefill)
        return sums

    def add(self, prefill: Prefill) -> None:
        self.change -= prefill.num_left
        self.needed = max(self.needed or 0, -self.change)
        self.change += prefill.num_returned + prefill.num_passing


class PrefillOrder:
    """Admitted requests that do not have all of their blocks yet, in the order of admission."""

    def __init__(self) -> None:
        self.prefills: dict[str, Prefill] = {}
        self._num_admitted = 0
        self._step = 0
        self._advanced: Sums | None = Sums()
        """Prefills that advanced in this step. vLLM goes through them in order, so that each costs
        an addition; None once something happened out of order."""
        self._last_advanced = 0
        """Number of the last of them."""

    def begin_step(self) -> None:
        self._step += 1
        self._advanced, self._last_advanced = Sums(), 0

    def admit(self, request_id: str, prefill: Prefill) -> None:
        """Add a request behind the others, which keep the blocks that it shares with them.

        It is not known which of them would have given these back. They are deducted from the
        first ones, so that the others do not count on them too early.
        """
        num_shared = prefill.num_shared
        for other in self.prefills.values():
            if not num_shared:
                break
            kept = min(other.num_returned, num_shared)
            other.num_returned -= kept
            num_shared -= kept
            self._advanced = None
        self._num_admitted += 1
        prefill.number = self._num_admitted
        self.prefills[request_id] = prefill

    def advance(self, request_id: str, num_held: int, windows: tuple[int, int] = (0, 0)) -> None:
        """Record that a prefill runs in this step.

        One that has all its blocks leaves, once its windows are no longer than its answer needs.

        Args:
            num_held: blocks that it holds now, including reserved ones but no blocks of windows.
            windows: blocks of windows that it still takes, and that it gives back by its end.
        """
        prefill = self.prefills[request_id]
        num_left = prefill.num_prompt + prefill.num_fresh - num_held
        # Replayed tokens take the place of blocks that the prompt gives back.
        num_left += max(prefill.num_replayed - prefill.num_returned, 0)
        num_taken, prefill.num_passing = windows
        if num_left <= 0 and not prefill.num_fresh and not prefill.num_passing:
            self.leave(request_id)
            return
        prefill.num_left = max(num_left, 0) + num_taken
        prefill.last_step = self._step
        if self._advanced is not None and prefill.number > self._last_advanced:
            self._advanced.add(prefill)
            self._last_advanced = prefill.number
        else:
            self._advanced = None

    def evict(self, request_id: str, num_held: int, windows: tuple[int, int] = (0, 0)) -> None:
        """Record that a prompt has given back its blocks; it stays if it has tokens to replay.

        Args:
            num_held: blocks in its row now, null blocks included.
            windows: as in `advance`.
        """
        prefill = self.prefills[request_id]
        prefill.num_fresh = prefill.num_returned = 0
        self.advance(request_id, num_held, windows)

    def leave(self, request_id: str) -> None:
        """Drop a request that ended, was preempted or has all of its blocks; unknown ones too."""
        prefill = self.prefills.pop(request_id, None)
        if prefill is not None and prefill.last_step == self._step:
            self._advanced = None

    def may_take(self, request_id: str, num_blocks: int, num_free: int) -> bool:
        """Return whether a prefill may take blocks now, and those before it still finish.

        Only prefills that advance in this step are waited for: one that does not may itself wait
        for something that this one holds, such as a place in the encoder's cache.
        """
        prefill, sums = self.prefills[request_id], self._advanced
        if sums is None or prefill.number <= self._last_advanced:
            sums = Sums.of(
                other
                for other in self.prefills.values()
                if other.number < prefill.number and other.last_step == self._step
            )
        needed = sums.needed
        return needed is None or num_blocks + needed <= num_free

    def needed(self) -> int:
        """Return the free blocks without which one of the prefills could not finish."""
        return Sums.of(self.prefills.values()).needed or 0

    def net_change(self, num_shared: int) -> int:
        """Return the net change in free blocks after all prefills finish.

        Args:
            num_shared: blocks that they do not give back, because the next request shares them.
        """
        prefills = self.prefills.values()
        num_returned = sum(prefill.num_returned for prefill in prefills)
        change = sum(prefill.num_passing - prefill.num_left for prefill in prefills)
        return max(num_returned - num_shared, 0) + change
