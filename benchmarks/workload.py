# SPDX-License-Identifier: Apache-2.0
"""The prompts: images that nobody has seen before, and a question about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.shape import IMAGE, ModelShape


@dataclass(frozen=True)
class Workload:
    """A kind of prompt: `[text | images | question]`, `prompt_tokens` long.

    There are as many images as fit, and the text in front of them is what is left. All text after
    the first image, the question, is what the plugin observes, at most `observation_window` rows.
    """

    prompt_tokens: int
    question_tokens: int = 64

    def num_images(self, shape: ModelShape) -> int:
        return (self.prompt_tokens - self.question_tokens) // shape.tokens_per_image

    def prompt(self, shape: ModelShape, seed: int) -> dict[str, Any]:
        """A prompt in vLLM's format; each seed gives new text and new images."""
        rng = np.random.default_rng(seed)
        num_images = self.num_images(shape)
        num_text = self.prompt_tokens - num_images * shape.tokens_per_image - self.question_tokens
        images = [_image(rng, shape.image_size) for _ in range(num_images)]
        text = _text(rng, num_text) + IMAGE * num_images + _text(rng, self.question_tokens)
        return {"prompt": text, "multi_modal_data": {"image": images}}


def _image(rng: np.random.Generator, side: int) -> Image.Image:
    cells = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((side, side), Image.Resampling.NEAREST)


def _text(rng: np.random.Generator, length: int) -> str:
    """Random letters, one token each."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8)
    return rng.choice(letters, length).tobytes().decode()
