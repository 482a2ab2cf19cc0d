# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve the demonstration model with eviction and ask it about pages it never saw.

Starts `vllm serve` with `--kv-eviction tgv`, sends PNG pages with questions through the OpenAI
client, and prints the answers with the full cache and with four budgets, and the KV blocks each
held. The exit status is not zero if anything fails. `python -m demo.run --pages 200` does the same
for more pages.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from PIL import Image

from demo.pages import Question, make_page
from measure.messages import image_part, png_url, text_part
from measure.serving import Server, ServingError, serving

MODEL = Path(__file__).parent / "model"
BLOCK_SIZE = 16
DEFAULT_BUDGET = 0.1
BUDGETS = (0.5, 0.2, 0.1, 0.05)
MIN_FULL_CACHE_ACCURACY = 0.75
"""Share of right answers to the few questions asked here; tests ask many."""


@dataclass(frozen=True)
class Answer:
    """An answer and the KV blocks its request held before and after the eviction."""

    text: str
    blocks_before: int
    blocks_after: int

    @property
    def memory_saved(self) -> float:
        return 1 - self.blocks_after / self.blocks_before


def main() -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description="Serve the demonstration model and ask it.")
    parser.add_argument("--pages", type=int, default=8, help="one question each (default: 8)")
    parser.add_argument("--granularity", choices=("layer", "head"), default="layer")
    options = parser.parse_args()
    print(f"Starting: {shlex.join(['vllm', *serve_arguments(options.granularity)])}")
    try:
        with demo_server(options.granularity) as server:
            print(f"The server is ready after {server.start_seconds:.0f} s.\n")
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            rows = [ask_about_page(client, index) for index in range(options.pages)]
        return summarise(rows)
    except (ServingError, openai.OpenAIError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1


def serve_arguments(granularity: str) -> list[str]:
    """Return the arguments of `vllm`, without host and port."""
    config = [] if granularity == "layer" else ["--kv-eviction-config", '{"granularity": "head"}']
    return [
        *("serve", os.path.relpath(MODEL)),
        *("--kv-eviction", "tgv", "--kv-eviction-budget", str(DEFAULT_BUDGET)),
        *config,
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--enforce-eager", "--served-model-name", "demo"),
    ]


@contextmanager
def demo_server(granularity: str, more: Sequence[str] = ()) -> Iterator[Server]:
    """Serve the demonstration model until the block ends; `more` are further flags.

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
    full = ask(client, page.image, question.text, {"kv_eviction": "none"})
    answers = [full]
    for budget in BUDGETS:
        answer = ask(client, page.image, question.text, {"kv_eviction_budget": budget})
        if not answer.blocks_after < answer.blocks_before:
            raise ServingError(f"budget {budget} released no block for {question.text!r}")
        answers.append(answer)
    if index == 0:
        print_header()
    print_row(question, answers)
    return question, answers


def ask(client: openai.OpenAI, image: Image.Image, question: str, xargs: dict[str, Any]) -> Answer:
    """Send a page as a PNG with a question.

    Raises:
        ServingError: if the response has no eviction report.
    """
    content: Any = [image_part(png_url(image)), text_part(question)]
    response = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=12,
        extra_body={"vllm_xargs": {**xargs, "kv_eviction_report": 1}},
    )
    report = (getattr(response, "kv_transfer_params", None) or {}).get("kv_eviction")
    if report is None:
        raise ServingError("the response has no eviction report")
    before = report["blocks_before"]
    return Answer(
        text=(response.choices[0].message.content or "").strip(),
        blocks_before=before,
        blocks_after=before if report["blocks_after"] is None else report["blocks_after"],
    )


def print_header() -> None:
    columns = "".join(f"{budget:>10.0%}" for budget in BUDGETS)
    print(f"{'question':34}{'truth':>8}{'full':>10}{columns}   KV blocks full -> ...")


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
    print(f"{'KV memory of the prompt given back':42}" + "".join(f"{s:>9.0%} " for s in saved))
    if right[0] < MIN_FULL_CACHE_ACCURACY * len(rows):
        print("\nThe full cache answers too few questions: is demo/model intact?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
