# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a chat's prompt stand before its first user's message.

They are the system prompt, the descriptions of tools, and what else the chat template puts there.
The template itself says where they end: the messages before the first user's one are rendered twice
more, with two different words in its place. What both prompts and the real one begin with is
protected, token by token, so a template that puts the instructions elsewhere protects less, never
anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_tgvkv.config.request import PROTECTED_TOKENS

if TYPE_CHECKING:
    from vllm.renderers import ChatParams

logger = init_logger("vllm.tgvkv")

WORDS = ("0", "x")
"""Two messages that have no token in common."""

MOST_KNOWN = 128
"""Instructions that are remembered."""

Conversation = Sequence[Mapping[str, Any]]
Tokens = Sequence[int]


@dataclass(frozen=True)
class Chat:
    """A rendered conversation with instructions before its first user's message."""

    key: str
    before: Conversation
    """The messages before it."""
    engine_input: dict[str, Any]
    """What the renderer made of it, which is marked."""

    @property
    def probes(self) -> list[list[Mapping[str, Any]]]:
        """Return two conversations that differ from the first user's message on."""
        return [[*self.before, {"role": "user", "content": word}] for word in WORDS]

    def mark(self, beginning: Tokens) -> None:
        """Store the number of protected tokens; `beginning` is what both probes begin with."""
        shared = shared_beginning(beginning, self.engine_input["prompt_token_ids"])
        self.engine_input[PROTECTED_TOKENS] = len(shared)


@dataclass
class Instructions:
    """The beginnings of prompts by the instructions that they were rendered from."""

    known: dict[str, Tokens] = field(default_factory=dict)
    """By a digest, the last used one at the end."""

    def chats(
        self,
        conversations: Sequence[Conversation],
        params: ChatParams,
        engine_inputs: Sequence[dict[str, Any]],
        special_tokens: bool | None,
    ) -> Iterator[Chat]:
        """Mark rendered conversations whose instructions are known, and yield the others.

        Args:
            special_tokens: whether the tokenizer adds special tokens; None for its default.
        """
        for conversation, engine_input in zip(conversations, engine_inputs, strict=True):
            before = _before_user(conversation)
            given = params.chat_template_kwargs
            if before is None or not (before or given.get("tools")):
                continue
            if "prompt_token_ids" not in engine_input:
                continue
            settings = params.chat_template, params.chat_template_content_format, given
            text = repr((before, settings, special_tokens))
            key = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
            chat = Chat(key, before, engine_input)
            if key in self.known:
                self._store(chat, self.known.pop(key))
            else:
                yield chat

    def learn(self, chat: Chat, probes: Sequence[dict[str, Any]]) -> None:
        """Remember what the rendered probes of a chat begin with, and mark the chat."""
        one, other = (probe["prompt_token_ids"] for probe in probes)
        self._store(chat, shared_beginning(one, other))

    def give_up(self, chat: Chat, error: Exception) -> None:
        """Protect nothing where the template refuses a probe."""
        logger.warning(
            "KV eviction: the chat template refuses the system prompt with another user's message "
            "(%s), so protect: system does nothing for it",
            error,
        )
        self._store(chat, ())

    def _store(self, chat: Chat, beginning: Tokens) -> None:
        self.known[chat.key] = beginning
        if len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]
        chat.mark(beginning)


def shared_beginning(one: Tokens, other: Tokens) -> Tokens:
    """Return the tokens that two prompts begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


def _before_user(conversation: Conversation) -> Conversation | None:
    """Return the messages before the first user's one; None if there is none."""
    for index, message in enumerate(conversation):
        if message["role"] == "user":
            return conversation[:index]
    return None
