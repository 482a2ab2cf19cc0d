# SPDX-License-Identifier: Apache-2.0
"""Makes a model's file of head scores: `python -m vllm_tgvkv.visual_heads MODEL --output FILE`.

The model reads pages that are drawn here: a question names a key, and the answer is the number next
to it. For each token of the answer it is known in which patches of the image its characters stand.
A head is hit where the key that it attends to most, of all keys, is one of these patches. As in
SparseMM, each hit counts 1 / (number of these patches), and a head's score is the sum over the
tokens of a page, averaged over pages.

SparseMM lets the model transcribe a page, and counts output tokens that occur in one place of it
only. Here the question says which place is meant, and only right answers count (**a choice**).

The model runs in transformers, one prompt after the other. A small model takes a minute or two on
two cores for 40 pages; take a GPU (`--device cuda`) for a large one. Patches are found for models
with one grid of patches for an image, such as LLaVA 1.5, or whose processor names it, such as
Qwen's; others are refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vllm_tgvkv.policies.head_scores import write

QUESTION = "What is the value of {key}?"
PAGE_SIZE = 336
COLUMNS, ROWS = 2, 8
"""Slots of a page, each for one entry or none."""
ENTRIES = (3, 8)
"""Least and most entries of a page."""
FONT_SIZES = (25, 29)
MAX_TOKENS = 32
"""Tokens of an answer at most."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


class CalibrationError(RuntimeError):
    """A model whose heads cannot be scored; the message says why, and the way out."""


@dataclass(frozen=True)
class Entry:
    """One entry of a page: a key, its value, and the box of each character of the value."""

    key: str
    value: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Page:
    """A drawn page of `PAGE_SIZE` squared pixels."""

    image: Image.Image
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Answer:
    """An answer with the key that each head attended to most."""

    pieces: tuple[str, ...]
    """Text of each token."""
    tops: torch.Tensor
    """Position of that key, int64 `[tokens, L, Q]`."""
    vision: torch.Tensor
    """Positions of the image's patches in the order of their grid, int64 `[rows * columns]`."""
    grid: tuple[int, int]


@dataclass
class Tally:
    """Hits so far."""

    scores: torch.Tensor
    """float64 `[L, Q]`."""
    num_answers: int = 0
    num_right: int = 0
    num_tokens: int = 0


def draw_page(rng: np.random.Generator, faces: Sequence[str]) -> Page:
    """Draw entries such as `K:58213` in slots of a page, with `faces` from `font_files`."""
    face, size = faces[int(rng.integers(len(faces)))], int(rng.integers(*FONT_SIZES, endpoint=True))
    font = ImageFont.truetype(face, size) if face else ImageFont.load_default(size)
    paper, ink = int(rng.integers(220, 256)), int(rng.integers(0, 60))
    image = Image.new("RGB", (PAGE_SIZE, PAGE_SIZE), (paper,) * 3)
    drawing = ImageDraw.Draw(image)
    count = int(rng.integers(*ENTRIES, endpoint=True))
    keys = rng.choice(list(string.ascii_uppercase), size=count, replace=False).tolist()
    slots = np.sort(rng.choice(COLUMNS * ROWS, size=count, replace=False)).tolist()
    width, height = PAGE_SIZE / COLUMNS, PAGE_SIZE / ROWS
    entries = []
    for key, slot in zip(keys, slots, strict=True):
        value = "".join(str(digit) for digit in rng.integers(0, 10, size=rng.integers(5, 7)))
        text = f"{key}:{value}"
        left, top, right, bottom = font.getbbox(text)
        x = slot % COLUMNS * width + 2 + rng.uniform(0, max(0.0, width - (right - left) - 4))
        y = slot // COLUMNS * height + 1 + rng.uniform(0, max(0.0, height - (bottom - top) - 2))
        drawing.text((x - left, y - top), text, fill=(ink,) * 3, font=font)
        ends = [x - left + font.getlength(text[:n]) for n in range(2, len(text) + 1)]
        boxes = tuple((start, y, end, y + bottom - top) for start, end in itertools.pairwise(ends))
        entries.append(Entry(key, value, boxes))
    return Page(image, tuple(entries))


def font_files() -> list[str]:
    """Return font files of matplotlib, or "" for Pillow's own font without it."""
    try:
        import matplotlib
    except ImportError:
        return [""]
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return [str(folder / f"{face}.ttf") for face in ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")]


def patches_of(box: Box, grid: tuple[int, int]) -> set[int]:
    """Return the patches of a grid of (rows, columns) that a box of a page touches, row by row."""
    rows, columns = grid
    left, right = (int(edge * columns / PAGE_SIZE) for edge in (box[0], box[2]))
    top, bottom = (int(edge * rows / PAGE_SIZE) for edge in (box[1], box[3]))
    return {
        row * columns + column
        for row in range(max(0, top), min(rows, bottom + 1))
        for column in range(max(0, left), min(columns, right + 1))
    }


def count_hits(tally: Tally, answer: Answer, entry: Entry) -> bool:
    """Add an answer's hits to the tally; return whether the answer is right.

    It is if the value stands in it once.
    """
    tally.num_answers += 1
    text = "".join(answer.pieces)
    if text.count(entry.value) != 1:
        return False
    tally.num_right += 1
    start, end = text.index(entry.value), 0
    for piece, tops in zip(answer.pieces, answer.tops, strict=True):
        begin, end = end, end + len(piece)
        characters = range(max(begin, start), min(end, start + len(entry.value)))
        patches = (patches_of(entry.boxes[i - start], answer.grid) for i in characters)
        if region := set[int]().union(*patches):
            tally.num_tokens += 1
            tally.scores += torch.isin(tops, answer.vision[sorted(region)]).double() / len(region)
    return True


class Reader:
    """A model in transformers that answers questions about one page."""

    def __init__(self, model: str, device: str, dtype: str) -> None:
        """Load the model.

        Raises:
            CalibrationError: if it cannot be loaded, or sees no images.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

        try:
            self.processor = AutoProcessor.from_pretrained(model)
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                model, dtype=dtype, attn_implementation="eager"
            )
        except (OSError, ValueError) as error:
            raise CalibrationError(
                f"{model}: cannot be loaded as a vision-language model ({error}); give a folder or "
                "name that transformers knows"
            ) from error
        self.model = loaded.to(device).eval()
        text = self.model.config.get_text_config()
        self.shape: tuple[int, int] = (text.num_hidden_layers, text.num_attention_heads)
        self.kv_heads: int = text.num_key_value_heads
        # Greedy, whatever the model's own configuration says.
        self._greedy = GenerationConfig(
            max_new_tokens=MAX_TOKENS,
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=0,
            output_attentions=True,
            return_dict_in_generate=True,
        )

    @torch.inference_mode()
    def answer(self, image: Image.Image, question: str) -> Answer:
        """Return the greedy answer.

        Raises:
            CalibrationError: if the patches of the image have no known grid.
        """
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        # The template has added the tokens that begin a text.
        inputs = self.processor(
            text=[prompt], images=[image], add_special_tokens=False, return_tensors="pt"
        ).to(self.model.device)
        ids = inputs["input_ids"]
        vision = (ids[0] == self.model.config.image_token_id).nonzero().flatten()
        grid = self._grid(inputs, len(vision))
        found = self.model.generate(**inputs, generation_config=self._greedy)
        tokens, decode = (
            found.sequences[0, ids.shape[1] :].tolist(),
            self.processor.tokenizer.decode,
        )
        tops = [[layer[0, :, -1].argmax(dim=-1) for layer in step] for step in found.attentions]
        texts = [decode(tokens[:n], skip_special_tokens=True) for n in range(len(tokens) + 1)]
        pieces = tuple(text[len(start) :] for start, text in itertools.pairwise(texts))
        stacked = torch.stack([torch.stack(layers) for layers in tops])
        return Answer(pieces, stacked.cpu(), vision.cpu(), grid)

    def _grid(self, inputs: Any, num_patches: int) -> tuple[int, int]:
        """Return rows and columns of an image's patches in the prompt."""
        if "image_grid_thw" in inputs:
            merge = self.model.config.vision_config.spatial_merge_size
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            grid = (rows // merge, columns // merge)
        else:
            grid = (math.isqrt(num_patches),) * 2
        if num_patches < 1 or grid[0] * grid[1] != num_patches:
            raise CalibrationError(
                f"an image of this model has {num_patches} tokens, and not one grid of patches "
                "whose size is known: its heads cannot be scored; choose a method without head "
                "scores, or write the file by other means"
            )
        return grid


def calibrate(reader: Reader, pages: int, seed: int, question: str = QUESTION) -> Tally:
    """Return the hits of all questions about some pages.

    Raises:
        CalibrationError: if no answer is right, or no head was hit.
    """
    tally = Tally(torch.zeros(reader.shape, dtype=torch.float64))
    for index in range(pages):
        page = draw_page(np.random.default_rng([seed, index]), font_files())
        for entry in page.entries:
            count_hits(tally, reader.answer(page.image, question.format(key=entry.key)), entry)
    if not tally.scores.any():
        raise CalibrationError(
            f"{tally.num_right} of {tally.num_answers} answers were right, and no head was hit: "
            "ask in words that the model knows with --question, about more pages with --pages, or "
            "choose a method without head scores"
        )
    return tally


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tgvkv.visual_heads",
        description="Make the file of head scores for a model, for the setting head_scores.",
    )
    add = parser.add_argument
    add("model", help="folder or name of the model that is served")
    add("--output", type=Path, required=True, help="file to write")
    add("--pages", type=int, default=40, help="pages to read (default: 40)")
    add("--question", default=QUESTION, help=f"with {{key}} in it (default: {QUESTION})")
    add("--seed", type=int, default=0, help="of the pages (default: 0)")
    add("--device", default="cpu", help="of torch (default: cpu)")
    add("--dtype", help="default: float32 on CPU, else the model's")
    options = parser.parse_args(arguments)
    if options.pages < 1:
        parser.error(f"--pages is {options.pages}: give at least 1")
    if "{key}" not in options.question:
        parser.error(f"--question is {options.question!r}: it needs {{key}}, such as {QUESTION!r}")
    if not options.output.parent.is_dir():
        parser.error(f"--output is {options.output}: its folder does not exist; create it")
    try:
        dtype = options.dtype or ("float32" if options.device == "cpu" else "auto")
        reader = Reader(options.model, options.device, dtype)
        tally = calibrate(reader, options.pages, options.seed, options.question)
    except CalibrationError as error:
        sys.exit(f"visual_heads: {error}")
    scores = (tally.scores / options.pages).tolist()
    folder = Path(options.model)
    name = folder.resolve().name if folder.is_dir() else options.model
    packages = ("vllm-tgvkv", "torch", "transformers", "pillow")
    made = {
        "by": "python -m vllm_tgvkv.visual_heads",
        "question": options.question,
        "seed": options.seed,
        "pages": options.pages,
        "answers": tally.num_answers,
        "right_answers": tally.num_right,
        "tokens": tally.num_tokens,
        "fonts": [Path(face).stem or "Pillow's" for face in font_files()],
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    write(options.output, name, reader.kv_heads, scores, made)
    print(
        f"{options.output}: {tally.num_right} of {tally.num_answers} answers were right, with "
        f"{tally.num_tokens} tokens; start the server with head_scores: {options.output.resolve()}"
    )


if __name__ == "__main__":
    main()
