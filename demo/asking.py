# SPDX-License-Identifier: Apache-2.0
"""Questions to a server that evicts: the answer, and the KV blocks its prompt held."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from PIL import Image

from measure.messages import png_url
from measure.serving import Server, ServingError, log_errors, serving
from reader.assemble import MODELS
from reader.tasks import PageExample

MODEL_NAME = "demo"
"""Name under which the model is served."""

MAX_TOKENS = 12
"""Tokens of an answer: a number of seven digits, a space before and a full stop after it."""

INSPECTED_BUDGET = 0.1
SAMPLE = MODELS.parent / "demo" / "page.png"
"""The page of the first question."""

QUESTION = "inspector_question.json"
"""Name of the question that a model's folder holds for its inspector."""

PLUGINS = {"VLLM_PLUGINS": "tgvkv"}
"""Environment of a server that has the inspector."""

WIDTH = 96
"""Columns of a terminal that the output needs."""

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, as shells have it."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the KV blocks of its prompt before and after the eviction."""

    text: str
    blocks_before: int
    blocks_after: int


@dataclass
class Question:
    """A question about a page, as it is asked again and again."""

    example: PageExample

    @cached_property
    def messages(self) -> list[Any]:
        """Return the conversation, which begins the answer."""
        return self.example.chat()


def exit_status(title: str, program: Callable[[], int]) -> int:
    """Run a program and return its exit status, with a message if it failed or was stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    try:
        return program()
    # OSError: the weights are not installed, or the disk is full.
    except (OSError, ServingError, openai.OpenAIError) as error:
        print(f"\n{title} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the server has ended.", file=sys.stderr)
        return INTERRUPTED


def command_line(arguments: Sequence[str]) -> str:
    """Return the command of a server as a user would type it, with some flags on each line."""
    variables = [f"{name}={value}" for name, value in PLUGINS.items()]
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
        with serving(arguments, log, environment=PLUGINS) as server:
            url = f"{server.url}/v1"
            try:
                yield server, openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            except openai.APIConnectionError as error:
                if server.is_alive():
                    raise
                raise ServingError(f"the server ended; {log_errors(log)}") from error


def ask(client: openai.OpenAI, question: Question, xargs: dict[str, Any]) -> Answer:
    """Ask about a page, greedily; the text of the answer is the number that was found in it.

    Args:
        xargs: the request's `vllm_xargs`; a report is asked for in any case.

    Raises:
        ServingError: if the response has no eviction report, or if no block was released although
            eviction was asked for.
    """
    body = {
        "vllm_xargs": {**xargs, "kv_eviction_report": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    response = client.chat.completions.create(
        model=MODEL_NAME,
        messages=question.messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body=body,
    )
    report = (getattr(response, "kv_transfer_params", None) or {}).get("kv_eviction")
    if report is None:
        raise ServingError("the response has no eviction report")
    before, after = report["blocks_before"], report["blocks_after"]
    if xargs.get("kv_eviction") != "none" and (after is None or after >= before):
        raise ServingError(f"{xargs} released no block: {report['skip_reason']}")
    said = question.example.asked.found((response.choices[0].message.content or "").strip())
    return Answer(said, before, before if after is None else after)


def sample_page(example: PageExample) -> Image.Image:
    """Return a question's page in few colours, so that the inspector's links can hold it."""
    return example.pages[0].quantize(16)


def question_record(example: PageExample, method: str) -> dict[str, Any]:
    """Return a question about a page, without its introduction, as the inspector saves it."""
    asked = example.asked
    places = {asked.answer: example.places}
    return {
        "format": "vllm-tgvkv inspector",
        "version": 2,
        "images": [{"name": SAMPLE.name, "url": png_url(sample_page(example)), "places": places}],
        "question": example.question.strip(),
        "start": asked.start,
        "expected": asked.answer,
        "tokens": MAX_TOKENS,
        "settings": {"policy": method, "budget": INSPECTED_BUDGET},
    }


def let_inspect(server: Server) -> None:
    """Say how to open the inspector, and wait for Ctrl-C.

    Raises:
        ServingError: if the server ends before.
    """
    print(
        f'\nOpen {server.url}/kv-eviction/ in a browser, choose "Fill in a sample", '
        "and press Ask.\nCtrl-C ends the server.",
        flush=True,
    )
    try:
        while server.is_alive():
            time.sleep(1)
    except KeyboardInterrupt:
        return
    said = log_errors(server.log) if server.log else "it has no log"
    raise ServingError(f"the server ended; {said}")


def shown(path: Path) -> str:
    """Return a path as a user would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
