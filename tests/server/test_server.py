# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve --kv-eviction tgv`, called through the official client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import openai
import pytest

from measure.serving import group_members
from tests.conftest import ROOT
from tests.models import random_image, random_text
from tests.server.serving import (
    BLOCK_SIZE,
    VISION_TOKENS,
    ChatServer,
    eventually,
    messages,
    report_of,
    serve,
)
from vllm_tgvkv.api import report_of as read_report
from vllm_tgvkv.judge.__main__ import main as judge
from vllm_tgvkv.shared.metrics import STATES
from vllm_tgvkv.shared.report import EvictionReport

pytestmark = [pytest.mark.engine, pytest.mark.slow]

REPORT = {"kv_eviction_report": 1}


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChatServer]:
    """Start a server whose log has a line for every eviction."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    config = {"debug": {"check_integrity": True}}
    with serve(tiny_model("llava", image_size=112), log, config) as running:
        yield running


def scraped(server: ChatServer) -> dict[tuple[str, ...], float]:
    """Return eviction's samples on `/metrics`, by name and the values of its own labels."""
    found = {}
    for sample in server.samples():
        if sample.name.startswith("vllm:kv_eviction_"):
            assert sample.labels.pop("model_name") == "tiny"
            assert sample.labels.pop("engine") == "0"
            name = sample.name.removeprefix("vllm:kv_eviction_")
            order = ("policy", "reason", "modality", "part", "layers", "state", "cause", "le")
            labels = [sample.labels[label] for label in order if label in sample.labels]
            found[(name, *labels)] = sample.value
    return found


def test_metrics(server: ChatServer) -> None:
    """One evicted request and one without an image add to the right series."""
    before, started = scraped(server), time.monotonic()
    answer = server.ask({"kv_eviction": "random", "kv_eviction_budget": 0.5, **REPORT})
    report = report_of(answer)
    server.ask(messages=[{"role": "user", "content": random_text(3, 400)}])
    after: dict[tuple[str, ...], float] = {}

    def has_arrived() -> bool:
        """Statistics arrive with a later step."""
        server.ask(messages=[{"role": "user", "content": "a"}], max_tokens=2)
        after.update(scraped(server))
        skipped = ("skipped_requests_total", "tgv", "text_only")
        return after[skipped] != before[skipped]

    assert eventually(has_arrived)
    elapsed = time.monotonic() - started
    grown = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)}
    assert grown["requests_total", "random"] == 1
    assert grown["skipped_requests_total", "tgv", "text_only"] == 1
    seen = {m: grown["prompt_tokens_total", "random", m] for m in ("text", "vision")}
    kept = {m: grown["kept_tokens_total", "random", m] for m in ("text", "vision")}
    assert seen == {"text": report["prompt_tokens"] - VISION_TOKENS, "vision": VISION_TOKENS}
    assert sum(kept.values()) == report["kept_tokens"]
    assert min(kept.values()) > 0
    assert grown["blocks_given_back_total", "random"] >= 1
    assert grown["kept_fraction_count", "random"] == 1
    fraction = report["kept_tokens"] / report["prompt_tokens"]
    assert grown["kept_fraction_sum", "random"] == pytest.approx(fraction, abs=1e-3)
    # No request is running, and none holds blocks.
    assert [after["requests_by_state", state] for state in STATES] == [0, 0, 0]
    assert [after["blocks_held", layers] for layers in ("evicted", "window", "state")] == [0, 0, 0]
    for part in ("statistics", "selection", "copy"):
        assert grown["seconds_count", "random", part] == 1
        assert 0 < grown["seconds_sum", "random", part] < elapsed  # they are seconds


def test_status_and_start_log(server: ChatServer) -> None:
    status = httpx.get(f"{server.url}/kv-eviction/status").json()
    assert status["settings"]["policy"] == "tgv"
    assert status["settings"]["budget"] == "10 % of the prompt"
    (engine,) = status["engines"]
    assert engine["pool"] == {"blocks": 255, "block_size": 32, "layers": 4, "kv_heads": 2}
    assert engine["totals"]["requests_evicted"] > 0
    assert "/kv-eviction/status" in httpx.get(f"{server.url}/openapi.json").json()["paths"]
    (line,) = [line for line in server.lines() if "KV eviction: policy" in line]
    assert line.endswith(
        "KV eviction: policy tgv, budget 10 % of the prompt, after 0 tokens of the answer, "
        "granularity layer; "
        "pages of 32 tokens, pool of 255 blocks of 8 pages (layers x KV heads)"
    )


def test_answer_tells_what_was_evicted(server: ChatServer) -> None:
    """Tests of the engine check every number; here all of them have to arrive."""
    answer = server.ask(REPORT)
    num_tokens = answer.usage.prompt_tokens
    assert num_tokens > 300 + VISION_TOKENS
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].message.content
    tail, report = num_tokens % BLOCK_SIZE, report_of(answer)
    assert list(report) == [field.name for field in fields(EvictionReport)]
    sizes = {"kept_tokens": BLOCK_SIZE + tail, "blocks_after": 1 + bool(tail)}
    sizes["blocks_before"] = -(-num_tokens // BLOCK_SIZE)
    assert report["cuts"] == [{"answer_tokens": 0, **sizes, "cause": "first"}]


@pytest.fixture
def page_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the image that pages ask about."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/demo").mkdir(parents=True)
    path = tmp_path / "build/demo/page.png"
    random_image(5, 112, 84).save(path)
    return path


def blocks(page: str, language: str) -> str:
    """Return the only block of a page in a language."""
    text = (ROOT / f"docs/{page}.md").read_text()
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return code


@pytest.mark.parametrize(
    ("page", "part"), [("requests", "'30 % of the prompt'"), ("http", "[[1, 1], [1")]
)
def test_examples_of_pages_run_as_printed(
    server: ChatServer, page: str, part: str, page_png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(blocks(page, "python").replace("http://localhost:8000", server.url), {})
    assert part in capsys.readouterr().out


def test_the_judge_asks_the_questions_of_its_page(
    server: ChatServer, page_png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's own command; then more questions, two of them in the log."""
    command = blocks("judge", "bash").replace("http://localhost:8000", server.url)
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-ec", command], env=path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "10 requests, 0 of them answered in mine.judge/answers.jsonl" in ended.stderr
    assert "2 questions, 1 with an expected answer." in ended.stdout

    whole = server.ask({"kv_eviction": "none"}, messages=messages(5)).choices[0].message.content
    more = [
        {"messages": messages(5), "max_tokens": 8, "answer": ["no", whole], "match": "exact"},
        {"messages": messages(5), "max_tokens": 8, "answer": "such a text", "match": "contains"},
        {"prompt": random_text(3, 300), "images": [page_png.as_uri()[7:]], "max_tokens": 8},
    ]
    asked = page_png.parents[2] / "mine.jsonl"
    asked.write_text(asked.read_text() + "".join(f"{json.dumps(line)}\n" for line in more))
    budgets = ["--budgets", "0.5", "0.2", "0.1", "--in-flight", "2"]
    given = ["--questions", str(asked), "--url", f"{server.url}/v1", *budgets]
    with (asked.with_suffix(".judge") / "answers.jsonl").open("a") as log:
        log.write('{"key": "cut o')  # the run was killed
    assert judge(given) == 0
    shown = capsys.readouterr()
    # Two lines have the same request.
    assert "25 requests, 10 of them answered" in shown.err
    result = json.loads((asked.with_suffix(".judge") / "result.json").read_text())
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert list(arms) == ["full cache", "as served", "reach 50 %", "reach 20 %", "reach 10 %"]
    full, tenth = arms["full cache"], arms["reach 10 %"]
    assert (full["right"]["mean"], full["same"]) == (pytest.approx(1 / 3), None)
    assert (full["kept"], full["difference"]) == (1, None)
    assert tenth["kept"] < arms["reach 50 %"]["kept"] < 1
    first = result["answers"][2]["arms"]["full cache"]
    assert first == {"text": whole, "right": True}
    assert result["answers"][4]["arms"]["reach 10 %"]["right"] is None
    drawn = ElementTree.parse(asked.with_suffix(".judge") / "picture.svg")
    assert "reach 10 %" in {element.text for element in drawn.iter()}
    assert judge([*given, "--methods", "reech"]) == 1
    assert "'reech'" in capsys.readouterr().err
    asked.write_text(json.dumps({"prompt": "a" * 5000}))
    assert judge(given) == 1
    assert "line 1 of the questions, " in capsys.readouterr().err


def test_a_system_prompt_is_kept_in_every_head(server: ChatServer) -> None:
    """Found by the template, once for all questions about it."""
    system = {"role": "system", "content": random_text(70, 100)}
    xargs = {**REPORT, "kv_eviction_trace": 1, "kv_eviction": "snapkv"}
    for seed in (70, 71):
        asked = [system, *messages(seed)]
        answer = server.ask({**xargs, "kv_eviction_protect": "system"}, messages=asked)
        report = report_of(answer)
        # "<|im_start|>system\n", the text, "<|im_end|>\n<|im_start|>user\n": a token a byte.
        assert report["protected_tokens"] == 8 + 100 + 2 + 6
        assert report["blocks_after"] == 4 + 1 + 1  # the system prompt, the floor and the tail
        trace = httpx.get(f"{server.url}/kv-eviction/requests/{answer.id}").json()
        everyone = trace["layers"] * trace["kv_heads"]
        assert trace["kept_by"][:116] == [everyone] * 116
    without = server.ask({**xargs, "kv_eviction_protect": "none"}, messages=asked)
    assert report_of(without)["protected_tokens"] == 0
    assert report_of(without)["blocks_after"] == 1 + 1


def test_options_of_a_request(server: ChatServer) -> None:
    assert server.ask().kv_transfer_params is None  # no report unless asked
    half = report_of(server.ask({"kv_eviction_budget": 0.5, **REPORT}))
    num_tokens = half["prompt_tokens"]
    assert 0.5 * num_tokens - BLOCK_SIZE < half["kept_tokens"] <= 0.5 * num_tokens
    tokens = report_of(server.ask({"kv_eviction_budget": "200", **REPORT}))
    assert 200 - BLOCK_SIZE < tokens["kept_tokens"] <= 200
    none = report_of(server.ask({"kv_eviction": "none", **REPORT}))
    assert (none["policy"], none["skip_reason"]) == ("none", "policy_none")
    assert none["blocks_after"] is None
    full = report_of(server.ask({"kv_eviction_budget": 1, **REPORT}))
    assert full["skip_reason"] == "budget_covers_prompt"

    # The log has one debug line for each eviction.
    marks = ("KV eviction of", "tgv, 60 tokens per head")
    answer = server.ask({"kv_eviction_budget": 60, **REPORT})
    report = report_of(answer)
    assert report["understood"] == "60 tokens per head; for 60 % of the prompt give 0.6"
    assert half["understood"] == "50 % of the prompt"
    assert none["understood"] == "everything is kept"
    assert tokens["understood"] == "200 tokens per head"
    (line,) = [line for line in server.lines() if all(mark in line for mark in marks)]
    assert answer.id in line
    assert f"{report['kept_tokens']} of {report['prompt_tokens']} prompt tokens kept" in line
    assert line.endswith(f"blocks {report['blocks_before']} -> {report['blocks_after']}")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("kv_eviction", True, ["vllm_xargs.kv_eviction is", "none, tgv"]),
        ("kv_eviction_budget", [0.1], ["vllm_xargs.kv_eviction_budget is [0.1]", "such as 512"]),
        ("kv_eviction_budget", "9" * 5000, ["vllm_xargs.kv_eviction_budget is '999", "..."]),
        ("kv_eviction_trace", 2, ["vllm_xargs.kv_eviction_trace is 2", "give 1 for a trace"]),
        ("kv_evicton", "snapkv", ["vllm_xargs has kv_evicton: did you mean kv_eviction?"]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_wrong_options_are_http_400(
    server: ChatServer, key: str, value: Any, parts: list[str]
) -> None:
    """As `unit/test_refusals.py` has them; the server keeps running."""
    with pytest.raises(openai.BadRequestError) as caught:
        server.ask({key: value})
    assert all(part in str(caught.value) for part in parts), caught.value
    assert server.ask(max_tokens=2).usage.completion_tokens == 2


def test_an_image_that_came_with_a_wrong_request_first_is_missed_once(server: ChatServer) -> None:
    """Only vLLM's front end has seen it, not the engine. Our options are refused before that."""
    ask = {"messages": messages(901), "max_tokens": 2}
    with pytest.raises(openai.BadRequestError):
        server.ask({"kv_eviction_budget": 0}, **ask)
    assert server.ask(**ask).usage.completion_tokens == 2
    ask["messages"] = messages(902)
    with pytest.raises(openai.BadRequestError):
        server.ask(**ask, logit_bias={99999: 1})
    with pytest.raises(openai.InternalServerError):
        server.ask(**ask)
    assert server.ask(**ask).usage.completion_tokens == 2


def test_ten_thousand_images_are_http_400(server: ChatServer) -> None:
    """vLLM's own limit refuses them before it decodes any."""
    (message,) = messages(1)
    (image,) = (part for part in message["content"] if part["type"] == "image_url")
    with pytest.raises(openai.BadRequestError, match="image"):
        server.ask(messages=[{**message, "content": [image] * 10_000}])
    assert server.ask(max_tokens=2).usage.completion_tokens == 2


def test_wrong_options_in_a_stream_and_in_completions(server: ChatServer) -> None:
    """HTTP 400, and not an event of a stream that has begun."""
    wrong = {"kv_eviction_budget": -1}
    with pytest.raises(openai.BadRequestError, match="kv_eviction_budget is -1"):
        server.ask(wrong, stream=True)
    beside = "kv_eviction_budget is at the top level of the request's body: put it into vllm_xargs"
    body: dict[str, Any] = {"model": "tiny", "stream": True}
    for given, message in (({"vllm_xargs": wrong}, "kv_eviction_budget is -1"), (wrong, beside)):
        with pytest.raises(openai.BadRequestError, match=message):
            server.client.completions.create(**body, prompt="a" * 200, extra_body=given)
        with pytest.raises(openai.BadRequestError, match=message):
            server.client.responses.create(**body, input="a" * 200, extra_body=given)
        asked = {**body, "max_tokens": 2, "messages": [{"role": "user", "content": "a" * 200}]}
        answer = httpx.post(f"{server.url}/v1/messages", json={**asked, **given}, timeout=60)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_several_choices_share_a_prompt(server: ChatServer) -> None:
    """Each choice is a request that is evicted, although they share the prompt's blocks."""
    before = evictions(server)
    answer = server.ask(REPORT, n=2, max_tokens=40, temperature=1)
    assert answer.usage.completion_tokens == 80
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert evictions(server) - before == 2
    assert report_of(answer)["blocks_after"] == 2


def evictions(server: ChatServer) -> int:
    return sum(" prompt tokens kept a head, blocks " in line for line in server.lines())


def test_prompts_of_all_kinds(server: ChatServer) -> None:
    """Two images, only text, and completions; a stream has the text of the whole answer."""
    answer = server.ask(REPORT, messages=messages(7, images=2))
    assert answer.usage.prompt_tokens > 300 + 2 * VISION_TOKENS
    assert report_of(answer)["skip_reason"] is None
    text = random_text(3, 400)
    report = report_of(server.ask(REPORT, messages=[{"role": "user", "content": text}]))
    assert (report["skip_reason"], report["kept_tokens"]) == ("text_only", None)
    options = {"max_tokens": 5, "temperature": 0, "extra_body": {"vllm_xargs": REPORT}}
    completion = server.client.completions.create(model="tiny", prompt=text, **options)
    assert completion.usage.completion_tokens == 5
    assert report_of(completion)["skip_reason"] == "text_only"
    asked: dict[str, Any] = {"max_tokens": 20, "seed": 1, "temperature": 1}
    whole = server.ask(REPORT, **asked)
    usage = {"stream_options": {"include_usage": True}}
    for number, more in ((1, {}), (2, usage)):
        chunks = list(server.ask(REPORT, **asked, n=number, stream=True, **more))
        shown = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == 0]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in shown)
        assert text == whole.choices[0].message.content
        # The last chunk of each choice has its report, whatever other chunks come later.
        ends = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert len(ends) == number
        for end in ends:  # choices share blocks of the prompt
            same = {"seconds": None, "memory": None}
            assert replace(read_report(end), **same) == replace(read_report(whole), **same)
        assert not any(read_report(chunk) for chunk in chunks if chunk not in ends)
    options["max_tokens"] = 1  # its first result is its last
    *_, last = server.client.completions.create(model="tiny", prompt=text, stream=True, **options)
    assert read_report(last).policy == "tgv"
    assert not any(map(read_report, server.ask(stream=True)))  # no report unless asked


def test_responses(server: ChatServer) -> None:
    content = messages(0)[0]["content"]
    image = {"type": "input_image", "image_url": content[0]["image_url"]["url"], "detail": "auto"}
    question: Any = [{"type": "input_text", "text": content[1]["text"]}, image]
    body = {"model": "tiny", "input": [{"role": "user", "content": question}]}
    before = evictions(server)
    answer = server.client.responses.create(
        **body, max_output_tokens=8, extra_body={"vllm_xargs": REPORT}
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8
    assert report_of(answer)["blocks_after"] == 2
    assert evictions(server) - before == 1
    *_, done = server.client.responses.create(
        **body, max_output_tokens=8, stream=True, extra_body={"vllm_xargs": REPORT}
    )
    assert read_report(done.response).blocks_after == 2
    with pytest.raises(openai.BadRequestError, match="kv_eviction_budget"):
        server.client.responses.create(
            **body, extra_body={"vllm_xargs": {"kv_eviction_budget": 1.5}}
        )


def test_many_at_once_answer_as_alone(server: ChatServer) -> None:
    """Different prompts and budgets in one batch; each request gets the answer it gets alone."""

    def ask(seed: int) -> str:
        xargs = {"kv_eviction_budget": (0.1, 0.3, 0.6, 1)[seed % 4]}
        answer = server.ask(xargs, messages=messages(seed, length=150 + 60 * seed), max_tokens=40)
        assert answer.usage.completion_tokens == 40
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, range(8)))
    assert together == [ask(seed) for seed in range(8)]
    assert len(set(together)) == 8


def test_engine_logs_no_error_and_an_interrupt_ends_every_process(server: ChatServer) -> None:
    """Last in this file: it stops the server. `check_integrity` recounted every step until here."""
    lines = [line for line in server.lines() if re.match(r"\((EngineCore|Worker|VllmWorker)", line)]
    assert lines
    assert [line for line in lines if re.search(r"\bERROR\b|Traceback|Integrity", line)] == []
    assert len(group_members(server.process.pid)) > 1  # the engine is a separate process
    server.interrupt()
