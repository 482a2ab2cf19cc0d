# SPDX-License-Identifier: Apache-2.0
"""Instruments for a running engine: stopwatches, memory of calls, a smaller pool, waits."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_tgvkv.scheduler.scheduler import EvictionScheduler
from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.metrics import MetricsBuffer


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

    @contextmanager
    def watching(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Watch a method of an object inside the block only."""
        self.watch(owner, attribute, name)
        try:
            yield
        finally:
            delattr(owner, attribute)  # the class's is left

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()


class Metrics:
    """The places where an engine in this process collects metrics of evictions."""

    def __init__(self, scheduler: EvictionScheduler, loggers: list[Any]) -> None:
        self._counters = scheduler.records.counters
        self._loggers = [x for x in loggers if isinstance(x, EvictionPrometheusStatLogger)]
        if not self._loggers:
            raise RuntimeError("the engine exports no metrics of eviction")

    def switch(self, on: bool) -> None:
        """Switch the metrics on or off; without them the worker sends the same reports."""
        self._counters.metrics = MetricsBuffer() if on else None
        ours = EvictionPrometheusStatLogger
        for logger in self._loggers:
            logger.__class__ = ours if on else ours.__base__

    def check(self, on: bool) -> None:
        """Check that steps collect metrics, or none.

        Raises:
            RuntimeError: if they do otherwise.
        """
        exporting = all(type(x) is EvictionPrometheusStatLogger for x in self._loggers)
        collecting = self._counters.metrics is not None
        if (exporting, collecting) != (on, on):
            raise RuntimeError(f"metrics are switched {'on' if on else 'off'}, and are not")


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


class Waits:
    """The waits of an engine's requests for their next cut, which can be set aside.

    A request without a next cut is one whose last cut is behind it: it decodes, and stores nothing.
    """

    def __init__(self, scheduler: EvictionScheduler) -> None:
        self._scheduler = scheduler
        self._cuts: dict[str, Cut] = {}
        """Cuts that were set aside, by request id."""

    def switch(self, on: bool) -> None:
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
