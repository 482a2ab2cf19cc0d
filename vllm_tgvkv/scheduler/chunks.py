# SPDX-License-Identifier: Apache-2.0
"""Where the chunks of a step end, and which requests wait."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from vllm.v1.request import Request, RequestStatus

from vllm_tgvkv.blocks.manager import EvictingManager
from vllm_tgvkv.scheduler.candidate import Candidate
from vllm_tgvkv.scheduler.query_rows import QueryRows


class ChunkLimits:
    """Limits the chunk of each request of a step; a limit of 0 makes the request wait."""

    def __init__(
        self,
        manager: EvictingManager,
        query_rows: QueryRows,
        most_cut_tokens: int,
        state_interval: int | None,
    ) -> None:
        """Make the limits of a scheduler.

        Args:
            most_cut_tokens: tokens of all requests together that are evicted in one step or have
                column sums, where their scores will be, which bounds the memory of both
                (`worker/memory.py`). One more request waits.
            state_interval: tokens between two states that the prefix cache may hold; None if it
                holds none.
        """
        self._manager = manager
        self._query_rows = query_rows
        self._most_cut_tokens = most_cut_tokens
        self._state_interval = state_interval
        self._num_cut_tokens = 0
        """Tokens of this step's evictions, but for requests with column sums."""
        self._summed: dict[str, int] = {}
        """Tokens of requests whose column sums the worker has, from their first chunk on."""
        self._began: list[str] = []
        """Requests that began to sum in this step."""
        self._was_cut: list[str] = []
        """Requests whose sums are gone at the end of this step."""
        self._cut_waits = False
        """Whether an eviction has to wait in this step. No request begins to sum then, or in the
        next step."""
        self._cut_waited = False
        """The same of the step before."""
        self._queue_waits = False
        """Whether a request that is not admitted yet has to wait in this step."""

    def begin_step(self) -> None:
        for request_id in self._was_cut:
            self.forget(request_id)
        self._began, self._was_cut, self._cut_waited = [], [], self._cut_waits
        self._num_cut_tokens, self._queue_waits, self._cut_waits = 0, False, False

    def end_step(self, scheduled: Container[str]) -> None:
        """Undo what was noted of requests that were not scheduled after all."""
        for request_id in self._began:
            if request_id not in scheduled:
                self.forget(request_id)
        self._was_cut = [name for name in self._was_cut if name in scheduled]

    def forget(self, request_id: str) -> None:
        """Take back the memory of a request's column sums: it was evicted, preempted or ended."""
        self._summed.pop(request_id, None)

    def limit(self, request: Request, candidate: Candidate | None, start: int, num_new: int) -> int:
        """Return the tokens of a chunk from `start`, at most `num_new`.

        Requests that are not admitted yet wait behind one that has to wait, so that it is not
        overtaken for ever: vLLM 0.32 asks no further, 0.33 does.
        """
        is_admitted = request.status is RequestStatus.RUNNING
        if (
            is_admitted
            and (
                candidate is None
                or candidate.next_at is None
                or candidate.votes_after(start + num_new)
            )
            and request.request_id not in self._manager.order.prefills
        ):
            return num_new  # most requests in most steps
        if num_new == 0 or (self._queue_waits and not is_admitted):
            return 0
        num_new = self._limit(request, candidate, start, num_new)
        self._queue_waits |= num_new == 0 and not is_admitted
        return num_new

    def _limit(
        self, request: Request, candidate: Candidate | None, start: int, num_new: int
    ) -> int:
        """Return the tokens of a chunk; 0 if blocks, query rows or the step's tokens are short.

        A candidate waits if earlier prefills need the blocks, or if it has to store queries and no
        rows are left for them.
        """
        end = start + num_new
        if candidate is not None and (next_at := candidate.next_at) is not None:
            end = self._end_of_chunk(request, candidate, next_at, start, end)
            if not self._takes_query_rows(request.request_id, candidate, start, end):
                return 0
        if not self._manager.may_take(request, end):
            return 0
        if not self._has_memory(request.request_id, candidate, start, end):
            return 0
        return end - start

    def _has_memory(
        self, request_id: str, candidate: Candidate | None, start: int, end: int
    ) -> bool:
        """Return whether there is memory for a chunk's column sums, or for the cut after it.

        Sums take the memory of the cut that they are for, so a request that has some never waits.
        """
        if candidate is None or candidate.cut is None:
            return True
        cut = candidate.cut
        is_summed = cut is candidate.cuts.first and candidate.voters.every_row
        if request_id not in self._summed and (is_summed or end == cut.at):
            num_tokens, num_others = cut.at * candidate.weight, sum(self._summed.values())
            num_others += self._num_cut_tokens
            is_full = num_others > 0 and num_others + num_tokens > self._most_cut_tokens
            if is_summed:
                if start == 0 and (is_full or self._cut_waits or self._cut_waited):
                    return False
                self._summed[request_id] = num_tokens
                self._began.append(request_id)
            elif is_full:
                self._cut_waits = True
                return False
            else:
                self._num_cut_tokens += num_tokens
        if end == cut.at and is_summed:
            self._was_cut.append(request_id)
        return True

    def _end_of_chunk(
        self, request: Request, candidate: Candidate, next_at: int, start: int, end: int
    ) -> int:
        """Return where the chunk of a candidate ends, at most at `end`.

        It ends where the candidate is evicted or its tokens are chosen again, and where a later
        request with the same prompt takes over a cached state: only the state at the end of a
        chunk can be cached. Only a preempted
        request has tokens after its cut when it prefills: they follow in the next chunk, over the
        compressed cache, as they were computed the first time.
        """
        end = min(end, next_at)
        if (interval := self._state_interval) is not None:
            reusable = self._manager.compressions[request.request_id].num_reusable
            if start < reusable // interval * interval < end:
                end = reusable // interval * interval
        num_known = request.num_tokens + request.num_output_placeholders
        if end > num_known and end == next_at:
            # A draft would evict, and it may be rejected: wait until the token is known.
            end -= 1
        if candidate.voters_of_cut.every_row:
            end = min(end, num_known)  # a draft that is rejected must not be summed
        return end

    def _takes_query_rows(
        self, request_id: str, candidate: Candidate, start: int, end: int
    ) -> bool:
        """Take query rows for a chunk of a candidate if it needs any; return False if it waits.

        It needs none if all tokens that vote are in the chunk that evicts. Otherwise it takes one
        with each token that votes, and holds them until the cut. Two requests cannot wait for
        each other for ever: one that waits for rows does not advance and so holds nobody back
        (`blocks/admission.py`), and if blocks run out vLLM preempts the last request with its rows.
        """
        if candidate.votes_after(end):
            return True
        rows = candidate.voters_of_cut.rows
        if not len(rows) or end <= rows[0]:
            return True
        if candidate.chooses_next:  # which can do without
            if not self._query_rows.take_spare(request_id, len(rows)):
                candidate.choose_later()
            return True
        assert candidate.cut is not None
        if end == candidate.cut.at and start <= max(rows[0], candidate.num_cached):
            return True
        return self._query_rows.take(request_id, int(np.searchsorted(rows, end)), len(rows))
