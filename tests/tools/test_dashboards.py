# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerts and `docs/metrics.md` against the metrics that our Prometheus logger exports.

If Prometheus is installed (Debian package `prometheus`), it scrapes them, loads the rules and
answers every query. Otherwise names are compared with a scrape, and queries are parsed if the
package `promql-parser` is there.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from tests.conftest import ROOT
from tests.tools.programs import program
from tests.tools.prometheus import Prometheus, running_prometheus
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger
from vllm_tgvkv.shared.counters import SKIP_REASONS
from vllm_tgvkv.shared.metrics import HANDOVERS, LAYERS, METRICS, STATES, MetricsBuffer

pytestmark = pytest.mark.apparatus

CONFIGS = ROOT / "configs"
DASHBOARD = json.loads((CONFIGS / "grafana/dashboards/kv-eviction.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES_FILE = CONFIGS / "prometheus/rules/kv-eviction.yml"
RULES = [rule for g in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in g["rules"]]
ALERT_TESTS = sorted((ROOT / "tests/data/alerts").glob("*.yml"))
RECORDED = ROOT / "tests/data/metrics.txt"
"""`/metrics` of a server with eviction, of histograms the first bucket and the last."""

LABELS = {
    "policy": ("tgv", "snapkv"),
    "reason": tuple(SKIP_REASONS),
    "modality": ("text", "vision"),
    "part": ("statistics", "selection", "copy"),
    "layers": LAYERS,
    "state": STATES,
    "cause": ("first", "later", "pressure"),
    "fault": ("full", "failed"),
    "outcome": HANDOVERS,
    "cache": ("sent", "whole"),
}
VARIABLES = {
    "__rate_interval": "1m",
    "__range": "1m",
    "model_name": "m",
    "engine": "0",
    "policy": "tgv",
}
"""One value each, so that a matcher for a label which a metric lacks finds nothing."""


def fill_in(text: str) -> str:
    """Return a query with a value for every variable, as Grafana sends it."""
    return re.sub(r"\$(\w+)", lambda match: VARIABLES[match[1]], text)


QUERIES = [
    (panel["title"], fill_in(target["expr"]), target["legendFormat"])
    for panel in PANELS
    for target in panel["targets"]
]
EXPRESSIONS = [query for _, query, _ in QUERIES] + [rule["expr"] for rule in RULES]


def selectors(expression: str) -> list[tuple[str, str]]:
    """Return the metrics in an expression, each with the matchers in its braces."""
    return re.findall(r"(vllm:\w+)(?:\{([^}]*)\})?", expression)


@pytest.fixture(scope="module")
def step() -> Iterator[Callable[[], None]]:
    """Return a function that records a step which changes every metric that queries use."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        served_model_name="m", max_model_len=1024, is_diffusion=False
    )
    config.additional_config = {CONFIG_KEY: {"policy": "tgv"}}
    logger = EvictionPrometheusStatLogger(config)

    def record() -> None:
        buffer = MetricsBuffer()
        for metric in METRICS.values():
            for labels in itertools.product(*(LABELS[label] for label in metric.labels)):
                if metric.kind == "gauge":
                    buffer.set(metric.name, 3, *labels)
                elif metric.kind == "histogram":
                    buffer.observe(metric.name, *labels, value=0.01)
                else:
                    number = {"prompt_tokens": 100, "kept_tokens": 12}.get(metric.name, 2)
                    buffer.count(metric.name, *labels, by=number)
        stats = SchedulerStats(num_running_reqs=5, num_waiting_reqs=2, kv_cache_usage=0.7)
        buffer.move_to(stats.waiting_lora_adapters)
        iteration = IterationStats()
        iteration.time_to_first_tokens_iter = [0.2, 0.2]
        iteration.inter_token_latencies_iter = [0.02] * 10
        iteration.num_preempted_reqs = 1
        logger.record(stats, iteration)

    yield record
    unregister_vllm_metrics()


@pytest.fixture(scope="module")
def prometheus(
    step: Callable[[], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Run a Prometheus with our configuration and rules."""
    traffic = type("Traffic", (), {"collect": lambda _: step() or ()})()  # a step with every scrape
    prometheus_client.REGISTRY.register(traffic)
    scraped, _ = prometheus_client.start_http_server(0, "127.0.0.1")
    configuration = CONFIGS / "prometheus/prometheus.yml"
    rules = [
        RULES_FILE.parent / Path(p).name
        for p in yaml.safe_load(configuration.read_text())["rule_files"]
    ]
    targets = [{"targets": [f"127.0.0.1:{scraped.server_port}"]}]
    try:
        folder = tmp_path_factory.mktemp("prometheus")
        with running_prometheus(folder, configuration, targets, rules) as server:
            yield server
    finally:
        scraped.shutdown()
        scraped.server_close()
        prometheus_client.REGISTRY.unregister(traffic)


# The dashboard


@pytest.mark.parametrize(("query", "legend"), [q[1:] for q in QUERIES], ids=[q[0] for q in QUERIES])
def test_a_query_finds_numbers(prometheus: Prometheus, query: str, legend: str) -> None:
    """And each series has a name of its own; KeyError if it lacks a label of the legend."""
    found = prometheus.query(query)
    assert found
    assert all(math.isfinite(value) for _, value in found), found
    named = re.sub(r"\{\{(\w+)\}\}", r"{\1}", legend)
    assert len({named.format(**labels) for labels, _ in found}) == len(found)


def test_numbers_at_a_glance(prometheus: Prometheus) -> None:
    """The figures at the top are those that `step` makes."""
    num_skipped = 2 * len(SKIP_REASONS)
    expected = {
        "Requests evicted": 2 / (2 + num_skipped),
        "Prompt tokens kept": 0.12,
        "Blocks given back per eviction": 1,
        "Eviction against time to first token": 3 * 0.01 / 0.2,
        "Skipped by mistake": 3 * 2 / (2 + num_skipped),
        "Highest KV cache usage": 0.7,
    }
    assert {p["title"] for p in PANELS if p["type"] == "stat"} == expected.keys()
    for title, query, _ in QUERIES:
        if title in expected:
            ((_, value),) = prometheus.query(query)
            assert value == pytest.approx(expected[title], rel=1e-3), title


def test_variables_have_values(prometheus: Prometheus) -> None:
    queries = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert {v["name"] for v in queries} == VARIABLES.keys() - {"__rate_interval", "__range"}
    for variable in queries:
        text = variable["query"]["query"]
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", text).groups()
        series = prometheus.get("series", **{"match[]": fill_in(selector)})
        assert VARIABLES[variable["name"]] in {labels[label] for labels in series}


def test_expressions_parse() -> None:
    """Parsed without Prometheus, for machines that lack it."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for expression in EXPRESSIONS:
        parser.parse(expression)


@pytest.mark.parametrize("source", ["logger", "server"])
def test_names_are_exported(step: Callable[[], None], source: str) -> None:
    """By a logger in this process, and by a recorded server."""
    step()
    text = prometheus_client.generate_latest().decode()
    scraped: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(
        RECORDED.read_text() if source == "server" else text
    ):
        for sample in family.samples:
            scraped.setdefault(sample.name, set()).update(sample.labels)
    for expression in EXPRESSIONS:
        found = selectors(expression)
        assert found
        for name, matchers in found:
            assert name in scraped
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= scraped[name], name


def test_panels_and_pages_have_every_metric_reason_and_alert() -> None:
    asked = {name for _, query, _ in QUERIES for name, _ in selectors(query)}
    for metric in METRICS.values():
        assert any(name.startswith(f"vllm:kv_eviction_{metric.name}") for name in asked), metric
    text = "".join(EXPRESSIONS) + json.dumps(PANELS).replace('\\"', '"')
    named = {reason for m in re.findall(r'reason=~"([^"]*)"', text) for reason in m.split("|")}
    assert named
    assert named <= SKIP_REASONS.keys()

    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `vllm:kv_eviction_(\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    assert [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows] == [
        (f"{m.name}{'_total' if m.kind == 'counter' else ''}", m.kind, list(m.labels))
        for m in METRICS.values()
    ]
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert names == [*SKIP_REASONS, *(rule["alert"] for rule in RULES)]
    assert all(panel["description"] for panel in PANELS)


# Alerts


def test_rules_are_evaluated_and_find_something(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert [(rule["name"], rule["health"]) for rule in found] == [(r["alert"], "ok") for r in RULES]
    for rule in RULES:
        for name, matchers in selectors(rule["expr"]):
            assert prometheus.query(f"count({name}{{{matchers}}})"), name


def test_an_alert_says_what_to_do_and_has_tests() -> None:
    for rule in RULES:
        assert list(rule["annotations"]) == ["summary", "description", "action", "runbook"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"docs/troubleshooting\.md#[a-z-]+", rule["annotations"]["runbook"])
    assert {path.stem for path in ALERT_TESTS} == {rule["alert"] for rule in RULES}
    for path in ALERT_TESTS:
        cases = [
            c for t in yaml.safe_load(path.read_text())["tests"] for c in t["promql_expr_test"]
        ]
        assert {bool(case["exp_samples"]) for case in cases} == {True, False}, path.name


@pytest.mark.parametrize(
    "words",
    [("check", "rules", "--lint-fatal", RULES_FILE), *(("test", "rules", p) for p in ALERT_TESTS)],
    ids=lambda words: words[-1].stem,
)
def test_an_alert_fires_when_it_should(words: tuple[str, ...]) -> None:
    command = [program("promtool", "Debian package prometheus"), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
