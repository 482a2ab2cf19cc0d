# SPDX-License-Identifier: Apache-2.0
"""Every question asked with every arm, on a running server; answers go to a log at once.

All runs in one thread, so that Ctrl-C ends the requests in flight, also on the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import httpx

from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.judge.log import whole_lines
from vllm_tgvkv.judge.questions import JudgeError, Question
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import quoted

FULL = "full cache"
SERVED = "as served"
TIMEOUT = 600
"""Seconds that an answer may take."""


@dataclass(frozen=True)
class Arm:
    """Options that all questions are asked with."""

    name: str
    xargs: dict[str, Any]

    @classmethod
    def of(cls, method: str, budget: str) -> Arm:
        """Return the arm that always evicts once, by a method and to a budget."""
        parsed = Budget.parse(budget, "--budgets")
        xargs = {
            "kv_eviction": method,
            "kv_eviction_budget": parsed.value,
            "kv_eviction_when": "always",
            "kv_eviction_schedule": "none",
        }
        kept = budget if parsed.is_auto else str(parsed).removesuffix(" of the prompt")
        return cls(f"{method} {kept}", xargs)


def arms_of(methods: Sequence[str], budgets: Sequence[str]) -> list[Arm]:
    """Return the full cache, the server's own defaults, and each method at each budget."""
    given = [Arm.of(method, budget) for method in methods for budget in budgets]
    return [Arm(FULL, {CONFIG_KEY: "none"}), Arm(SERVED, {}), *given]


@dataclass(frozen=True)
class Answer:
    """An answer as it is logged."""

    text: str
    """Without the reasoning, where the server keeps it apart."""
    reasoning: str
    stopped: bool
    """Whether it ended by itself, and not at the most tokens."""
    tokens: int
    kept: float
    """Share of the prompt that the last eviction kept; 1 if there was none."""


class QuestionError(JudgeError):
    """The server refuses one question, or takes too long for it; others may be answered."""


@dataclass(frozen=True)
class Server:
    """A server's chat route."""

    url: str
    model: str
    settings: Any
    """Settings and defaults as `/kv-eviction/status` shows them; None where it does not answer."""
    client: httpx.AsyncClient

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, model: str | None) -> AsyncIterator[Server]:
        """Find the model that it serves, unless one is named, and its settings.

        Raises:
            JudgeError: if it does not answer, or serves no model.
        """
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        url = url.removesuffix("/").removesuffix("/v1")
        async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT, limits=limits) as client:
            server = cls(url, "", None, client)
            if model is None:
                listed = await server._call("GET", "v1/models")
                with server._reading():
                    models = [each["id"] for each in listed["data"]]
                if not models:
                    raise JudgeError(f"{url} serves no model")
                model = models[0]
            try:
                status = await server._call("GET", "kv-eviction/status")
                settings = {name: status[name] for name in ("settings", "defaults")}
            except (QuestionError, LookupError, TypeError):  # a proxy may hide it
                settings = None
            yield replace(server, model=model, settings=settings)

    def request(self, question: Question, arm: Arm) -> dict[str, Any]:
        """Return the body of a request; greedy, with a report."""
        return {
            "model": self.model,
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "vllm_xargs": {**arm.xargs, "kv_eviction_report": 1},
        }

    def key(self, body: dict[str, Any]) -> str:
        """Return the name of a request in the log: what has changed is asked again."""
        asked = json.dumps([self.url, self.settings, body], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Return the answer to a request.

        Raises:
            QuestionError: with the server's message.
            JudgeError: if no question will be answered.
        """
        found = await self._call("POST", "v1/chat/completions", body)
        with self._reading():
            report = (found.get("kv_transfer_params") or {}).get(CONFIG_KEY)
            if report is None:
                raise JudgeError(f"{self.url} does not evict: start it with --kv-eviction reach")
            choice, kept = found["choices"][0], report["kept_tokens"]
            message = choice["message"]
            return Answer(
                message["content"] or "",
                message.get("reasoning") or "",
                choice["finish_reason"] == "stop",
                found["usage"]["completion_tokens"],
                1.0 if kept is None else kept / report["prompt_tokens"],
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, AttributeError) as error:
            raise JudgeError(f"{self.url} answers not as vLLM does: {error!r}") from error

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = await self.client.request(method, f"{self.url}/{path}", json=body)
        except httpx.ReadTimeout as error:
            raise QuestionError(f"{self.url} takes more than {TIMEOUT} seconds") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JudgeError(f"{self.url} does not answer: {error!r}") from error
        text = response.text
        if response.status_code != 200:
            raise QuestionError(f"{self.url} answers {response.status_code}: {text[:500]}")
        try:
            return response.json()
        except ValueError as error:
            raise QuestionError(f"{self.url} answers no JSON: {quoted(text)}") from error


async def ask_all(
    server: Server,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    log: Path,
    in_flight: int,
    say: Callable[[str], None],
) -> tuple[dict[str, list[Answer]], dict[int, str]]:
    """Ask what the log lacks; a question that fails with one arm is left out of all.

    Args:
        log: file to which each answer is added.
        in_flight: most requests that run at once.
        say: prints a line of progress.

    Returns:
        Answers of each arm in the order of the other questions, and messages about those that
        failed, by their line.

    Raises:
        JudgeError: if no question is left, or the server does not answer any more. The log keeps
            all answers until then.
    """
    known = dict(_logged(log))
    bodies = {
        (question.line, arm.name): server.request(question, arm)
        for question in questions
        for arm in arms
    }
    keys = {at: server.key(body) for at, body in bodies.items()}
    todo = [at for at, key in keys.items() if key not in known]
    say(f"{len(keys)} requests, {len(keys) - len(todo)} of them answered in {log}")
    failed: dict[int, str] = {}
    waiting = enumerate(todo, 1)

    async def work(file: TextIO) -> None:
        for number, at in waiting:
            line, arm = at
            if line in failed:
                continue
            try:
                answer = await server.ask(bodies[at])
            except QuestionError as error:
                failed.setdefault(line, f"line {line} of the questions, {arm}: {error}")
                continue
            file.write(json.dumps({"key": keys[at], **asdict(answer)}) + "\n")
            file.flush()
            known[keys[at]] = answer
            if number % 10 == 0 or number == len(todo):
                say(f"{number} of {len(todo)} asked")

    with log.open("a", encoding="utf-8") as file:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(work(file))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    lines = [question.line for question in questions if question.line not in failed]
    if not lines:
        raise JudgeError(next(iter(failed.values())))
    return {arm.name: [known[keys[line, arm.name]] for line in lines] for arm in arms}, failed


def _logged(log: Path) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of a log by their key; lines of another release are passed over."""
    for line in whole_lines(log):
        try:
            values = json.loads(line)
            yield values.pop("key"), Answer(**values)
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
