# SPDX-License-Identifier: Apache-2.0
"""Synthetic document pages with questions: ``K:58213`` entries drawn in real DejaVu faces.

A page is a 336 x 336 RGB image, which the CLIP tower of LLaVA cuts into 24 x 24 patches of 14 px.
A page shows entries, each a one-letter key, a colon and a value of five or six digits. A glyph
covers about two by two patches. A question names a key; the answer is its value.

Face, size, place, colours and noise vary from page to page. A page is determined by
``(split, index)``: the same pair gives the same page on every machine with the same Pillow, and
the splits never share a seed. This module needs only NumPy, Pillow and matplotlib (for its fonts).
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

PATCH = 14
PAGE_SIZE = 336
SLOT_WIDTH, SLOT_HEIGHT = 12 * PATCH, 3 * PATCH
KEYS = string.ascii_uppercase
VALUE_CHARACTERS = string.digits
VALUE_LENGTHS = (5, 6)
PAGE_ENTRIES = (3, 8)
SPLITS = {"train": 0, "validation": 1, "test": 2}

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
)
FONT_SIZES = (25, 26, 27, 28, 29)

PHRASES = (
    "What is the value of {key}?",
    "What does {key} say?",
    "Please read the value of {key}.",
    "Which value has the key {key}?",
    "Find {key} on the page.",
    "Value of {key}?",
    "{key}",
)

_T = TypeVar("_T")

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels; right and bottom are exclusive."""


@dataclass(frozen=True)
class Entry:
    """One line of a page: its key, its value, and the ink box of each drawn character.

    ``boxes[i]`` belongs to ``text[i]``.
    """

    key: str
    value: str
    boxes: tuple[Box, ...]

    @property
    def text(self) -> str:
        return f"{self.key}:{self.value}"

    @property
    def row(self) -> int:
        """Return the row of slots that holds the entry; its ink never leaves its slot."""
        return self.boxes[0][1] // SLOT_HEIGHT


@dataclass(frozen=True)
class Question:
    """A question in plain text, the key it asks for, and the exact text of the right answer."""

    text: str
    key: str
    answer: str


@dataclass(frozen=True)
class Page:
    """A drawn page, its entries from top to bottom, and one question for each entry."""

    image: Image.Image
    entries: tuple[Entry, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Glyph:
    """Return a character's coverage, ``[height, width]`` in 0..1, and its offset from the pen."""

    coverage: np.ndarray
    left: int
    top: int
    advance: float


def make_page(split: str, index: int, keys: Sequence[str] = KEYS) -> Page:
    """Return page ``index`` of ``split``, which is one of ``SPLITS``.

    ``keys`` restricts the letters the page may use, so that two pages of one prompt need not share
    any.
    """
    rng = np.random.default_rng([SPLITS[split], index])
    count = min(int(rng.integers(PAGE_ENTRIES[0], PAGE_ENTRIES[1] + 1)), len(keys))
    return draw_page(rng, rng.choice(list(keys), size=count, replace=False).tolist())


def draw_page(
    rng: np.random.Generator, keys: Sequence[str], width: int = PAGE_SIZE, height: int = PAGE_SIZE
) -> Page:
    """Draw one entry for each of ``keys`` on a page of ``width`` x ``height`` pixels.

    Entries lie in slots of ``SLOT_WIDTH`` x ``SLOT_HEIGHT``; training uses smaller pages than
    ``PAGE_SIZE`` at first. Raises ``ValueError`` if there are fewer slots than keys.
    """
    columns, rows = width // SLOT_WIDTH, height // SLOT_HEIGHT
    if len(keys) > columns * rows:
        raise ValueError(f"{len(keys)} entries do not fit into {columns * rows} slots")
    face, size = pick(rng, FACES), pick(rng, FONT_SIZES)
    slots = np.sort(rng.choice(columns * rows, size=len(keys), replace=False))
    ink = np.zeros((height, width), np.float32)
    entries = []
    for key, slot in zip(keys, slots, strict=True):
        value = "".join(pick(rng, VALUE_CHARACTERS) for _ in range(pick(rng, VALUE_LENGTHS)))
        corner = (slot % columns * SLOT_WIDTH, slot // columns * SLOT_HEIGHT)
        boxes = _draw_line(ink, rng, f"{key}:{value}", face, size, corner)
        entries.append(Entry(key, value, boxes))
    questions = tuple(
        Question(pick(rng, PHRASES).format(key=entry.key), entry.key, entry.value)
        for entry in entries
    )
    return Page(_print(ink, rng), tuple(entries), questions)


def pick(rng: np.random.Generator, options: Sequence[_T]) -> _T:
    """Return one of ``options``, all equally likely."""
    return options[int(rng.integers(len(options)))]


def _draw_line(
    ink: np.ndarray,
    rng: np.random.Generator,
    text: str,
    face: str,
    size: int,
    corner: tuple[int, int],
) -> tuple[Box, ...]:
    """Draw ``text`` somewhere in the slot whose top left is ``corner``; return its ink boxes."""
    glyphs = [_glyph(face, size, character) for character in text]
    top = min(glyph.top for glyph in glyphs)
    bottom = max(glyph.top + glyph.coverage.shape[0] for glyph in glyphs)
    # One pixel is kept free for the jitter of single glyphs; an oblique glyph may overhang.
    spare_x = SLOT_WIDTH - sum(glyph.advance for glyph in glyphs) - 4
    spare_y = SLOT_HEIGHT - (bottom - top) - 2
    pen = corner[0] + 2 + rng.uniform(0, max(spare_x, 0))
    base = corner[1] + 1 - top + int(rng.integers(0, spare_y + 1))
    boxes = []
    for glyph, jitter in zip(glyphs, rng.integers(-1, 2, size=len(glyphs)), strict=True):
        height, width = glyph.coverage.shape
        x = min(max(round(pen) + glyph.left, 0), ink.shape[1] - width)
        y = base + glyph.top + int(jitter)
        region = ink[y : y + height, x : x + width]
        np.maximum(region, glyph.coverage, out=region)
        boxes.append((x, y, x + width, y + height))
        pen += glyph.advance
    return tuple(boxes)


def _print(ink: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """Turn coverage ``[height, width]`` into an image: tinted paper, coloured ink, grain."""
    paper = rng.uniform(210, 255) + rng.uniform(-10, 0, size=3)
    colour = rng.uniform(0, 90) + rng.uniform(0, 40, size=3)
    grain = rng.integers(-128, 128, size=ink.shape, dtype=np.int8)
    # The grain is centred in a byte's range, so that nothing is clipped.
    noise = grain * np.float32(rng.uniform(0, 10) / 128)
    low, high = np.float32(10), np.float32(245)
    planes = []
    for bright, dark in zip(np.clip(paper, low, high), np.clip(colour, low, high), strict=True):
        plane = ink * np.float32(dark - bright) + noise + np.float32(bright)
        planes.append(Image.fromarray(plane.astype(np.uint8)))
    return Image.merge("RGB", planes)


@cache
def _glyph(face: str, size: int, character: str) -> _Glyph:
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    font = ImageFont.truetype(str(folder / f"{face}.ttf"), size)
    left, top, right, bottom = (int(edge) for edge in font.getbbox(character))
    image = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), character, fill=255, font=font)
    coverage = np.asarray(image, np.float32) / 255
    return _Glyph(coverage, left, top, font.getlength(character))
