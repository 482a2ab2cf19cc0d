# SPDX-License-Identifier: Apache-2.0
"""What a connector stores of requests that are cut.

A store has blocks by the hashes of their tokens, so that other requests find them. Keys that are
computed after a cut depend on what it left and must not be found under these hashes. And a store
copies blocks after the step that computes them, when a cut has given them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class Stores:
    """Keeps a connector's store true while requests are cut."""

    def __init__(self) -> None:
        self._hashers: dict[str, Callable[[Request], Any] | None] = {}
        """What hashed the blocks of requests that are cut."""
        self._cut: set[str] = set()
        """Requests that were cut since the connector was last told."""

    def cut(self, request: Request) -> None:
        """Record that blocks of a request go back to the pool; its later ones get no hashes."""
        if request.request_id not in self._hashers:
            self._hashers[request.request_id] = request._block_hasher
            request._block_hasher = None
        self._cut.add(request.request_id)

    def undo(self, request: Request) -> None:
        """Hash a preempted request's blocks again, all of which are computed over a whole cache."""
        if request.request_id in self._hashers:
            request._block_hasher = self._hashers.pop(request.request_id)
            request.update_block_hashes()

    def forget(self, request_id: str) -> None:
        self._hashers.pop(request_id, None)

    def told(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step as the connector sees it, and begin a new list.

        Of preempted requests it finishes all copies before the step writes to any block; and the
        step that follows a cut is the first to write to those that it gave back.
        """
        cut, self._cut = self._cut, set()
        if not cut:
            return output
        return replace(output, preempted_req_ids=cut.union(output.preempted_req_ids or ()))
