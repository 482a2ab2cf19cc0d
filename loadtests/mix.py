# SPDX-License-Identifier: Apache-2.0
"""The requests of `loadtests.soak`: a fixed list that covers every kind."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.pages import content, question
from measure.messages import image_part, png_url
from vllm_tgvkv.config.server import EvictionConfig

MIXES = {
    "tgv-head": {"base": "tgv", "granularity": "head"},
    "vlcache-head": {"base": "vlcache", "granularity": "head"},
    "snapkv-layer": {"base": "snapkv", "granularity": "layer"},
    "h2o-layer": {"base": "h2o", "granularity": "layer"},
}
"""Mixes in the server's configuration; requests choose a granularity by these names."""

BUDGETS = (0.1, 0.3, 0.05, 100, 0.6)
GUARDED = ("tgv", "snapkv", "vlcache", "tgv-head")
GUARDS = ("auto:0.9", "auto:0.98,min=0.05,max=0.5")
LONG = 64
"""Length of answers that ignore the end token."""
NATURAL = 24
"""Limit of the other answers."""


@dataclass(frozen=True)
class Case:
    """One request, which is repeated during the soak."""

    kind: str
    messages: list[dict[str, Any]]
    xargs: Mapping[str, Any] = field(default_factory=dict)
    is_long: bool = False

    @property
    def max_tokens(self) -> int:
        return LONG if self.is_long else NATURAL

    def body(self, evicting: bool) -> dict[str, Any]:
        """Return the fields of the request except the model; greedy, with log-probabilities."""
        extra: dict[str, Any] = {"return_tokens_as_token_ids": True, "ignore_eos": self.is_long}
        if evicting and self.xargs:
            extra["vllm_xargs"] = dict(self.xargs)
        return {
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
            "extra_body": extra,
        }


def make_cases() -> list[Case]:
    """Return all requests, no two alike. Every second answer is long."""
    found = []
    for number, (kind, task, page, xargs) in enumerate(_kinds()):
        if task is None:
            messages = [{"role": "user", "content": _text(page, length=40 + 90 * page)}]
        else:
            messages = _conversation(task, page)
        found.append(Case(kind, messages, xargs, is_long=number % 2 == 1))
    return found


def _conversation(task: str, page: int) -> list[dict[str, Any]]:
    """Return a question about a page, or with the task `chat` a second one."""
    first = content("row" if task == "chat" else task, page, lambda i: image_part(png_url(i)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    if task == "chat":
        messages.append({"role": "assistant", "content": "It is empty."})
        messages.append({"role": "user", "content": question("value", page)})
    return messages


def _kinds() -> Iterator[tuple[str, str | None, int, dict[str, Any]]]:
    """Yield kind, task (None for text only), page and `vllm_xargs` of each request."""
    for number, method in enumerate((*EvictionConfig().method_names[1:], *MIXES)):
        budget = BUDGETS[number % len(BUDGETS)]
        task = ("value", "row", "compare")[number % 3]
        yield "methods", task, number, {"kv_eviction": method, "kv_eviction_budget": budget}
    for number, method in enumerate(GUARDED):
        guard = GUARDS[number % len(GUARDS)]
        yield "auto", "row", 30 + number, {"kv_eviction": method, "kv_eviction_budget": guard}
    for number in range(5):
        yield "uncompressed", "value", 40 + number, {"kv_eviction": "none"}
    for number in range(4):
        yield "two images", "two_images", 50 + number, {"kv_eviction_budget": BUDGETS[number]}
    for page in range(60, 63):  # several questions about one page, one of them a second turn
        yield "chats", "value", page, {}
        yield "chats", "row", page, {}
        yield "chats", "chat", page, {"kv_eviction_budget": 0.3}
        yield "chats", "chat", page, {"kv_eviction": "none"}
    for number in range(5):
        yield "text", None, number, {}


def _text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + " ", k=length))
