# SPDX-License-Identifier: Apache-2.0
"""The requests of `loadtests.soak`: fixed lists that cover every kind."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtests.pages import page_message
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
PRESSED = 160
"""Length of answers under pressure: load rises and falls meanwhile."""


@dataclass(frozen=True)
class Case:
    """One request, which is repeated during the soak."""

    kind: str
    messages: list[dict[str, Any]]
    xargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = NATURAL

    @property
    def is_long(self) -> bool:
        """Return whether the answer ignores the end token."""
        return self.max_tokens > NATURAL

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
    return [
        Case(kind, messages, xargs, LONG if number % 2 else NATURAL)
        for number, (kind, messages, xargs) in enumerate(_kinds())
    ]


def make_pressed_cases() -> list[Case]:
    """Return requests for a server that evicts when memory is short, no two alike.

    Method and budget are the server's. The reports tell what happened to each.
    """
    pages = [("one image", _asks(number)) for number in range(12)]
    pages += [("two images", _asks(50 + number, 60 + number)) for number in range(4)]
    pages += [("chats", _asks(page, asked=asked)) for page in range(70, 73) for asked in (0, 3)]
    texts = [("text", [_says(_text(number, length=220 + 90 * number))]) for number in range(5)]
    return [Case(*each, {"kv_eviction_report": 1}, PRESSED) for each in (*pages, *texts)]


def _kinds() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Yield kind, messages and `vllm_xargs` of each request."""
    for number, method in enumerate((*EvictionConfig().method_names[1:], *MIXES)):
        budget = BUDGETS[number % len(BUDGETS)]
        yield "methods", _asks(number), {"kv_eviction": method, "kv_eviction_budget": budget}
    for number, method in enumerate(GUARDED, 30):
        guard = GUARDS[number % len(GUARDS)]
        yield "auto", _asks(number), {"kv_eviction": method, "kv_eviction_budget": guard}
    for number in range(40, 45):
        yield "uncompressed", _asks(number), {"kv_eviction": "none"}
    for number, budget in enumerate(BUDGETS[:4]):
        yield "two images", _asks(50 + number, 60 + number), {"kv_eviction_budget": budget}
    for page in range(70, 73):  # several questions about one page, one of them a second turn
        chat = [*_asks(page), {"role": "assistant", "content": "12345"}, _says("And the next one?")]
        yield "chats", _asks(page), {}
        yield "chats", _asks(page, asked=3), {}
        yield "chats", chat, {"kv_eviction_budget": 0.3}
        yield "chats", chat, {"kv_eviction": "none"}
    for number in range(5):
        yield "text", [_says(_text(number, length=40 + 90 * number))], {}


def _asks(*pages: int, asked: int = 0) -> list[dict[str, Any]]:
    return [_says(page_message(list(pages), asked))]


def _says(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + " ", k=length))
