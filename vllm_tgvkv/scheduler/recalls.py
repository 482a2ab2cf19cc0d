# SPDX-License-Identifier: Apache-2.0
"""Which requests may recall evicted tokens, and whose the blocks of the tier are."""

from __future__ import annotations

import numpy as np


class Recalls:
    """Hands out blocks of the tier; where they are short, who recalled longest ago loses its own.

    A request has as many as its prompt has full blocks, from its first cut until it ends, is
    preempted or gets its prompt back.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_blocks = num_blocks
        self._held: dict[str, np.ndarray] = {}
        """By request id; the one that recalled longest ago comes first."""
        self._new: set[str] = set()
        """Requests whose blocks are written in this step, so that nobody can have them."""
        self._ended: list[str] = []

    @property
    def num_held(self) -> int:
        return self._num_blocks - len(self._free)

    def has(self, request_id: str) -> bool:
        return request_id in self._held

    def begin(self, request_id: str, num_blocks: int) -> tuple[np.ndarray | None, list[str]]:
        """Give a request blocks of the tier, and take them from others if needed.

        Returns:
            The blocks, int32, or None if it can have none; and the requests that lost theirs.
        """
        num_new = sum(len(self._held[name]) for name in self._new)
        if num_blocks > self._num_blocks - num_new:
            return None, [request_id]
        losing = []
        while num_blocks > len(self._free):
            losing.append(next(name for name in self._held if name not in self._new))
            self.end(losing[-1])
        self._new.add(request_id)
        blocks = np.array([self._free.pop() for _ in range(num_blocks)], np.int32)
        self._held[request_id] = blocks
        return blocks, losing

    def recalled(self, request_id: str) -> None:
        """Record that tokens of a request come back."""
        if (blocks := self._held.pop(request_id, None)) is not None:
            self._held[request_id] = blocks

    def end(self, request_id: str) -> None:
        """Take back a request's blocks, if it has some."""
        if (blocks := self._held.pop(request_id, None)) is not None:
            self._free.extend(blocks[::-1].tolist())
            self._ended.append(request_id)
            self._new.discard(request_id)

    def drain(self) -> list[str]:
        """Return the requests that lost their blocks since the last call; end the step."""
        self._new.clear()
        ended, self._ended = self._ended, []
        return ended

    def check(self, compressed: set[str]) -> None:
        """Check that each block has one owner, which is a compressed request.

        Raises:
            AssertionError: if not.
        """
        numbers = [*self._free, *(n for blocks in self._held.values() for n in blocks.tolist())]
        assert sorted(numbers) == list(range(self._num_blocks)), "a block of the tier is lost"
        assert self._held.keys() <= compressed, "a whole request holds blocks of the tier"
