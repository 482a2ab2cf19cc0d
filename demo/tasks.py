# SPDX-License-Identifier: Apache-2.0
"""Five tasks on the pages; the question decides where the tokens of the answer are.

``value``: the value of one key. ``row``: every entry on a key's row, left to right.
``two_images``: two values, one from each of two pages. ``compare``: the entry, of two, whose value
begins with the larger digit. ``chat``: a second value, after a first question and answer.

An example is determined by ``(task, split, index)``. All tasks show page ``index`` of the split
first, so that a server can reuse the image's prefix.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from PIL import Image

from demo.pages import KEYS, SPLITS, VALUE_LENGTHS, Entry, Page, make_page, pick

TASKS: tuple[str, ...] = ("value", "row", "two_images", "compare", "chat")

MAX_ANSWER_TOKENS = len("K: K:") + 2 * max(VALUE_LENGTHS) + 1
"""Tokens of the longest answer, a row of two entries, with its end token."""

ROW_PHRASES = (
    "Read the row of {}.",
    "What does the row of {} say?",
    "Transcribe the row with {}.",
    "Row of {}?",
)
TWO_PHRASES = (
    "What are the values of {} and {}?",
    "Please read the values of {} and {}.",
    "Values of {} and {}?",
    "{} and {}?",
)
COMPARE_PHRASES = (
    "Which begins with the larger digit, {} or {}?",
    "Whose first digit is larger, {} or {}?",
    "Larger first digit: {} or {}?",
    "Larger, {} or {}?",
)

SECOND_PAGE = 1_000_000
"""Second pages are pages ``SECOND_PAGE + index`` of the split, with the keys the first lacks."""

REDRAW = 2_000_000
"""Distance to the page that replaces a page without a pair to compare."""


@dataclass(frozen=True)
class Turn:
    """A question and its right answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Source:
    """An entry that the answer is copied from, and the number of its page in the prompt."""

    page: int
    entry: Entry


@dataclass(frozen=True)
class Example:
    """A prompt with its right answer.

    ``history`` holds earlier turns with right answers; ``sources`` are the entries that the answer
    is copied from, in its order.
    """

    task: str
    pages: tuple[Page, ...]
    history: tuple[Turn, ...]
    question: str
    answer: str
    sources: tuple[Source, ...]

    def messages(self, image_part: Callable[[Image.Image], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return OpenAI chat messages that end with the question.

        The first message has the pages, each as the part that ``image_part`` makes of it.
        """
        *earlier, question = [*(turn.question for turn in self.history), self.question]
        messages: list[dict[str, Any]] = []
        for text, turn in zip(earlier, self.history, strict=True):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": question})
        text_part = {"type": "text", "text": messages[0]["content"]}
        messages[0]["content"] = [*(image_part(page.image) for page in self.pages), text_part]
        return messages


def make_example(task: str, split: str, index: int) -> Example:
    """Return example ``index`` of ``task`` on ``split``, one of ``demo.pages.SPLITS``.

    Its first page is ``make_page(split, index)``, and ``value`` asks question ``index`` of it,
    modulo their number. Where all values of the page begin with the same digit, ``compare`` has
    page ``index + REDRAW`` instead (or the next one at that distance).
    """
    pages: tuple[Page, ...] = (make_page(split, index),)
    if task == "value":
        return _ask_value(pages, index)
    if task == "two_images":
        others = [key for key in KEYS if key not in {entry.key for entry in pages[0].entries}]
        pages = (*pages, make_page(split, SECOND_PAGE + index, others))
    while not can_ask(task, pages):
        index += REDRAW
        pages = (make_page(split, index),)
    # A trailing zero would repeat the seed of the page.
    return ask(task, pages, np.random.default_rng([SPLITS[split], index, 1 + TASKS.index(task)]))


def can_ask(task: str, pages: Sequence[Page]) -> bool:
    """Return whether ``task`` has a question about ``pages``."""
    if task == "two_images":
        return len(pages) == 2
    if task == "compare":
        return len({entry.value[0] for page in pages for entry in page.entries}) > 1
    return task != "chat" or sum(len(page.entries) for page in pages) > 1


def ask(task: str, pages: Sequence[Page], rng: np.random.Generator) -> Example:
    """Draw a question of ``task`` about ``pages``, whose keys all differ."""
    return _ASK[task](tuple(pages), rng)


def _ask_value(pages: tuple[Page, ...], number: int) -> Example:
    """Ask question ``number`` of ``pages``, modulo the number of questions."""
    everything = _sources(pages)
    number %= len(everything)
    question = [question for page in pages for question in page.questions][number]
    source = everything[number]
    return Example("value", pages, (), question.text, question.answer, (source,))


def _ask_any_value(pages: tuple[Page, ...], rng: np.random.Generator) -> Example:
    return _ask_value(pages, int(rng.integers(len(_sources(pages)))))


def _ask_row(pages: tuple[Page, ...], rng: np.random.Generator) -> Example:
    """Ask for a row of several entries if there is one."""
    rows: dict[tuple[int, int], list[Source]] = defaultdict(list)
    for source in _sources(pages):
        rows[source.page, source.entry.row].append(source)
    longest = max(len(row) for row in rows.values())
    row = pick(rng, [row for row in rows.values() if len(row) == longest])
    question = pick(rng, ROW_PHRASES).format(pick(rng, row).entry.key)
    answer = " ".join(source.entry.text for source in row)
    return Example("row", pages, (), question, answer, tuple(row))


def _ask_two_images(pages: tuple[Page, ...], rng: np.random.Generator) -> Example:
    order = rng.permutation(2).tolist()
    chosen = [Source(number, pick(rng, pages[number].entries)) for number in order]
    question = pick(rng, TWO_PHRASES).format(*(source.entry.key for source in chosen))
    answer = " ".join(source.entry.value for source in chosen)
    return Example("two_images", pages, (), question, answer, tuple(chosen))


def _ask_compare(pages: tuple[Page, ...], rng: np.random.Generator) -> Example:
    pair = pick(
        rng,
        [
            (first, second)
            for first, second in permutations(_sources(pages), 2)
            if first.entry.value[0] != second.entry.value[0]
        ],
    )
    question = pick(rng, COMPARE_PHRASES).format(*(source.entry.key for source in pair))
    winner = max(pair, key=lambda source: source.entry.value[0])
    return Example("compare", pages, (), question, winner.entry.text, (winner,))


def _ask_chat(pages: tuple[Page, ...], rng: np.random.Generator) -> Example:
    numbers = rng.choice(len(_sources(pages)), size=2, replace=False)
    first, second = (_ask_value(pages, int(number)) for number in numbers)
    history = (Turn(first.question, first.answer),)
    return Example("chat", pages, history, second.question, second.answer, second.sources)


def _sources(pages: tuple[Page, ...]) -> list[Source]:
    """Return all entries: page by page, row by row, left to right."""
    return [Source(number, entry) for number, page in enumerate(pages) for entry in page.entries]


_ASK: dict[str, Callable[[tuple[Page, ...], np.random.Generator], Example]] = {
    "value": _ask_any_value,
    "row": _ask_row,
    "two_images": _ask_two_images,
    "compare": _ask_compare,
    "chat": _ask_chat,
}
