# SPDX-License-Identifier: Apache-2.0
"""Which request holds which rows of the query pool, whose memory the worker has."""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from vllm_tgvkv.shared.plan import NO_ROW


class QueryRows:
    """Hands out rows of the query pool."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows, NO_ROW, -1))
        self._num_rows = num_rows
        self._held: dict[str, np.ndarray] = {}
        self._new: list[str] = []
        """Requests that took rows in this step."""
        self._is_short = False
        """Whether a request waits for rows in this step. Those after it take none, or a request
        that needs many could wait for ever."""

    @property
    def num_free(self) -> int:
        """Return the number of rows that nobody holds."""
        return len(self._free)

    def take(self, request_id: str, num_rows: int) -> bool:
        """Give a request `num_rows` rows unless it holds some; return False if it has to wait."""
        if request_id in self._held:
            return True
        if self._is_short or num_rows > len(self._free):
            self._is_short = True
            return False
        self._held[request_id] = np.array([self._free.pop() for _ in range(num_rows)], np.int64)
        self._new.append(request_id)
        return True

    def take_spare(self, request_id: str, num_rows: int) -> bool:
        """Give a request `num_rows` rows unless it holds some, if nobody may need them.

        Half of the rows stay for requests that cannot go on without any.
        """
        if request_id in self._held:
            return True
        if num_rows > len(self._free) - self._num_rows // 2:
            return False
        return self.take(request_id, num_rows)

    def of(self, request_id: str) -> np.ndarray | None:
        """Return the rows that a request holds, int64, or None."""
        return self._held.get(request_id)

    def give_back(self, request_ids: Iterable[str]) -> None:
        """Take back the rows of requests that were evicted, preempted or ended."""
        for request_id in request_ids:
            rows = self._held.pop(request_id, None)
            if rows is not None:
                self._free.extend(rows[::-1].tolist())

    def end_step(self, scheduled: Container[str]) -> None:
        """Take back the rows of requests that took some and were not scheduled after all."""
        self.give_back(name for name in self._new if name not in scheduled)
        self._new, self._is_short = [], False
