# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on two nodes, as processes that meet through the loopback interface.

A node's workers share no memory with another's: vLLM names the memory by a file of the node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from measure.serving import (
    ServingError,
    free_port,
    process_group,
    vllm_executable,
    wait_until_healthy,
)
from tests.engine.running import engine
from tests.server.serving import ENVIRONMENT, ChatServer, arguments_of, messages, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

SECONDS = 120
START_SECONDS = 240
NUM_REQUESTS = 6
TOKENS = 16
METHODS = ("snapkv", "tgv", "h2o")
STATUS = "/kv-eviction/status"
Kept = tuple[str, Any, Any]
"""An answer, how many heads keep each token of its prompt, and pages by layer and head."""


def options(seed: int) -> dict[str, Any]:
    budget = (0.1, 0.3)[seed % 2]
    method = METHODS[seed % len(METHODS)]
    return {"kv_eviction": method, "kv_eviction_budget": budget, "kv_eviction_trace": 1}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Kept]:
    """Return what a single worker answers and keeps."""
    from vllm import SamplingParams

    with engine(folder, {"policy": "tgv", "budget": 0.1}) as running:
        parameters = [
            SamplingParams(
                max_tokens=TOKENS, temperature=0, ignore_eos=True, extra_args=options(seed)
            )
            for seed in range(NUM_REQUESTS)
        ]
        chats = [messages(seed) for seed in range(NUM_REQUESTS)]
        found = []
        for output in running.llm.chat(chats, parameters, use_tqdm=False):
            (trace,) = running.llm.collective_rpc("kv_eviction_trace", args=(output.request_id,))
            found.append((output.outputs[0].text, trace["kept_by"], trace["pages"]))
    return found


@contextmanager
def nodes(
    folder: Path,
    logs: Path,
    flags: Sequence[str],
    first: Sequence[str] = (),
    second: Sequence[str] = (),
    *,
    budget: str = "0.1",
    evicts: bool = True,
) -> Iterator[ChatServer]:
    """Serve a model on two nodes until the block ends.

    Args:
        flags: of both nodes; `first` and `second` are of one.
        budget: of the second node.
        evicts: whether the second node does.

    Raises:
        ServingError: with the errors in the first node's log, if it does not start.
    """
    environment = {**ENVIRONMENT, "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "INFO"}
    arguments = arguments_of(folder, {} if evicts else None, budget)
    command = [vllm_executable(), *arguments, *flags, *second, "--headless"]
    other = environment | ({} if evicts else {"VLLM_PLUGINS": "none"})
    log, both = logs / "first.log", [*flags, *first, "--api-server-count", "1"]
    with (
        process_group(command, logs / "second.log", other, stop_seconds=0),
        serve(
            folder, log, {}, environment=environment, flags=both, start_seconds=START_SECONDS
        ) as server,
    ):
        yield server


def of_group(**sizes: int) -> dict[str, list[str]]:
    """Return the flags of nodes whose workers are one group, by parameter of `nodes`."""
    port = str(free_port())
    flags = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    for name, size in sizes.items():
        flags += [f"--{name.replace('_', '-')}", str(size)]
    return {"flags": flags, "first": ["--node-rank", "0"], "second": ["--node-rank", "1"]}


def of_replicas() -> dict[str, list[str]]:
    """Return the flags of nodes with an engine each, by parameter of `nodes`."""
    flags = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    flags += ["--data-parallel-address", "127.0.0.1"]
    flags += ["--data-parallel-rpc-port", str(free_port())]
    return {"flags": flags, "second": ["--data-parallel-start-rank", "1"]}


def ask(server: ChatServer, seeds: Sequence[int], num_engines: int = 1) -> list[Kept]:
    """Send requests at the same time, to the engines in turn; return what comes back."""
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:

        def one(seed: int) -> Kept:
            body = {"model": "tiny", "messages": messages(seed), "max_tokens": TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "vllm_xargs": options(seed)}
            headers = {"X-data-parallel-rank": str(seed % num_engines)}
            answer = checked(client.post("/v1/chat/completions", json=body, headers=headers))
            trace = checked(client.get(f"/kv-eviction/requests/{answer['id']}"))
            text = answer["choices"][0]["message"]["content"]
            return text, trace["kept_by"], trace["pages"]

        with ThreadPoolExecutor(len(seeds)) as threads:
            return list(threads.map(one, seeds))


def checked(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def engines_of(server: ChatServer) -> list[Mapping[str, Any]]:
    return checked(httpx.get(f"{server.url}{STATUS}", timeout=SECONDS))["engines"]


def test_tensor_ranks_on_two_nodes(alone: list[Kept], folder: Path, tmp_path: Path) -> None:
    """Answers and evictions are one worker's; ranks exchange over TCP."""
    with nodes(folder, tmp_path, **of_group(tensor_parallel_size=2)) as server:
        assert ask(server, range(NUM_REQUESTS)) == alone
        (found,) = engines_of(server)
        assert found["totals"]["requests_evicted"] == NUM_REQUESTS
        assert found["pool"]["kv_heads"] == 2
    assert "CPU SHM communicator disabled for group tp" in (tmp_path / "second.log").read_text()


@pytest.mark.nightly
def test_replicas_on_two_nodes(alone: list[Kept], folder: Path, tmp_path: Path) -> None:
    """Each engine has its own scheduler; the first node's API server asks both."""
    with nodes(folder, tmp_path, **of_replicas()) as server:
        assert ask(server, range(NUM_REQUESTS), num_engines=2) == alone
        first, second = engines_of(server)
        assert first["settings"] == second["settings"]
        for found in (first, second):
            assert found["totals"]["requests_evicted"] == NUM_REQUESTS // 2


def test_another_budget_ends_the_start_on_both_nodes(folder: Path, tmp_path: Path) -> None:
    said = "kv_eviction.budget is 0.2 on rank 1 of 2 and 0.1 on rank 0: start every node with"
    flags = of_group(tensor_parallel_size=2)
    with (
        pytest.raises(ServingError, match=said),
        nodes(folder, tmp_path, **flags, budget="0.2"),
    ):
        pass
    assert said in (tmp_path / "second.log").read_text()


@pytest.mark.nightly
def test_pipeline_stages_on_two_nodes(alone: list[Kept], folder: Path, tmp_path: Path) -> None:
    """With methods whose layers have equal shares, whichever stage they are in."""
    seeds = [seed for seed in range(NUM_REQUESTS) if METHODS[seed % len(METHODS)] != "tgv"]
    with nodes(folder, tmp_path, **of_group(pipeline_parallel_size=2)) as server:
        assert ask(server, seeds) == [alone[seed] for seed in seeds]
        (found,) = engines_of(server)
        assert found["totals"]["requests_evicted"] == len(seeds)
        assert found["pool"]["layers"] == 4


@pytest.mark.nightly
def test_a_node_without_eviction_is_named(folder: Path, tmp_path: Path) -> None:
    """Its stock worker would read compressed rows as if they were whole."""
    said, begin = "rank 1 of 2 did not say within 60 s", time.monotonic()
    flags = of_group(tensor_parallel_size=2)
    with pytest.raises(ServingError, match=said), nodes(folder, tmp_path, **flags, evicts=False):
        pass
    assert time.monotonic() - begin > 60


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"budget": "0.2"}, "kv_eviction.budget is 0.2 on engine 1 of 2 and 0.1 on engine 0"),
        ({"evicts": False}, "runs without the flag"),
    ],
)
def test_another_replica_ends_the_start(
    folder: Path, tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    with (
        pytest.raises(ServingError, match=said),
        nodes(folder, tmp_path, **of_replicas(), **other),
    ):
        pass


@pytest.mark.nightly
def test_replicas_that_vllm_counts_by_nodes(
    alone: list[Kept], folder: Path, tmp_path: Path
) -> None:
    with nodes(folder, tmp_path, **of_group(data_parallel_size=2)) as server:
        assert ask(server, range(NUM_REQUESTS), num_engines=2) == alone


@pytest.mark.nightly
def test_api_servers_that_see_their_own_nodes_engines(
    alone: list[Kept], folder: Path, tmp_path: Path
) -> None:
    """With `--data-parallel-hybrid-lb`, behind a load balancer: two engines on each node."""
    flags = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
    flags += ["--data-parallel-hybrid-lb", "--data-parallel-address", "127.0.0.1"]
    flags += ["--data-parallel-rpc-port", str(free_port()), "--api-server-count", "1"]
    port, log = free_port(), tmp_path / "second.log"
    environment = {**ENVIRONMENT, "VLLM_HOST_IP": "127.0.0.1"}
    command = [vllm_executable(), *arguments_of(folder, {}), *flags, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--data-parallel-start-rank", "2"]
    with (
        process_group(command, log, environment, stop_seconds=0) as process,
        serve(
            folder,
            tmp_path / "first.log",
            {},
            environment=environment,
            flags=flags,
            start_seconds=2 * START_SECONDS,
        ) as first,
    ):
        second = ChatServer(f"http://127.0.0.1:{port}", process, log)
        wait_until_healthy(second.url, process, log, START_SECONDS)
        for server in (first, second):
            assert ask(server, range(NUM_REQUESTS), num_engines=2) == alone
        found = [engine["settings"] for server in (first, second) for engine in engines_of(server)]
        assert len(found) == 4
        assert len(set(found)) == 1
