# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve`: one computes and cuts prompts, the other decodes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from measure.serving import free_port
from tests.server.serving import ChatServer, messages, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12")

SECONDS = 120
TOKENS = 24
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to the server that computes a prompt."""


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llava", image_size=112)


@contextmanager
def server(
    folder: Path, log: Path, config: Mapping[str, Any], **options: Any
) -> Iterator[ChatServer]:
    flags = ["--kv-transfer-config", json.dumps(CONNECTOR)]
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,sm,self",
    }
    with serve(folder, log, config, flags=flags, environment=environment, **options) as found:
        yield found


CONFIG = {"policy": "reach", "when": "always", "debug": {"check_integrity": True}}


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    logs = tmp_path_factory.mktemp("handover")
    with server(folder, logs / "prefill.log", CONFIG) as prefill:
        with server(folder, logs / "decode.log", CONFIG) as decode:
            yield prefill, decode


def body_of(seed: int, **options: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": messages(seed),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "vllm_xargs": {"kv_eviction_report": 1},
        **options,
    }


def post(server: ChatServer, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def handed_over(prefill: ChatServer, decode: ChatServer, body: dict[str, Any]) -> dict[str, Any]:
    first = post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": ASKED})
    return post(decode, {**body, "kv_transfer_params": first["kv_transfer_params"]})


def test_an_answer_is_that_of_one_server(pair: tuple[ChatServer, ChatServer]) -> None:
    prefill, decode = pair
    for seed in range(3):
        body = body_of(seed)
        alone = post(prefill, body)
        apart = handed_over(prefill, decode, body)
        print(json.dumps(apart, indent=1)[:3000])
        assert apart["choices"][0]["message"] == alone["choices"][0]["message"]
    for each in pair:
        print([s for s in each.samples() if "nixl" in s.name or "handover" in s.name])
