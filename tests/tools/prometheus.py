# SPDX-License-Identifier: Apache-2.0
"""A running Prometheus, if Debian's package `prometheus` is installed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from measure.serving import free_port
from tests.tools.programs import program

START_SECONDS = 60
SCRAPE_INTERVAL = "200ms"
SCRAPES = 8


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._address}/api/v1/{path}", params=parameters, timeout=10)
        assert answer.status_code == 200, answer.text
        assert not answer.json().get("warnings"), answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every series of an instant query."""
        for _ in range(25):
            if found := self.get("query", query=expression)["result"]:
                break
            time.sleep(0.2)  # a busy machine misses a scrape, and then series end for a moment
        return [(series["metric"], float(series["value"][1])) for series in found]

    def is_busy(self) -> bool:
        """Return whether every target has enough scrapes and every rule has been evaluated."""
        try:
            counts = self.query("count_over_time(vllm:num_requests_running[1m])")
            num_targets = len(self.get("targets")["activeTargets"])
            groups = self.get("rules")["groups"]
        except (httpx.TransportError, AssertionError):
            return False  # it is starting
        has_scraped = len(counts) >= num_targets and all(n >= SCRAPES for _, n in counts)
        return has_scraped and all(g["lastEvaluation"][:4] != "0001" for g in groups)


@contextmanager
def running_prometheus(
    folder: Path, configuration: Path, targets: list[dict[str, Any]], rules: list[Path]
) -> Iterator[Prometheus]:
    """Run a Prometheus until the block ends, or skip the test if there is none.

    Args:
        folder: empty, for its data and its log.
        configuration: its configuration; only targets, paths of rules and intervals differ.
        targets: `static_configs` of its only job.
        rules: files of rules.
    """
    binary = program("prometheus", "Debian package prometheus")
    config = yaml.safe_load(configuration.read_text())
    config["global"] = dict.fromkeys(config["global"], SCRAPE_INTERVAL)
    config["rule_files"] = [str(path) for path in rules]
    config["scrape_configs"][0]["static_configs"] = targets
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    command = [binary, f"--config.file={folder}/prometheus.yml", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(f"http://{address}")
        deadline = time.monotonic() + START_SECONDS
        while not server.is_busy():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(START_SECONDS)
