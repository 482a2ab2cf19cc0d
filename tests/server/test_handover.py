# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve`: one computes and cuts prompts, the other decodes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from measure.serving import free_port
from tests.server.serving import ChatServer, eventually, messages, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12")

SECONDS = 240
TOKENS = 24
LEASE_SECONDS = 15
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
KEY = "kv_eviction_handover"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to the server that computes a prompt."""

CONFIG = {
    "policy": "reach",
    "when": "always",
    "debug": {"check_integrity": True, "poison": True},
}
CHUNKS = ["--max-num-batched-tokens", "128"]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@contextmanager
def server(
    folder: Path,
    log: Path,
    config: Mapping[str, Any] = CONFIG,
    flags: list[str] = [],
    port: int | None = None,
    **options: Any,
) -> Iterator[ChatServer]:
    """Serve the model with a connector.

    Args:
        port: where other servers ask for its metadata; a free one by default.
    """
    transfer = {**CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS}}
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port or free_port()),
        "UCX_TLS": "tcp,sm,self",
    }
    flags = [*flags, "--kv-transfer-config", json.dumps(transfer)]
    with serve(folder, log, config, flags=flags, environment=environment, **options) as found:
        yield found


def started(stack: ExitStack, folder: Path, logs: Path) -> tuple[ChatServer, ChatServer]:
    """Start two servers at the same time. The first one computes prompts in chunks."""
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(stack.enter_context, server(folder, logs / f"{name}.log", flags=flags))
            for name, flags in (("prefill", CHUNKS), ("decode", []))
        ]
    prefill, decode = (each.result() for each in both)
    return prefill, decode


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:
        yield started(stack, folder, tmp_path_factory.mktemp("handover"))
