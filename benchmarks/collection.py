# SPDX-License-Identifier: Apache-2.0
"""The metrics of a running engine: switched on and off, read, and timed alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_tgvkv.scheduler.scheduler import EvictionScheduler
from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger
from vllm_tgvkv.shared.counters import EvictionCounters
from vllm_tgvkv.shared.metrics import MetricsBuffer
from vllm_tgvkv.shared.plan import Outcome
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.stopwatch import PARTS


def exported() -> dict[str, float]:
    """Return samples of this process's Prometheus registry: eviction's, and vLLM's token count.

    The name is followed by the values of labels other than the model's and the engine's.
    """
    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if "kv_eviction" in sample.name or sample.name == "vllm:generation_tokens_total":
                labels = {k: v for k, v in sample.labels.items() if k not in _COMMON_LABELS}
                found[" ".join((sample.name, *labels.values()))] = sample.value
    return found


_COMMON_LABELS = ("model_name", "engine")


class Collection:
    """The places where an engine in this process collects metrics of evictions.

    Two engines differ by more than the cost of metrics, if only by where their memory lies. One
    engine that is switched from step to step differs by nothing else.
    """

    def __init__(self, scheduler: EvictionScheduler, evictor: Evictor, loggers: list[Any]) -> None:
        self.scheduler = scheduler
        self.evictor = evictor
        self.loggers = loggers

    def state(self) -> dict[str, bool]:
        """Return whether each place collects."""
        counters = self.scheduler.records.counters
        return {
            "scheduler": counters.metrics is not None,
            "logger": any(isinstance(each, EvictionPrometheusStatLogger) for each in self.loggers),
        }

    def switch(self, on: bool) -> None:
        """Switch the metrics on or off; without them the worker sends the same reports."""
        self.scheduler.records.counters.metrics = MetricsBuffer() if on else None
        ours = EvictionPrometheusStatLogger
        old, new = (ours.__base__, ours) if on else (ours, ours.__base__)
        for logger in self.loggers:
            if type(logger) is old:
                logger.__class__ = new

    def microseconds(self, calls: int) -> dict[str, float]:
        """Return what collection adds to a step, by what happens in it.

        From making the statistics to recording them in Prometheus, including the pipe between the
        processes of a server, less the same of stock vLLM.
        """
        pipe = _Pipe()
        outcome = Outcome(
            request_id="measured",
            first_block=1,
            num_blocks=None,
            method="tgv",
            seen={"text": 64, "vision": 576},
            kept={"text": 16, "vision": 48},
            seconds=dict.fromkeys(PARTS, 0.001),
        )
        observed = EvictionCounters(metrics=self.scheduler.records.counters.metrics)
        assert observed.metrics is not None, "metrics are off"

        def count(counters: EvictionCounters) -> None:
            counters.gave_back("tgv", 4)
            counters.evicted("tgv", 640, 64)
            counters.record_outcome(outcome)

        def with_ours() -> None:
            self._record(pipe.through(self.scheduler.make_stats()))

        def with_gauges() -> None:
            self.scheduler.records._last_gauges = 0.0
            with_ours()

        def with_eviction() -> None:
            count(observed)
            with_ours()

        def stock() -> None:
            make: Any = super(EvictionScheduler, self.scheduler).make_stats
            self._record(pipe.through(make()), stock=True)

        def stock_with_eviction() -> None:
            count(unobserved)
            stock()

        unobserved = EvictionCounters()
        return {
            "each step": _difference(with_ours, stock, calls),
            "gauges, once a second": _difference(with_gauges, stock, calls),
            "each eviction": _difference(with_eviction, stock_with_eviction, calls),
        }

    def _record(self, stats: SchedulerStats, stock: bool = False) -> None:
        for logger in self.loggers:
            if isinstance(logger, EvictionPrometheusStatLogger):
                owner: Any = super(EvictionPrometheusStatLogger, logger) if stock else logger
                owner.record(stats, None, engine_idx=0)


class _Pipe:
    """The encoding of statistics between the engine's process and the API server's."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def through(self, stats: SchedulerStats | None) -> SchedulerStats:
        frames = self._encoder.encode(EngineCoreOutputs(scheduler_stats=stats))
        arrived: SchedulerStats = self._decoder.decode(frames).scheduler_stats
        return arrived


def _difference(ours: Callable[[], None], stock: Callable[[], None], calls: int) -> float:
    """Return how much longer a call takes in microseconds, from medians of alternating calls."""
    seconds: dict[Callable[[], None], list[float]] = {ours: [], stock: []}
    for number in range(calls):
        for call in (ours, stock) if number % 2 else (stock, ours):
            start = time.perf_counter()
            call()
            seconds[call].append(time.perf_counter() - start)
    return 1e6 * (statistics.median(seconds[ours]) - statistics.median(seconds[stock]))
