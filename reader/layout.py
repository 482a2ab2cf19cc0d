# SPDX-License-Identifier: Apache-2.0
"""Pages of running text on a grid: each square patch shows one word piece in a real typeface.

A page has 32 x 32 patches of 48 pixels, or fewer, read row by row. A piece stands at the left of
its patch, long ones in small letters and on two or three lines. A stroke in the lower left corner
says that the piece continues the one before it without a space; an empty patch is a space. A page
has one face, one size and one pair of colours; each piece is shifted by up to a pixel.

Needs only NumPy, Pillow and matplotlib, for its fonts: DejaVu, and STIX, which is a kind of Times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

PATCH = 48
GRID = 32
"""Patches in a row, and rows, of a page."""

SHIFT = 1
"""Most pixels that a piece is shifted by, in each direction."""

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSerif",
    "STIXGeneral",
    "STIXGeneralBol",
)
SCALES = (0.88, 1.0)
"""Least and largest size of a page's letters, as a share of the size that fits."""

NEWLINE_SIGN = "\N{PILCROW SIGN}"
"""Text that is drawn for a line end."""

_LEFT, _WIDTH = 2, 43
"""First pixel of a line of letters, and its most pixels."""

_LARGEST = (22.0, 18.0, 12.5)
"""Largest font size of a piece on one, two and three lines, in pixels."""

_BASELINES = ((31,), (20, 39), (14, 27, 40))
"""Rows of pixels on which letters stand, for each number of lines."""

_JOINT = (0, 45, 11, 46)
"""Left, top, right and bottom pixel of the stroke that joins a piece to the one before."""

_EASY = 13.0
"""Font size from which on a piece needs no further line."""

_REFERENCE = 32
"""Font size at which widths are measured."""


def draw_piece(text: str, face: str, scale: float = 1.0) -> np.ndarray:
    """Return the ink of a word piece, `[PATCH, PATCH]` uint8, 255 where the patch is covered.

    Args:
        text: the piece with its leading space, if it has one.
        face: one of `FACES`.
        scale: size of the letters, as a share of the size that fits.
    """
    image = Image.new("L", (PATCH, PATCH))
    draw = ImageDraw.Draw(image)
    letters = text.removeprefix(" ").replace("\n", NEWLINE_SIGN)
    if not text.startswith(" "):
        draw.rectangle(_JOINT, fill=255)
    if letters:
        size, lines = _set(letters, face)
        font = _font(face, round(size * scale, 1))
        for line, baseline in zip(lines, _BASELINES[len(lines) - 1], strict=True):
            draw.text((_LEFT, baseline), line, fill=255, font=font, anchor="ls")
    return np.asarray(image)


def draw_page(
    texts: Sequence[str], rng: np.random.Generator, face: str | None = None, side: int = GRID
) -> Image.Image:
    """Return a page that shows word pieces, as an RGB image of `side` x `side` patches.

    Args:
        texts: at most `side` x `side` pieces; the patches behind them stay empty.
        rng: decides face, size, colours and shifts.
        face: one of `FACES`, instead of a random one.

    Raises:
        ValueError: if there are too many pieces.
    """
    room = side * side
    if len(texts) > room:
        raise ValueError(f"{len(texts)} word pieces do not fit on a page of {room}")
    drawn_face = FACES[int(rng.integers(len(FACES)))]
    scale = float(rng.uniform(*SCALES))
    paper = rng.uniform(225, 255) + rng.uniform(-12, 0, size=3)
    colour = rng.uniform(0, 60) + rng.uniform(0, 40, size=3)
    ink = np.zeros((side, PATCH, side, PATCH), np.uint8)
    for number, (text, shift) in enumerate(
        zip(texts, rng.integers(-SHIFT, SHIFT + 1, size=(room, 2)), strict=False)
    ):
        piece = draw_piece(text, face or drawn_face, scale)
        ink[number // side, :, number % side] = shifted(piece, *shift)
    shares = np.arange(256)[:, None] / 255
    colours = np.rint(paper + shares * (colour - paper)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(colours[ink.reshape(side * PATCH, side * PATCH)])


def shifted(ink: np.ndarray, right: int, down: int) -> np.ndarray:
    """Return a patch's ink moved by pixels; what leaves the patch is lost."""
    framed = np.pad(ink, SHIFT)
    return framed[SHIFT - down :, SHIFT - right :][:PATCH, :PATCH]


@cache
def _set(letters: str, face: str) -> tuple[float, tuple[str, ...]]:
    """Return the font size of a piece and its lines: no more than it needs."""
    font = _font(face, _REFERENCE)
    best: tuple[float, tuple[str, ...]] = (0, ())
    for count, largest in enumerate(_LARGEST[: len(letters)], 1):
        width = -(-len(letters) // count)
        lines = tuple(letters[i : i + width] for i in range(0, len(letters), width))
        if len(lines) < count:
            continue
        longest = max(font.getlength(line) for line in lines)
        size = min(largest, _REFERENCE * _WIDTH / longest) if longest else largest
        if size > best[0]:
            best = (size, lines)
        if size >= _EASY:
            break
    return best


@cache
def _font(face: str, size: float) -> ImageFont.FreeTypeFont:
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(str(folder / f"{face}.ttf"), size)
