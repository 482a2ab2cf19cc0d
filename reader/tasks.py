# SPDX-License-Identifier: Apache-2.0
"""Questions about pages: the texts of `measure.text_tasks`, drawn instead of written.

A prompt is what a text's prompt would be, with pages where the text stood: introduction, pages,
question, beginning of the answer. A tower that reads without mistakes makes both the same for the
language model, and a text that goes on over several pages is read like one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from measure.messages import image_part, png_url, text_part
from measure.text_tasks import Haystack, Kind, TextExample, TextQuestion, TextTask, asked_for
from reader.layout import GRID, PATCH, draw_page
from reader.vocabulary import Vocabulary

WORDS = 100
"""Tokens around the pages, about."""


@dataclass(frozen=True)
class PageTask:
    """A kind of question about a number of pages."""

    kind: Kind
    haystack: Haystack
    pages: int = 1
    keys: int = 1
    """Numbers or passages on the pages; one of them is asked for in each turn."""
    turns: int = 1
    """1, or 2 for a question after another one has been answered."""
    side: int = GRID
    """Patches in a row, and rows, of a page."""
    forced: bool = False
    """As in `TextTask`."""

    @property
    def name(self) -> str:
        keys = "" if self.keys == 1 else f"-{self.keys}"
        side = "" if self.side == GRID else f"-{self.side}x{self.side}"
        more = side + "-chat" * (self.turns - 1) + "-forced" * self.forced
        return f"{self.kind}{keys}-{self.haystack}-{self.pages}p{more}"

    @property
    def pieces(self) -> int:
        """Return the number of word pieces, and so of vision tokens, of a page."""
        return self.side * self.side

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a prompt, about."""
        return self.pages * self.pieces + WORDS

    @property
    def title(self) -> str:
        """Return its description for a reader, such as `one of 4 numbers, 2 pages of prose`."""
        pages = "a page" if self.pages == 1 else f"{self.pages} pages"
        more = ", second turn" * (self.turns - 1)
        return f"{asked_for(self.kind, self.keys)}, {pages} of {self.haystack}{more}"


TASKS = (
    PageTask("number", "prose"),
    PageTask("number", "noise"),
    PageTask("number", "noise", pages=2),
    PageTask("number", "noise", pages=4),
    PageTask("number", "prose", pages=2),
    PageTask("number", "prose", keys=4),
    PageTask("number", "prose", keys=2, turns=2),
    PageTask("passage", "noise"),
)


@dataclass(frozen=True)
class PageExample:
    """A question about pages, and what is right.

    Its `asked` has the words for a language model that gets the text itself.
    """

    pages: tuple[Image.Image, ...]
    introduction: str
    turns: tuple[tuple[str, str], ...]
    """Question and answer of each turn before the last."""
    question: str
    asked: TextExample
    places: tuple[tuple[int, int, int, int], ...] = ()
    """Left, top, width and height, in pixels, of each row of patches that shows the answer, as if
    the pages stood below each other. Empty if the answer does not stand on them word for word."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation, without the beginning of the answer: pages are `image` parts."""
        first, *more = [*(question for question, _ in self.turns), self.question]
        content: list[dict[str, Any]] = [
            {"type": "text", "text": self.introduction},
            *({"type": "image"} for _ in self.pages),
            {"type": "text", "text": first},
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        for (_, answer), question in zip(self.turns, more, strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": question.strip()})
        return messages

    def chat(self) -> list[dict[str, Any]]:
        """Return the conversation of one turn for a server, with the beginning of the answer."""
        images = [image_part(png_url(page)) for page in self.pages]
        content = [text_part(self.introduction), *images, text_part(self.question)]
        start = {"role": "assistant", "content": self.asked.start}
        return [{"role": "user", "content": content}, start]


@dataclass(frozen=True)
class PageQuestion:
    """Question `number` of a task. Its words and its pages follow from both."""

    task: PageTask
    number: int

    def example(self, vocabulary: Vocabulary) -> PageExample:
        """Write the question and draw its pages."""
        task = self.task

        def count(text: str) -> int:
            return len(vocabulary.split(text))

        written = TextTask(task.kind, task.haystack, task.pages * task.pieces, task.keys)
        question = TextQuestion(written, self.number)
        # The text alone fills the pages: what stands around it is taken off its length.
        draft = question.example(0, count)
        introduction, _, asking = _sections(draft)
        around = count(f"{introduction}\n") + count(f"\n{asking}") + count(draft.start)
        asked = question.example(-around, count)
        introduction, text, asking = _sections(asked)
        turns = (_first_turn(text, asked),) if task.turns > 1 else ()
        pieces = [vocabulary.texts[index] for index in vocabulary.split(text)]
        return PageExample(
            pages=tuple(draw_pages(pieces, f"{task.name}/{self.number}", task.side)),
            introduction=f"{introduction}\n",
            turns=turns,
            question=f"\n{asking}",
            asked=asked,
            places=_places(asked.answer, pieces, task.side),
        )


def draw_pages(pieces: Sequence[str], seed: str, side: int = GRID) -> list[Image.Image]:
    """Return as many pages as the pieces need, in one look that follows from the seed."""
    room = side * side
    return [
        draw_page(pieces[start : start + room], np.random.default_rng([*seed.encode()]), side=side)
        for start in range(0, len(pieces), room)
    ]


def _places(words: str, pieces: Sequence[str], side: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return `PageExample.places` of words among the pieces of pages."""
    start = "".join(pieces).find(words)
    if start < 0:
        return ()
    ends = np.cumsum([len(piece) for piece in pieces])
    within = [start, start + len(words) - 1]
    first, last = np.searchsorted(ends, within, side="right").tolist()
    rows = range(first // side, last // side + 1)
    runs = [(row, max(first - row * side, 0), min(last - row * side, side - 1)) for row in rows]
    return tuple(
        (left * PATCH, row * PATCH, (right + 1 - left) * PATCH, PATCH) for row, left, right in runs
    )


def _sections(example: TextExample) -> tuple[str, str, str]:
    """Return the line before the text, the text, which may have lines, and the question below."""
    introduction, rest = example.message.split("\n", 1)
    text, asking = rest.rsplit("\n", 1)
    return introduction, text, asking


def _first_turn(text: str, asked: TextExample) -> tuple[str, str]:
    """Return a question for a number on the page that is not asked for later, and its answer."""
    name, value = next(
        found
        for found in re.findall(r"magic numbers for (\S+) is: (\d+)\.", text)
        if found[1] != asked.answer
    )
    topic = f"the special magic number for {name} mentioned in the provided text"
    return f"\nWhat is {topic}?", f"T{topic[1:]} is {value}."
