# SPDX-License-Identifier: Apache-2.0
"""vLLM's Prometheus logger with the metrics of eviction, on the same `/metrics`."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from vllm_tgvkv.config import EvictionConfig, config_of
from vllm_tgvkv.counters import SKIP_REASONS
from vllm_tgvkv.metrics import METRICS, Metric, take_metrics


class EvictionPrometheusStatLogger(PrometheusStatLogger):
    """Stock, plus eviction where an engine has it.

    With several API servers vLLM sends an engine's statistics to one of them, now this one and now
    that one, and any of them answers a scrape with what all their processes have together. So
    everything here adds up, gauges too: of the last value set it would not be known whether it is
    the engine's last.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self._evictions: dict[str, Any] = {}
        config = config_of(vllm_config)
        if config.active and config.metrics:
            self._evictions = {metric.name: self._make(metric) for metric in METRICS.values()}
            self._begin_at_zero(config)

    def record(
        self, scheduler_stats: SchedulerStats | None, *args: Any, engine_idx: int = 0, **kwargs: Any
    ) -> None:
        if scheduler_stats is not None and self._evictions:
            for metric, labels, number in take_metrics(scheduler_stats.waiting_lora_adapters):
                self._record(metric, labels, number, engine_idx)
        super().record(scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    def _make(self, metric: Metric) -> Any:
        arguments: dict[str, Any] = {
            "name": f"vllm:kv_eviction_{metric.name}",
            "documentation": metric.documentation,
            "labelnames": ["model_name", "engine", *metric.labels],
        }
        if metric.kind == "gauge":
            return self._gauge_cls(multiprocess_mode="sum", **arguments)
        if metric.kind == "histogram":
            return self._histogram_cls(buckets=metric.buckets, **arguments)
        return self._counter_cls(**arguments)

    def _record(
        self, metric: Metric, labels: tuple[str, ...], number: int, engine_idx: int
    ) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        if metric.kind == "histogram":
            *labels_, value = labels
            child = self._evictions[metric.name].labels(*engine, *labels_)
            for _ in range(number):
                child.observe(int(value) * metric.unit)
        else:
            self._evictions[metric.name].labels(*engine, *labels).inc(number)

    def _begin_at_zero(self, config: EvictionConfig) -> None:
        """Make the series of the server's method, so that a rate over them starts at once."""
        values = {
            "policy": (config.policy,),
            "reason": tuple(SKIP_REASONS),
            "modality": ("text", "vision"),
            "part": ("statistics", "selection", "copy"),
        }
        for engine in self.per_engine_labelvalues.values():
            for name, metric in self._evictions.items():
                combinations: list[tuple[str, ...]] = [()]
                for label in METRICS[name].labels:
                    combinations = [(*c, value) for c in combinations for value in values[label]]
                for combination in combinations:
                    metric.labels(*engine, *combination)
