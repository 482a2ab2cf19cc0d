# SPDX-License-Identifier: Apache-2.0
"""Who shrinks when memory is short, and who gets the whole prompt back when it is not.

Before each step, the blocks that running requests will take and those that a waiting request was
refused for are compared with the free ones. If they are short, running requests are cut, a few
tokens ahead: the next tokens vote, and the fresh blocks of the cut are reserved at once. So a cut
never waits for memory, and nothing is done in steps without one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_tgvkv.blocks.manager import EvictingManager
from vllm_tgvkv.scheduler.candidate import Candidate
from vllm_tgvkv.scheduler.query_rows import QueryRows
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.prompt import PRESSURE_ROWS

_STEPS_AHEAD = 2
"""Steps that are scheduled and not computed when a cut is made."""
_CUT_STEPS = PRESSURE_ROWS + _STEPS_AHEAD
"""Steps until a cut that is decided now has freed memory, if as many tokens vote."""
_MOST_TOGETHER = 64
"""Waiting requests that are considered together, at most."""
_RESTORE_EVERY = 8
"""Steps between two looks for a request that may be restored."""
_RESTORE_AFTER = 4 * _RESTORE_EVERY
"""Steps after its last cut before a request is restored, so that it is not cut again at once."""
_ROOM = 0.1
"""Part of the pool that stays free after a request is restored."""


@dataclass(frozen=True)
class _Growth:
    """Blocks that running requests take until they have some more tokens."""

    near: int
    """Until the memory of a cut that is decided now is free: until the last of those who could be
    cut has voted, and two more steps are scheduled."""
    far: int
    """Until twice as many tokens. Cuts are decided if memory is short for these; when it is short
    for the near ones, there would be no room for their fresh blocks."""
    end: int
    """Until they end, if no answer stops by itself."""


class _Shrinkable(NamedTuple):
    """A request that decodes and may be cut further."""

    request: Request
    candidate: Candidate
    num_held: int
    """Blocks that hold its prompt now."""
    num_full: int
    """Full blocks of its prompt."""

    @property
    def at(self) -> int:
        """Tokens that are computed when a cut which is decided now is made."""
        return self.request.num_computed_tokens + self.candidate.num_votes


class _Option(NamedTuple):
    """A cut that may be made; options are ordered, the one with the least loss first."""

    loss: float
    """Part of the prompt that it leaves, negative."""
    not_freed: float
    """Blocks that it frees, negative."""
    arrival: float
    number: int
    """Of its request, among those that may be cut."""
    num_retained: int


class Pressure:
    """Decides cuts under pressure, and restores."""

    def __init__(
        self,
        manager: EvictingManager,
        candidates: Mapping[str, Candidate],
        query_rows: QueryRows,
        max_model_len: int,
        step_tokens: int,
        max_running: int,
        num_drafts: int = 0,
    ) -> None:
        """Make it for a scheduler.

        Args:
            candidates: by request id; the scheduler changes it.
            step_tokens: tokens that a step computes at most.
            max_running: requests that run at the same time at most.
            num_drafts: tokens that are drafted for each request in a step.
        """
        self._manager = manager
        drafts, num_lookahead = manager.others.drafts, manager.others.num_lookahead
        self._growing = ((manager, 0), *((each, num_lookahead) for each in drafts))
        """Managers of layers that hold every new token, and how many they hold in advance."""
        self._candidates = candidates
        self._query_rows = query_rows
        self._max_model_len = max_model_len
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._num_ahead = _STEPS_AHEAD * (1 + num_drafts)
        self._most_votes = PRESSURE_ROWS
        """Tokens that voted for any request so far, at most: a bound that a step need not seek."""
        self._step = 0
        self._late: set[str] = set()
        """Unfinished requests that pressure may cut; without one, admission is vLLM's."""
        self._due: dict[str, float] = {}
        """Blocks that the cuts which are decided and not made yet will free, by request id."""
        self._shrunk: dict[str, None] = {}
        """Requests that may be restored, the longest shrunk first."""

    def begin_step(self, running: Sequence[Request], waiting: Iterable[Request]) -> Request | None:
        """Decide cuts for the coming steps, or restore a request, which is returned."""
        self._step += 1
        manager = self._manager
        manager.num_kept_free = 0
        if not running or not self._late:
            return None
        num_free = manager.block_pool.get_num_free_blocks()
        first = next(iter(waiting), None) if len(running) < self._max_running else None
        is_quiet = first is None and not manager.order.prefills
        looks = bool(self._shrunk) and self._step % _RESTORE_EVERY == 0
        if is_quiet and not looks and num_free >= self._ample(len(running)):
            return None
        growth = self._growth(running, self._num_near(running))
        if growth.end + self._longest_blocks(first) > num_free:
            shrinkable = list(self._shrinkable(running))
            manager.num_kept_free = growth.far + self._fresh_blocks(shrinkable, first)
            wanted = manager.num_kept_free - num_free - sum(self._due.values())
            wanted += self._refused_blocks(waiting, len(running)) if first is not None else 0
            if wanted > 0 and shrinkable:
                self._decide(shrinkable, wanted, num_free - growth.near)
                return None
        return self._restore(running, growth, num_free) if looks and is_quiet else None

    def arrive(self, request_id: str, candidate: Candidate) -> None:
        """Know a request, which may be one that pressure cuts."""
        if candidate.stages:
            self._late.add(request_id)
            self._most_votes = max(self._most_votes, candidate.num_votes)

    def made(self, request_id: str) -> None:
        """Record that a cut which was decided is made."""
        if self._due.pop(request_id, None) is not None:
            self._candidates[request_id].cut_in_step = self._step
            self._shrunk.setdefault(request_id)

    def undo(self, request_id: str) -> None:
        """Forget the cuts of a request that was preempted."""
        self._due.pop(request_id, None)
        self._shrunk.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self.undo(request_id)
        self._late.discard(request_id)

    # -- what is needed -----------------------------------------------------------------

    def _ample(self, num_running: int) -> int:
        """Return free blocks with which running requests are not short for a while."""
        num_tokens = 2 * (self._most_votes + self._num_ahead)
        num_blocks = sum(cdiv(num_tokens, each.block_size) + 1 for each, _ in self._growing)
        return 2 * num_blocks * num_running

    def _longest(self, request: Request) -> int:
        return min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)

    def _longest_blocks(self, first: Request | None) -> int:
        """Return the blocks of a waiting request at its longest."""
        if first is None:
            return 0
        num_tokens = self._longest(first)
        return cdiv(num_tokens, self._manager.block_size) + self._manager.others.most(num_tokens)

    def _fresh_blocks(self, shrinkable: Iterable[_Shrinkable], first: Request | None) -> int:
        """Return the fresh blocks of one cut: of a running request, or of the one that waits."""
        least = min((each.candidate.stages[-1] for each in shrinkable), default=0)
        waits = self._candidates.get(first.request_id) if first is not None else None
        return max(least, waits.stages[-1]) if waits is not None and waits.stages else least

    def _num_near(self, running: Sequence[Request]) -> int:
        """Return the tokens of each request until a cut that is decided now has freed memory."""
        candidates = (self._candidates.get(request.request_id) for request in running)
        votes = (each.num_votes for each in candidates if each is not None and each.stages)
        return max(votes, default=PRESSURE_ROWS) + self._num_ahead

    def _growth(self, running: Sequence[Request], num_near: int) -> _Growth:
        growths = [self._growth_of(*each, running, num_near) for each in self._growing]
        return _Growth(*map(sum, zip(*growths, strict=True)))

    def _growth_of(
        self,
        manager: SingleTypeKVCacheManager,
        num_lookahead: int,
        running: Sequence[Request],
        num_near: int,
    ) -> tuple[int, int, int]:
        """Return the fields of a `_Growth` for one group of layers."""
        rows, size = manager.req_to_blocks, manager.block_size
        near = far = end = 0
        for request in running:  # in every step while memory is short, so without calls
            num_known = request.num_tokens
            if request.num_computed_tokens > num_known:
                num_known = request.num_computed_tokens
            num_known += num_lookahead
            num_left = request.num_prompt_tokens + request.max_tokens + num_lookahead - num_known
            if num_left > self._max_model_len - num_known:
                num_left = self._max_model_len - num_known
            num_room = len(rows[request.request_id]) * size - num_known
            if num_left > num_room:
                end += -((num_room - num_left) // size)
                if num_room < 2 * num_near:
                    far += -((num_room - min(num_left, 2 * num_near)) // size)
                    if num_room < num_near:
                        near += -((num_room - min(num_left, num_near)) // size)
        return near, far, end

    def _refused_blocks(self, waiting: Iterable[Request], num_running: int) -> int:
        """Return the blocks of the request that was refused, and of those that follow it.

        All of them could be computed in the steps that a cut takes. What the prefix cache has of
        them is known for the refused one only, which may have been aborted meanwhile.
        """
        manager = self._manager
        if manager.refused is None:
            return 0
        refused, num_blocks = manager.refused
        num_tokens, total = _CUT_STEPS * self._step_tokens, 0
        most = min(self._max_running - num_running, _MOST_TOGETHER)
        for request in itertools.islice(waiting, most):
            num_tokens -= request.num_tokens
            if request.request_id == refused:
                total += num_blocks + manager.others.most(request.num_tokens)
            elif num_tokens < 0:
                break
            else:
                total += cdiv(request.num_tokens, manager.block_size)
                total += manager.others.num_drafting(request.num_tokens)
        return total + manager.num_watermark

    # -- cuts ---------------------------------------------------------------------------

    def _shrinkable(self, running: Sequence[Request]) -> Iterator[_Shrinkable]:
        """Yield the requests that decode and may be cut further."""
        size, compressions = self._manager.block_size, self._manager.compressions
        for request in running:
            candidate = self._candidates.get(request.request_id)
            if candidate is None or not candidate.stages or candidate.cut is not None:
                continue
            num_computed, num_prompt = request.num_computed_tokens, request.num_prompt_tokens
            if num_computed < num_prompt or num_computed < request.num_tokens - 1:
                continue
            num_full = num_prompt // size
            num_held = compressions[request.request_id].num_retained or num_full
            if candidate.stages[-1] < num_held:
                found = _Shrinkable(request, candidate, num_held, num_full)
                if found.at + 1 < candidate.cuts.longest:
                    yield found

    def _decide(self, shrinkable: Sequence[_Shrinkable], wanted: float, num_free: int) -> None:
        """Decide cuts that free `wanted` blocks, with at most `num_free` fresh ones.

        All requests are cut to the first stage before one is cut to the second; among those of a
        stage the one that frees most comes first. Where there is no room for the fresh blocks of a
        stage, a lower one takes its place, which needs fewer.
        """
        chosen: dict[int, _Option] = {}
        for option in heapq.merge(*itertools.starmap(self._options, enumerate(shrinkable))):
            if wanted <= 0:
                break
            before = chosen.get(option.number)
            wanted += option.not_freed - (before.not_freed if before else 0)
            chosen[option.number] = option
        num_rows = self._query_rows.num_spare
        for number, option in chosen.items():
            request, candidate, _, num_full = each = shrinkable[number]
            lower = (k for k in candidate.stages if k <= option.num_retained)
            fitting = next((k for k in lower if k <= num_free), None)
            if fitting is None or candidate.num_stored > num_rows:
                continue
            num_rows -= candidate.num_stored
            num_free -= fitting
            candidate.cut = Cut(each.at, fitting, num_full)
            self._manager.plan_cut(request, candidate.cut)
            self._query_rows.give_back([request.request_id])  # of a choice that will not be made
            self._due[request.request_id] = option.num_retained - option.not_freed

    def _options(self, number: int, each: _Shrinkable) -> Iterator[_Option]:
        """Yield the cuts of a request that free blocks, in order."""
        request = each.request
        num_given_back = self._manager.num_given_back(request.request_id, each.num_full)
        for num_retained in each.candidate.stages:
            if num_retained < min(each.num_held, num_given_back):
                loss, not_freed = -num_retained / each.num_full, num_retained - num_given_back
                yield _Option(loss, not_freed, request.arrival_time, number, num_retained)

    # -- restoring ----------------------------------------------------------------------

    def _restore(
        self, running: Sequence[Request], growth: _Growth, num_free: int
    ) -> Request | None:
        """Restore the request that has been shrunk longest, if all of its prompt is there."""
        manager = self._manager
        num_free -= growth.far + int(_ROOM * manager.block_pool.num_gpu_blocks)
        for name in tuple(self._shrunk):
            candidate = self._candidates[name]
            if candidate.cut is not None or self._step - candidate.cut_in_step < _RESTORE_AFTER:
                return None
            num_taken = manager.num_to_restore(name)
            if num_taken is None:
                del self._shrunk[name]
                continue
            if num_taken > num_free:
                return None
            manager.restore(name)
            del self._shrunk[name]
            return next(request for request in running if request.request_id == name)
        return None
