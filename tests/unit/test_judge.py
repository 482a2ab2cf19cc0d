# SPDX-License-Identifier: Apache-2.0
"""The judge's questions, rules and figures; `server/test_server.py` runs it on a real server."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import DecodeOptions, EvictionConfig
from vllm_tgvkv.judge.__main__ import main as judge
from vllm_tgvkv.judge.asking import FULL, Answer, arms_of
from vllm_tgvkv.judge.questions import JudgeError, read_questions
from vllm_tgvkv.judge.report import figures, picture, table
from vllm_tgvkv.judge.statistics import CONFIDENCE_Z, Estimate, paired_difference
from vllm_tgvkv.shared.budget import Budget


@pytest.mark.parametrize(
    ("match", "expected", "text", "right"),
    [
        ("contains", "New  York", "in new\nyork.", True),
        ("contains", "York", "in New-Yrk", False),
        ("exact", "Yes", " yes ", True),
        ("exact", "Yes", "yes.", False),
        ("number", "1234.5", "of 7, it is 1,234.50", True),
        ("number", "-3", "-3", True),
        ("number", "-3.5", "x=-3.5.", True),
        ("number", "7", "Gate A-7", True),
        ("number", "15", "pages 12-15", True),
        ("number", "42", "No.42", True),
        ("number", "-42", "\u6e29\u5ea6\u662f-42", True),
        ("number", "3", "3 of 4", False),
        ("number", "3", "three", False),
        ("regex", "^a+$", "aaa", True),
        ("regex", "^a+$", "aab", False),
    ],
)
def test_rules(tmp_path: Path, match: str, expected: str, text: str, right: bool) -> None:
    path = tmp_path / "questions.jsonl"
    asked = {"prompt": "a\u2028b", "answer": expected, "match": match}
    path.write_text(json.dumps(asked, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (question,) = read_questions(path, 9)
    assert question.is_right(text) is right
    assert question.max_tokens == 9


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["line 1 is not JSON"]),
        (b'{"prompt": "\xff"}', ["line 1 is not JSON"]),
        ([1], ["line 1 is [1]"]),
        ({"messages": None}, ["messages of line 1 is None"]),
        ({"messages": [1]}, ["messages of line 1 is [1]"]),
        ({"messages": [{}], "images": []}, ["images of line 1 is []"]),
        ({"prompt": 3}, ["prompt of line 1 is 3"]),
        ({"prompt": "?", "images": None}, ["images of line 1 is None"]),
        ({"prompt": "?", "images": "p.png"}, ["images of line 1 is 'p.png'", "a list"]),
        ({"prompt": "?", "match": ["x"]}, ["match of line 1 is ['x']"]),
        ({"prompt": "?", "max_tokens": 0}, ["max_tokens of line 1 is 0"]),
        ({"prompt": "?", "answer": ""}, ["answer of line 1 is ''", "empty"]),
        ({"prompt": "?", "answer": ["a", None]}, ["answer of line 1 is ['a', None]"]),
        ("", ["has no questions"]),
        ({"answer": "4"}, ["line 1", "give an object with prompt or messages"]),
        ({"prompt": "?", "anwser": "4"}, ["line 1 has anwser: did you mean answer?"]),
        ({"prompt": "?", "match": "number?"}, ["match of line 1 is 'number?'", "number"]),
        ({"prompt": "?", "images": ["none.png"]}, ["No such file", "none.png"]),
        ({"prompt": "?", "answer": "four", "match": "number"}, ["line 1", "'four'", "number"]),
        ({"prompt": "?", "answer": "(", "match": "regex"}, ["line 1", "'('"]),
    ],
    ids=str,
)
def test_wrong_lines(tmp_path: Path, line: Any, parts: list[str]) -> None:
    path = tmp_path / "questions.jsonl"
    text = line if isinstance(line, str | bytes) else json.dumps(line)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JudgeError) as caught:
        read_questions(path, 9)
    assert all(part in str(caught.value) for part in [str(path), *parts]), caught.value


class Site(ThreadingHTTPServer):
    """A server as the judge sees it; its methods return status and body."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status: Any = {"settings": {"sinks": 4}, "defaults": {"budget": 0.1}}
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Answering)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def models(self) -> tuple[int, Any]:
        return 200, {"data": [{"id": "tiny"}]}

    def answer(self, prompt: str) -> tuple[int, Any]:
        """Return an answer with its reasoning, as vLLM has them."""
        message = {"content": prompt, "reasoning": f"{len(self.asked)}"}
        return 200, {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 1},
            "kv_transfer_params": {"kv_eviction": {"kept_tokens": None}},
        }


class Answering(BaseHTTPRequestHandler):
    """A connection to a `Site`."""

    server: Site

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.say(*self.server.models())
        assert self.path == "/kv-eviction/status"
        if self.server.status is None:
            return self.say(404, b"no such path")
        return self.say(200, {**self.server.status, "totals": len(self.server.asked)})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            said = self.server.answer(body["messages"][0]["content"][0]["text"])
        self.say(*said)

    def say(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as found:
        found.daemon_threads, found.block_on_close = True, False
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture
def ask(site: Site, tmp_path: Path) -> Callable[..., int]:
    """Return a call of the judge with 20 questions and three arms."""
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{n}", "answer": None}) for n in range(20)))
    given = ["--questions", str(path), "--budgets", "0.5", "--in-flight", "2"]
    return lambda *more: judge([*given, "--url", site.url, *more])


def test_what_was_answered_is_not_asked_again(
    site: Site, ask: Callable[..., int], tmp_path: Path
) -> None:
    assert ask() == 0
    assert len(site.asked) == 60
    result = json.loads((tmp_path / "mine.judge/result.json").read_text())
    assert (result["expected"], result["failed"]) == (0, {})
    full, other, _ = result["arms"]
    assert (full["same"], other["same"]["mean"]) == (None, 0)  # the reasoning differs
    log = tmp_path / "mine.judge/answers.jsonl"
    log.write_bytes(log.read_bytes()[:-9])  # the run was killed
    for asked in (61, 61):
        assert ask("--url", f"{site.url}/v1/") == 0
        assert len(site.asked) == asked
    for change in ({**site.status, "defaults": {"budget": 0.2}}, None):
        site.status = change
        before = len(site.asked)
        assert ask() == 0
        assert len(site.asked) - before == 60


def test_one_question_that_fails_is_left_out(
    site: Site, ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = site.answer
    vars(site)["answer"] = lambda text: (400, b"too long") if text == "q4" else answer(text)
    assert ask() == 1
    shown = capsys.readouterr()
    assert "19 questions, 0 with an expected answer. 1 more is left out" in shown.out
    assert shown.err.count("line 5 of the questions") == 1
    assert "answers 400: too long" in shown.err
    assert {body["messages"][0]["content"][0]["text"] for body in site.asked} == {
        f"q{n}" for n in range(20)
    }


def test_an_interrupt_keeps_what_was_answered_and_does_not_wait(
    site: Site, ask: Callable[..., int], tmp_path: Path
) -> None:
    answer, hangs = site.answer, threading.Event()

    def interrupted(text: str) -> tuple[int, Any]:
        if len(site.asked) == 9:
            os.kill(os.getpid(), signal.SIGINT)
            hangs.wait()
        return answer(text)

    vars(site)["answer"] = interrupted
    # A shell starts programs in the background with interrupts ignored.
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert ask() == 130
    finally:
        hangs.set()
        signal.signal(signal.SIGINT, before_test)
    kept = (tmp_path / "mine.judge/answers.jsonl").read_text().splitlines()
    assert 7 <= len(kept) <= 8  # two were in flight
    vars(site)["answer"], before = answer, len(site.asked)
    assert ask() == 0
    late = len(site.asked) - before - (60 - len(kept))
    assert late in (0, 1)  # one that was in flight may have been counted after the interrupt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": lambda: (200, {"data": []})}, "serves no model"),
        ({"models": lambda: (200, b"<html>")}, "answers no JSON"),
        ({"models": lambda: (200, [])}, "not as vLLM does"),
        ({"models": lambda: (401, b"no key")}, "answers 401: no key"),
        ({"answer": lambda text: (200, b"<html>")}, "answers no JSON"),
        ({"answer": lambda text: (200, {})}, "does not evict"),
        ({"answer": lambda text: (500, b"broken")}, "line 1 of the questions"),
        ({"url": "http://127.0.0.1:9"}, "does not answer"),
        ({"url": "http://["}, "does not answer"),
        ({"url": "localhost"}, "does not answer"),
        ({"out": "mine.jsonl"}, "File exists"),
    ],
    ids=lambda given: ",".join(given) if isinstance(given, dict) else given,
)
def test_other_failures_are_one_message(
    site: Site,
    ask: Callable[..., int],
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = change.pop("url", site.url)
    out = tmp_path / change.pop("out", "out")
    vars(site).update(change)
    assert ask("--url", url, "--out", str(out)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "written to" not in error


def test_none_in_flight(ask: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ask("--in-flight", "0")
    assert "0 is not a positive number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "decode", [{"schedule": ((8, Budget(fraction=0.05)),)}, {"max_tokens": 512}]
)
def test_arms_evict_once_to_their_budget(decode: dict[str, Any]) -> None:
    server = EvictionConfig(policy="tgv", decode=DecodeOptions(**decode))
    full, _, half = (RequestOptions.resolve(server, arm.xargs) for arm in arms_of(["tgv"], ["0.5"]))
    assert (full.policy, full.cuts_again) == ("none", False)
    assert (half.budget, half.when, half.cuts_again) == (Budget(fraction=0.5), "always", False)


def slow_difference(first: list[int], second: list[int]) -> list[float]:
    """Newcombe's method 10 from the answers: Wilson's limits as roots, and their correlation."""
    n, z2 = len(first), CONFIDENCE_Z**2
    (l1, u1), (l2, u2) = (
        sorted(np.roots(np.array([1 + z2 / n, -(2 * p + z2 / n), p * p])).real)
        for p in (sum(first) / n, sum(second) / n)
    )
    scale = n * n * np.std(first) * np.std(second)
    product = n * n * np.cov(first, second, bias=True)[0, 1]
    if product > 0:
        product = max(product - n / 2, 0)
    phi = product / scale if scale > 1e-9 else 0
    below = np.array([np.mean(first) - l1, u2 - np.mean(second)])
    above = np.array([u1 - np.mean(first), np.mean(second) - l2])
    form, delta = np.array([[1, -phi], [-phi, 1]]), np.mean(first) - np.mean(second)
    return [delta, delta - np.sqrt(below @ form @ below), delta + np.sqrt(above @ form @ above)]


def test_interval_of_a_paired_difference() -> None:
    random = np.random.default_rng()
    tables = [(10, 0, 0, 10), (20, 0, 0, 0), (0, 0, 0, 20), (0, 20, 0, 0), (36, 12, 2, 0)]
    tables += list(zip(*random.integers(1, 13, (4, 50)).tolist(), strict=True))
    for both, gained, lost, neither in tables:
        first = [1] * (both + gained) + [0] * (lost + neither)
        second = [1] * both + [0] * gained + [1] * lost + [0] * neither
        found = paired_difference(both, gained, lost, neither)
        wanted = slow_difference(first, second)
        assert [found.mean, found.low, found.high] == pytest.approx(wanted, abs=1e-6)
        assert -1 <= found.low < found.high <= 1
        if gained == lost == 0 and both + neither == 20:
            assert 0.16 < found.high - found.low < 0.33
    published = paired_difference(36, 12, 2, 0)  # Newcombe's table of examples
    assert (published.low, published.high) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    assert Estimate(-0.004, -0.3, 0.3).points == "0 points [-30, 30]"


def test_figures(tmp_path: Path) -> None:
    """Ten questions, six with an answer; another arm loses two of these and gains none."""
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": str(n), **({"answer": "a"} if n < 6 else {})} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))
    questions = read_questions(path, 9)
    full = [Answer("a" if n != 5 else "b", "", True, 3, 1.0) for n in range(10)]
    other = [Answer("b" if n in (0, 1, 5) else "a", "", n < 3, 4, 0.2) for n in range(10)]
    first, second = figures(questions, {FULL: full, "reach 20 %": other})
    assert first.right is not None
    assert first.right.mean == pytest.approx(5 / 6)
    assert (first.difference, first.p, first.same) == (None, None, None)
    assert second.right is not None
    assert second.right.mean == 0.5
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(-2 / 6)
    assert second.difference.low < second.difference.mean < second.difference.high < 1 / 3
    assert second.p == 0.5  # two questions that differ, both lost
    assert second.same is not None
    assert (second.same.mean, second.stopped, second.tokens) == (0.8, 0.3, 4)
    assert second.kept == pytest.approx(0.2)
    shown = "\n".join(table([first, second], 6, 10, 0))
    assert "10 questions, 6 with an expected answer." in shown
    assert "50 % [19, 81]" in shown
    assert "-33 points [" in shown
    assert "McNemar" in shown
    lost = replace(second, difference=Estimate(-1.0, -1.0, -0.5))
    assert " -100 points [-100, -50] " in "\n".join(table([first, lost], 6, 10, 0))
    assert "right answers" in picture([first, second], 10)
    without = figures(questions[6:], {FULL: full[6:], "reach 20 %": other[6:]})
    assert [each.right for each in without] == [None, None]
    assert "same answers as the full cache" in picture(without, 4)
