# SPDX-License-Identifier: Apache-2.0
"""Every question asked with every arm, on a running server; answers go to a log at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.judge.questions import JudgeError, Question
from vllm_tgvkv.shared.budget import Budget

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
        """Return the arm that always evicts, by a method and to a budget."""
        parsed = Budget.parse(budget, "--budgets")
        xargs = {
            "kv_eviction": method,
            "kv_eviction_budget": parsed.value,
            "kv_eviction_when": "always",
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

    key: str
    """Digest of the request: what has changed is asked again."""
    text: str
    stopped: bool
    """Whether it ended by itself, and not at the most tokens."""
    tokens: int
    kept: float
    """Share of the prompt that the last eviction kept; 1 if there was none."""


class Server:
    """A server's chat route."""

    def __init__(self, url: str, model: str | None) -> None:
        """Find the model that it serves, unless one is named.

        Raises:
            JudgeError: if it does not answer, or does not evict.
        """
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            base_url=f"{url.removesuffix('/').removesuffix('/v1')}/v1/",
            headers=headers,
            timeout=TIMEOUT,
        )
        self.url = url
        self.model = model or self._call("GET", "models")["data"][0]["id"]

    def request(self, question: Question, arm: Arm) -> dict[str, Any]:
        """Return the body of a request; greedy, with a report."""
        return {
            "model": self.model,
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "vllm_xargs": {**arm.xargs, "kv_eviction_report": 1},
        }

    def ask(self, body: dict[str, Any]) -> Answer:
        """Return the answer to a request.

        Raises:
            JudgeError: with the server's message.
        """
        found = self._call("POST", "chat/completions", body)
        report = (found.get("kv_transfer_params") or {}).get(CONFIG_KEY)
        if report is None:
            raise JudgeError(f"{self.url} does not evict: start it with --kv-eviction reach")
        choice, kept = found["choices"][0], report["kept_tokens"]
        return Answer(
            digest(body),
            choice["message"]["content"] or "",
            choice["finish_reason"] == "stop",
            found["usage"]["completion_tokens"],
            1.0 if kept is None else kept / report["prompt_tokens"],
        )

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise JudgeError(f"{self.url} does not answer: {error!r}") from error
        if response.status_code != 200:
            raise JudgeError(f"{self.url} answers {response.status_code}: {response.text[:500]}")
        return response.json()


def digest(body: dict[str, Any]) -> str:
    """Return the name of a request in the log."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def ask_all(
    server: Server,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    log: Path,
    in_flight: int,
    say: Callable[[str], None],
) -> dict[str, list[Answer]]:
    """Return the answers of each arm, in the questions' order; what the log has is not asked.

    Args:
        log: file to which each answer is added.
        in_flight: most requests that run at once.
        say: prints a line of progress.

    Raises:
        JudgeError: naming the line whose question failed. The log keeps all answers until then.
    """
    known = {answer.key: answer for answer in _logged(log)}
    bodies = {
        (arm.name, index): server.request(question, arm)
        for index, question in enumerate(questions)
        for arm in arms
    }
    todo = {at: body for at, body in bodies.items() if digest(body) not in known}
    say(f"{len(bodies)} requests, {len(bodies) - len(todo)} of them answered in {log}")
    with ThreadPoolExecutor(in_flight) as threads, log.open("a", encoding="utf-8") as file:
        asked = {threads.submit(server.ask, body): at for at, body in todo.items()}
        try:
            for number, future in enumerate(as_completed(asked), 1):
                name, index = asked[future]
                try:
                    answer = future.result()
                except JudgeError as error:
                    line = questions[index].line
                    raise JudgeError(f"line {line} of the questions, {name}: {error}") from error
                file.write(json.dumps(asdict(answer)) + "\n")
                file.flush()
                known[answer.key] = answer
                if number % 10 == 0 or number == len(todo):
                    say(f"{number} of {len(todo)} answered")
        except BaseException:  # also Ctrl-C: those that run are the last ones
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    found = {at: known[digest(body)] for at, body in bodies.items()}
    return {arm.name: [found[arm.name, i] for i in range(len(questions))] for arm in arms}


def _logged(log: Path) -> Iterator[Answer]:
    """Yield the answers of a log; its last line may be cut off."""
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            yield Answer(**json.loads(line))
        except (ValueError, TypeError):
            continue
