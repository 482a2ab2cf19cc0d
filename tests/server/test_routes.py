# SPDX-License-Identifier: Apache-2.0
"""Routes below `/kv-eviction` of a real server with keys: traces, questions, defaults, fuzzing."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from measure.messages import image_part, png_url
from tests.models import random_image, random_text
from tests.server.serving import (
    BLOCK_SIZE,
    VISION_TOKENS,
    ChatServer,
    eventually,
    report_of,
    serve,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KEY, ADMIN = "sesame", "boss"
OPTIONS = {"kv_eviction_budget": 0.3, "kv_eviction_report": 1, "kv_eviction_trace": 1}
FUZZ_SECONDS = 600
MAX_TRACES = 5


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    folder = tmp_path_factory.mktemp("server")
    config = {
        "debug": {"check_integrity": True},
        "defaults_file": str(folder / "defaults.json"),
        "max_traces": MAX_TRACES,
        "decode": {"on_request": True},
    }
    environment = {"KV_EVICTION_ADMIN_KEY": ADMIN}
    model = tiny_model("llava", image_size=112)
    with serve(model, folder / "log", config, key=KEY, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ChatServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    base = f"{server.url}/kv-eviction"
    with httpx.Client(base_url=base, headers=headers, timeout=60) as found:
        yield found


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


BOSS = {"Authorization": f"Bearer {ADMIN}"}


def put(client: httpx.Client, **values: Any) -> httpx.Response:
    return client.put("/defaults", json=values, headers=BOSS)


def restore(client: httpx.Client) -> httpx.Response:
    return client.delete("/defaults", headers=BOSS)


def question(seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "image": png_url(random_image(seed, 112, 84)),
        "question": random_text(seed, 300),
        "max_tokens": 6,
        **fields,
    }


def test_no_route_answers_without_the_key(server: ChatServer) -> None:
    for path in ("", "status", "sample", "requests", "requests/x", "inspector.js"):
        answer = httpx.get(f"{server.url}/kv-eviction/{path}", follow_redirects=False)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert "--api-key" in answer.json()["error"]["message"]
    asked = {"json": question(), "auth": ("", KEY), "timeout": 60}  # a browser's password
    assert httpx.post(f"{server.url}/kv-eviction/ask", **asked).json()["evicted"]["trace"]


def test_a_trace_agrees_with_the_report(server: ChatServer, client: httpx.Client) -> None:
    answer = server.ask(OPTIONS)
    report = report_of(answer)
    assert report["trace"].startswith(answer.id)
    trace = client.get(f"/requests/{report['trace']}").json()
    for field in ("policy", "prompt_tokens", "kept_tokens", "blocks_before", "blocks_after"):
        assert trace[field] == report[field], field
    assert trace == client.get(f"/requests/{answer.id}").json()
    layers, heads = trace["layers"], trace["kv_heads"]
    retained = report["kept_tokens"] // BLOCK_SIZE
    assert sum(map(sum, trace["pages"])) == retained * layers * heads
    assert sum(trace["kept_by"]) == report["kept_tokens"] * layers * heads
    (span,) = trace["vision"]
    assert (span["length"], span["grid"]) == (VISION_TOKENS, [8, 8])
    # No text and no image: only numbers, and the names of the settings.
    assert set(words(trace)) == {trace["id"], "tgv", "30 % of the prompt", "layer"}
    kept_by = [0] * report["prompt_tokens"]
    for index in range(layers):
        layer = client.get(f"/requests/{answer.id}/layers/{index}").json()
        for of_set in layer["token_sets"]:
            reasons = of_set["reasons"]
            assert sorted(p for kept in reasons.values() for p in kept) == of_set["positions"]
            first_tail = report["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
            assert reasons.get("tail", []) == list(range(first_tail, report["prompt_tokens"]))
            for position in of_set["positions"]:
                kept_by[position] += len(of_set["heads"])
    assert kept_by == trace["kept_by"]


def words(value: Any) -> Iterator[str]:
    """Yield the strings in a value at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from words(part)


def test_old_traces_expire_and_only_requests_that_ask_are_traced(
    server: ChatServer, client: httpx.Client
) -> None:
    first = server.ask(OPTIONS)
    assert client.get(f"/requests/{first.id}").status_code == 200
    asked = [server.ask(OPTIONS).id for _ in range(MAX_TRACES)]
    server.ask({"kv_eviction_budget": 0.3})
    server.ask({**OPTIONS, "kv_eviction": "none"})
    listed = [trace["id"] for trace in client.get("/requests").json()["requests"]]
    assert [name.rpartition("-")[0] for name in listed] == asked[::-1]
    expired = client.get(f"/requests/{first.id}")
    assert expired.status_code == 404
    assert "max_traces" in expired.json()["error"]["message"]


def test_both_caches_answer_a_question(server: ChatServer, client: httpx.Client) -> None:
    """About one image; and about two, with an answer that the reader has begun."""
    for seeds, start in (((0,), ""), ((0, 1), "It says")):
        images = [png_url(random_image(seed, 112, 84)) for seed in seeds]
        body = question(
            budget=0.3, image=images, tokens=True, **({"start": start} if start else {})
        )
        found = client.post("/ask", json=body).json()
        content = [*map(image_part, images), {"type": "text", "text": body["question"]}]
        asked: list[Any] = [{"role": "user", "content": content}]
        asked += [{"role": "assistant", "content": start}] if start else []
        for cache, xargs in (("evicted", OPTIONS), ("full", {"kv_eviction": "none"})):
            extra = {"vllm_xargs": xargs, **(CONTINUED if start else {})}
            options = {"max_tokens": 6, "temperature": 0, "extra_body": extra}
            direct = server.client.chat.completions.create(model="tiny", messages=asked, **options)
            assert found[cache]["text"] == direct.choices[0].message.content
        evicted = found["evicted"]
        assert found["full"]["blocks"] == evicted["blocks_before"] > evicted["blocks"]
        trace = client.get(f"/requests/{evicted['trace']}").json()
        assert trace["blocks_after"] == evicted["blocks"]
        assert len(trace["vision"]) == len(seeds)
        assert "".join(evicted["tokens"][: evicted["prompt_tokens"]]).endswith(start)
    alone = client.post("/ask", json=question(compare=False, policy="none")).json()
    assert alone["full"] is None
    assert (alone["evicted"]["skip_reason"], alone["evicted"]["trace"]) == ("policy_none", None)


def test_a_question_may_have_its_own_wait(client: httpx.Client) -> None:
    evicted = client.post("/ask", json=question(budget=0.3, defer=3)).json()["evicted"]
    (cut,) = evicted["cuts"]
    assert cut["answer_tokens"] == 3
    for name in ("blocks_before", "kept_tokens"):
        assert cut[name] == evicted[name]
    assert cut["blocks_after"] == evicted["blocks"]
    assert cut.pop("cause") == "first"
    assert client.get(f"/requests/{evicted['trace']}").json()["cuts"] == [cut]
    assert client.get(f"/requests/{evicted['trace']}?cut=1").status_code == 404


def test_a_question_may_have_its_own_later_cuts(client: httpx.Client) -> None:
    """A schedule, then a ceiling; without either, it is evicted once."""
    decode = client.get("/status").json()["settings"]["decode"]
    assert decode == {"schedule": [], "max_tokens": None, "on_request": True}
    asked = question(schedule="1:0.6,3:0.3", compare=False)
    evicted = client.post("/ask", json=asked).json()["evicted"]
    assert [cut["answer_tokens"] for cut in evicted["cuts"]] == [1, 3]
    assert (evicted["budget"], evicted["defer"]) == (0.6, 1)
    assert evicted["decode"] == {"schedule": [[1, 0.6], [3, 0.3]]}
    trace = client.get(f"/requests/{evicted['trace']}").json()
    assert [cut.pop("cause") for cut in evicted["cuts"]] == ["first", "later"]
    assert trace["cuts"] == evicted["cuts"]
    assert trace["budget"] == "60 % of the prompt, 30 % of the prompt after 3 tokens of the answer"

    asked = question(budget=0.3, ceiling=64, max_tokens=100, compare=False)
    evicted = client.post("/ask", json=asked).json()["evicted"]
    assert evicted["decode"] == {"max_tokens": 64}
    assert len(evicted["cuts"]) > 1
    assert {cut["blocks_after"] for cut in evicted["cuts"][1:]} == {64 // BLOCK_SIZE}
    once = client.post("/ask", json=question(schedule="none", compare=False)).json()["evicted"]
    assert (once["decode"], len(once["cuts"])) == (None, 1)


IMAGE = png_url(random_image(0, 112, 84))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"image": base64.b64encode(b"no image").decode()}, "cannot be read"),
        ({"image": "*"}, "not base64"),
        ({"image": [IMAGE, "*"]}, "not base64"),
        ({"image": []}, "image"),
        ({"image": [IMAGE] * 3}, "At most 2 image"),
        ({"question": ""}, "question"),
        ({"question": "a" * 5000}, "1024"),  # max_model_len
        ({"budget": 0}, "vllm_xargs.kv_eviction_budget is 0"),
        ({"defer": -1}, "defer"),
        ({"schedule": "8"}, "vllm_xargs.kv_eviction_schedule is '8'"),
        ({"schedule": "8:0.3", "ceiling": 512}, "either a schedule or a ceiling"),
        ({"ceiling": 8}, "vllm_xargs.kv_eviction_max_tokens is 8"),
        ({"policy": "snap"}, "vllm_xargs.kv_eviction is 'snap'"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": 1}, "temperature"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_questions_say_what_is_wrong(
    client: httpx.Client, fields: dict[str, Any], part: str
) -> None:
    answer = client.post("/ask", json=question(**fields))
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_and_one_that_is_not_json(client: httpx.Client) -> None:
    assert client.post("/ask", json=question(image="a" * (33 << 20))).status_code == 413
    for body in (b"\xff{", b'{"image":' + b"[" * 100_000):
        headers = {"Content-Type": "application/json"}
        assert client.post("/ask", content=body, headers=headers).status_code == 400
    assert client.get("/status").status_code == 200


def test_changed_defaults_apply_to_the_next_request(
    server: ChatServer, client: httpx.Client
) -> None:
    try:
        assert put(client, policy="snapkv", budget=0.5).status_code == 200
        report = report_of(server.ask({"kv_eviction_report": 1}))
        assert report["policy"] == "snapkv"
        assert report["kept_tokens"] > 0.5 * report["prompt_tokens"] - BLOCK_SIZE
        own = report_of(server.ask({"kv_eviction_report": 1, "kv_eviction": "tgv"}))
        assert (own["policy"], own["kept_tokens"]) == ("tgv", report["kept_tokens"])
        put(client, policy="none")  # the operator's way to stop evicting
        assert report_of(server.ask({"kv_eviction_report": 1}))["skip_reason"] == "policy_none"
        # A request's options are checked together with the defaults.
        put(client, policy="random", budget=0.1)
        with pytest.raises(openai.BadRequestError, match="auto"):
            server.ask({"kv_eviction_budget": "auto:0.9"})
        wrong = put(client, policy="tgv", budget=1.5)
        assert wrong.status_code == 400
        assert "budget of the request is 1.5" in wrong.json()["error"]["message"]
        denied = client.put("/defaults", json={})
        assert denied.status_code == 403
        assert client.get("/status").json()["defaults"]["policy"] == "random"
        # A part of the defaults does not switch eviction on.
        put(client, policy="none")
        for partial in (put(client, budget=0.2), client.put("/defaults", json={}, headers=BOSS)):
            assert partial.status_code == 400
            assert "policy" in partial.json()["error"]["message"]
        changed = client.patch("/defaults", json={"budget": 0.2}, headers=BOSS)
        assert changed.json() == {"policy": "none", "budget": 0.2, "changed": True}
        assert report_of(server.ask({"kv_eviction_report": 1}))["skip_reason"] == "policy_none"
        changed = client.patch("/defaults", json={"policy": "snapkv"}, headers=BOSS)
        assert changed.json() == {"policy": "snapkv", "budget": 0.2, "changed": True}
    finally:
        assert restore(client).json() == {"policy": "tgv", "budget": 0.1, "changed": False}
    assert report_of(server.ask({"kv_eviction_report": 1}))["policy"] == "tgv"


def test_a_client_that_goes_away(server: ChatServer, client: httpx.Client) -> None:
    """Its question ends at once, before, during and after the first of two answers.

    The last test of this file checks that no error was logged.
    """

    def total(name: str, **labels: str) -> float:
        found = server.samples(name)
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    def answers() -> float:
        return total("vllm:request_success_total", finished_reason="length")

    before = answers()
    phases: tuple[Callable[[], bool], ...] = (
        lambda: True,
        lambda: total("vllm:num_requests_running") == 1,
        lambda: answers() == before + 1,
    )
    for has_begun in phases:
        connection = HTTPConnection(server.url.removeprefix("http://"))
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        body = json.dumps(question(max_tokens=600))
        connection.request("POST", "/kv-eviction/ask", body, headers)
        assert eventually(has_begun)
        connection.close()
        # The gauge is as of the last step. After this question none of the others is running.
        assert client.post("/ask", json=question(max_tokens=20)).status_code == 200
        assert total("vllm:num_requests_running") == 0
        before = answers()


def test_pages_allow_nothing_from_elsewhere(client: httpx.Client) -> None:
    folder = Path(__file__).parents[2] / "server" / "inspector"
    kinds = {".html": "text/html", ".js": "javascript", ".css": "css"}
    files = {f"/{path.name}": kinds[path.suffix] for path in folder.iterdir()}
    assert len(files) > 10
    for path, kind in {"/": "text/html", **files}.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy


@pytest.mark.parametrize("key", [KEY, ADMIN])
def test_fuzzed_requests_get_no_server_error(
    server: ChatServer, client: httpx.Client, tmp_path: Path, key: str
) -> None:
    """Requests within and outside the OpenAPI document get documented answers."""
    command = [str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json"]
    command += ["--include-path-regex", "^/kv-eviction", "-H", f"Authorization: Bearer {key}"]
    # The document cannot describe valid images and names of methods.
    command += ["--exclude-checks", "positive_data_acceptance"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "30"]
    # Enough for 2 x 1024 tokens, the largest question, on a busy machine.
    command += ["--request-timeout", "240", "--suppress-health-check", "all", "--no-color"]
    command += ["--generation-database", ":memory:", "--continue-on-failure"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=FUZZ_SECONDS, cwd=tmp_path, check=False
    )
    restore(client)
    assert result.returncode == 0, result.stdout[-6000:]
    assert "8 selected" in result.stdout
    assert server.ask(max_tokens=2).usage.completion_tokens == 2


def test_the_server_logged_no_error_and_lost_no_block(server: ChatServer) -> None:
    """`check_integrity` recounted every step of the tests above."""
    bad = [line for line in server.lines() if "Traceback" in line or " ERROR " in line]
    assert bad == []

    def held() -> list[float]:
        return [sample.value for sample in server.samples("vllm:kv_eviction_blocks_held")]

    assert held()
    assert eventually(lambda: not any(held()))
