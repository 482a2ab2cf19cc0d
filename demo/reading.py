# SPDX-License-Identifier: Apache-2.0
"""The demonstration with the page-reading model: a number hidden on a page of 1,024 vision tokens.

Each question is asked of the full cache and of the recommended method first, then of published
methods and smaller budgets, until the answers are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from demo.asking import (
    MODEL_NAME,
    SAMPLE,
    Answer,
    ask,
    client_of_server,
    command_line,
    let_inspect,
    save_question,
    shown,
)
from measure.messages import image_part, png_url, text_part
from measure.serving import ServingError
from reader.assemble import load_vocabulary
from reader.tasks import PageExample, PageQuestion, PageTask

RECOMMENDED = "reach"

BUDGETS = (0.2, 0.1)
"""Budgets with which the recommended method is asked first."""

PUBLISHED = ("snapkv", "tgv", "aircache")
HARDER = (0.5, 0.2, 0.05, 0.02)

MIN_FULL_CACHE_ACCURACY = 0.75
"""Least share of questions that the full cache must answer."""

TASK = PageTask("number", "prose")
BLOCK_SIZE = 16
_LABEL = 28
_CELL = 15


@dataclass(frozen=True)
class Asked:
    """A question with its page as the client sends it."""

    example: PageExample
    page_url: str

    @property
    def truth(self) -> str:
        return self.example.asked.answer

    def answer(self, client: openai.OpenAI, xargs: dict[str, Any]) -> Answer:
        """Ask it; the text of the answer is the number that was found in it."""
        content = [
            text_part(self.example.introduction),
            image_part(self.page_url),
            text_part(self.example.question),
        ]
        said = ask(client, content, xargs, self.example.asked.start)
        found = self.example.asked.found(said.text)
        return Answer(found, said.blocks_before, said.blocks_after)


def demonstrate(folder: Path, num_pages: int) -> int:
    """Run the demonstration with the model in `folder` and return its exit status.

    Raises:
        ServingError: if the server fails, or the full cache answers too few questions.
        openai.OpenAIError: if a request fails.
    """
    vocabulary = load_vocabulary(folder)
    examples = [PageQuestion(TASK, number).example(vocabulary) for number in range(num_pages)]
    asked = [Asked(example, png_url(example.pages[0])) for example in examples]
    save(examples[0])
    arguments = serve_arguments(folder)
    pages = "a page" if num_pages == 1 else f"{num_pages} pages"
    print(
        "Model      SmolLM2-135M and a vision tower that reads pages (docs/page_model.md)\n"
        f"Questions  {pages} of text, 1,024 vision tokens each; a number is hidden in each text\n"
        f"First page {shown(SAMPLE)}\n\n{command_line(arguments)}\n"
        "Starting takes half a minute or more.",
        flush=True,
    )
    with client_of_server(arguments) as (server, client):
        print(f"The server is ready after {server.start_seconds:.0f} s.\n", flush=True)
        columns = compare(client, asked, block_bytes(folder))
        num_right = [right(column, asked) for column in columns]
        if num_right[0] < MIN_FULL_CACHE_ACCURACY * num_pages:
            raise ServingError(
                f"the full cache answers {num_right[0]} of {num_pages} questions: remove "
                f"{shown(folder)}, so that the model is put together again"
            )
        find_the_limit(client, asked, dict(zip(BUDGETS, num_right[1:], strict=True)))
        if sys.stdout.isatty():
            let_inspect(server)
    return 0


def save(example: PageExample) -> None:
    """Write a question for the inspector, without its introduction."""
    start = example.asked.start
    save_question(example.pages[0], example.question.strip(), method=RECOMMENDED, start=start)


def serve_arguments(folder: Path) -> list[str]:
    """Return the arguments of `vllm`, without host and port."""
    return [
        *("serve", shown(folder)),
        *("--kv-eviction", RECOMMENDED, "--kv-eviction-budget", str(BUDGETS[-1])),
        *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", "4096"),
        *("--max-num-seqs", "4", "--enforce-eager", "--served-model-name", MODEL_NAME),
    ]


def compare(
    client: openai.OpenAI, asked: Sequence[Asked], bytes_per_block: int
) -> list[list[Answer]]:
    """Print the answers of the full cache next to those of the recommended method.

    Returns:
        Answers by column: the full cache, then the budgets.
    """
    budgets = [f"{budget:.0%} kept" for budget in BUDGETS]
    print(f"The full cache, and the recommended method, {RECOMMENDED}. * marks a wrong answer.\n")
    print(row("number of", "truth", "full cache", *budgets))
    answers = []
    for question in asked:
        arms = [{"kv_eviction": "none"}, *(_arm(RECOMMENDED, budget) for budget in BUDGETS)]
        answers.append([question.answer(client, arm) for arm in arms])
        marked = (a.text[:10] + " *"[a.text != question.truth] for a in answers[-1])
        print(row(name_of(question.example), f"{question.truth} ", *marked), flush=True)
    columns = [list(column) for column in zip(*answers, strict=True)]
    counts = (f"{right(column, asked)} of {len(asked)} " for column in columns)
    print(row("right answers", "", *counts))
    mean = [sum(a.blocks_after for a in column) / len(column) for column in columns]
    sizes = (f"{blocks * bytes_per_block / 1e6:.1f} MB " for blocks in mean)
    print(row("KV cache of a prompt", "", *sizes))
    print(row("memory saved", "", "", *(f"{saved(column):.0%} " for column in columns[1:])))
    return columns


def find_the_limit(client: openai.OpenAI, asked: Sequence[Asked], known: dict[float, int]) -> None:
    """Print how many answers stay right with published methods and smaller budgets.

    Args:
        known: right answers of the recommended method, by budget, which are not asked again.
    """
    print(
        "\nNow harder: other methods as they were published, and smaller budgets. "
        f"Right answers of {len(asked)}:\n"
    )
    print(row("part of the prompt kept", *(f"{budget:.0%}" for budget in HARDER)))
    for method in (RECOMMENDED, *PUBLISHED):
        print(f"{method:{_LABEL}}", end="", flush=True)
        for budget in HARDER:
            count = known.get(budget) if method == RECOMMENDED else None
            if count is None:
                arm = _arm(method, budget)
                count = right([question.answer(client, arm) for question in asked], asked)
            print(f"{count:>{_CELL}}", end="", flush=True)
        print()
    print(
        "\nHow much a task needs has to be measured: docs/tuning.md. "
        "More methods and questions: docs/evaluation."
    )


def _arm(method: str, budget: float) -> dict[str, Any]:
    return {"kv_eviction": method, "kv_eviction_budget": budget}


def right(answers: Sequence[Answer], asked: Sequence[Asked]) -> int:
    """Return how many answers are right."""
    return sum(a.text == question.truth for a, question in zip(answers, asked, strict=True))


def saved(answers: Sequence[Answer]) -> float:
    """Return the share of the prompts' blocks that was given back."""
    return sum(answer.memory_saved for answer in answers) / len(answers)


def name_of(example: PageExample) -> str:
    """Return the name whose number is asked for."""
    return example.asked.start.split(" for ")[1].split()[0]


def block_bytes(folder: Path) -> int:
    """Return the bytes of a block, from the model's configuration: float32 keys and values."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    head_size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    values: int = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_size
    return 4 * values * BLOCK_SIZE


def row(label: str, *cells: str) -> str:
    """Return a line of a table."""
    return f"{label:{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
