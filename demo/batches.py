# SPDX-License-Identifier: Apache-2.0
"""Training batches: pages cut into patches, labels of the patches, and questions.

All prompts of a batch share one prefix. Several questions are asked of the same pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from demo import chat
from demo.blocks import IGNORE, Blocks, make_blocks, shorten
from demo.pages import KEYS, PAGE_SIZE, PATCH, SLOT_HEIGHT, SLOT_WIDTH, Page, draw_page
from demo.tasks import Example, ask, can_ask

GRID = PAGE_SIZE // PATCH
SLOT_COLUMNS, SLOT_ROWS = SLOT_WIDTH // PATCH, SLOT_HEIGHT // PATCH
SLOTS = (GRID // SLOT_COLUMNS) * (GRID // SLOT_ROWS)
LABEL_AREA = 25
"""Pixels of a patch that an ink box must cover for the patch to be labelled with it."""

SYSTEM_TEXTS = (
    "You read documents.",
    "You are a helpful assistant.",
    "Answer with the value only.",
    "You answer questions about scanned pages. Be brief.",
)


@dataclass(frozen=True)
class Stage:
    """A stretch of training: ``steps`` batches of pages, ``pages`` of them in each.

    A prompt of one page is asked a question of each of ``tasks``; the share ``pairs`` of all
    batches has prompts of two pages, which are asked ``pair_tasks``. Without tasks, only the vision
    tower and the projector learn, to read.

    ``window`` is the part of the page that is drawn and seen, in patches (columns, rows). It lies
    anywhere on the page, on a row of slots, and keeps its positions: small windows make the first
    steps cheap. The learning rate goes linearly from the first of ``rates`` to the second.
    ``brief`` questions are as short as their task allows, a bare key for ``value``: looking up is
    learned much faster when nothing lies between the key and the answer. With ``seen``, the
    language model sees that many patches of a page only, those with ink among them: blank paper
    costs as much as ink. ``reading`` tells whether the vision tower learns.
    """

    steps: int
    pages: int
    window: tuple[int, int]
    entries: tuple[int, int]
    rates: tuple[float, float]
    tasks: tuple[str, ...] = ()
    pair_tasks: tuple[str, ...] = ()
    pairs: float = 0.25
    brief: bool = False
    seen: int | None = None
    reading: bool = True


@dataclass(frozen=True)
class Batch:
    """B prompts of M pages (N = B * M), P patches a page, Q question blocks.

    ``patches [N, P, 3 * 14 * 14]`` float32, normalised; ``places [N, P]`` index on the page's grid;
    ``seen [N, S]`` the patches that the language model sees, as indices into P, ascending;
    ``glyphs``, ``keys``, ``ranks``, ``slots`` ``[N, S]`` what a patch shows: its character and the
    key of its entry (tokens), the character's place in the entry, and the slot on the page, or
    ``IGNORE`` on empty paper;
    ``prefix [T]`` tokens before the pages; ``tasks`` names the task of each block of ``blocks``.
    """

    patches: torch.Tensor
    places: torch.Tensor
    seen: torch.Tensor
    glyphs: torch.Tensor
    keys: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor
    prefix: torch.Tensor
    tasks: tuple[str, ...]
    blocks: Blocks

    def to(self, device: torch.device) -> "Batch":
        fields: dict[str, Any] = {
            name: value if isinstance(value, tuple) else value.to(device)
            for name, value in vars(self).items()
        }
        return Batch(**fields)


def make_batch(rng: np.random.Generator, stage: Stage) -> Batch:
    """Draw one batch of ``stage``."""
    count, tasks = (2, stage.pair_tasks) if rng.random() < stage.pairs else (1, stage.tasks)
    prompts = []
    for _ in range(max(stage.pages // count, 1)):
        letters = rng.permutation(list(KEYS))
        prompts.append([_draw(rng, stage, letters[i::count].tolist()) for i in range(count)])
    pages = [page for prompt in prompts for page in prompt]
    labels = [label_patches(page) for page in pages]
    glyphs, keys, ranks = (torch.from_numpy(np.stack(kind)) for kind in zip(*labels, strict=True))
    places = torch.tensor([_places(rng, stage.window) for _ in pages])
    slots = torch.where(glyphs == IGNORE, IGNORE, _slots(places))
    seen = torch.from_numpy(np.stack([_seen(rng, row, stage.seen) for row in glyphs.numpy()]))
    examples = [[_ask(rng, task, prompt, stage.brief) for task in tasks] for prompt in prompts]
    glyphs, keys, ranks, slots = (label.gather(1, seen) for label in (glyphs, keys, ranks, slots))
    return Batch(
        patches=torch.from_numpy(np.stack([cut_patches(page.image) for page in pages])),
        places=places,
        seen=seen,
        glyphs=glyphs,
        keys=keys,
        ranks=ranks,
        slots=slots,
        prefix=torch.tensor(_prefix(rng)),
        tasks=tasks,
        blocks=make_blocks(examples),
    )


def _draw(rng: np.random.Generator, stage: Stage, letters: list[str]) -> Page:
    count = int(rng.integers(stage.entries[0], stage.entries[1] + 1))
    return draw_page(rng, letters[:count], *(side * PATCH for side in stage.window))


def _ask(rng: np.random.Generator, task: str, pages: Sequence[Page], brief: bool) -> Example:
    """Draw a question of ``task``, or of ``value`` where the pages have none."""
    example = ask(task if can_ask(task, pages) else "value", pages, rng)
    return shorten(example) if brief else example


def cut_patches(image: Image.Image) -> np.ndarray:
    """Return the patches of ``image`` as ``[patches, 3 * 14 * 14]``, normalised, row by row."""
    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    patches = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
    patches = patches.reshape(rows * columns, -1).astype(np.float32) / 255
    normalised: np.ndarray = (patches - chat.PIXEL_MEAN) / chat.PIXEL_STD
    return normalised


def label_patches(page: Page) -> tuple[np.ndarray, ...]:
    """Return glyph, key and rank of the character that fills most of each patch.

    Each is int64 ``[patches]``, ``IGNORE`` where no ink box covers ``LABEL_AREA`` pixels.
    """
    drawn = [
        (chat.TOKENS[character], chat.TOKENS[entry.key], rank, *box)
        for entry in page.entries
        for rank, (character, box) in enumerate(zip(entry.text, entry.boxes, strict=True))
    ]
    *labels, left, top, right, bottom = np.array(drawn).T

    def overlap(low: np.ndarray, high: np.ndarray, length: int) -> np.ndarray:
        edges = np.arange(0, length, PATCH)
        shared = np.minimum(high[:, None], edges + PATCH) - np.maximum(low[:, None], edges)
        positive: np.ndarray = np.maximum(shared, 0)
        return positive

    across = overlap(left, right, page.image.width)
    down = overlap(top, bottom, page.image.height)
    area = (down[:, :, None] * across[:, None, :]).reshape(len(drawn), -1)
    owner, empty = area.argmax(0), area.max(0) < LABEL_AREA
    return tuple(np.where(empty, IGNORE, label[owner]) for label in labels)


def _places(rng: np.random.Generator, window: tuple[int, int]) -> list[int]:
    """Place ``window`` on the page at random; return the places of its patches."""
    columns, rows = window
    left = int(rng.integers(GRID - columns + 1))
    top = int(rng.integers((GRID - rows) // SLOT_ROWS + 1)) * SLOT_ROWS
    return [(top + row) * GRID + left + column for row in range(rows) for column in range(columns)]


def _slots(places: torch.Tensor) -> torch.Tensor:
    rows, columns = places // GRID // SLOT_ROWS, places % GRID // SLOT_COLUMNS
    return rows * (GRID // SLOT_COLUMNS) + columns


def _seen(rng: np.random.Generator, glyphs: np.ndarray, count: int | None) -> np.ndarray:
    """Return ``count`` random patches, or all; patches with a glyph come first."""
    order = np.argsort(rng.random(len(glyphs)) + (glyphs == IGNORE))
    return np.sort(order[:count])


def _prefix(rng: np.random.Generator) -> list[int]:
    """Return the tokens before the first page; half of the prompts begin with a system text."""
    text = ""
    kind = rng.random()
    if kind < 0.25:
        text = SYSTEM_TEXTS[int(rng.integers(len(SYSTEM_TEXTS)))]
    elif kind < 0.5:
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz    ABCDEFGH.,\n"))
        text = "".join(rng.choice(letters, size=rng.integers(1, 60)))
    system = [chat.TOKENS[chat.SYSTEM], *chat.encode(text)] if text else []
    return [chat.TOKENS[chat.BOS], *system, chat.TOKENS[chat.USER]]
