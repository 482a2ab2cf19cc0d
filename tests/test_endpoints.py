# SPDX-License-Identifier: Apache-2.0
"""Who gets an answer from `/kv-eviction`; `test_server.py` asks a real server."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.datastructures import State
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from vllm_tgvkv.config import CONFIG_KEY
from vllm_tgvkv.counters import EvictionCounters
from vllm_tgvkv.server.endpoints import EvictionEndpoints

POOL = {"blocks": 9, "block_size": 16, "layers": 2, "kv_heads": 4}


class EngineClient:
    """Two engines, as data parallelism has them."""

    def __init__(self, eviction: dict[str, Any] | None) -> None:
        additional = {} if eviction is None else {CONFIG_KEY: eviction}
        self.vllm_config = SimpleNamespace(additional_config=additional)

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "kv_eviction_status"
        return [{"totals": EvictionCounters().as_dict(), "pool": POOL}] * 2


def client(engine_client: Any, keys: list[str] | None = None) -> TestClient:
    app, plugin = FastAPI(), EvictionEndpoints()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    state: State = app.state
    asyncio.run(plugin.init_state(engine_client, state, Namespace(api_key=keys)))
    return TestClient(app)


def test_every_engine_is_in_the_answer() -> None:
    answer = client(EngineClient({"policy": "tgv", "budget": 512})).get("/kv-eviction/status")
    assert answer.status_code == 200
    found = answer.json()
    assert found["settings"]["budget"] == "512 tokens per head"
    assert found["settings"]["granularity"] == "layer"
    assert [engine["pool"] for engine in found["engines"]] == [POOL] * 2


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"Authorization": "Bearer right"}, 200),
        ({"Authorization": "Bearer other"}, 200),
    ],
)
def test_the_servers_key_is_asked_for(headers: dict[str, str], code: int) -> None:
    server = client(EngineClient({"policy": "tgv"}), ["right", "other"])
    assert server.get("/kv-eviction/status", headers=headers).status_code == code


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = client(EngineClient({"policy": "tgv"}))
    assert server.get("/kv-eviction/status").status_code == 401


@pytest.mark.parametrize("engine_client", [None, EngineClient(None), EngineClient({})])
def test_a_server_without_eviction_says_what_to_do(engine_client: Any) -> None:
    answer = client(engine_client).get("/kv-eviction/status")
    assert answer.status_code == 409
    assert "--kv-eviction" in answer.json()["detail"]


def test_nothing_but_get() -> None:
    server = client(EngineClient({"policy": "tgv"}))
    assert server.post("/kv-eviction/status").status_code == 405
    assert server.get("/kv-eviction/nothing").status_code == 404
