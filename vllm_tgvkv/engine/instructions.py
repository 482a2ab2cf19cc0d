# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a chat's prompt stand before its first user's message.

They are the system prompt, the descriptions of tools, and what else the chat template puts there.
The template itself says where they end: the messages before the first user's one are rendered twice
more, with two different words in its place. What both of these prompts and the real one begin with,
token by token, is protected. So a template that puts the instructions elsewhere protects less, and
never anything else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_tgvkv.config.request import PROTECTED_TOKENS

if TYPE_CHECKING:
    from vllm.renderers import ChatParams, TokenizeParams

logger = init_logger("vllm.tgvkv")

WORDS = ("0", "x")
"""Two messages that share no token."""

MOST_KNOWN = 128
"""Instructions whose tokens are remembered."""

Conversation = Sequence[Mapping[str, Any]]
Tokens = Sequence[int]


@dataclass
class Chat:
    """A rendered conversation that has messages or tools before its first user's message."""

    before: Conversation
    """The messages before it."""
    digest: str
    """Of these and of all else that the beginning of the prompt depends on."""
    engine_input: dict[str, Any]
    """The rendered conversation."""
    probed: Sequence[dict[str, Any]] = ()
    """The rendered probes."""

    @property
    def probes(self) -> list[Conversation]:
        """Return two conversations that differ from the first user's message on."""
        return [[*self.before, {"role": "user", "content": word}] for word in WORDS]


@dataclass
class Instructions:
    """What prompts begin with, by the instructions in it, for one renderer."""

    is_active: bool
    """Whether the renderer's engine evicts."""
    known: dict[str, Tokens] = field(default_factory=dict)
    """By the chat's digest, the last used one at the end."""

    def new_chats(
        self,
        conversations: Sequence[Conversation],
        params: ChatParams,
        tokenization: TokenizeParams | None,
        engine_inputs: Sequence[dict[str, Any]],
    ) -> Iterator[Chat]:
        """Store the number of protected tokens in rendered chats; yield those not known yet."""
        if not self.is_active:
            return
        given = params.chat_template_kwargs
        special = tokenization and tokenization.add_special_tokens
        settings = params.chat_template, params.chat_template_content_format, given, special
        for conversation, engine_input in zip(conversations, engine_inputs, strict=True):
            before = _before_user(conversation)
            has_instructions = before is not None and (before or given.get("tools"))
            if not has_instructions or "prompt_token_ids" not in engine_input:
                continue
            text = repr((before, settings)).encode(errors="surrogatepass")
            chat = Chat(before or (), hashlib.sha256(text).hexdigest(), engine_input)
            if chat.digest in self.known:
                self._store(chat, self.known.pop(chat.digest))
            else:
                yield chat

    @contextmanager
    def learning(self, chat: Chat) -> Iterator[None]:
        """Remember what a chat's probes begin with, which the block renders.

        If the template refuses them, nothing is protected.
        """
        beginning: Tokens = ()
        try:
            yield
            beginning = _common(*(probe["prompt_token_ids"] for probe in chat.probed))
        except Exception as error:
            logger.warning(
                "KV eviction: the chat template refuses the system prompt or tools with another "
                "user's message (%s), so protect: system does nothing for them",
                error,
            )
        self._store(chat, beginning)

    def _store(self, chat: Chat, beginning: Tokens) -> None:
        self.known[chat.digest] = beginning
        if len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]
        protected = _common(beginning, chat.engine_input["prompt_token_ids"])
        chat.engine_input[PROTECTED_TOKENS] = len(protected)


def _common(one: Tokens, other: Tokens) -> Tokens:
    """Return the tokens that two prompts begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


def _before_user(conversation: Conversation) -> Conversation | None:
    """Return the messages before the first user's one; None if there is none."""
    for index, message in enumerate(conversation):
        if message["role"] == "user":
            return conversation[:index]
    return None
