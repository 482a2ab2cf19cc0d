# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM's server with eviction: guided answers, beams, adapters, control routes."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.adapters import write_adapters
from tests.engine.questions import (
    DEBUG,
    JSON_SCHEMA,
)
from tests.server.serving import ChatServer, eventually, messages, report_of, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    """Serve adapters, with vLLM's control routes and a log line for each request."""
    folder, root = tiny_model("llava", image_size=112), tmp_path_factory.mktemp("server")
    log, adapters = root / "server.log", write_adapters(folder, root)
    flags = ["--kv-eviction-budget", "0.3", "--enable-log-requests", "--scheduling-policy"]
    flags += ["priority", "--enable-lora", "--max-loras", "3", "--lora-modules"]
    flags += [f"{name}={path}" for name, (path, _) in adapters.items()]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with serve(folder, log, {"debug": DEBUG}, environment=environment, flags=flags) as running:
        yield running


def post(server: ChatServer, route: str) -> Any:
    request = urllib.request.Request(f"{server.url}{route}", data=b"", method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or b"null")


def answer(server: ChatServer, xargs: dict[str, Any], model: str = "tiny", **fields: Any) -> Any:
    """Return one chat answer; `extra_body` is merged with that of every request."""
    extra = {"vllm_xargs": {"kv_eviction_report": 1, **xargs}, **fields.pop("extra_body", {})}
    body = {"messages": messages(1), "max_tokens": 30, "temperature": 0, **fields}
    return server.client.chat.completions.create(model=model, extra_body=extra, **body)


def test_guided_answers_and_logprobs_over_http(server: ChatServer) -> None:
    schema = {"name": "s", "schema": JSON_SCHEMA, "strict": True}
    guided = answer(
        server,
        {},
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(guided.choices[0].message.content).keys() == {"a", "b"}
    assert report_of(guided)["skip_reason"] is None
    choice = answer(server, {}, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert choice.choices[0].message.content in ("left", "right")
    assert report_of(choice)["skip_reason"] is None
    fields = {"logprobs": True, "top_logprobs": 4, "extra_body": {"prompt_logprobs": 1}}
    evicted = answer(server, {}, max_tokens=4, **fields)
    stock = answer(server, {"kv_eviction": "none"}, max_tokens=4, **fields)
    assert report_of(evicted)["skip_reason"] is None
    # The first token and the whole prompt come from the full cache.
    mine, its = (a.choices[0].logprobs.content for a in (evicted, stock))
    assert [t.token for t in mine[0].top_logprobs] == [t.token for t in its[0].top_logprobs]
    assert mine[0].logprob == pytest.approx(its[0].logprob, abs=1e-3)
    assert mine[3].logprob != pytest.approx(its[3].logprob, abs=1e-3)
    assert len(evicted.prompt_logprobs) == evicted.usage.prompt_tokens
    for here, there in zip(evicted.prompt_logprobs[1:], stock.prompt_logprobs[1:], strict=True):
        for token in here.keys() & there.keys():
            assert here[token]["logprob"] == pytest.approx(there[token]["logprob"], abs=1e-3)


def test_beams_are_stocks_over_http(server: ChatServer) -> None:
    """Each step of a beam is a request of one token, so it never reads a compressed cache."""
    beams = {"n": 2, "max_tokens": 4, "extra_body": {"use_beam_search": True}}
    texts = [
        [choice.message.content for choice in answer(server, xargs, **beams).choices]
        for xargs in ({}, {"kv_eviction": "none"})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 2


def test_adapters_are_models_over_http(server: ChatServer) -> None:
    answers = [answer(server, {}, model=model) for model in ("tiny", "first", "second")]
    assert len({a.choices[0].message.content for a in answers}) == 3
    assert {report_of(a)["skip_reason"] for a in answers} == {None}
    # The plugin's statistics travel in a field of vLLM's that is meant for adapters.
    labels = [sample.labels for sample in server.samples("vllm:lora_requests_info")]
    assert labels
    assert not [value for label in labels for value in label.values() if "eviction" in value]


def test_a_client_that_goes_away(server: ChatServer) -> None:
    stream = answer(server, {}, max_tokens=600, stream=True, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(stream)
    stream.close()
    running = ("vllm:num_requests_running", "vllm:kv_eviction_requests_by_state")

    def nothing_runs() -> bool:
        answer(server, {}, max_tokens=2)  # steps report statistics
        return not any(sample.value for sample in server.samples(*running))

    assert eventually(nothing_runs)


@pytest.mark.parametrize(
    "disturb",
    [("/pause?mode=keep", "/resume"), ("/reset_prefix_cache?reset_running_requests=true",)],
    ids=["pause", "reset"],
)
def test_control_routes_change_no_answer(server: ChatServer, disturb: Sequence[str]) -> None:
    # A new image: vLLM would lose track of one that was requested before.
    fields = {"max_tokens": 150, "messages": messages(10 + len(disturb))}
    fields["extra_body"] = {"ignore_eos": True}
    stream = answer(server, {}, stream=True, **fields)
    chunks = (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    text = "".join(itertools.islice(chunks, 4))
    for route in disturb:
        told = post(server, route)
        assert told in ({"status": "paused"}, {"status": "resumed"}, {"success": True})
    disturbed = text + "".join(chunks)
    assert answer(server, {}, **fields).choices[0].message.content == disturbed


@pytest.mark.parametrize("route", ["embeddings", "audio/transcriptions", "audio/translations"])
def test_what_the_model_cannot_do_is_an_error_of_vllms(server: ChatServer, route: str) -> None:
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        server.client.post(f"/{route}", cast_to=object, body={"model": "tiny", "input": "a"})
    assert report_of(answer(server, {}, max_tokens=2))["skip_reason"] is None


def test_the_servers_log_tells_requests_and_no_error(server: ChatServer) -> None:
    lines = server.lines()
    assert [line for line in lines if "Received request" in line]
    assert [line for line in lines if re.search(r"\bERROR\b|Traceback|Integrity", line)] == []
