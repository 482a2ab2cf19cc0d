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
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import wsgiref.simple_server
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from measure.serving import free_port
from tests.conftest import ROOT
from tests.tools.programs import program
from tests.tools.test_docs import DASHBOARD
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.server.prometheus import EvictionPrometheusStatLogger
from vllm_tgvkv.shared.counters import SKIP_REASONS
from vllm_tgvkv.shared.metrics import LAYERS, METRICS, MetricsBuffer

pytestmark = pytest.mark.apparatus

CONFIGS = ROOT / "configs"
RULES = CONFIGS / "prometheus/rules/kv-eviction.yml"
ALERT_TESTS = sorted((ROOT / "tests/data/alerts").glob("*.yml"))
RECORDED = ROOT / "tests/data/metrics.txt"
"""`/metrics` of a server with eviction: curl -s localhost:8000/metrics > tests/data/metrics.txt"""

START_SECONDS = 60
SCRAPE_INTERVAL = "200ms"
SCRAPES = 8
LABELS = {
    "policy": ("tgv", "snapkv"),
    "reason": tuple(SKIP_REASONS),
    "modality": ("text", "vision"),
    "part": ("statistics", "selection", "copy"),
    "layers": LAYERS,
}
VARIABLES = {
    "__rate_interval": "1m",
    "__range": "1m",
    "model_name": "m",
    "engine": "0",
    "policy": "tgv",
}
"""One value each, so that a matcher for a label which a metric lacks finds nothing."""


# The queries and rules


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: int
    title: str
    expression: str
    legend: str

    @property
    def filled(self) -> str:
        """Return the query with a value for every variable, as Grafana sends it."""
        return fill_in(self.expression)

    def name_of(self, labels: dict[str, str]) -> str:
        """Return the legend's name for a series; raise KeyError if it lacks a label."""
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels[match[1]], self.legend)


def fill_in(text: str) -> str:
    return re.sub(r"\$(\w+)", lambda match: VARIABLES[match[1]], text)


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for g in yaml.safe_load(RULES.read_text())["groups"] for rule in g["rules"]]


QUERIES = [
    Query(panel["id"], panel["title"], target["expr"], target["legendFormat"])
    for panel in panels()
    for target in panel["targets"]
]
EXPRESSIONS = [query.filled for query in QUERIES] + [rule["expr"] for rule in rules()]
each_query = pytest.mark.parametrize("query", QUERIES, ids=lambda q: f"{q.panel}-{q.title}")
each_rule = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])


def selectors(expression: str) -> list[tuple[str, str]]:
    """Return the metrics in an expression, each with the matchers in its braces."""
    return re.findall(r"(vllm:\w+)(?:\{([^}]*)\})?", expression)


# Traffic to query


class Traffic:
    """Our Prometheus logger, fed with an engine's statistics."""

    def __init__(self) -> None:
        config = VllmConfig()
        config.model_config = SimpleNamespace(
            served_model_name="m", max_model_len=1024, is_diffusion=False
        )
        config.additional_config = {CONFIG_KEY: {"policy": "tgv"}}
        self._logger = EvictionPrometheusStatLogger(config)

    def step(self) -> None:
        """Record a step that changes all our metrics, and those of vLLM that queries use."""
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
        self._logger.record(stats, iteration)


@pytest.fixture(scope="module")
def traffic() -> Iterator[Traffic]:
    yield Traffic()
    unregister_vllm_metrics()


@pytest.fixture(scope="module")
def metrics_address(traffic: Traffic) -> Iterator[str]:
    """Serve `/metrics` with one step of traffic before every scrape, and yield host and port."""
    app = prometheus_client.make_wsgi_app()

    def one_more_step(environ: Any, start_response: Any) -> Any:
        traffic.step()
        return app(environ, start_response)

    class Silent(wsgiref.simple_server.WSGIRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with wsgiref.simple_server.make_server(
        "127.0.0.1", 0, one_more_step, handler_class=Silent
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        assert not answer.get("warnings"), answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every series of an instant query."""
        found = self.get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def names(self) -> list[str]:
        """Return some names of vLLM's metrics as they arrived."""
        return [name for name in self.get("label/__name__/values") if "vllm" in name][:5]

    def is_busy(self) -> bool:
        """Return whether there are enough scrapes and every rule has been evaluated."""
        try:
            counts = self.query("count_over_time(vllm:num_requests_running[1m])")
            groups = self.get("rules")["groups"]
        except (urllib.error.URLError, ConnectionError, AssertionError):
            return False  # it is starting
        has_scraped = bool(counts) and counts[0][1] >= SCRAPES
        return has_scraped and all(g["lastEvaluation"][:4] != "0001" for g in groups)


@pytest.fixture(scope="module")
def prometheus(
    metrics_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Run a Prometheus with our configuration and rules; only addresses and interval differ."""
    binary = program("prometheus", "Debian package prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((CONFIGS / "prometheus/prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], SCRAPE_INTERVAL)
    config["rule_files"] = [str(RULES.parent / Path(p).name) for p in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [metrics_address]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [binary, f"--config.file={folder}/prometheus.yml", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(f"http://{address}")
        deadline = time.monotonic() + START_SECONDS
        while not server.is_busy():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, (log.read_text(), server.names())
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(START_SECONDS)


# Queries


@each_query
def test_a_query_finds_numbers(prometheus: Prometheus, query: Query) -> None:
    found = prometheus.query(query.filled)
    assert found
    assert all(math.isfinite(value) for _, value in found), found
    assert len({query.name_of(labels) for labels, _ in found}) == len(found)


def test_numbers_at_a_glance(prometheus: Prometheus) -> None:
    """The figures at the top are those that `Traffic` makes."""
    num_skipped = 2 * len(SKIP_REASONS)
    expected = {
        "Requests evicted": 2 / (2 + num_skipped),
        "Prompt tokens kept": 0.12,
        "Blocks given back per eviction": 1,
        "Eviction against time to first token": 3 * 0.01 / 0.2,
        "Skipped by mistake": 3 * 2 / (2 + num_skipped),
        "Highest KV cache usage": 0.7,
    }
    stats = {p["title"]: p["id"] for p in panels() if p["type"] == "stat"}
    assert stats.keys() == expected.keys()
    for query in QUERIES:
        if query.title in stats:
            ((_, value),) = prometheus.query(query.filled)
            assert value == pytest.approx(expected[query.title], rel=1e-3), query.title


def test_variables_have_values(prometheus: Prometheus) -> None:
    queries = [v for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    assert {v["name"] for v in queries} == VARIABLES.keys() - {"__rate_interval", "__range"}
    for variable in queries:
        text = variable["query"]["query"]
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", text).groups()
        series = prometheus.get("series", **{"match[]": fill_in(selector)})
        found = {labels[label] for labels in series}
        assert VARIABLES[variable["name"]] in found


def test_expressions_parse() -> None:
    """Parsed without Prometheus, for machines that lack it."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    for expression in EXPRESSIONS:
        parser.parse(expression)


def label_names(scrape: str) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


@pytest.fixture(scope="module", params=["logger", "server"])
def scraped(request: pytest.FixtureRequest, traffic: Traffic) -> dict[str, set[str]]:
    """Return metrics and their labels, from a logger in this process or a recorded server."""
    if request.param == "logger":
        traffic.step()
        return label_names(prometheus_client.generate_latest().decode())
    if not RECORDED.exists():
        pytest.skip(f"no recorded scrape of a server at {RECORDED.relative_to(ROOT)}")
    return label_names(RECORDED.read_text())


def test_names_are_exported(scraped: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        found = selectors(expression)
        assert found
        for name, matchers in found:
            assert name in scraped
            assert set(re.findall(r"(\w+)\s*[=!]", matchers)) <= scraped[name], name


def test_reasons_are_known() -> None:
    text = "".join(EXPRESSIONS) + json.dumps(panels()).replace('\\"', '"')
    named = {reason for m in re.findall(r'reason=~"([^"]*)"', text) for reason in m.split("|")}
    assert named
    assert named <= SKIP_REASONS.keys()


# The dashboard's file


def test_every_metric_has_a_panel() -> None:
    asked = {name for query in QUERIES for name, _ in selectors(query.expression)}
    for metric in METRICS.values():
        assert any(name.startswith(f"vllm:kv_eviction_{metric.name}") for name in asked), metric


# Alerts


def test_prometheus_evaluates_the_rules(prometheus: Prometheus) -> None:
    found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in found] == [rule["alert"] for rule in rules()]
    assert [rule for rule in found if rule["health"] != "ok"] == []


@each_rule
def test_selectors_of_a_rule_find_something(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    for name, matchers in selectors(rule["expr"]):
        assert prometheus.query(f"count({name}{{{matchers}}})"), name


@each_rule
def test_a_rule_says_what_to_do(rule: dict[str, Any]) -> None:
    assert list(rule["annotations"]) == ["summary", "description", "action", "runbook"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert re.fullmatch(r"docs/troubleshooting\.md#[a-z-]+", rule["annotations"]["runbook"])


def test_promtool_accepts_the_rules() -> None:
    subprocess.run(
        [program("promtool", "Debian package prometheus"), "check", "rules", "--lint-fatal", RULES],
        check=True,
    )


def test_every_alert_has_tests() -> None:
    assert {path.stem for path in ALERT_TESTS} == {rule["alert"] for rule in rules()}
    for path in ALERT_TESTS:
        firing = [
            bool(case["exp_samples"])
            for test in yaml.safe_load(path.read_text())["tests"]
            for case in test["promql_expr_test"]
        ]
        assert True in firing, path.name
        assert False in firing, path.name


@pytest.mark.parametrize("path", ALERT_TESTS, ids=lambda path: path.stem)
def test_an_alert_fires_when_it_should(path: Path) -> None:
    command = [program("promtool", "Debian package prometheus"), "test", "rules", path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


# The documentation


def test_the_table_of_metrics_is_right() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `vllm:kv_eviction_(\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    assert [(name, kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows] == [
        (f"{m.name}{'_total' if m.kind == 'counter' else ''}", m.kind, list(m.labels))
        for m in METRICS.values()
    ]


def test_reasons_and_alerts_are_explained() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    names = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    alerts = [rule["alert"] for rule in rules()]
    assert names == [*SKIP_REASONS, *alerts]
