# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve` behind a router: one computes prompts, the other decodes them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure.serving import (
    START_SECONDS,
    Server,
    ServingError,
    flags,
    free_port,
    process_group,
    vllm_executable,
    wait_until_healthy,
)

CONNECTOR: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
COMPUTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` by which a router asks for a prompt that another server decodes."""

TRANSFERS = "vllm:nixl_bytes_transferred"
"""NIXL's own metric, on the server that reads: `_count` and `_sum`, the bytes."""
HANDOVERS = "vllm:kv_eviction_handovers_total"
METRIC_SECONDS = 30


def nixl_environment(port: int | None = None) -> dict[str, str]:
    """Return where other servers of this machine find a connector; by default at a free port."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port or free_port()),
        "UCX_TLS": "tcp,sm,self",
    }


@dataclass(frozen=True)
class Pair:
    """Two healthy servers and their router."""

    prefill: Server
    decode: Server
    router: Server

    def transfers(self, after: int = -1) -> tuple[int, int]:
        """Return how many prompts the decode server has taken over, and the bytes that it read.

        Nothing is read for an answer that ended within the tokens which came with its prompt.

        Args:
            after: waits for one more than this number; the metrics come after the answer.

        Raises:
            ServingError: if there is none.
        """
        deadline = time.monotonic() + METRIC_SECONDS
        while True:
            samples = self.decode.samples()
            found = {each.name: each.value for each in samples}
            count, num_bytes = int(found[f"{TRANSFERS}_count"]), int(found[f"{TRANSFERS}_sum"])
            count += sum(
                int(each.value)
                for each in samples
                if each.name == HANDOVERS and each.labels["outcome"] == "answered"
            )
            if count > after:
                return count, num_bytes
            if time.monotonic() > deadline:
                lines = [line for line in self.decode.lines() if "KV eviction" in line]
                said = " ".join(lines[-1:])
                raise ServingError(f"the decode server has read nothing from the other one; {said}")
            time.sleep(0.1)


@contextmanager
def served_apart(
    arguments: Mapping[str, Sequence[str]],
    logs: Path,
    environment: Mapping[str, str] | None = None,
    connector: Mapping[str, Any] = CONNECTOR,
    start_seconds: float = 2 * START_SECONDS,
) -> Iterator[Pair]:
    """Run two servers and a router until the block ends.

    Args:
        arguments: of `vllm` without host, port and connector, for `prefill` and for `decode`.
        logs: folder for what the three write.

    Raises:
        ServingError: if one of them does not start.
    """
    for module in ("nixl", "vllm_router"):
        if find_spec(module) is None:
            raise ServingError(f"the package {module} is not installed: make setup does it")
    with ExitStack() as stack:
        servers = []
        for name in ("prefill", "decode"):
            port, log = free_port(), logs / f"{name}.log"
            where = {"kv-transfer-config": dict(connector), "host": "127.0.0.1", "port": port}
            process = stack.enter_context(
                process_group(
                    [vllm_executable(), *arguments[name], *flags(where)],
                    log,
                    {**nixl_environment(), **(environment or {})},
                )
            )
            servers.append(Server(f"http://127.0.0.1:{port}", process, log))
        for server in servers:
            wait_until_healthy(server.url, server.process, server.log, start_seconds)
        prefill, decode = servers
        port, log = free_port(), logs / "router.log"
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        command += flags(
            {
                "host": "127.0.0.1",
                "port": port,
                "prometheus-port": free_port(),
                "prefill": prefill.url,
                "decode": decode.url,
                "kv-connector": "nixl",
            }
        )
        process = stack.enter_context(process_group(command, log))
        wait_until_healthy(url, process, log, start_seconds)
        yield Pair(prefill, decode, Server(url, process, log))
