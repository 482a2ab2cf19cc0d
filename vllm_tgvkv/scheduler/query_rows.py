# SPDX-License-Identifier: Apache-2.0
"""Which request holds which rows of the query pool, whose memory the worker has.

A request takes rows as its tokens that vote are computed, and gives all of them back at its cut. So
more requests wait for their cuts at a time than the pool has room for at their ends. Rows are given
only as long as all that hold some can still get the rest, one after the other (the banker's
algorithm): no two requests wait for each other's rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from vllm_tgvkv.shared.plan import NO_ROW


class QueryRows:
    """Hands out rows of the query pool."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows, NO_ROW, -1))
        self._num_rows = num_rows
        self._held: dict[str, list[int]] = {}
        self._owed: dict[str, int] = {}
        """Rows that each of them still has to get before its cut."""
        self._new: dict[str, int] = {}
        """Requests that took rows in this step, with the number that they had before."""
        self._is_short = False
        """Whether a request waits for its first rows in this step. Others that hold none wait, too,
        or a request that needs many could wait for ever."""

    @property
    def num_free(self) -> int:
        """Return the number of rows that nobody holds."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Return the number of rows that nobody holds or will need."""
        return max(len(self._free) - sum(self._owed.values()), 0)

    def take(self, request_id: str, num_rows: int, most: int) -> bool:
        """Let a request hold `num_rows` rows, of `most` at its cut; return False if it has to wait.

        It keeps what it holds in any case.
        """
        held = self._held.get(request_id, [])
        more, owed = num_rows - len(held), max(most - num_rows, 0)
        if more <= 0:
            return True
        if (self._is_short and not held) or not self._may_give(request_id, more, owed):
            self._is_short |= not held
            return False
        self._new.setdefault(request_id, len(held))
        self._held[request_id] = [*held, *(self._free.pop() for _ in range(more))]
        self._owed[request_id] = owed
        return True

    def take_spare(self, request_id: str, num_rows: int) -> bool:
        """Give a request `num_rows` rows unless it holds some, if nobody may need them.

        Half of the rows stay for requests that cannot go on without any.
        """
        if request_id in self._held:
            return True
        if self._is_short or num_rows > self.num_spare - self._num_rows // 2:
            return False
        return self.take(request_id, num_rows, num_rows)

    def _may_give(self, request_id: str, more: int, owed: int) -> bool:
        """Return whether all can get what they still need if a request gets `more` rows now."""
        free = len(self._free) - more
        if free < 0:
            return False
        if sum(self._owed.values()) - self._owed.get(request_id, 0) + owed <= free:
            return True  # at the same time, as nearly always
        holders = {name: (need, len(self._held[name])) for name, need in self._owed.items()}
        holders[request_id] = owed, len(self._held.get(request_id, ())) + more
        for need, num_held in sorted(holders.values()):
            if need > free:
                return False
            free += num_held
        return True

    def of(self, request_id: str) -> np.ndarray | None:
        """Return the rows that a request holds, int64, or None."""
        rows = self._held.get(request_id)
        return None if rows is None else np.array(rows, np.int64)

    def give_back(self, request_ids: Iterable[str]) -> None:
        """Take back the rows of requests that were evicted, preempted or ended."""
        for request_id in request_ids:
            self._shorten(request_id, 0)

    def end_step(self, scheduled: Container[str]) -> None:
        """Take back the rows of requests that took some and were not scheduled after all."""
        for request_id, number in self._new.items():
            if request_id not in scheduled:
                self._shorten(request_id, number)
        self._new, self._is_short = {}, False

    def _shorten(self, request_id: str, number: int) -> None:
        """Leave a request the first `number` of its rows."""
        rows = self._held.get(request_id)
        if rows is None:
            return
        self._owed[request_id] += len(rows) - number
        self._free.extend(reversed(rows[number:]))
        self._held[request_id] = rows[:number]
        if not number:
            del self._held[request_id], self._owed[request_id]
