# SPDX-License-Identifier: Apache-2.0
"""Metrics on their way from the scheduler to Prometheus, and the series there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats

from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.shared.counters import SKIP_REASONS, EvictionCounters
from vllm_tgvkv.shared.metrics import METRICS, MetricsBuffer, take_metrics
from vllm_tgvkv.shared.plan import Outcome


def test_what_is_observed_arrives_and_leaves_no_trace() -> None:
    buffer = MetricsBuffer()
    buffer.count("requests", "tgv")
    buffer.count("requests", "tgv", by=2)
    buffer.count("requests", "h2o")
    buffer.set("requests_by_state", 1, "shrunk")
    buffer.set("blocks_held", 7, "evicted")
    buffer.set("blocks_held", 4, "window")
    buffer.observe("kept_fraction", "tgv", value=0.1234)
    buffer.observe("seconds", "tgv", "copy", value=0.00042)
    field = {"an adapter": 3}
    buffer.move_to(field)
    found = {(metric.name, *labels): number for metric, labels, number in take_metrics(field)}
    assert found == {
        ("requests", "tgv"): 3,
        ("requests", "h2o"): 1,
        ("requests_by_state", "shrunk"): 1,
        ("blocks_held", "evicted"): 7,
        ("blocks_held", "window"): 4,
        ("kept_fraction", "tgv", "1234"): 1,
        ("seconds", "tgv", "copy", "420"): 1,
    }
    assert field == {"an adapter": 3}
    buffer.move_to(field)
    assert field == {"an adapter": 3}
    # Of a gauge its changes travel.
    buffer.set("blocks_held", 7, "evicted")
    buffer.set("blocks_held", 9, "evicted")
    buffer.set("blocks_held", 4, "window")
    buffer.set("blocks_held", 2, "evicted")
    buffer.move_to(field)
    assert [number for _, _, number in take_metrics(field)] == [-5]


def config(eviction: dict[str, Any] | None) -> Any:
    """A `VllmConfig`, as far as the logger asks for it."""
    vllm_config = pytest.importorskip("vllm.config").VllmConfig()
    vllm_config.model_config = SimpleNamespace(
        served_model_name="m", max_model_len=1024, is_diffusion=False
    )
    if eviction is not None:
        vllm_config.additional_config = {CONFIG_KEY: eviction}
    return vllm_config


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    yield
    unregister_vllm_metrics()


def value(name: str, registry: Any = prometheus_client.REGISTRY, **labels: str) -> float | None:
    labels = {"model_name": "m", "engine": "0", **labels}
    return registry.get_sample_value(f"vllm:kv_eviction_{name}", labels)


def logger(eviction: dict[str, Any] | None) -> Any:
    from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger

    return EvictionPrometheusStatLogger(config(eviction))


def test_statistics_become_metrics() -> None:
    """The series of the server's method begin at zero."""
    prometheus = logger({"policy": "tgv"})
    for name, labels in (
        ("requests_total", {}),
        *(("skipped_requests_total", {"reason": reason}) for reason in SKIP_REASONS),
        ("seconds_count", {"part": "selection"}),
        ("kept_tokens_total", {"modality": "vision"}),
    ):
        assert value(name, policy="tgv", **labels) == 0
    assert value("requests_total", policy="h2o") is None
    counters = EvictionCounters(metrics=MetricsBuffer())
    counters.evicted("h2o", 400, 40)
    counters.gave_back("h2o", 9)
    counters.gave_back("h2o", -2)  # others share the prompt's blocks
    counters.deferred("h2o")
    counters.skip("tgv", "text_only")
    seen, kept = {"text": 300, "vision": 100}, {"text": 30, "vision": 10}
    counters.record_outcome(Outcome("r", 5, None, "h2o", seen, kept, {"copy": 0.002}))
    stats = SchedulerStats()
    assert counters.metrics is not None
    counters.metrics.set("requests_by_state", 3, "shrunk")
    counters.metrics.move_to(stats.waiting_lora_adapters)
    prometheus.record(stats, None)
    assert not stats.waiting_lora_adapters
    for name, labels, wanted in (
        ("requests_total", {}, 1),
        ("kept_fraction_sum", {}, 0.1),
        ("kept_fraction_bucket", {"le": "0.1"}, 1),
        ("blocks_given_back_total", {}, 9),
        ("deferred_requests_total", {}, 1),
        ("prompt_tokens_total", {"modality": "text"}, 300),
        ("kept_tokens_total", {"modality": "vision"}, 10),
        ("seconds_sum", {"part": "copy"}, 0.002),
    ):
        assert value(name, policy="h2o", **labels) == pytest.approx(wanted), name
    assert value("skipped_requests_total", policy="tgv", reason="text_only") == 1
    assert value("requests_by_state", state="shrunk") == 3
    assert counters.blocks_given_back == 7
    assert str(counters).endswith(" 7 blocks given back")
    counters.gave_back("h2o", -9)
    assert str(counters).endswith(" 2 blocks more in use")


def record(steps: list[dict[str, int]]) -> None:
    """Record statistics as one of several API server processes does."""
    prometheus = logger({"policy": "tgv"})
    for numbers in steps:
        prometheus.record(SchedulerStats(waiting_lora_adapters=dict(numbers)), None)


@pytest.mark.nightly  # two processes that import vLLM
@pytest.mark.slow
def test_statistics_may_reach_any_api_server_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of several processes, added up by a scrape of any of them."""
    buffer, steps = MetricsBuffer(), []
    for number in (5, 2, 3, 0):
        buffer.set("blocks_held", number, "window")
        buffer.count("requests", "tgv")
        steps.append({})
        buffer.move_to(steps[-1])
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    registry = prometheus_client.CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))

    def found(name: str, **labels: str) -> float | None:
        return value(name, registry, **labels)

    seen = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as first, ProcessPoolExecutor(1, spawn) as second:
        # The process with the last step is the first to be through.
        for process, mine in ((first, ()), (second, (1, 3)), (first, (0, 2))):
            process.submit(record, [steps[i] for i in mine]).result()
            seen.append(
                (found("requests_total", policy="tgv"), found("blocks_held", layers="window"))
            )
    assert seen == [(0, 0), (2, -6), (4, 0)]


@pytest.mark.parametrize("eviction", [None, {"policy": "none"}])
def test_without_eviction_there_is_no_metric_of_ours(eviction: dict[str, Any] | None) -> None:
    prometheus = logger(eviction)
    prometheus.record(SchedulerStats(), None)
    names = {metric.name for metric in prometheus_client.REGISTRY.collect()}
    assert "vllm:num_requests_running" in names
    assert not {name for name in names if "kv_eviction" in name}


def test_every_metric_is_counted_somewhere() -> None:
    """By name, so that one which nothing feeds is found."""
    import inspect

    from vllm_tgvkv.scheduler import records
    from vllm_tgvkv.shared import counters

    source = inspect.getsource(counters) + inspect.getsource(records)
    assert [name for name in METRICS if f'"{name}"' not in source] == []


def test_vllm_makes_its_prometheus_logger_by_that_name() -> None:
    """Contract of the replacement in `patches.py`."""
    import inspect

    assert "PrometheusStatLogger(vllm_config" in inspect.getsource(loggers.StatLoggerManager)
    assert SchedulerStats.__dataclass_fields__["waiting_lora_adapters"].type in (
        "dict[str, int]",
        dict[str, int],
    )
