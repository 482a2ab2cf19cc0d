# SPDX-License-Identifier: Apache-2.0
"""Prompts of exact lengths; each seed gives new text and new images."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from benchmarks.models import MAX_TOKENS_PER_IMAGE, Shape

QUESTION_TOKENS = 64
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8)
_IMAGE_TEXT_TOKENS = {"llava": 0, "qwen3_vl": 2}
"""Text tokens around each image."""


def image_prompt(
    shape: Shape, num_tokens: int, seed: int, question_tokens: int = QUESTION_TOKENS
) -> dict[str, Any]:
    """Return `[text | images | question]` of `num_tokens` tokens.

    It has as many images as fit; the text in front of them takes the rest.
    """
    rng = np.random.default_rng(seed)
    around = _IMAGE_TEXT_TOKENS[shape.arch]
    room = num_tokens - question_tokens
    images = []
    while (size := _image_size(rng, shape, room - around)) is not None:
        height, width = size
        images.append(_image(rng, height, width, shape.pixels_per_token))
        room -= height * width + around
    text = shape.image_text * len(images)
    return {
        "prompt": _text(rng, room) + text + _text(rng, question_tokens),
        "multi_modal_data": {"image": images},
    }


def text_prompt(num_tokens: int, seed: int) -> dict[str, Any]:
    """Return a prompt of random letters, one token each."""
    rng = np.random.default_rng(seed)
    return {"prompt_token_ids": rng.integers(1, 256, num_tokens).tolist()}


def _image_size(rng: np.random.Generator, shape: Shape, room: int) -> tuple[int, int] | None:
    """Return height and width in tokens of the next image; None if no more fits."""
    if shape.arch == "llava":
        side = shape.image_side
        return (side, side) if side * side <= room else None
    if room < 64:
        return None
    # Neither side is more than about three times the other, as in photographs and pages.
    tokens = min(room, int(rng.integers(64, MAX_TOKENS_PER_IMAGE)))
    height = max(1, round((tokens * rng.uniform(0.35, 2.8)) ** 0.5))
    return height, max(1, tokens // height)


def _image(rng: np.random.Generator, height: int, width: int, pixels: int) -> Image.Image:
    cells = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    size = (width * pixels, height * pixels)
    return Image.fromarray(cells).resize(size, Image.Resampling.NEAREST)


def _text(rng: np.random.Generator, length: int) -> str:
    """Return random letters, one token each."""
    return rng.choice(_LETTERS, length).tobytes().decode()
