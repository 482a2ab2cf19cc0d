# SPDX-License-Identifier: Apache-2.0
"""Samples of a server's `/metrics`: one, or a series while it is under load."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from measure.serving import MIB, Server, ServingError, parse_samples

SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:mm_cache_hits_total": "image_hits",
    "vllm:request_success_total": "finished",
    "vllm:kv_eviction_blocks_held": "blocks_held",
}
"""Metrics that are summed over the engines of a server."""

USAGE = "vllm:kv_cache_usage_perc"
POOL = "vllm:cache_config_info"
MEMORY = "process_resident_memory_bytes"
EVICTION = "vllm:kv_eviction_"


@dataclass(frozen=True)
class Sample:
    """The metrics of a server at one moment."""

    time: float
    """Seconds on this machine's monotonic clock."""
    kv_usage: float
    """Share of the pool in use by requests, in the fullest engine."""
    running: float = 0
    waiting: float = 0
    preemptions: float = 0
    prefix_queries: float = 0
    prefix_hits: float = 0
    image_hits: float = 0
    finished: float = 0
    memory_mib: float | None = None
    pool: tuple[int, int] | None = None
    """Blocks of an engine, slots of a block."""
    eviction: dict[str, float] = field(default_factory=dict)
    """Counters of the plugin by name, summed over their labels."""
    blocks_held: float = 0
    """Blocks held by compressed requests, from the plugin's gauge."""

    @property
    def left(self) -> dict[str, float]:
        """Return what must be 0 when no request is left."""
        names = ("running", "waiting", "kv_usage", "blocks_held")
        return {name: getattr(self, name) for name in names}

    @property
    def idle(self) -> bool:
        return not any(self.left.values())


def parse(text: str, now: float, memory_mib: float | None = None) -> Sample:
    """Read the text of `/metrics`.

    Raises:
        ServingError: if it is not vLLM's.
    """
    sums = dict.fromkeys(SUMMED.values(), 0.0)
    usage: list[float] = []
    pool = None
    eviction: dict[str, float] = {}
    for name, labels, value, *_ in parse_samples(text):
        if name in SUMMED:
            sums[SUMMED[name]] += value
        elif name == USAGE:
            usage.append(value)
        elif name == POOL:
            pool = (int(labels["num_gpu_blocks"]), int(labels["block_size"]))
        elif name == MEMORY and memory_mib is None:
            memory_mib = value / MIB
        elif name.startswith(EVICTION) and name.endswith("_total"):
            short = name.removeprefix(EVICTION).removesuffix("_total")
            eviction[short] = eviction.get(short, 0.0) + value
    if not usage:
        raise ServingError(f"/metrics has no {USAGE}; is this a vLLM server with statistics on?")
    return Sample(
        time=now,
        kv_usage=max(usage),
        memory_mib=memory_mib,
        pool=pool,
        eviction=eviction,
        **sums,
    )


def scrape(server: Server) -> Sample:
    """Return a sample of the server.

    Raises:
        OSError: if it does not answer.
    """
    return parse(server.metrics(), time.monotonic(), server.memory_mib())


class Scraper:
    """A thread that samples the server every `seconds` until the `with` block ends."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.samples: list[Sample] = []
        self._server = server
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(OSError):  # a busy server may miss one
                self.samples.append(scrape(self._server))
            if self._ended.wait(self._seconds):
                return


def drain(server: Server, seconds: float, step: float = 0.2) -> tuple[float, Sample]:
    """Wait until nothing runs or waits and no block is in use, for at most `seconds`.

    Returns the seconds waited and the last sample, which is not idle if the time was over.
    """
    started = time.monotonic()
    while True:
        sample = scrape(server)
        if sample.idle or sample.time - started > seconds:
            return sample.time - started, sample
        time.sleep(step)
