# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve a model with eviction and ask it about pages it never saw.

Starts `vllm serve`, sends PNG pages with questions through the OpenAI client, and prints the
answers with the full cache next to those with parts of it, and the memory saved. In a terminal, the
server then waits for a browser until Ctrl-C: it has the inspector. The model is the
one that reads pages (`demo.reading`) if SmolLM2's weights are installed; otherwise, or with
`--small`, the small trained one in `demo/model`. The exit status is not zero if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from demo import reading
from demo.asking import (
    MIN_FULL_CACHE_ACCURACY,
    MODEL_NAME,
    Answer,
    ask,
    client_of_server,
    command_line,
    let_inspect,
    save_question,
)
from demo.pages import Question, make_page
from measure.messages import image_part, png_url, text_part
from measure.serving import Server, ServingError, serving
from reader.assemble import page_model_folder

MODEL = Path(__file__).parent / "model"
BLOCK_SIZE = 16
DEFAULT_BUDGET = 0.1
BUDGETS = (0.5, 0.2, 0.1, 0.05)
INSPECTED_METHOD = "aircache"
"""Method with which the small model's first page stays readable at a tenth."""

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, as shells have it."""


def main() -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description="Serve a model with eviction and ask it.")
    parser.add_argument("--pages", type=int, help="one question each (default: 5, small: 8)")
    parser.add_argument(
        "--granularity", choices=("layer", "head"), help="default: the method's own"
    )
    parser.add_argument("--small", action="store_true", help="the small model in demo/model")
    options = parser.parse_args()
    if options.pages is not None and options.pages < 1:
        parser.error(f"--pages must be at least 1, got {options.pages}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    try:
        if not options.small and (folder := page_model()):
            return reading.demonstrate(folder, options.pages or 5, options.granularity)
        return demonstrate(options.pages or 8, options.granularity)
    except (ServingError, openai.OpenAIError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the server has ended.", file=sys.stderr)
        return INTERRUPTED


def page_model() -> Path | None:
    """Return the folder of the model that reads pages; None, with a message, if there is none."""
    try:
        return page_model_folder()
    except OSError as error:  # its weights are not installed, or the disk is full
        print(f"{error}\nWithout it, the small model in demo/model answers.\n", flush=True)
        return None


def demonstrate(num_pages: int, granularity: str | None) -> int:
    """Run the demonstration with the small model and return its exit status.

    Raises:
        ServingError: if the server fails.
        openai.OpenAIError: if a request fails.
    """
    arguments = serve_arguments(granularity)
    save_sample()
    print(f"{command_line(arguments)}\nStarting takes half a minute or more.", flush=True)
    with client_of_server(arguments) as (server, client):
        print(f"The server is ready after {server.start_seconds:.0f} s.\n", flush=True)
        rows = [ask_about_page(client, index) for index in range(num_pages)]
        status = summarise(rows)
        if status == 0 and sys.stdout.isatty():
            let_inspect(server)
    return status


def save_sample() -> None:
    """Write a question for the inspector."""
    page = make_page("test", 0)
    save_question(page.image, page.questions[0].text, method=INSPECTED_METHOD)


def serve_arguments(granularity: str | None) -> list[str]:
    """Return the arguments of `vllm` for the small model, without host and port."""
    config = ["--kv-eviction-config", json.dumps({"granularity": granularity})]
    return [
        *("serve", os.path.relpath(MODEL)),
        *("--kv-eviction", "tgv", "--kv-eviction-budget", str(DEFAULT_BUDGET)),
        *(config if granularity else ()),
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--enforce-eager", "--served-model-name", MODEL_NAME),
    ]


@contextmanager
def demo_server(granularity: str | None, more: Sequence[str] = ()) -> Iterator[Server]:
    """Serve the small model until the block ends; `more` are further flags.

    Raises:
        ServingError: if the server does not start.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*serve_arguments(granularity), *more], Path(folder, "server.log")) as server,
    ):
        yield server


def ask_about_page(client: openai.OpenAI, index: int) -> tuple[Question, list[Answer]]:
    """Ask one question with the full cache and with every budget, and print a row."""
    page = make_page("test", index)
    question = page.questions[index % len(page.questions)]
    content = [image_part(png_url(page.image)), text_part(question.text)]
    arms: list[dict[str, Any]] = [{"kv_eviction": "none"}]
    arms += [{"kv_eviction_budget": budget} for budget in BUDGETS]
    answers = [ask(client, content, arm, max_tokens=12) for arm in arms]
    if index == 0:
        print_header()
    print_row(question, answers)
    return question, answers


def print_header() -> None:
    columns = "".join(f"{budget:>9.0%} " for budget in BUDGETS)
    print(f"{'question':34}{'truth':>8}{'full':>9} {columns}   KV blocks full -> ...")


def print_row(question: Question, answers: list[Answer]) -> None:
    marked = "".join(
        f"{answer.text[:7] + (' ' if answer.text == question.answer else '*'):>10}"
        for answer in answers
    )
    blocks = " ".join(str(answer.blocks_after) for answer in answers)
    print(f"{question.text[:33]:34}{question.answer:>8}{marked}   {blocks}", flush=True)


def summarise(rows: list[tuple[Question, list[Answer]]]) -> int:
    """Print the last lines of the table and return the exit status."""
    columns = list(zip(*(answers for _, answers in rows), strict=True))
    right = [
        sum(a.text == question.answer for a, (question, _) in zip(column, rows, strict=True))
        for column in columns
    ]
    saved = [sum(a.memory_saved for a in column) / len(column) for column in columns]
    print(
        f"\n{'right answers (* marks a wrong one)':42}"
        + "".join(f"{f'{n}/{len(rows)}':>9} " for n in right)
    )
    print(f"{'KV memory of the prompt saved':42}" + "".join(f"{s:>9.0%} " for s in saved))
    if right[0] < MIN_FULL_CACHE_ACCURACY * len(rows):
        print("\nThe full cache answers too few questions: is demo/model intact?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
