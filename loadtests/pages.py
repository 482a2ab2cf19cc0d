# SPDX-License-Identifier: Apache-2.0
"""Drawn pages of names and numbers, with questions; a page follows from its number."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from measure.messages import image_part, jpeg_url, png_url, text_part

SIDE = 336
"""Width and height of a page in pixels."""

_ROWS = 12
_NAMES = [
    *("amber", "birch", "cedar", "delta", "ember", "fjord"),
    *("grove", "haven", "inlet", "jetty", "knoll", "ledge"),
]


def draw_page(number: int, scale: int = 1) -> tuple[Image.Image, list[str]]:
    """Return page `number`, enlarged by `scale`, and a question about each of its rows."""
    rng = random.Random(number)
    paper = tuple(rng.randint(220, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE * scale, SIDE * scale), paper)
    draw = ImageDraw.Draw(image)
    height = SIDE * scale // (_ROWS + 1)
    questions = []
    for row, name in enumerate(rng.sample(_NAMES, _ROWS)):
        text = f"{name}: {rng.randint(10000, 99999)}"
        draw.text((height // 2, height * row + height // 2), text, fill=0, font=_font(height // 2))
        questions.append(f"What is the number of {name}? Answer with the number.")
    return image, questions


def page_message(pages: list[int], asked: int = 0, scale: int = 1) -> list[dict[str, Any]]:
    """Return the content of a message: the pages, then a question about the last one.

    `asked` is the row that the question is about, counted round.
    """
    drawn = [draw_page(number, scale) for number in pages]
    questions = drawn[-1][1]
    # Enlarged pages would be large PNGs.
    url = png_url if scale == 1 else jpeg_url
    return [
        *(image_part(url(image)) for image, _ in drawn),
        text_part(questions[asked % len(questions)]),
    ]


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(str(path), size)
