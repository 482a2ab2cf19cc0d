# SPDX-License-Identifier: Apache-2.0
"""Drawn pages of entries such as `K:58213`, and questions about them.

Load tests ask whether answers arrive, when, and whether they stay the same; not whether they are
right. A page and a question follow from their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from measure.messages import text_part
from vllm_tgvkv.visual_heads import Page, draw_page, font_files

TASKS = ("value", "row", "two_images", "compare")
"""Kinds of questions; `two_images` has two pages."""

SECOND_PAGE = 1_000_000
"""Distance to the number of the second page."""


@lru_cache(maxsize=64)
def make_page(number: int) -> Page:
    """Return a page, 336 x 336 pixels."""
    return draw_page(np.random.default_rng(number), font_files())


def pages_of(task: str, number: int) -> list[Image.Image]:
    """Return the pages that a question of a task is about."""
    numbers = [number, SECOND_PAGE + number] if task == "two_images" else [number]
    return [make_page(each).image for each in numbers]


def question(task: str, number: int) -> str:
    """Return the question of a task about page `number`."""
    first, *_, last = make_page(number).entries
    if task == "two_images":
        last = make_page(SECOND_PAGE + number).entries[0]
    return {
        "value": f"What is the value of {first.key}?",
        "row": f"Read the row of {first.key}.",
        "two_images": f"What are the values of {first.key} and {last.key}?",
        "compare": f"Which begins with the larger digit, {first.key} or {last.key}?",
    }[task]


def content(
    task: str, number: int, image_part: Callable[[Image.Image], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parts of a user's message: pages, then the question."""
    return [*map(image_part, pages_of(task, number)), text_part(question(task, number))]
