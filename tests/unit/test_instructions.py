# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a chat stand before its first user's message, by templates of real models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers import ChatParams, TokenizeParams
from vllm.sampling_params import SamplingParams

from measure.folders import byte_tokenizer
from tests.models import _CHAT_TEMPLATE
from vllm_tgvkv.config.request import PROTECTED_TOKENS, RequestOptions
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.engine import patches
from vllm_tgvkv.engine.instructions import MOST_KNOWN, WORDS

QWEN = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are Qwen."
    "{% endif %}\n\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% else %}<|im_start|>system\nYou are Qwen.<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
"""Qwen 2.5: a system prompt of its own, and tools in the system's turn."""
LLAMA = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<|begin|>system\n"
    "{{ system }}<|eot|>{% if tools %}{% if not messages %}{{ raise_exception('no user') }}"
    "{% endif %}<|begin|>user\nGiven the following functions, answer with a call.\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ messages[0].content | trim }}<|eot|>"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<|begin|>{{ m.role }}\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
)
"""Llama 3.1: tools in the first user's turn, before the message."""
GEMMA = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}<start_of_turn>"
    "{{ m.role }}\n{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}<start_of_turn>model\n"
)
"""Gemma: the system prompt is part of the first user's turn. Roles have to alternate."""
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<s>"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ system if loop.last else '' }}"
    "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Mistral: the system prompt stands in the last user's turn."""

SYSTEM = {"role": "system", "content": "Answer with one word."}
USER = {"role": "user", "content": "What is this?"}
TURNS = [USER, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Renderer:
    """What the wrappers see of vLLM's renderer: one token for each byte of the template's text."""

    def __init__(self, template: str, **settings: Any) -> None:
        self.template = template
        self.num_rendered = 0
        self.tokenizer, _ = byte_tokenizer(["<e>"], eos="<e>", pad="<e>", max_length=10**6)
        settings = {"policy": "tgv", **settings}
        self.config = SimpleNamespace(additional_config={CONFIG_KEY: settings})

    def render(
        self,
        conversations: list[Any],
        params: ChatParams,
        tok_params: TokenizeParams | None = None,
        *,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        self.num_rendered += len(conversations)
        return conversations, [
            {"prompt_token_ids": self.tokens(messages, params)} for messages in conversations
        ]

    async def render_async(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return self.render(*args, **kwargs)

    def tokens(self, messages: Any, params: ChatParams) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.template,
            tokenize=False,
            **params.chat_template_kwargs,
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def chat(self, messages: list[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the engine's input for a chat, rendered as `LLM.chat` and as the server does."""
        params = ChatParams(chat_template_kwargs=kwargs)
        _, (found,) = patches._render_chat(Renderer.render, self, [messages], params)  # type: ignore[arg-type]
        served = patches._render_chat_async(Renderer.render_async, self, [messages], params)  # type: ignore[arg-type]
        _, (also,) = asyncio.run(served)
        assert found == also
        return dict(found)

    def protected(self, messages: list[Any], **kwargs: Any) -> str | None:
        """Return the text of the protected tokens; None if the chat has no instructions."""
        found = self.chat(messages, **kwargs)
        if PROTECTED_TOKENS not in found:
            return None
        text: str = self.tokenizer.decode(found["prompt_token_ids"][: found[PROTECTED_TOKENS]])
        return text


@dataclass(eq=False)
class Processor:
    """What the wrapper sees of vLLM's input processor."""

    vllm_config: Any


TEMPLATES = {"tiny": _CHAT_TEMPLATE, "qwen": QWEN, "llama": LLAMA, "gemma": GEMMA}
ENDS = {
    "tiny": f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n",
    "qwen": f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n",
    "llama": f"<|begin|>system\n{SYSTEM['content']}<|eot|><|begin|>user\n",
    "gemma": f"<start_of_turn>user\n{SYSTEM['content']}\n\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("later", [[USER], TURNS], ids=["one_turn", "several_turns"])
def test_the_system_prompt_and_what_opens_the_users_turn(name: str, later: list[Any]) -> None:
    assert Renderer(TEMPLATES[name]).protected([SYSTEM, *later]) == ENDS[name]


@pytest.mark.parametrize("word", WORDS)
def test_messages_that_begin_like_a_probe(word: str) -> None:
    user = {"role": "user", "content": f"{word} is it"}
    assert Renderer(QWEN).protected([SYSTEM, user]) == ENDS["qwen"]


@pytest.mark.parametrize(("template", "messages"), [(QWEN, [USER]), (LLAMA, [SYSTEM, USER])])
def test_tools_are_protected(template: str, messages: list[Any]) -> None:
    """Also those that the template puts into the user's turn, and without a system prompt."""
    found = Renderer(template).protected(messages, tools=[TOOL])
    assert found is not None
    assert json.dumps(TOOL) in found
    assert found.endswith("user\n" if template is QWEN else f"{json.dumps(TOOL)}\n")


def test_examples_before_the_first_user() -> None:
    before = [SYSTEM, {"role": "assistant", "content": "Hello!"}]
    found = Renderer(_CHAT_TEMPLATE).protected([*before, USER])
    assert found is not None
    assert found.endswith("Hello!<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize("messages", [[USER], TURNS, [SYSTEM]], ids=["user", "turns", "system"])
def test_chats_without_instructions_or_user_are_not_rendered_again(messages: list[Any]) -> None:
    """A template's own system prompt is nobody's instruction."""
    renderer = Renderer(QWEN)
    assert renderer.protected(messages) is None
    assert renderer.num_rendered == 2


def test_instructions_that_stand_elsewhere_are_not_mistaken() -> None:
    """Of a prompt that begins otherwise than both probes, only what is the same is protected."""
    renderer = Renderer(MISTRAL)
    assert renderer.protected([SYSTEM, USER]) == f"<s>[INST] {SYSTEM['content']}\n\n"
    assert renderer.protected([SYSTEM, *TURNS]) == "<s>[INST] "


def test_images_follow() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    user = {"role": "user", "content": content}
    assert Renderer(_CHAT_TEMPLATE).protected([SYSTEM, user]) == ENDS["tiny"]


def test_a_template_that_refuses_the_probes_protects_nothing() -> None:
    """And is not asked again."""
    only_known = "{% if messages[-1].content | length < 3 %}{{ raise_exception('too short') }}"
    renderer = Renderer(only_known + "{% endif %}" + QWEN)
    for _ in range(2):
        assert renderer.protected([SYSTEM, USER]) == ""
    assert renderer.num_rendered == 4 + 2


def test_each_instructions_are_rendered_once() -> None:
    renderer = Renderer(QWEN)

    def rendered(*args: Any, **kwargs: Any) -> int:
        before = renderer.num_rendered
        renderer.chat(*args, **kwargs)
        return renderer.num_rendered - before - 2  # once by each door

    other = {"role": "system", "content": "Answer with two words."}
    assert rendered([SYSTEM, USER]) == 2
    assert rendered([SYSTEM, *TURNS]) == 0
    assert rendered([other, USER]) == 2
    assert rendered([SYSTEM, USER], tools=[TOOL]) == 2
    assert rendered([SYSTEM, USER], enable_thinking=False) == 2
    for number in range(MOST_KNOWN):
        rendered([{"role": "system", "content": str(number)}, USER])
    assert rendered([{"role": "system", "content": "1"}, USER]) == 0
    assert rendered([SYSTEM, USER]) == 2


def test_engines_without_eviction_render_nothing_more() -> None:
    renderer = Renderer(QWEN, policy="none")
    assert renderer.protected([SYSTEM, USER]) is None
    assert renderer.num_rendered == 2


def test_a_token_that_joins_template_and_message_is_not_protected() -> None:
    """A tokenizer may write the end of the template and the first letter as one token."""
    renderer = Renderer("{{ messages[0].content }} U:{{ messages[1].content }}")

    def words(self: Renderer, messages: Any, params: ChatParams) -> list[int]:
        text = f"{messages[0]['content']} U:{messages[1]['content']}"
        return [hash(word) for word in text.split()]

    renderer.tokens = words.__get__(renderer)  # type: ignore[method-assign]
    found = renderer.chat([SYSTEM, USER])
    assert found[PROTECTED_TOKENS] == len(SYSTEM["content"].split())


@pytest.mark.parametrize(
    ("server", "options", "wanted"),
    [
        ("system", {}, 41),
        ("none", {}, 0),
        ("none", {"protect": "system"}, 41),
        ("system", {"protect": "none"}, 0),
        ("system", {"protected_tokens": 7}, 7),
        ("none", {"protected_tokens": 7}, 7),
    ],
)
def test_the_number_reaches_the_engine_among_the_options(
    server: str, options: dict[str, Any], wanted: int
) -> None:
    """The caller's own parameters, which may serve several requests, stay as they are."""
    params = SamplingParams(extra_args={f"kv_eviction_{k}": v for k, v in options.items()})
    given = dict(params.extra_args or {})
    prompt = {"type": "token", "prompt_token_ids": [1] * 50, PROTECTED_TOKENS: 41}
    config = Renderer(QWEN, protect=server).config
    config.cache_config = SimpleNamespace(block_size=16)

    def process(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
        return SimpleNamespace(sampling_params=params.clone())

    args: Any = (process, Processor(config), "a", prompt, params)
    request = patches._process_request(*args)
    assert params.extra_args == given
    found = RequestOptions.resolve(EvictionConfig(), request.sampling_params.extra_args)
    assert found.protected == wanted
