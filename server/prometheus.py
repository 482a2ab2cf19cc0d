# SPDX-License-Identifier: Apache-2.0
"""vLLM's Prometheus logger, which also exports eviction's metrics on the same `/metrics`."""

from __future__ import annotations

import itertools
from typing import Any, get_args

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from vllm_tgvkv.config.server import EvictionConfig, config_of
from vllm_tgvkv.shared.counters import SKIP_REASONS
from vllm_tgvkv.shared.metrics import (
    HANDOVERS,
    LAYERS,
    METRICS,
    STATES,
    TIER_FAULTS,
    Metric,
    take_metrics,
)
from vllm_tgvkv.shared.report import CutCause


class EvictionPrometheusStatLogger(PrometheusStatLogger):
    """Stock logger, with eviction's metrics if the server evicts.

    With several API servers vLLM sends each of an engine's statistics to any of them, and any of
    them answers a scrape for all their processes. So every metric adds up, gauges too: the last
    value that a process has set may not be the engine's last.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self._evictions: dict[str, Counter | Gauge | Histogram] = {}
        config = config_of(vllm_config)
        if config.active:
            self._evictions = {metric.name: self._make(metric) for metric in METRICS.values()}
            self._begin_at_zero(config)

    def record(
        self, scheduler_stats: SchedulerStats | None, *args: Any, engine_idx: int = 0, **kwargs: Any
    ) -> None:
        if scheduler_stats is not None and self._evictions:
            for metric, labels, number in take_metrics(scheduler_stats.waiting_lora_adapters):
                self._record(metric, labels, number, engine_idx)
        super().record(scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        arguments = {
            "name": f"vllm:kv_eviction_{metric.name}",
            "documentation": metric.documentation,
            "labelnames": ["model_name", "engine", *metric.labels],
        }
        if metric.kind == "gauge":
            return self._gauge_cls(**arguments, multiprocess_mode="sum")
        if metric.kind == "histogram":
            return self._histogram_cls(**arguments, buckets=metric.buckets)
        return self._counter_cls(**arguments)

    def _record(
        self, metric: Metric, labels: tuple[str, ...], number: int, engine_idx: int
    ) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        exported = self._evictions[metric.name]
        if isinstance(exported, Histogram):
            *labels_, value = labels
            child = exported.labels(*engine, *labels_)
            for _ in range(number):
                child.observe(int(value) * metric.unit)
        else:
            exported.labels(*engine, *labels).inc(number)

    def _begin_at_zero(self, config: EvictionConfig) -> None:
        """Create the series of the server's method, so that rates over them start at once."""
        values = {
            "policy": (config.policy,),
            "reason": tuple(SKIP_REASONS),
            "modality": ("text", "vision"),
            "part": ("statistics", "selection", "copy"),
            "layers": LAYERS,
            "state": STATES,
            "fault": TIER_FAULTS,
            "outcome": HANDOVERS,
            "cache": ("sent", "whole"),
            "cause": get_args(CutCause),
        }
        for engine in self.per_engine_labelvalues.values():
            for name, exported in self._evictions.items():
                of_labels = (values[label] for label in METRICS[name].labels)
                for combination in itertools.product(*of_labels):
                    exported.labels(*engine, *combination)
