# SPDX-License-Identifier: Apache-2.0
"""Which request holds which rows of the query pool, whose memory the worker has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm_tgvkv.shared.plan import NO_ROW


class QueryRows:
    """The scheduler's side: which request holds which rows."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows, NO_ROW, -1))
        self._held: dict[str, np.ndarray] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, request_id: str) -> bool:
        """Return whether a request holds rows."""
        return request_id in self._held

    def take(self, request_id: str, num_rows: int) -> bool:
        """Give a request that holds none `num_rows` rows; return False if too few are free."""
        if num_rows > len(self._free):
            return False
        self._held[request_id] = np.array([self._free.pop() for _ in range(num_rows)], np.int64)
        return True

    def of(self, request_id: str) -> np.ndarray | None:
        """Return the rows that a request holds, int64, or None."""
        return self._held.get(request_id)

    def give_back(self, request_ids: Iterable[str]) -> None:
        """Take back the rows of requests that were evicted, preempted or ended."""
        for request_id in request_ids:
            rows = self._held.pop(request_id, None)
            if rows is not None:
                self._free.extend(rows[::-1].tolist())
