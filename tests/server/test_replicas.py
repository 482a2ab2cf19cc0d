# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --data-parallel-size 2 --api-server-count 2`: every API server and engine."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from measure.serving import group_members
from tests.engine.running import engine
from tests.server.serving import BLOCK_SIZE, ChatServer, eventually, messages, serve
from vllm_tgvkv.shared.counters import SKIP_REASONS

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

ENGINES = (0, 1)
NUM_REQUESTS = 40
TOKENS = 16
EVICTION = {"policy": "tgv", "budget": 0.1}
SECONDS = 120
START_SECONDS = 600
"""Eight processes start, possibly on two cores."""
ADMIN_KEY = "admin"
REPORT = {"kv_eviction_report": 1}


def connect(server: ChatServer, api_server: int | None = None) -> HTTPConnection:
    """Open a connection that a given API server process accepts, or any if none is given.

    On an idle machine one process may accept them all, so the others are stopped meanwhile.
    """
    stopped: set[int] = set()
    try:
        while True:
            connection = HTTPConnection(server.url.removeprefix("http://"), timeout=SECONDS)
            assert call(connection, "GET", "/version")[0] == 200
            owner = server_of(server, connection)
            if api_server in (None, owner):
                connection.auto_open = 0  # another process might accept a new one
                return connection
            connection.close()
            os.kill(owner, signal.SIGSTOP)
            stopped.add(owner)
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)


def server_of(server: ChatServer, connection: HTTPConnection) -> int:
    """Return the process at the other end of a connection, from /proc."""
    port = connection.sock.getsockname()[1]
    members = group_members(server.process.pid)
    (owner,) = (member for member in members if is_at_other_end(member, port))
    return owner


def is_at_other_end(process: int, port: int) -> bool:
    """Return whether a process holds the other end of a connection from a local port."""
    table = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    rows = [row.split() for row in table]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            if os.readlink(descriptor) in sockets:
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def engine_processes(server: ChatServer) -> list[int]:
    """Return the processes of the engines, which vLLM names."""
    return [
        member
        for member in group_members(server.process.pid)
        if b"EngineCore_DP" in Path(f"/proc/{member}/cmdline").read_bytes()
    ]


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    """Stop processes until the block ends."""
    assert len(processes) == len(ENGINES)
    try:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


def call(
    connection: HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    rank: int | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Send a request, to the engine `rank` if given; return status and text."""
    headers["Content-Type"] = "application/json"
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def question(seed: int, **fields: Any) -> dict[str, Any]:
    """Build a chat request; every seed has its own image."""
    values = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "vllm_xargs": REPORT}
    return {"model": "tiny", "messages": messages(seed), **values, **fields}


def options(seed: int) -> dict[str, Any]:
    """Return `vllm_xargs` with one of three budgets."""
    return {"kv_eviction_budget": (0.1, 0.3, 0.6)[seed % 3], **REPORT}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    """Return the answers of a single engine to all questions."""
    from vllm import SamplingParams

    with engine(folder, EVICTION) as running:
        outputs = running.llm.chat(
            [messages(seed) for seed in range(NUM_REQUESTS)],
            [
                SamplingParams(
                    max_tokens=TOKENS, temperature=0, ignore_eos=True, extra_args=options(seed)
                )
                for seed in range(NUM_REQUESTS)
            ],
            use_tqdm=False,
        )
        assert running.counters["requests_evicted"] == NUM_REQUESTS
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def server(
    alone: list[str], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    """Start the server after the single engine has ended, to save memory and cores."""
    folder_of_test = tmp_path_factory.mktemp("replicas")
    log, defaults = folder_of_test / "server.log", folder_of_test / "defaults.json"
    config = {"defaults_file": str(defaults), "debug": {"check_integrity": True}}
    environment = {
        "KV_EVICTION_ADMIN_KEY": ADMIN_KEY,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # connections wait for their turn
    }
    flags = ["--data-parallel-size", "2", "--api-server-count", "2", "--max-model-len", "4096"]
    # API servers that write every token by itself leave /metrics no time on two cores.
    flags += ["--stream-interval", "500"]
    with serve(
        folder, log, config, environment=environment, flags=flags, start_seconds=START_SECONDS
    ) as running:
        yield running


@pytest.fixture(scope="module")
def doors(server: ChatServer) -> list[HTTPConnection]:
    """Open a connection to each API server process."""
    found: dict[int, HTTPConnection] = {}

    def has_both() -> bool:
        connection = connect(server)
        found.setdefault(server_of(server, connection), connection)
        return len(found) == 2

    assert eventually(has_both), f"only {list(found)} answers"
    return list(found.values())


class Scrape:
    """Eviction's metrics by engine, as one API server reports them."""

    def __init__(self, door: HTTPConnection) -> None:
        self.samples: dict[tuple[str, int], dict[tuple[str, ...], float]] = {}
        status, text = call(door, "GET", "/metrics")
        assert status == 200
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("vllm:kv_eviction_"):
                    engine = int(sample.labels["engine"])
                    key = sample.name.removeprefix("vllm:kv_eviction_"), engine
                    order = (
                        "policy",
                        "reason",
                        "modality",
                        "part",
                        "layers",
                        "state",
                        "cause",
                        "fault",
                        "outcome",
                        "cache",
                        "le",
                    )
                    labels = tuple(sample.labels[name] for name in order if name in sample.labels)
                    values = self.samples.setdefault(key, {})
                    assert labels not in values  # one series for all processes
                    values[labels] = sample.value

    def of(self, name: str, *labels: str) -> dict[int, float]:
        """Return a series of every engine; KeyError if an engine lacks it."""
        return {engine: self.samples[name, engine][labels] for engine in ENGINES}

    def total(self, name: str, *labels: str) -> float:
        return sum(self.of(name, *labels).values())


def test_series_of_every_engine_begin_at_zero(doors: list[Any]) -> None:
    """First in this file, before any request."""
    for door in doors:
        scrape = Scrape(door)
        zero = dict.fromkeys(ENGINES, 0.0)
        assert scrape.of("requests_total", "tgv") == zero
        assert scrape.of("requests_by_state", "shrunk") == zero
        assert scrape.of("blocks_held", "evicted") == zero
        assert scrape.of("seconds_count", "tgv", "selection") == zero
        for reason in SKIP_REASONS:
            assert scrape.of("skipped_requests_total", "tgv", reason) == zero


def test_load_on_all_of_them_at_once(
    server: ChatServer, doors: list[Any], alone: list[str]
) -> None:
    """Answers are those of a single engine, and reports add up to the scraped metrics."""
    lines = [[connect(server, server_of(server, door)) for _ in range(4)] for door in doors]
    free = [connection for pair in zip(*lines, strict=True) for connection in pair]

    def ask(seed: int) -> dict[str, Any]:
        connection = free.pop()
        status, text = call(
            connection, "POST", "/v1/chat/completions", question(seed, vllm_xargs=options(seed))
        )
        free.append(connection)
        assert status == 200, text
        return json.loads(text)

    with ThreadPoolExecutor(len(free)) as threads:
        answers = list(threads.map(ask, range(NUM_REQUESTS)))
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == alone
    reports = [answer["kv_transfer_params"]["kv_eviction"] for answer in answers]
    assert all(report["skip_reason"] is None for report in reports)

    for door in doors:
        assert eventually(
            lambda door=door: (
                Scrape(door).total("requests_total", "tgv") == NUM_REQUESTS
                and Scrape(door).total("blocks_held", "evicted") == 0
            )
        )
    scrapes = [Scrape(door) for door in doors]
    assert scrapes[0].samples == scrapes[1].samples
    scrape = scrapes[0]
    evicted = scrape.of("requests_total", "tgv")
    assert min(evicted.values()) > 0
    given_back = sum(report["blocks_before"] - report["blocks_after"] for report in reports)
    assert scrape.total("blocks_given_back_total", "tgv") == given_back > 0
    seen = sum(report["prompt_tokens"] for report in reports)
    assert sum(scrape.total("prompt_tokens_total", "tgv", m) for m in ("text", "vision")) == seen
    assert scrape.of("requests_by_state", "shrunk") == {0: 0.0, 1: 0.0}
    assert scrape.of("blocks_held", "evicted") == {0: 0.0, 1: 0.0}
    assert scrape.of("kept_fraction_count", "tgv") == evicted
    assert scrape.of("kept_fraction_bucket", "tgv", "+Inf") == evicted
    kept = sum(report["kept_tokens"] / report["prompt_tokens"] for report in reports)
    assert scrape.total("kept_fraction_sum", "tgv") == pytest.approx(kept, abs=1e-4 * NUM_REQUESTS)
    for part in ("statistics", "selection", "copy"):
        assert scrape.of("seconds_count", "tgv", part) == evicted

    for door in doors:
        status, text = call(door, "GET", "/kv-eviction/status")
        assert status == 200
        engines = json.loads(text)["engines"]
        assert [engine["pool"]["blocks"] for engine in engines] == [255, 255]
        totals = [engine["totals"] for engine in engines]
        assert dict(enumerate(t["requests_evicted"] for t in totals)) == evicted
        assert sum(t["blocks_given_back"] for t in totals) == given_back


def test_gauges_show_the_running_requests_of_each_engine(
    server: ChatServer, doors: list[Any]
) -> None:
    """An engine's requests come from both API servers, which also share its statistics."""
    wanted = [(0, 0), (0, 1), (1, 1)]  # engine and API server
    # Connected first: that stops a process for a moment.
    lines = [connect(server, server_of(server, doors[index])) for _, index in wanted]
    counts = {rank: float(n) for rank, n in Counter(rank for rank, _ in wanted).items()}
    checked = Event()

    def keep_asking(line: HTTPConnection, rank: int, seed: int) -> None:
        """Have a request running until the check is done, however slow the machine is."""
        while not checked.is_set():
            body = question(seed, max_tokens=500)
            assert call(line, "POST", "/v1/chat/completions", body, rank)[0] == 200

    def is_shown() -> bool:
        """Return whether all API servers show it now, with the engines stopped.

        Otherwise API servers that are busy with tokens answer a scrape late on two cores.
        """
        with stopped(engine_processes(server)):
            scrapes = [Scrape(door) for door in doors]
        held = [scrape.of("blocks_held", "evicted") for scrape in scrapes]
        return all(min(blocks.values()) >= 2 for blocks in held) and all(
            scrape.of("requests_by_state", "shrunk") == counts for scrape in scrapes
        )

    with ThreadPoolExecutor(len(wanted)) as threads:
        asked = [
            threads.submit(keep_asking, line, rank, seed)
            for seed, ((rank, _), line) in enumerate(zip(wanted, lines, strict=True), 1000)
        ]
        try:
            # Between two requests an engine has fewer for a moment. A request that failed ends the
            # wait, and its error is raised below.
            was_shown = eventually(lambda: is_shown() or any(each.done() for each in asked))
        finally:
            checked.set()
    for each in asked:
        each.result()
    assert was_shown
    zero = dict.fromkeys(ENGINES, 0.0)
    for door in doors:
        for names in (("requests_by_state", "shrunk"), ("blocks_held", "evicted")):
            assert eventually(lambda door=door, names=names: Scrape(door).of(*names) == zero), names


def test_every_api_server_finds_the_traces_of_every_engine(doors: list[Any]) -> None:
    names = []
    for rank, door in zip(ENGINES, doors, strict=True):
        body = question(2000 + rank, vllm_xargs={**REPORT, "kv_eviction_trace": 1})
        status, text = call(door, "POST", "/v1/chat/completions", body, rank)
        assert status == 200, text
        names.append(json.loads(text)["kv_transfer_params"]["kv_eviction"]["trace"])
    for door in doors:
        status, text = call(door, "GET", "/kv-eviction/requests")
        listed = [trace["id"] for trace in json.loads(text)["requests"]]
        assert (status, listed) == (200, names[::-1])
        for name in names:
            for path in (f"/kv-eviction/requests/{name}", f"/kv-eviction/requests/{name}/layers/0"):
                assert call(door, "GET", path)[0] == 200
        assert call(door, "GET", "/kv-eviction/requests/unknown")[0] == 404


def test_changed_defaults_reach_every_api_server_and_engine(doors: list[Any]) -> None:
    bearer = f"Bearer {ADMIN_KEY}"
    for door, budget in zip(doors, (0.5, 0.25), strict=True):
        change = {"policy": "snapkv", "budget": budget}
        status, text = call(door, "PUT", "/kv-eviction/defaults", change, Authorization=bearer)
        assert status == 200, text
        for other in doors:
            told = json.loads(call(other, "GET", "/kv-eviction/status")[1])["defaults"]
            assert told == {"policy": "snapkv", "budget": budget, "changed": True}
            for rank in ENGINES:
                body = question(3000)
                _, text = call(other, "POST", "/v1/chat/completions", body, rank)
                report = json.loads(text)["kv_transfer_params"]["kv_eviction"]
                assert report["policy"] == "snapkv"
                most = budget * report["prompt_tokens"]
                assert most - BLOCK_SIZE < report["kept_tokens"] <= most
    assert call(doors[0], "DELETE", "/kv-eviction/defaults", Authorization=bearer)[0] == 200


@pytest.mark.parametrize("xargs", [{"kv_eviction_budget": -1}, {"kv_eviction": "snap"}], ids=repr)
def test_wrong_options_are_http_400_at_every_api_server(
    doors: list[Any], xargs: dict[str, Any]
) -> None:
    before = Scrape(doors[0]).of("skipped_requests_total", "tgv", "invalid_request")
    for door in doors:
        for rank in ENGINES:
            status, text = call(
                door, "POST", "/v1/chat/completions", question(1, vllm_xargs=xargs), rank
            )
            assert status == 400, text
            assert next(iter(xargs)) in json.loads(text)["error"]["message"]
            status, text = call(door, "POST", "/v1/chat/completions", question(1), rank)
            assert status == 200, text
    after = Scrape(doors[0]).of("skipped_requests_total", "tgv", "invalid_request")
    assert after == before  # none reached an engine


def test_every_engine_logs_its_settings_and_no_error(server: ChatServer) -> None:
    lines = server.log.read_text(errors="replace").splitlines()
    told = [line for line in lines if "KV eviction: policy tgv, budget 10 % of the prompt" in line]
    assert len(told) == 2
    assert len({line.split(" pid=")[0] for line in told}) == 2
    wrong = r"\bERROR\b|Traceback|Integrity"
    assert [line for line in lines if re.search(wrong, line)] == []


def test_interrupt_ends_every_process(server: ChatServer) -> None:
    """Last in this file, because it stops the server."""
    server.interrupt()
