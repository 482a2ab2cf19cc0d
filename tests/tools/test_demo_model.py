# SPDX-License-Identifier: Apache-2.0
"""The demonstration model as it is shipped, served by vLLM, on pages it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.chat import EOS, TOKENS
from demo.tasks import MAX_ANSWER_TOKENS, TASKS, Example, make_example
from tests.engine.running import Ask, SteppedEngine, engine

pytestmark = [pytest.mark.apparatus, pytest.mark.engine, pytest.mark.slow]

MODEL = Path(__file__).parents[2] / "demo/model"
NUM_PAGES = 100
CHARACTERS = {number: character for character, number in TOKENS.items()}
LEAST_ACCURACY = {"value": 0.95, "row": 0.9, "two_images": 0.9, "compare": 0.75, "chat": 0.9}


@pytest.fixture(scope="module")
def served() -> Iterator[SteppedEngine]:
    options = {
        "dtype": "bfloat16",
        "block_size": 16,
        "num_gpu_blocks_override": 1024,
        "max_model_len": 2048,
    }
    with engine(MODEL, {"policy": "tgv", "budget": 0.1}, **options) as running:
        yield running


def accuracy(served: SteppedEngine, task: str, num_examples: int, **xargs: object) -> float:
    """Share of examples on test pages that are answered exactly."""
    examples = [make_example(task, "test", index) for index in range(num_examples)]
    asks = [
        Ask(
            prompt(example),
            tuple(page.image for page in example.pages),
            MAX_ANSWER_TOKENS,
            xargs,
        )
        for example in examples
    ]
    answers = [text_of(tokens) for tokens in served.tokens(asks)]
    right = [a == example.answer for a, example in zip(answers, examples, strict=True)]
    return sum(right) / len(right)


def prompt(example: Example) -> str:
    turns = [*(f"{turn.question}<|assistant|>{turn.answer}</s>" for turn in example.history)]
    turns.append(f"{example.question}<|assistant|>")
    return "<|user|>" + "<image>" * len(example.pages) + "<|user|>".join(turns)


def text_of(tokens: list[int]) -> str:
    ids = tokens[: tokens.index(TOKENS[EOS])] if TOKENS[EOS] in tokens else tokens
    return "".join(CHARACTERS[i] for i in ids)


def test_weights_are_small_enough_to_ship() -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 6 << 20


@pytest.mark.parametrize("task", TASKS)
def test_full_cache_answers(served: SteppedEngine, task: str) -> None:
    assert accuracy(served, task, NUM_PAGES // 2, kv_eviction="none") >= LEAST_ACCURACY[task]


def test_half_the_cache_reads_values_as_well(served: SteppedEngine) -> None:
    """Eviction keeps what the question needs: random eviction of half the cache would not."""
    assert accuracy(served, "value", NUM_PAGES, kv_eviction_budget=0.5) >= 0.9
