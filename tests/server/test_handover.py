# SPDX-License-Identifier: Apache-2.0
"""Two `vllm serve`: one computes and cuts prompts, the other decodes them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from measure.pairs import COMPUTE, CONNECTOR, HANDOVERS, nixl_environment
from measure.serving import START_SECONDS, free_port
from tests.inputs import new_rng
from tests.server.serving import ChatServer, eventually, messages, serve

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

pytest.importorskip("nixl", reason="pip install --no-deps nixl nixl-cu12")

SECONDS = 240
TOKENS = 24
LEASE_SECONDS = 15
NUM_REQUESTS, NUM_LIVES = 500, 5
"""Of the load, and of the server that computes its prompts."""

KEY = "kv_eviction_handover"

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
    flags: Sequence[str] = (),
    port: int | None = None,
    **options: Any,
) -> Iterator[ChatServer]:
    """Serve the model with a connector.

    Args:
        port: where other servers ask for its metadata; a free one by default.
    """
    transfer = {**CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS}}
    environment = nixl_environment(port)
    flags = [*flags, "--kv-transfer-config", json.dumps(transfer)]
    options = {"flags": flags, "environment": environment, **options}
    # Two start at the same time.
    with serve(folder, log, config, start_seconds=2 * START_SECONDS, **options) as found:
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


def body_of(number: int, length: int = 300, images: int = 1, **options: Any) -> dict[str, Any]:
    """Return a question; `xargs` are added to its `vllm_xargs`."""
    xargs = {"kv_eviction_report": 1, **options.pop("xargs", {})}
    return {
        "model": "tiny",
        "messages": messages(number, images, length),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": xargs,
        **options,
    }


def post(server: ChatServer, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def computed(prefill: ChatServer, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a router gets from the server that computes a prompt."""
    body = {**body, "max_tokens": 1, "kv_transfer_params": COMPUTE}
    body.pop("min_tokens", None)
    return post(prefill, body)["kv_transfer_params"]


def told(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that do not depend on where its prompt was computed."""
    report = dict((answer["kv_transfer_params"] or {}).get("kv_eviction", {}))
    report.pop("seconds", None)
    # Logarithms differ in their last digits where a prompt was computed in chunks.
    choices = json.loads(json.dumps(answer["choices"]), parse_float=lambda x: round(float(x), 1))
    return {"choices": choices, "usage": answer["usage"], "report": report}


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def handed_over(prefill: ChatServer, decode: ChatServer, body: Mapping[str, Any]) -> dict[str, Any]:
    return post(decode, {**body, "kv_transfer_params": computed(prefill, body)})


def outcomes(server: ChatServer) -> dict[str, float]:
    """Return the prompts that came from another server so far, by outcome."""
    poke(server)
    found: dict[str, float] = {}
    for sample in server.samples(HANDOVERS):
        outcome = sample.labels["outcome"]
        found[outcome] = found.get(outcome, 0) + sample.value
    return found


def poke(server: ChatServer) -> None:
    """Let the server make a step: statistics arrive with the next one."""
    post(server, {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2})


@contextmanager
def counting(server: ChatServer, **expected: int) -> Iterator[None]:
    """Check how many prompts from another server ended how."""
    before = outcomes(server)
    grown: dict[str, float] = {}
    yield

    def have_arrived() -> bool:
        after = outcomes(server)
        grown.update({name: after[name] - before.get(name, 0) for name in after})
        return sum(grown.values()) >= sum(expected.values())

    assert eventually(have_arrived), grown
    assert {name: number for name, number in grown.items() if number} == expected


def holds_nothing(server: ChatServer) -> bool:
    poke(server)
    names = ("kv_cache_usage_perc", "kv_eviction_blocks_held", "num_requests_running")
    return not any(each.value for each in server.samples(*(f"vllm:{name}" for name in names)))


def check_empty(*servers: ChatServer) -> None:
    """Check that nothing is held, once leases are over."""
    for each in servers:
        assert each.is_alive()
        assert eventually(lambda each=each: holds_nothing(each)), each.log


def stream(
    server: ChatServer, body: Mapping[str, Any], most: int | None = None
) -> tuple[list[list[int]], dict[str, Any] | None]:
    """Return the tokens of each part of an answer, and its usage; hang up after `most` parts."""
    parts, usage = [], None
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            tokens = [each["token_ids"] for each in chunk["choices"] if each.get("token_ids")]
            parts += tokens
            if most is not None and len(parts) >= most:
                break
    return parts, usage


# -- answers ------------------------------------------------------------------------------------


def test_a_batch_is_that_of_one_server(pair: tuple[ChatServer, ChatServer]) -> None:
    """Several requests at once share images or whole prompts, and hit the prefix cache."""
    prefill, decode = pair
    first = body_of(0)
    follow_ups = []
    for seed in (20, 21):
        (message,) = messages(seed, 0)
        image, text = first["messages"][0]["content"][0], message["content"][0]
        content = [image, text]
        follow_ups.append(body_of(0, messages=[{"role": "user", "content": content}]))
    bodies = [first, first, *follow_ups, body_of(1), body_of(2, images=2), body_of(3, length=600)]
    alone = [told(post(decode, body)) for body in bodies]
    with counting(decode, received=len(bodies)), ThreadPoolExecutor(8) as pool:
        apart = list(pool.map(lambda body: told(handed_over(prefill, decode, body)), bodies))
    for each in (*alone, *apart):
        # Shared blocks are not given back, and what is shared depends on who was first.
        each["report"]["memory"].pop("given_back")
    assert apart == alone
    assert handed_over(prefill, decode, first)["choices"] == alone[0]["choices"]
    check_empty(*pair)


TGV = {"kv_eviction": "tgv"}


def test_each_option_is_that_of_one_server(pair: tuple[ChatServer, ChatServer]) -> None:
    prefill, decode = pair
    usual = post(decode, body_of(0, length=304))
    # The prompt that fills its blocks, and its neighbours.
    edge = 304 + -usual["usage"]["prompt_tokens"] % 32
    tokens, text = tokens_of(usual), usual["choices"][0]["message"]["content"]
    asked = {"length": 304}
    received = [
        *(body_of(0, length=edge + more) for more in (-4, 0)),
        body_of(0, length=edge, xargs=TGV),
        body_of(4, xargs={"kv_eviction": "snapkv", "kv_eviction_budget": 0.3}),
        body_of(5, xargs={"kv_eviction_budget": "auto:0.98,min=0.02,max=0.5"}),
        body_of(0, max_tokens=6, **asked),
        body_of(0, min_tokens=8, stop_token_ids=[250], **asked),
        body_of(7, temperature=1, top_p=1e-6, frequency_penalty=0.5),
    ]
    # As many tokens as travel, or fewer, and answers that end by themselves.
    answered = [
        *(body_of(0, max_tokens=most, **asked) for most in (1, 5)),
        body_of(0, max_tokens=1, xargs=TGV),
        body_of(0, stop_token_ids=[tokens[2]], **asked),
    ]
    refused = [body_of(0, min_tokens=8, stop_token_ids=[tokens[2]], **asked)]
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
    as_json = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    # They travel whole, or not at all.
    others = [
        body_of(8, logprobs=True, top_logprobs=2),
        body_of(8, response_format=as_json, ignore_eos=False),
        body_of(8, seed=3, temperature=1),
        body_of(8, n=2, temperature=1, top_p=1e-6),
        body_of(8, length=1, images=0),
        body_of(8, xargs={"kv_eviction": "none"}),
    ]
    for bodies, expected in (
        (received, {"received": len(received)}),
        (answered, {"answered": len(answered)}),
        (refused, {"refused": len(refused)}),
        (others, {}),
    ):
        with counting(decode, **expected):
            for body in bodies:
                alone = told(post(decode, body))
                assert told(handed_over(prefill, decode, body)) == alone, body
    # A text that stops the answer may be found before or after it is handed over.
    body = body_of(0, stop=[text[1:3]], **asked)
    assert told(handed_over(prefill, decode, body)) == told(post(decode, body))
    # Several answers to a prompt do not begin with the same tokens.
    several = handed_over(prefill, decode, body_of(8, n=2, temperature=1))
    first, second = (each["token_ids"][:5] for each in several["choices"])
    assert first != second
    # vLLM checks the type of the field, not of what else a client can name so.
    body = body_of(8, xargs={"kv_transfer_params": "x"})
    answer = httpx.post(f"{decode.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
    check_empty(*pair)


def test_streams_and_clients_that_hang_up(pair: tuple[ChatServer, ChatServer]) -> None:
    """The tokens of the first server come first and at once; none is repeated, nothing is held."""
    prefill, decode = pair
    body = body_of(9, max_tokens=100)
    alone = post(decode, body)
    parts, usage = stream(decode, {**body, "kv_transfer_params": computed(prefill, body)})
    assert len(parts[0]) == 5  # `reach` waits for four tokens, and the next one is known
    assert list(chain.from_iterable(parts)) == tokens_of(alone)
    assert usage is not None
    assert usage.items() <= alone["usage"].items()
    body = body_of(9, max_tokens=500)
    for most in (1, 3, 10):
        asked = {**body, "kv_transfer_params": computed(prefill, body)}
        assert stream(decode, asked, most)[0]
    # While the blocks are awaited: nobody answers at this port.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        elsewhere = {"remote_engine_id": "silent", "remote_port": silent.getsockname()[1]}
        asked = {**body, "kv_transfer_params": {**(computed(prefill, body) or {}), **elsewhere}}
        assert stream(decode, asked, 1)[0][0] == tokens_of(alone)[:5]
        with counting(decode, failed=1):
            asked["max_tokens"] = 100
            assert tokens_of(post(decode, asked)) == tokens_of(alone)
    # While the prompt is computed.
    url, asked = (
        f"{prefill.url}/v1/chat/completions",
        {**body_of(10), "kv_transfer_params": COMPUTE},
    )
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=asked, timeout=0.05)
    check_empty(decode)  # the other one once its lease is over, see below


# -- failures -----------------------------------------------------------------------------------


def changed(parameters: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**parameters, KEY: {**parameters[KEY], **values}}


def forgeries(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield parameters that a server refuses before anything is read."""
    message = good[KEY]
    region, (blocks,) = message["region"], good["remote_block_ids"]
    for value in (None, 5, "x", [], {}, {"version": 1}, {**message, "version": 2}):
        yield {**good, KEY: value}
    yield {KEY: message}
    yield {**good, KEY: {**message, "more": 1}}
    for tokens in ([], None, "abc", ["a"], [1.5], [-1], [10**9], [2**60], [7] * 5000, [True] * 5):
        yield changed(good, tokens=tokens)
    for name, value in (("settings", "0"), ("num_ranks", 2), ("method", 5), ("prompt", "0" * 32)):
        yield changed(good, **{name: value})
    for name, value in (
        *(("at", region["at"] + 1), ("at", -1), ("at", "x"), ("num_planned", 3)),
        *(("num_retained", 0), ("num_replaced", 2**60), ("num_header", region["num_header"] + 1)),
        *(("nonce", []), ("nonce", None), ("nonce", ["a"] * 4), ("more", 1)),
    ):
        yield changed(good, region={**region, name: value})
    yield changed(good, region=None)  # the answer does not end there
    yield changed(good, region=[region])
    for value in (
        *(None, 5, "x", [], [[]], [blocks[1:]], [blocks, blocks], [blocks * 10000], blocks),
        *([["a"] * len(blocks)], [[-1] * len(blocks)], [[2**40] * len(blocks)], {"0": blocks}),
    ):
        yield {**good, "remote_block_ids": value}
    for name, value in (
        *(("remote_host", None), ("remote_host", 5), ("remote_port", "x"), ("remote_port", 0)),
        *(("remote_port", 2**16), ("remote_engine_id", []), ("remote_request_id", {"a": 1})),
        *(("tp_size", 2), ("tp_size", "1"), ("pp_size", 3), ("dcp_size", [])),
    ):
        yield {**good, name: value}
    yield {name: value for name, value in good.items() if name != "remote_host"}


@pytest.mark.nightly
def test_forged_parameters(pair: tuple[ChatServer, ChatServer]) -> None:
    """The prompt is computed where it is decoded, and both servers go on."""
    prefill, decode = pair
    body, other = body_of(11, max_tokens=8), body_of(12)
    alone = told(post(decode, body))
    good = computed(prefill, body) or {}
    forged = [*forgeries(good), computed(prefill, other)]
    with counting(decode, refused=len(forged)):
        for parameters in forged:
            answer = told(post(decode, {**body, "kv_transfer_params": parameters}))
            assert answer == alone, parameters
    # What ends with the given tokens reads nothing. Neither does what lacks our key.
    with counting(decode, answered=3):
        for change in ({}, {"remote_block_ids": 5}, {"remote_host": None}):
            short = {**body, "max_tokens": 1, "kv_transfer_params": {**good, **change}}
            assert tokens_of(post(decode, short)) == alone["choices"][0]["token_ids"][:1]
        lost = {name: value for name, value in good.items() if name != KEY}
        assert told(post(decode, {**body, "kv_transfer_params": lost})) == alone
    # Blocks that another server does not have, or that are not the prompt's; and the report.
    region = good[KEY]["region"]
    unread: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda good: {**good, "remote_block_ids": [[10**6] * len(good["remote_block_ids"][0])]},
        lambda good: {**good, "remote_block_ids": [good["remote_block_ids"][0][::-1]]},
        lambda good: changed(good, region={**good[KEY]["region"], "nonce": region["nonce"]}),
        lambda good: {**good, "remote_engine_id": "other", "remote_host": "nobody.invalid"},
        lambda good: {**good, "remote_engine_id": "another"},
    ]
    with counting(decode, failed=len(unread)):
        for change in unread:
            parameters = change(computed(prefill, body) or {})
            answer = told(post(decode, {**body, "kv_transfer_params": parameters}))
            assert answer == alone, parameters
    with counting(decode, received=3):
        for report in (5, {"policy": "x"}, {**good["kv_eviction"], "cuts": [{"at": "x"}]}):
            parameters = {**(computed(prefill, body) or {}), "kv_eviction": report}
            answer = post(decode, {**body, "kv_transfer_params": parameters})
            assert answer["choices"] == alone["choices"]
    check_empty(decode)  # the other one once its lease is over, see below


def test_blocks_that_were_given_to_others(pair: tuple[ChatServer, ChatServer]) -> None:
    """They are read after their lease."""
    prefill, decode = pair
    bodies = [body_of(seed) for seed in (13, 14)]
    alone = [told(post(decode, body)) for body in bodies]
    found = [computed(prefill, body) for body in bodies]
    check_empty(prefill)
    with counting(decode, failed=2):
        for index, body in enumerate(bodies):
            answer = told(post(decode, {**body, "kv_transfer_params": found[index]}))
            assert answer == alone[index]
            for seed in range(30, 42):
                post(prefill, body_of(seed, 700, max_tokens=1))
    check_empty(*pair)


@pytest.mark.nightly
def test_a_server_that_dies(
    folder: Path, pair: tuple[ChatServer, ChatServer], tmp_path: Path
) -> None:
    """Where a prompt was computed: before it is read, and with another server in its place. Where
    it is decoded: the blocks go back once their lease is over."""
    decode, port = pair[1], free_port()
    bodies = [body_of(number) for number in (50, 51, 52)]
    alone = [told(post(decode, body)) for body in bodies]
    with server(folder, tmp_path / "first.log", port=port) as prefill:
        # One that both know each other from, and one that is left.
        assert told(handed_over(prefill, decode, bodies[0])) == alone[0]
        found = [computed(prefill, body) for body in bodies]
        kill(prefill)
        with counting(decode, failed=1):
            answer = post(decode, {**bodies[1], "kv_transfer_params": found[1]})
            assert told(answer) == alone[1]
    with server(folder, tmp_path / "second.log", port=port) as prefill:
        with counting(decode, failed=2, received=2):
            for body, parameters, expected in zip(bodies, found, alone, strict=True):
                if body is not bodies[1]:
                    answer = post(decode, {**body, "kv_transfer_params": parameters})
                    assert told(answer) == expected
                    assert told(handed_over(prefill, decode, body)) == expected
        assert computed(prefill, bodies[0]) is not None
        check_empty(prefill, decode)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "budget", "flags"),
    [
        (CONFIG, "0.2", []),
        (CONFIG, "0.1", ["--block-size", "64"]),
        (None, "0.1", []),
    ],
    ids=["budget", "block size", "stock"],
)
def test_a_server_that_differs(
    folder: Path,
    pair: tuple[ChatServer, ChatServer],
    tmp_path: Path,
    config: Any,
    budget: str,
    flags: list[str],
) -> None:
    """It computes the prompt itself, and what it reads nothing of is given back."""
    body = body_of(60)
    with server(folder, tmp_path / "log", config, flags, budget=budget) as decode:
        alone = told(post(decode, body))
        with counting(decode, **{"refused": 1} if config else {}):
            assert told(handed_over(pair[0], decode, body)) == alone
        check_empty(pair[0], decode)


@pytest.mark.nightly
def test_a_small_pool(folder: Path, pair: tuple[ChatServer, ChatServer], tmp_path: Path) -> None:
    """Requests whose prompts came from another server are preempted, and computed again."""
    bodies = [body_of(number, max_tokens=250) for number in range(70, 74)]
    early = computed(pair[0], bodies[0])  # for a decode server that ends before it is asked
    with server(folder, tmp_path / "log", flags=["--num-gpu-blocks-override", "34"]) as decode:
        alone = [post(decode, body)["choices"] for body in bodies]
        assert post(decode, {**bodies[0], "kv_transfer_params": early})["choices"] == alone[0]
        with counting(decode, received=len(bodies)), ThreadPoolExecutor(len(bodies)) as pool:
            apart = pool.map(lambda body: handed_over(pair[0], decode, body)["choices"], bodies)
            assert list(apart) == alone
        (preemptions,) = decode.samples("vllm:num_preemptions_total")
        assert preemptions.value > 0
        check_empty(pair[0], decode)


def kill(server: ChatServer) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)


@pytest.mark.nightly
def test_load_with_random_kills(
    folder: Path, pair: tuple[ChatServer, ChatServer], tmp_path: Path
) -> None:
    """A router's clients do not notice that prompts are computed by a server that is killed."""
    decode, port, rng = pair[1], free_port(), new_rng()
    lengths = rng.integers(100, 700, 20)
    bodies = [
        body_of(100 + number, int(length), max_tokens=int(rng.integers(1, 40)))
        for number, length in enumerate(lengths)
    ]
    alone = [told(post(decode, body))["choices"] for body in bodies]
    num_wrong, num_local, before, begin = 0, 0, outcomes(decode), time.monotonic()

    def ask(prefill: ChatServer, index: int) -> bool:
        nonlocal num_local
        try:
            found = computed(prefill, bodies[index])
        except httpx.TransportError:  # a router would go on without it, too
            found = None
            num_local += 1
        answer = post(decode, {**bodies[index], "kv_transfer_params": found})
        return told(answer)["choices"] == alone[index]

    for life in range(NUM_LIVES):
        log = tmp_path / f"{life}.log"
        with server(folder, log, flags=CHUNKS, port=port) as prefill, ThreadPoolExecutor(8) as pool:
            chosen = rng.integers(len(bodies), size=NUM_REQUESTS // NUM_LIVES)
            asked = [pool.submit(ask, prefill, index) for index in chosen]
            asked[rng.integers(len(asked) // 2, len(asked))].result()
            kill(prefill)
            num_wrong += sum(not each.result() for each in asked)
        after = outcomes(decode)
        grown = {name: after[name] - before.get(name, 0) for name in after}
        seconds = time.monotonic() - begin
        print(f"after {life + 1} kills: {NUM_REQUESTS // NUM_LIVES * (life + 1)} requests", end=" ")
        print(f"in {seconds:.0f} s, starts included, {num_wrong} wrong, {num_local} without")
        print(f"parameters, others {grown}", flush=True)
    assert num_wrong == 0
    assert grown["received"] > NUM_REQUESTS / 4
    check_empty(decode)
