# SPDX-License-Identifier: Apache-2.0
"""Questions about long texts: numbers and passages that are hidden in noise or in prose.

The noise and the wording of the numbers are those of RULER's needle tasks (Hsieh et al., "RULER:
What's the Real Context Size of Your Long-Context Language Models?", 2024). The prose is Python's
own documentation of its language, which every installation has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pydoc_data.topics import topics
from typing import Literal

Kind = Literal["number", "passage"]
Haystack = Literal["noise", "prose"]
TokenCounter = Callable[[str], int]
"""Returns the number of tokens of a text."""

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""RULER's, repeated as often as needed."""

PASSAGE_TOKENS = (30, 45)
"""Least and most tokens of a passage."""

ADJECTIVES = (
    *("amber", "ancient", "bitter", "bold", "bright", "broken", "calm", "careful", "clever"),
    *("cold", "crooked", "curious", "distant", "dusty", "early", "empty", "faint", "famous"),
    *("fierce", "friendly", "frozen", "gentle", "golden", "grand", "hollow", "honest", "hungry"),
    *("jolly", "lazy", "lonely", "lucky", "mellow", "mighty", "narrow", "noble", "patient"),
    *("plain", "proud", "quiet", "rapid", "rough", "royal", "rusty", "scarlet", "silent"),
    *("silver", "simple", "sleepy", "steep", "stormy", "sturdy", "tender", "tiny", "wooden"),
)
NOUNS = (
    *("acorn", "anchor", "apple", "arrow", "badger", "baker", "barrel", "basket", "beacon"),
    *("bishop", "bridge", "candle", "captain", "carpet", "castle", "cellar", "cherry", "clock"),
    *("copper", "cottage", "doctor", "dragon", "farmer", "feather", "fiddle", "forest", "garden"),
    *("hammer", "harbor", "helmet", "island", "kettle", "ladder", "lantern", "market", "meadow"),
    *("miller", "mirror", "monkey", "needle", "orchard", "painter", "palace", "parrot", "pepper"),
    *("pigeon", "pillow", "planet", "pocket", "rabbit", "river", "sailor", "saddle", "shadow"),
    *("spider", "temple", "tiger", "tower", "trumpet", "turtle", "valley", "violin", "wagon"),
)
VERBS = (
    *("admired", "borrowed", "carried", "counted", "followed", "found", "guarded", "hid", "lifted"),
    *("lost", "mended", "moved", "noticed", "opened", "painted", "polished", "pushed", "raised"),
    *("reached", "remembered", "sold", "touched", "traded", "watched", "weighed", "wrapped"),
)
PLACES = ("above", "behind", "below", "beside", "beyond", "near", "opposite", "outside", "under")
JOINTS = ("after", "although", "and", "because", "before", "but", "until", "when", "while")


@dataclass(frozen=True)
class TextTask:
    """A kind of question about a text of a length."""

    kind: Kind
    haystack: Haystack
    tokens: int
    """Most tokens of a prompt; the text is cut after the last sentence that fits."""
    keys: int = 1
    """Numbers or passages in the text; one of them is asked for."""

    @property
    def name(self) -> str:
        keys = "" if self.keys == 1 else f"-{self.keys}"
        return f"{self.kind}{keys}-{self.haystack}-{self.tokens}"

    @property
    def title(self) -> str:
        """Return its description for a reader, such as `one of 4 numbers, prose of 1024 tokens`."""
        what = f"a {self.kind}" if self.keys == 1 else f"one of {self.keys} {self.kind}s"
        return f"{what}, {self.haystack} of {self.tokens} tokens"


@dataclass(frozen=True)
class TextExample:
    """A question: a user's message, the words with which the answer begins, and what is right."""

    message: str
    start: str
    """Beginning of the assistant's turn, which is part of the prompt."""
    answer: str
    kind: Kind

    def found(self, text: str) -> str:
        """Return what a completion of `start` gives as the answer.

        The first number, or the first sentence. What follows it is no part of the answer.
        """
        found = re.search(r'[^".]*\.?' if self.kind == "passage" else r"\d+", text)
        return found.group() if found else ""

    def hits(self, text: str, pieces: Sequence[str]) -> str:
        """Return one digit for each token of the answer, and one for its end.

        A token is right, `1`, if nothing before its end differs; after the first mistake all are
        `0`. The end is right if the answer is.

        Args:
            pieces: texts of the answer's tokens.
        """
        found, so_far, digits = self.found(text), "", ""
        for piece in pieces:
            so_far += piece
            digits += "01"[found.startswith(so_far)]
        return digits + "01"[found == self.answer]


@dataclass(frozen=True)
class TextQuestion:
    """Question `number` of a task. Its words follow from both."""

    task: TextTask
    number: int

    def example(self, frame_tokens: int, count: TokenCounter) -> TextExample:
        """Write the question.

        Args:
            frame_tokens: tokens that the chat template adds to the message and the answer's start.
        """
        rng = random.Random(f"{self.task.name}/{self.number}")
        keys = _distinct(rng, self.task.keys)
        if self.task.kind == "number":
            values = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
            return _numbers(self.task, keys, values, rng, frame_tokens, count)
        values = [_passage(rng, count) for _ in keys]
        return _passages(self.task, keys, values, rng, frame_tokens, count)


def _numbers(
    task: TextTask,
    keys: Sequence[str],
    values: Sequence[str],
    rng: random.Random,
    frame_tokens: int,
    count: TokenCounter,
) -> TextExample:
    several = task.keys > 1
    head = (
        f"{'Some special magic numbers are' if several else 'A special magic number is'} hidden "
        "within the following text. Make sure to memorize it. I will quiz you about the "
        f"{'numbers' if several else 'number'} afterwards.\n"
    )
    asked = rng.randrange(len(keys))
    topic = f"the special magic number for {keys[asked]} mentioned in the provided text"
    question, start = f"\nWhat is {topic}?", f"T{topic[1:]} is"
    needles = [
        f"One of the special magic numbers for {key} is: {value}."
        for key, value in zip(keys, values, strict=True)
    ]
    free = task.tokens - frame_tokens - count(head) - count(question) - count(start)
    text = _hide(needles, task.haystack, free, rng, count)
    return TextExample(f"{head}{text}{question}", start, values[asked], task.kind)


def _passages(
    task: TextTask,
    keys: Sequence[str],
    values: Sequence[str],
    rng: random.Random,
    frame_tokens: int,
    count: TokenCounter,
) -> TextExample:
    head = (
        f"{'Special passages are' if task.keys > 1 else 'A special passage is'} hidden within the "
        "following text. Make sure to memorize it. I will ask you to repeat it afterwards.\n"
    )
    asked = rng.randrange(len(keys))
    question = f"\nRepeat the special passage about {keys[asked]} word for word."
    starts = [f'The special passage about {key} is: "' for key in keys]
    needles = [f'{start}{value}"' for start, value in zip(starts, values, strict=True)]
    free = task.tokens - frame_tokens - count(head) - count(question) - count(starts[asked])
    text = _hide(needles, task.haystack, free, rng, count)
    return TextExample(f"{head}{text}{question}", starts[asked], values[asked], task.kind)


def _distinct(rng: random.Random, number: int) -> list[str]:
    """Return distinct names of two words, such as `quiet-badger`."""
    pairs = zip(rng.sample(ADJECTIVES, number), rng.sample(NOUNS, number), strict=True)
    return [f"{adjective}-{noun}" for adjective, noun in pairs]


def _passage(rng: random.Random, count: TokenCounter) -> str:
    """Return a sentence of `PASSAGE_TOKENS` tokens that nobody has written before.

    No noun or adjective comes twice, so that each word determines the next one.
    """
    least, most = PASSAGE_TOKENS
    nouns, adjectives = rng.sample(NOUNS, len(NOUNS)), rng.sample(ADJECTIVES, len(ADJECTIVES))
    sentence = ""
    while count(sentence) < least:
        sentence += f" {rng.choice(JOINTS)} " if sentence else ""
        sentence += (
            f"the {adjectives.pop()} {nouns.pop()} {rng.choice(VERBS)} {rng.randint(11, 99)} "
            f"{nouns.pop()}s {rng.choice(PLACES)} the {adjectives.pop()} {nouns.pop()}"
        )
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    return sentence if count(sentence) <= most else _passage(rng, count)


def _hide(
    needles: Sequence[str],
    haystack: Haystack,
    tokens: int,
    rng: random.Random,
    count: TokenCounter,
) -> str:
    """Return sentences of at most `tokens` tokens with the needles at random places between them.

    Raises:
        ValueError: if the needles do not fit.
    """
    left = tokens - sum(count(f" {needle}") for needle in needles)
    if left < 0:
        raise ValueError(f"{tokens} tokens are too few for {len(needles)} hidden sentences")
    sentences: list[str] = []
    for sentence in _sentences(haystack, rng):
        left -= count(f" {sentence}")
        if left < 0:
            break
        sentences.append(sentence)
    for needle in needles:
        sentences.insert(rng.randint(0, len(sentences)), needle)
    return " ".join(sentences)


def _sentences(haystack: Haystack, rng: random.Random) -> Iterator[str]:
    """Yield sentences without end: the noise, or the prose from a random one on."""
    if haystack == "noise":
        return cycle(NOISE)
    prose = python_prose()
    start = rng.randrange(len(prose))
    return cycle([*prose[start:], *prose[:start]])


@cache
def python_prose() -> tuple[str, ...]:
    """Return the sentences of `pydoc_data.topics`, without code, tables and headings."""
    paragraphs = [text for name in sorted(topics) for text in re.split(r"\n\s*\n", topics[name])]
    sentences = (
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.?!]) (?=[A-Z])", re.sub(r"\s+", " ", paragraph).strip())
    )
    return tuple(s for s in sentences if re.fullmatch(r"[A-Z][^=|{}<>]{20,300}[.?!]", s))
