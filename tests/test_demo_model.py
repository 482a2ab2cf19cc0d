# SPDX-License-Identifier: Apache-2.0
"""The demonstration model as it is shipped, served by vLLM, on pages it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.chat import EOS, TOKENS
from demo.pages import Question, make_page
from tests.engine import Ask, Engine, engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = Path(__file__).parents[1] / "demo/model"
NUM_PAGES = 100
CHARACTERS = {number: character for character, number in TOKENS.items()}


@pytest.fixture(scope="module")
def served() -> Iterator[Engine]:
    options = {"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 512}
    with engine(MODEL, {"policy": "tgv", "budget": 0.1}, **options) as running:
        yield running


def accuracy(served: Engine, **xargs: object) -> float:
    """Share of test pages whose question is answered exactly, one question a page."""
    pages = [make_page("test", index) for index in range(NUM_PAGES)]
    questions: list[Question] = [p.questions[i % len(p.questions)] for i, p in enumerate(pages)]
    asks = [
        Ask(f"<|user|><image>{question.text}<|assistant|>", (page.image,), 8, xargs)
        for page, question in zip(pages, questions, strict=True)
    ]
    answers = [text_of(tokens) for tokens in served.tokens(asks)]
    right = [a == question.answer for a, question in zip(answers, questions, strict=True)]
    return sum(right) / len(right)


def text_of(tokens: list[int]) -> str:
    ids = tokens[: tokens.index(TOKENS[EOS])] if TOKENS[EOS] in tokens else tokens
    return "".join(CHARACTERS[i] for i in ids)


def test_weights_are_small_enough_to_ship() -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 10 << 20


def test_full_cache_reads_the_pages(served: Engine) -> None:
    assert accuracy(served, kv_eviction="none") >= 0.9


def test_half_the_cache_reads_them_as_well(served: Engine) -> None:
    """Eviction keeps what the question needs: random eviction of half the cache would not."""
    assert accuracy(served, kv_eviction_budget=0.5) >= 0.9
