# SPDX-License-Identifier: Apache-2.0
"""Stopwatches of functions, and switches inside a running engine."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_tgvkv.scheduler.scheduler import EvictionScheduler
from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.metrics import MetricsBuffer
from vllm_tgvkv.shared.plan import StepPlan
from vllm_tgvkv.worker.evictor import Evictor


class Stopwatches:
    """Wall-clock seconds and calls of functions by name; a nested call counts in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def watch(self, owner: Any, attribute: str, name: str | None = None) -> None:
        """Replace `owner.attribute` by a timed version."""
        function = getattr(owner, attribute)
        name = name or attribute

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1

        setattr(owner, attribute, timed)

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()


class Metrics:
    """The places where an engine in this process collects metrics of evictions."""

    def __init__(self, scheduler: EvictionScheduler, loggers: list[Any]) -> None:
        self._counters = scheduler.records.counters
        self._loggers = [x for x in loggers if isinstance(x, EvictionPrometheusStatLogger)]

    def turn(self, on: bool) -> None:
        """Switch the metrics on or off; without them the worker sends the same reports."""
        self._counters.metrics = MetricsBuffer() if on else None
        ours = EvictionPrometheusStatLogger
        for logger in self._loggers:
            logger.__class__ = ours if on else ours.__base__

    def check(self, on: bool) -> None:
        """Check that the last step collected and exported metrics, or none.

        Raises:
            RuntimeError: if it did otherwise.
        """
        exporting = [type(x) is EvictionPrometheusStatLogger for x in self._loggers]
        collecting = self._counters.metrics is not None
        if not exporting or {*exporting, collecting} != {on}:
            raise RuntimeError(f"metrics are switched {'on' if on else 'off'}, and are not")


class Waits:
    """The waits of an engine's requests for their next cut, which can be set aside.

    A request without a next cut is one whose last cut is behind it: it decodes, and stores nothing.
    """

    def __init__(self, scheduler: EvictionScheduler, evictor: Evictor) -> None:
        self._scheduler = scheduler
        self._evictor = evictor
        self._cuts: dict[str, Cut] = {}
        """Cuts that were set aside, by request id."""

    def turn(self, on: bool) -> None:
        """Let all requests wait for their cuts, or none."""
        candidates = self._scheduler.candidates
        if on:
            aside, self._cuts = self._cuts, {}
            changed: dict[str, Cut | None] = {n: c for n, c in aside.items() if n in candidates}
        else:
            waiting = {n: c.cut for n, c in candidates.items() if c.cut is not None}
            self._cuts.update(waiting)
            changed = dict.fromkeys(waiting)
        for request_id, cut in changed.items():
            candidates[request_id].cut = cut
            self._scheduler.manager.expect(self._scheduler.requests[request_id], cut)

    def check(self, on: bool) -> None:
        """Check that all running requests stored a query in the last step, or none.

        Raises:
            RuntimeError: if they did otherwise.
        """
        stored, wanted = num_stored(self._evictor.plan), len(self._scheduler.running) if on else 0
        if stored != wanted:
            raise RuntimeError(f"{stored} tokens stored queries in a step, instead of {wanted}")


def spoil_drafts(drafter: Any, accepted: float, vocabulary: int) -> None:
    """Replace drafted tokens by others, each with a probability of 1 - `accepted`.

    A draft of random weights agrees with its model always or never.
    """
    propose = drafter.propose
    random = torch.Generator().manual_seed(0)

    @functools.wraps(propose)
    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens: torch.Tensor = propose(*args, **kwargs)
        is_kept = torch.rand(tokens.shape, generator=random) < accepted
        return torch.where(is_kept, tokens, (tokens + 1) % vocabulary)

    drafter.propose = spoiled


def num_stored(plan: StepPlan) -> int:
    """Return the number of a step's tokens whose queries are stored until they vote."""
    return sum(len(part.rows) for part in plan.observations if part.stored is not None)


@contextmanager
def reduced_pool(scheduler: Scheduler, num_tokens: int) -> Iterator[None]:
    """Leave only the free blocks for `num_tokens` in a scheduler's pool inside the block.

    Raises:
        ValueError: if fewer are free.
    """
    pool = scheduler.kv_cache_manager.block_pool
    num_left = -(-num_tokens // scheduler.block_size)
    num_taken = pool.get_num_free_blocks() - num_left
    if num_taken < 0:
        raise ValueError(f"{num_left} blocks are asked for, and {num_left + num_taken} are free")
    taken = pool.get_new_blocks(num_taken)
    try:
        yield
    finally:
        pool.free_blocks(reversed(taken))
