# SPDX-License-Identifier: Apache-2.0
"""Access to the routes below `/kv-eviction`; `server/test_server.py` calls a real server."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from argparse import Namespace
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image
from starlette.datastructures import State
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from tests.inputs import new_rng
from tests.unit.test_trace import make_trace
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.server.ask import token_texts
from vllm_tgvkv.server.endpoints import EvictionEndpoints
from vllm_tgvkv.shared.counters import EvictionCounters
from vllm_tgvkv.shared.errors import EvictionConfigError

POOL = {"blocks": 9, "block_size": 16, "layers": 2, "kv_heads": 4}


class EngineClient:
    """Two engines, as with data parallelism; each keeps a trace of two cuts."""

    def __init__(self, eviction: dict[str, Any] | None) -> None:
        additional = {} if eviction is None else {CONFIG_KEY: eviction}
        parallel = SimpleNamespace(data_parallel_size=2)
        self.vllm_config = SimpleNamespace(additional_config=additional, parallel_config=parallel)
        self.settings = [{"kv_eviction.sinks": "4"}] * 2
        self.model_config = SimpleNamespace(served_model_name="tiny")
        self.engine_core = self
        rng = new_rng()
        first = [make_trace(rng, 21, name=f"of-{engine}")[0] for engine in range(2)]
        again = [make_trace(rng, 21, name=f"of-{engine}", num_answer=8)[0] for engine in range(2)]
        self.traces = [cut.after(earlier) for earlier, cut in zip(first, again, strict=True)]

    async def call_utility_all_async(
        self, method: str, worker_method: str, timeout: None, args: Any, kwargs: Any
    ) -> list[list[Any]]:
        assert method == "collective_rpc"
        # One of an engine's workers (ranks or pipeline stages) keeps the traces.
        others: dict[str, Any] = {"kv_eviction_traces": [], "kv_eviction_trace": None}
        answers = [getattr(self, worker_method)(engine, *args) for engine in range(2)]
        ranks, stages = ([answer, others.get(worker_method, answer)] for answer in answers)
        return [ranks, stages[::-1]]

    def kv_eviction_settings(self, engine: int) -> dict[str, str]:
        return self.settings[engine]

    def kv_eviction_status(self, engine: int) -> dict[str, Any]:
        return {"settings": "a1", "totals": EvictionCounters().as_dict(), "pool": POOL}

    def kv_eviction_traces(self, engine: int) -> list[dict[str, Any]]:
        return [{**self.traces[engine].summary(), "time": float(engine)}]

    def kv_eviction_trace(self, engine: int, name: str, layer: int | None, cut: int | None) -> Any:
        trace = self.traces[engine]
        if name != trace.id:
            return None
        return trace.detail(cut) if layer is None else trace.layer(layer, cut)


def client(engine_client: Any, keys: list[str] | None = None) -> TestClient:
    app, plugin = FastAPI(), EvictionEndpoints()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    state: State = app.state
    asyncio.run(plugin.init_state(engine_client, state, Namespace(api_key=keys)))
    return TestClient(app)


TGV = {"policy": "tgv"}
BOSS = {"Authorization": "Bearer boss"}


def test_every_engine_is_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = client(EngineClient({"policy": "tgv", "budget": 512}))
    answer = server.get("/kv-eviction/status")
    assert answer.status_code == 200
    found = answer.json()
    assert found["settings"]["budget"] == "512 tokens per head"
    assert found["settings"]["granularity"] == "layer"
    assert [engine["pool"] for engine in found["engines"]] == [POOL] * 2
    assert server.post("/kv-eviction/status").status_code == 405
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert client(EngineClient(TGV)).get("/kv-eviction/status").status_code == 401


def test_engines_with_other_settings_end_the_start() -> None:
    """Nodes read their own flags; an engine without eviction does not know the call."""
    engines = EngineClient(TGV)
    engines.settings = [{"kv_eviction.sinks": "4"}, {"kv_eviction.sinks": "5"}]
    with pytest.raises(EvictionConfigError, match=r"sinks is 5 on engine 1 of 2 and 4 on engine 0"):
        client(engines)
    engines.settings = engines.settings[:1]
    with pytest.raises(EvictionConfigError, match="runs without the flag"):
        client(engines)
    engines.vllm_config.parallel_config.data_parallel_size = 1  # its workers have met
    client(engines)
    engines.vllm_config.parallel_config.data_parallel_size = 2
    engines.vllm_config.additional_config = {}
    client(engines)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic right", 401),
        (f"Basic {b64encode(b'anybody:right').decode()}", 200),
        (f"Basic {b64encode(b'right:wrong').decode()}", 401),
        (f"Basic {b64encode(bytes([200, 201])).decode()}", 401),
        ("Bearer", 401),
        ("Bearer right", 200),
        ("Bearer other", 200),
    ],
)
def test_the_servers_key_is_required(header: str | None, code: int) -> None:
    server = client(EngineClient(TGV), ["right", "other"])
    headers = {} if header is None else {"Authorization": header}
    assert server.get("/kv-eviction/status", headers=headers).status_code == code


@pytest.mark.parametrize("engine_client", [None, EngineClient(None), EngineClient({})])
def test_a_server_without_eviction_says_what_to_do(engine_client: Any) -> None:
    server = client(engine_client)
    answer = server.get("/kv-eviction/status")
    assert answer.status_code == 409
    assert "--kv-eviction" in answer.json()["detail"]
    assert server.get("/").status_code == 404


def test_every_route_checks_the_key_before_it_reads_the_body() -> None:
    """The answer makes a browser ask its user for a password. The root only names the inspector."""
    server = client(EngineClient(TGV), ["right"])
    found: Any = server.app
    routes = [r for r in found.routes if r.path.startswith("/kv-eviction")]
    assert len(routes) >= 8
    for route in routes:
        if route.path.endswith("/defaults"):
            continue  # the admin's, tested below
        (method,) = route.methods - {"HEAD"}
        answer = server.request(method, route.path.format(name="of-0", layer=0), content=b"{")
        assert answer.status_code == 401, route.path
        assert answer.headers["www-authenticate"].startswith("Basic ")
    answer = server.get("/")
    assert answer.status_code == 200
    assert 'href="kv-eviction/"' in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert server.post("/").status_code == 405


def test_a_server_with_a_page_at_its_root_keeps_it() -> None:
    app = FastAPI()
    app.add_api_route("/", lambda: "its own")
    EvictionEndpoints().attach_router(app)
    assert TestClient(app).get("/").json() == "its own"


def test_texts_of_tokens_add_up() -> None:
    """With a decoder that drops the first space and joins bytes, as tokenizers do."""
    pieces = {1: b" What", 2: b" is", 3: b"\xc3", 4: b"\xa9", 5: b"?", 6: b"<image>"}

    def decode(ids: list[int]) -> str:
        text = b"".join(pieces[i] for i in ids).decode(errors="replace")
        return text.removeprefix(" ")

    assert token_texts([1, 2, 2, 5, 6, 6, 1], decode) == [
        *("What", " is", " is", "?", "<image>", "<image>", " What")
    ]
    assert token_texts([5, 3, 4, 5], decode) == ["?", "\ufffd", "\u00e9", "?"]
    assert token_texts([], decode) == []


def test_traces_of_all_engines() -> None:
    engines = EngineClient(TGV)
    server = client(engines)
    listed = server.get("/kv-eviction/requests").json()["requests"]
    assert [trace["id"] for trace in listed] == ["of-1", "of-0"]  # newest first
    for trace in engines.traces:
        path = f"/kv-eviction/requests/{trace.id}"
        for cut, query in ((None, ""), (0, "?cut=0"), (1, "?cut=1")):
            found = server.get(f"{path}{query}").json()
            assert found == json.loads(json.dumps(trace.detail(cut)))
            layer = server.get(f"{path}/layers/2{query}").json()
            assert layer == json.loads(json.dumps(trace.layer(2, cut)))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("requests/unknown", 404),
        ("requests/of-0/layers/3", 404),
        ("requests/of-0?cut=2", 404),
        ("requests/of-0/layers/0?cut=2", 404),
        ("requests/of-0?cut=-1", 422),
        ("requests/of-0?cut=x", 422),
        ("requests/of-0/layers/-1", 422),  # 400 in vLLM's server
        ("requests/of-0/layers/x", 422),
        (f"requests/{'x' * 600}", 422),
        ("nothing", 404),
    ],
)
def test_what_is_not_there(path: str, code: int) -> None:
    assert client(EngineClient(TGV)).get(f"/kv-eviction/{path}").status_code == code


def png(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


SIGNATURE = b64encode(b"\x89PNG\r\n\x1a\n").decode()


@pytest.mark.parametrize(
    ("image", "code", "part"),
    [
        ("%%%", 400, "not base64"),
        ("", 400, "cannot be read"),
        (b64encode(b"<svg/>").decode(), 400, "PNG, JPEG"),
        (f"data:image/png;base64,{SIGNATURE}", 400, "cannot be read"),
        (png(100, 10), 413, "100 x 10"),  # not decoded: too many pixels
        ("x" * (1 << 20), 413, "1 MiB"),
    ],
    ids=range(6),
)
def test_an_invalid_image(
    image: str, code: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tgvkv.server.ask.MAX_PIXELS", 999)
    monkeypatch.setattr("vllm_tgvkv.server.access.MAX_BODY_BYTES", 1 << 20)
    server = client(EngineClient(TGV))
    answer = server.post("/kv-eviction/ask", json={"image": image, "question": "?"})
    assert answer.status_code == code
    assert part in answer.json()["detail"]


CHANGE = {"policy": "snapkv", "budget": 0.5}


@pytest.mark.parametrize(
    ("file", "admin_key", "given", "code", "part"),
    [
        (False, "boss", "Bearer boss", 403, "defaults_file"),
        (True, None, "Bearer right", 403, "KV_EVICTION_ADMIN_KEY"),
        (True, None, "Bearer ", 403, "KV_EVICTION_ADMIN_KEY"),
        (True, "boss", None, 401, "KV_EVICTION_ADMIN_KEY"),
        (True, "boss", "Bearer right", 403, "KV_EVICTION_ADMIN_KEY"),
        # A browser's password does not make an admin.
        (True, "boss", f"Basic {b64encode(b'admin:boss').decode()}", 403, "KV_EVICTION_ADMIN_KEY"),
        (True, "boss", "Bearer boss", 200, None),
    ],
)
def test_only_the_admin_changes_defaults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: bool,
    admin_key: str | None,
    given: str | None,
    code: int,
    part: str | None,
) -> None:
    path = tmp_path / "defaults.json"
    monkeypatch.delenv("KV_EVICTION_ADMIN_KEY", raising=False)
    if admin_key is not None:
        monkeypatch.setenv("KV_EVICTION_ADMIN_KEY", admin_key)
    server = client(EngineClient(TGV | ({"defaults_file": str(path)} if file else {})), ["right"])
    headers = {} if given is None else {"Authorization": given}
    answer = server.put("/kv-eviction/defaults", json=CHANGE, headers=headers)
    assert answer.status_code == code
    if part is not None:
        assert part in answer.json()["detail"]
        assert not path.exists()
    else:
        assert answer.json() == {**CHANGE, "changed": True}
        found = server.get("/kv-eviction/status", headers={"Authorization": "Bearer right"}).json()
        assert found["defaults"] == answer.json()
        assert found["settings"]["policy"] == "tgv"
    for method, body in (("PATCH", {"json": CHANGE}), ("DELETE", {})):
        answer = server.request(method, "/kv-eviction/defaults", headers=headers, **body)
        assert answer.status_code == code


def test_defaults_that_are_wrong_or_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_EVICTION_ADMIN_KEY", "boss")
    folder = tmp_path / "folder"
    folder.mkdir()
    server = client(EngineClient(TGV | {"defaults_file": str(folder / "d.json")}))
    wrong = server.patch("/kv-eviction/defaults", json={"budget": 0}, headers=BOSS)
    assert wrong.status_code == 400
    assert wrong.json()["detail"].startswith("budget of the request is 0: give")
    unknown = server.put("/kv-eviction/defaults", json={"sinks": 4}, headers=BOSS)
    assert unknown.status_code == 422
    shutil.rmtree(folder)
    lost = server.put("/kv-eviction/defaults", json=CHANGE, headers=BOSS)
    assert lost.status_code == 409
    assert "cannot be written: No such file" in lost.json()["detail"]
