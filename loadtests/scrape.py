# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself at `/metrics`, now and while it is under load."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

from loadtests.server import MIB, LoadTestError, Server

SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:mm_cache_hits_total": "image_hits",
    "vllm:request_success_total": "finished",
}
"""Metrics that are added up over the engines of a server."""

USAGE = "vllm:kv_cache_usage_perc"
POOL = "vllm:cache_config_info"
MEMORY = "process_resident_memory_bytes"
EVICTION = "vllm:kv_eviction_"
HELD = f"{EVICTION}blocks_held"


@dataclass(frozen=True)
class Sample:
    """One look at `/metrics`."""

    time: float
    """Seconds on this machine's monotonic clock."""
    kv_usage: float
    """Share of the pool in use, of the fullest engine; cached blocks that are free do not count."""
    running: float = 0
    waiting: float = 0
    preemptions: float = 0
    prefix_queries: float = 0
    prefix_hits: float = 0
    image_hits: float = 0
    finished: float = 0
    memory_mib: float | None = None
    pool: tuple[int, int] | None = None
    """Blocks of an engine, and slots of a block."""
    eviction: dict[str, float] = field(default_factory=dict)
    """Counters of the plugin by their names, added up over their labels."""
    blocks_held: float = 0
    """By compressed requests, as the plugin says."""

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.kv_usage or self.blocks_held)


def parse(text: str, now: float, memory_mib: float | None = None) -> Sample:
    """Read what `/metrics` answered.

    Raises:
        LoadTestError: if it is not vLLM's.
    """
    sums = dict.fromkeys(SUMMED.values(), 0.0)
    usage: list[float] = []
    pool = None
    eviction: dict[str, float] = {}
    held = 0.0
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name in SUMMED:
                sums[SUMMED[name]] += value
            elif name == USAGE:
                usage.append(value)
            elif name == POOL:
                pool = (int(labels["num_gpu_blocks"]), int(labels["block_size"]))
            elif name == MEMORY and memory_mib is None:
                memory_mib = value / MIB
            elif name == HELD:
                held += value
            elif name.startswith(EVICTION) and name.endswith("_total"):
                short = name.removeprefix(EVICTION).removesuffix("_total")
                eviction[short] = eviction.get(short, 0.0) + value
    if not usage:
        raise LoadTestError(f"/metrics has no {USAGE}; is this a vLLM server with statistics on?")
    return Sample(
        time=now,
        kv_usage=max(usage),
        memory_mib=memory_mib,
        pool=pool,
        eviction=eviction,
        blocks_held=held,
        **sums,
    )


def scrape(server: Server) -> Sample:
    """Look at the server now.

    Raises:
        OSError: if it does not answer.
    """
    request = urllib.request.Request(f"{server.url}/metrics")
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read().decode()
    return parse(text, time.monotonic(), server.memory_mib())


class Scraper:
    """Looks at the server again and again until the `with` block ends."""

    def __init__(
        self, server: Server, seconds: float, seen: Callable[[Sample], None] = lambda sample: None
    ) -> None:
        self.samples: list[Sample] = []
        self.misses = 0
        """Times that `/metrics` did not answer."""
        self._server = server
        self._seconds = seconds
        self._seen = seen
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                sample = scrape(self._server)
            except OSError:
                self.misses += 1
            else:
                self.samples.append(sample)
                self._seen(sample)
            if self._ended.wait(self._seconds):
                return


def drain(server: Server, seconds: float, step: float = 0.2) -> tuple[float, Sample]:
    """Wait until nothing runs or waits and no block is in use; how long it took, and the last look.

    The server is not idle then if it took longer than `seconds`.
    """
    started = time.monotonic()
    while True:
        sample = scrape(server)
        if sample.idle or sample.time - started > seconds:
            return sample.time - started, sample
        time.sleep(step)
