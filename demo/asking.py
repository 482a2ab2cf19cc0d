# SPDX-License-Identifier: Apache-2.0
"""Questions to a server that evicts: the answer, and the KV blocks its prompt held."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from PIL import Image

from measure.messages import png_url
from measure.serving import Server, ServingError, log_errors, serving

MODEL_NAME = "demo"
"""Name under which the demonstrations serve their models."""

WIDTH = 96
"""Columns of a terminal that the output needs."""

MIN_FULL_CACHE_ACCURACY = 0.75
"""Least share of questions that the full cache must answer; tests ask many more."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the KV blocks of its prompt before and after the eviction."""

    text: str
    blocks_before: int
    blocks_after: int

    @property
    def memory_saved(self) -> float:
        return 1 - self.blocks_after / self.blocks_before


def command_line(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return the command of a server as a user would type it, with some flags on each line."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    flags = shlex.join([*variables, "vllm", *arguments]).split(" --")
    lines = [flags[0]]
    for flag in flags[1:]:
        if len(lines[-1]) + len(flag) + 3 <= WIDTH - 2:
            lines[-1] += f" --{flag}"
        else:
            lines.append(f"  --{flag}")
    return "$ " + " \\\n".join(lines)


@contextmanager
def client_of_server(arguments: Sequence[str]) -> Iterator[tuple[Server, openai.OpenAI]]:
    """Run `vllm` with `arguments` until the block ends, with a client of it.

    Raises:
        ServingError: if the server does not start, or ends before the block does.
    """
    with TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        with serving(arguments, log) as server:
            try:
                yield (
                    server,
                    openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0),
                )
            except openai.APIConnectionError as error:
                if server.is_alive():
                    raise
                raise ServingError(f"the server ended; {log_errors(log)}") from error


def ask(
    client: openai.OpenAI,
    content: Sequence[dict[str, Any]],
    xargs: dict[str, Any],
    *,
    max_tokens: int,
    start: str | None = None,
) -> Answer:
    """Ask a question greedily.

    Args:
        content: parts of the user's message, see `measure.messages`.
        xargs: the request's `vllm_xargs`; it gets a report in any case.
        start: words that begin the answer and belong to the prompt.

    Raises:
        ServingError: if the response has no eviction report, or if a request that was to be evicted
            was not.
    """
    messages: list[Any] = [{"role": "user", "content": list(content)}]
    body: dict[str, Any] = {"vllm_xargs": {**xargs, "kv_eviction_report": 1}}
    if start is not None:
        messages.append({"role": "assistant", "content": start})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    response = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, temperature=0, max_tokens=max_tokens, extra_body=body
    )
    report = (getattr(response, "kv_transfer_params", None) or {}).get("kv_eviction")
    if report is None:
        raise ServingError("the response has no eviction report")
    before, after = report["blocks_before"], report["blocks_after"]
    if xargs.get("kv_eviction") != "none" and (after is None or after >= before):
        raise ServingError(f"{xargs} released no block: {report['skip_reason']}")
    text = (response.choices[0].message.content or "").strip()
    return Answer(text, before, before if after is None else after)


def inspector_question(
    page: Image.Image, question: str, *, method: str, budget: float, max_tokens: int, start: str
) -> dict[str, Any]:
    """Return what the inspector opens as a saved file: a question that is yet to be asked."""
    return {
        "format": "vllm-tgvkv inspector",
        "version": 2,
        "images": [{"name": "page.png", "url": png_url(page)}],
        "question": question,
        "start": start,
        "tokens": max_tokens,
        "settings": {"policy": method, "budget": budget},
    }
