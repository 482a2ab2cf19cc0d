# SPDX-License-Identifier: Apache-2.0
"""The demonstration with the page-reading model: a number hidden on a page of 1,024 vision tokens.

Each question is asked of the full cache and of the recommended method first, then of published
methods and smaller budgets, until the answers are wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from demo.asking import (
    MODEL_NAME,
    QUESTION,
    SAMPLE,
    Answer,
    Question,
    ask,
    client_of_server,
    command_line,
    let_inspect,
    question_record,
    sample_page,
    shown,
)
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


def demonstrate(folder: Path, num_pages: int) -> int:
    """Run the demonstration with the model in `folder` and return its exit status.

    Raises:
        ServingError: if the server fails, or the full cache answers too few questions.
        openai.OpenAIError: if a request fails.
    """
    vocabulary = load_vocabulary(folder)
    asked = [Question(PageQuestion(TASK, n).example(vocabulary)) for n in range(num_pages)]
    save(asked[0].example, folder)
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
        num_right = compare(client, asked, block_bytes(folder))
        if num_right[0] < MIN_FULL_CACHE_ACCURACY * num_pages:
            raise ServingError(
                f"the full cache answers {num_right[0]} of {num_pages} questions: remove "
                f"{shown(folder)}, so that the model is put together again"
            )
        find_the_limit(client, asked, dict(zip(BUDGETS, num_right[1:], strict=True)))
        if sys.stdout.isatty():
            let_inspect(server)
    return 0


def save(example: PageExample, folder: Path) -> None:
    """Write a question's page below `build/demo`, and the question into the model's folder."""
    SAMPLE.parent.mkdir(parents=True, exist_ok=True)
    sample_page(example).save(SAMPLE)
    written = folder / f"{QUESTION}.{os.getpid()}"
    written.write_text(json.dumps(question_record(example, RECOMMENDED)))
    written.replace(folder / QUESTION)  # a server of the same model may be reading it


def serve_arguments(folder: Path) -> list[str]:
    """Return the arguments of `vllm`, without host and port."""
    return [
        *("serve", shown(folder)),
        *("--kv-eviction", RECOMMENDED, "--kv-eviction-budget", str(BUDGETS[-1])),
        *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--max-model-len", "4096"),
        *("--max-num-seqs", "4", "--enforce-eager", "--served-model-name", MODEL_NAME),
    ]


def compare(client: openai.OpenAI, asked: Sequence[Question], bytes_per_block: int) -> list[int]:
    """Print the answers of the full cache next to those of the recommended method.

    Returns:
        Numbers of right answers: of the full cache, then by budget.
    """
    budgets = [f"{budget:.0%} kept" for budget in BUDGETS]
    print(f"The full cache, and the recommended method, {RECOMMENDED}. * marks a wrong answer.\n")
    print(row("number of", "truth", "full cache", *budgets))
    arms = [{"kv_eviction": "none"}, *(_arm(RECOMMENDED, budget) for budget in BUDGETS)]
    answers = []
    for question in asked:
        truth = question.example.asked.answer
        answers.append([ask(client, question, arm) for arm in arms])
        marked = (answer.text[:10] + " *"[answer.text != truth] for answer in answers[-1])
        name = question.example.asked.start.split(" for ")[1].split()[0]
        print(row(name, f"{truth} ", *marked), flush=True)
    columns = list(zip(*answers, strict=True))
    counts = [right(column, asked) for column in columns]
    mean = [sum(a.blocks_after for a in column) / len(column) for column in columns]
    saved = [
        sum(1 - a.blocks_after / a.blocks_before for a in column) / len(column)
        for column in columns[1:]
    ]
    print(row("right answers", "", *(f"{count} of {len(asked)} " for count in counts)))
    sizes = (f"{blocks * bytes_per_block / 1e6:.1f} MB " for blocks in mean)
    print(row("KV cache of a prompt", "", *sizes))
    print(row("memory saved", "", "", *(f"{share:.0%} " for share in saved)))
    return counts


def find_the_limit(
    client: openai.OpenAI, asked: Sequence[Question], known: dict[float, int]
) -> None:
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
        print(row(method), end="", flush=True)
        for budget in HARDER:
            count = known.get(budget) if method == RECOMMENDED else None
            if count is None:
                arm = _arm(method, budget)
                count = right([ask(client, question, arm) for question in asked], asked)
            print(f"{count:>{_CELL}}", end="", flush=True)
        print()
    print(
        "\nHow much a task needs has to be measured: docs/tuning.md. "
        "More methods and questions: docs/evaluation."
    )


def _arm(method: str, budget: float) -> dict[str, Any]:
    # To see what it costs: memory is not short here.
    return {"kv_eviction": method, "kv_eviction_budget": budget, "kv_eviction_when": "always"}


def right(answers: Sequence[Answer], asked: Sequence[Question]) -> int:
    """Return how many answers are right."""
    return sum(
        a.text == question.example.asked.answer for a, question in zip(answers, asked, strict=True)
    )


def block_bytes(folder: Path) -> int:
    """Return the bytes of a block, from the model's configuration: float32 keys and values."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    head_size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    values: int = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head_size
    return 4 * values * BLOCK_SIZE


def row(label: str, *cells: str) -> str:
    """Return a line of a table."""
    return f"{label:{_LABEL}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
