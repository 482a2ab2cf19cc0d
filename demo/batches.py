# SPDX-License-Identifier: Apache-2.0
"""Training batches: pages cut into patches, labels of the patches, and blocks of questions.

All prompts of a batch share one prefix. Several questions are asked of the same pages; each is a
*block* that sees the prefix, the pages and itself, so no answer leaks into another question.
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from demo import chat
from demo.pages import KEYS, PAGE_SIZE, PATCH, Page, Question, draw_page

GRID = PAGE_SIZE // PATCH
IGNORE = -100
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
    """A stretch of training: ``steps`` batches of ``prompts`` prompts, each with ``questions``.

    ``window`` is the part of the page that is drawn and seen, in patches (columns, rows). It lies
    anywhere on the page and keeps its positions: small windows make the first steps cheap. Without
    questions, only the vision tower and the projector learn, to read. The learning rate goes
    linearly from the first of ``rates`` to the second. ``brief`` questions are the bare key:
    looking up is learned much faster when nothing lies between the key and the answer.
    """

    steps: int
    prompts: int
    questions: int
    window: tuple[int, int]
    entries: tuple[int, int]
    rates: tuple[float, float]
    brief: bool = False


@dataclass(frozen=True)
class Batch:
    """B prompts of M pages (N = B * M), P visible patches a page, Q question blocks of L tokens.

    ``patches [N, P, 3 * 14 * 14]`` float32, normalised; ``places [N, P]`` index on the page's grid;
    ``glyphs``, ``keys``, ``ranks`` ``[N, P]`` what a patch shows: its character and the key of its
    entry (tokens), and the character's place in the entry, or ``IGNORE`` on empty paper;
    ``prefix [T]`` tokens before the pages; ``blocks [B, Q, L]`` tokens of question and answer;
    ``targets [B, Q, L]`` the next token where it belongs to the answer, else ``IGNORE``;
    ``asked [B, Q, L]`` rows of the question from its key on; ``outlook [B, Q, V]`` how often each
    token occurs in the answer, as a distribution.
    """

    patches: torch.Tensor
    places: torch.Tensor
    glyphs: torch.Tensor
    keys: torch.Tensor
    ranks: torch.Tensor
    prefix: torch.Tensor
    blocks: torch.Tensor
    targets: torch.Tensor
    asked: torch.Tensor
    outlook: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def make_batch(rng: np.random.Generator, stage: Stage) -> Batch:
    """Draw one batch of ``stage``; a quarter of the batches have two pages a prompt."""
    pages_per_prompt = 2 if rng.random() < 0.25 else 1
    pages, windows, questions = [], [], []
    for _ in range(max(stage.prompts // pages_per_prompt, 1)):
        letters = rng.permutation(list(KEYS))
        asked: list[Question] = []
        for number in range(pages_per_prompt):
            count = int(rng.integers(stage.entries[0], stage.entries[1] + 1))
            mine = letters[number::pages_per_prompt][:count].tolist()
            page = draw_page(rng, mine, *(side * PATCH for side in stage.window))
            pages.append(page)
            windows.append([int(rng.integers(GRID - side + 1)) for side in stage.window])
            asked.extend(page.questions)
        order = rng.permutation(len(asked))
        questions.append([asked[i] for i in np.resize(order, stage.questions)])
    labels = [label_patches(page) for page in pages]
    glyphs, keys, ranks = (torch.from_numpy(np.stack(kind)) for kind in zip(*labels, strict=True))
    return Batch(
        torch.from_numpy(np.stack([cut_patches(page.image) for page in pages])),
        torch.tensor([_places(stage.window, corner) for corner in windows]),
        glyphs,
        keys,
        ranks,
        torch.tensor(_prefix(rng)),
        *_blocks(rng, questions, stage.brief),
    )


def cut_patches(image: Image.Image) -> np.ndarray:
    """Return the patches of ``image`` as ``[patches, 3 * 14 * 14]``, normalised, row by row."""
    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    patches = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
    patches = patches.reshape(rows * columns, -1).astype(np.float32)
    return (patches / 255 - chat.PIXEL_MEAN) / chat.PIXEL_STD


def label_patches(page: Page) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return glyph token, key token and rank of the character that fills most of each patch.

    Each is int64 ``[patches]``, ``IGNORE`` where no ink box covers ``LABEL_AREA`` pixels.
    """
    drawn = [
        (chat.TOKENS[character], chat.TOKENS[entry.key], rank, *box)
        for entry in page.entries
        for rank, (character, box) in enumerate(zip(entry.text, entry.boxes, strict=True))
    ]
    glyph, key, rank, left, top, right, bottom = np.array(drawn).T

    def overlap(low: np.ndarray, high: np.ndarray, length: int) -> np.ndarray:
        edges = np.arange(0, length, PATCH)
        shared = np.minimum(high[:, None], edges + PATCH) - np.maximum(low[:, None], edges)
        return np.maximum(shared, 0)

    across = overlap(left, right, page.image.width)
    down = overlap(top, bottom, page.image.height)
    area = (down[:, :, None] * across[:, None, :]).reshape(len(drawn), -1)
    owner, empty = area.argmax(0), area.max(0) < LABEL_AREA
    glyphs, keys, ranks = (np.where(empty, IGNORE, kind[owner]) for kind in (glyph, key, rank))
    return glyphs, keys, ranks


def _places(window: tuple[int, int], corner: list[int]) -> list[int]:
    columns, rows = window
    return [
        (corner[1] + row) * GRID + corner[0] + column
        for row in range(rows)
        for column in range(columns)
    ]


def _prefix(rng: np.random.Generator) -> list[int]:
    """Tokens from the start of the prompt to the first page: in half of all cases a system text."""
    text = ""
    kind = rng.random()
    if kind < 0.25:
        text = SYSTEM_TEXTS[int(rng.integers(len(SYSTEM_TEXTS)))]
    elif kind < 0.5:
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz    ABCDEFGH.,\n"))
        text = "".join(rng.choice(letters, size=rng.integers(1, 60)))
    system = [chat.TOKENS[chat.SYSTEM], *chat.encode(text)] if text else []
    return [chat.TOKENS[chat.BOS], *system, chat.TOKENS[chat.USER]]


def _blocks(
    rng: np.random.Generator, questions: list[list[Question]], brief: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``blocks``, ``targets``, ``asked`` and ``outlook`` of a batch."""
    count = len(questions[0])
    blocks = np.full((len(questions), count, 64), chat.TOKENS[chat.PAD])
    targets = np.full(blocks.shape, IGNORE)
    asked = np.zeros(blocks.shape, bool)
    outlook = np.zeros((len(questions), count, chat.VOCABULARY_SIZE), np.float32)
    longest = 0
    for i, row in enumerate(questions):
        for j, question in enumerate(row):
            text = question.key if brief else question.text
            text = ("\n" if rng.random() < 0.15 else "") + text
            prompt = [*chat.encode(text), chat.TOKENS[chat.ASSISTANT]]
            answer = [*chat.encode(question.answer), chat.TOKENS[chat.EOS]]
            end = len(prompt) + len(answer)
            blocks[i, j, :end] = prompt + answer
            targets[i, j, len(prompt) - 1 : end - 1] = answer
            asked[i, j, text.rindex(question.key) : len(prompt)] = True
            np.add.at(outlook[i, j], answer[:-1], 1 / len(question.answer))
            longest = max(longest, end)
    cut = (torch.from_numpy(array[:, :, :longest]) for array in (blocks, targets, asked))
    return *cut, torch.from_numpy(outlook)
