# SPDX-License-Identifier: Apache-2.0
"""Prompts of exact lengths with images of many sizes, none of which was seen before."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu.shapes import MOST_TOKENS_PER_IMAGE, Shape

QUESTION_TOKENS = 64
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8)
_IMAGE_TEXT_TOKENS = {"llava": 0, "qwen2_5_vl": 2, "qwen3_vl": 2}
"""Text tokens around each image."""


def image_prompt(shape: Shape, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return `[text | images | question]` of `num_tokens` tokens, 64 of them the question's.

    The images take what room there is, and the text in front of them what they leave.
    """
    rng = np.random.default_rng(seed)
    around = _IMAGE_TEXT_TOKENS[shape.arch]
    room = num_tokens - QUESTION_TOKENS - 1
    images = []
    while (size := _image_size(rng, shape, room - around)) is not None:
        height, width = size
        images.append(_image(rng, height, width, shape.pixels_per_token))
        room -= height * width + around
    text = shape.image_text * len(images)
    return {
        "prompt": _text(rng, room + 1) + text + _text(rng, QUESTION_TOKENS),
        "multi_modal_data": {"image": images},
    }


def text_prompt(num_tokens: int, seed: int) -> dict[str, Any]:
    """Return a prompt of random letters, one token each."""
    rng = np.random.default_rng(seed)
    return {"prompt_token_ids": rng.integers(1, 256, num_tokens).tolist()}


def _image_size(rng: np.random.Generator, shape: Shape, room: int) -> tuple[int, int] | None:
    """Height and width in tokens of the next image, None if no more fits."""
    if shape.arch == "llava":
        side = shape.image_side
        return (side, side) if side * side <= room else None
    if room < 64:
        return None
    # Neither side more than about thrice the other, as in photographs and pages.
    tokens = min(room, int(rng.integers(64, MOST_TOKENS_PER_IMAGE)))
    height = max(1, round((tokens * rng.uniform(0.35, 2.8)) ** 0.5))
    return height, max(1, tokens // height)


def _image(rng: np.random.Generator, height: int, width: int, pixels: int) -> Image.Image:
    cells = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((width * pixels, height * pixels))


def _text(rng: np.random.Generator, length: int) -> str:
    return rng.choice(_LETTERS, length).tobytes().decode()
