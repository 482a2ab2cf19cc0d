# SPDX-License-Identifier: Apache-2.0
"""Questions about long texts: what is hidden in noise, in prose or among its like.

Wording and scores follow RULER (Hsieh et al., "RULER: What's the Real Context Size of Your
Long-Context Language Models?", 2024), in a size that a small model can answer. Passages are ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal

from measure.text_words import (
    ADJECTIVES,
    JOINTS,
    NAMES,
    NOISE,
    NOUNS,
    PLACES,
    SYLLABLES,
    VERBS,
    python_prose,
)

Kind = Literal[
    "number",
    "numbers",
    "fact",
    "passage",
    "passages",
    "copy",
    "table",
    "aloud",
    "code",
    "maker",
    "room",
]
Haystack = Literal["noise", "prose", "needles"]
TokenCounter = Callable[[str], int]
"""Returns the number of tokens of a text."""

PASSAGE_TOKENS = (30, 45)
"""Least and most tokens of a passage."""

TRAINING = 1000
"""Number of the first question for training. Choices are made on questions from it on, and what is
reported on those before it."""

FRESH = 500
"""Number of the first test question of the second set, for a choice that was made after the first
set's results were known."""


def split_of(number: int) -> str:
    """Return the split of the question of a number."""
    if number >= TRAINING:
        return "training"
    return "fresh" if number >= FRESH else "test"


def asked_for(kind: Kind, keys: int) -> str:
    """Return what a question is for, for a reader, such as `one of 4 numbers`."""
    several = {
        "numbers": f"{keys} numbers",
        "passages": f"{keys} passages in another order",
        "copy": f"a list of {keys} numbers",
        "table": f"a table of {keys} rows",
        "aloud": f"the first {keys} words",
    }
    if kind in several:
        return several[kind]
    return f"a {kind}" if keys == 1 else f"one of {keys} {kind}s"


@dataclass(frozen=True)
class TextTask:
    """A kind of question about a text of a length."""

    kind: Kind
    haystack: Haystack
    tokens: int
    """Most tokens of a prompt; the text is cut after the last sentence that fits."""
    keys: int = 1
    """Numbers, passages or facts: one of them is asked for, or all of several numbers."""
    system: bool = False
    """Whether a system prompt stands before the text. It is what some kinds ask about."""
    forced: bool = False
    """Whether the right answer is given token by token, and each next token is asked for."""

    @property
    def name(self) -> str:
        keys = "" if self.keys == 1 else f"-{self.keys}"
        more = "-system" * self.system + "-forced" * self.forced
        return f"{self.kind}{keys}-{self.haystack}-{self.tokens}{more}"

    @property
    def title(self) -> str:
        """Return its description for a reader, such as `one of 4 numbers, prose of 1024 tokens`."""
        where = {"needles": "among others, text"}.get(self.haystack, self.haystack)
        what = asked_for(self.kind, self.keys)
        if self.kind in _INSTRUCTED:
            return f"{what} in the system prompt before {where}, {self.tokens} tokens"
        below = " below a system prompt" if self.system else ""
        return f"{what}, {where} of {self.tokens} tokens{below}"


@dataclass(frozen=True)
class TextExample:
    """A question: a user's message, the words with which the answer begins, and what is right."""

    message: str
    start: str
    """Beginning of the assistant's turn, which is part of the prompt."""
    answer: str
    kind: Kind
    items: tuple[str, ...] = ()
    """Words that a list has to name, in any order. Empty for answers compared from their start."""
    system: str = field(default="", repr=False)
    """System prompt, which stands before the message."""

    def found(self, text: str) -> str:
        """Return what a completion of `start` gives as the answer.

        The first number, or the first sentence. What follows it is no part of the answer.
        """
        found = re.search(_PATTERNS.get(self.kind, r"\d+"), text)
        return found.group() if found else ""

    def hits(self, text: str, pieces: Sequence[str]) -> str:
        """Return one digit for each token of the answer, and one for its end.

        A token is right, `1`, if nothing before its end differs; after the first mistake all are
        `0`. The end is right if the answer is. Of a list, there is one digit for each item, first
        those that the completion names, wherever it does; the end is right if it names them all.

        Args:
            pieces: texts of the answer's tokens.
        """
        if self.items:
            said = set(re.findall(r"\w+", text))
            num_right = sum(item in said for item in self.items)
            missing = len(self.items) - num_right
            return "1" * num_right + "0" * missing + "10"[missing > 0]
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

    @property
    def split(self) -> str:
        return split_of(self.number)

    def example(self, frame_tokens: int, count: TokenCounter) -> TextExample:
        """Write the question.

        Args:
            frame_tokens: tokens that the chat template adds to the message and the answer's start.
        """
        rng = random.Random(f"{self.task.name}/{self.number}")
        return _WRITERS[self.task.kind](_Writer(self.task, rng, frame_tokens, count))


@dataclass(frozen=True)
class _Writer:
    """Writer of one question."""

    task: TextTask
    rng: random.Random
    frame_tokens: int
    count: TokenCounter

    def room(self, *texts: str) -> int:
        """Return the tokens that are left for the text between some other texts."""
        return self.task.tokens - self.frame_tokens - sum(map(self.count, texts))

    def needles_of(self, keys: Sequence[str], values: Sequence[str]) -> list[str]:
        return [
            f"One of the special magic numbers for {key} is: {value}."
            for key, value in zip(keys, values, strict=True)
        ]

    def numbers(self, number: int) -> list[str]:
        return [str(self.rng.randint(1_000_000, 9_999_999)) for _ in range(number)]

    def distinct(self, number: int) -> list[str]:
        """Return distinct names of two words, such as `quiet-badger`."""
        pairs = zip(
            self.rng.sample(ADJECTIVES, number), self.rng.sample(NOUNS, number), strict=True
        )
        return [f"{adjective}-{noun}" for adjective, noun in pairs]

    def hide(self, needles: Sequence[str], tokens: int) -> str:
        """Return sentences of at most `tokens` tokens with needles at random places between them.

        Raises:
            ValueError: if the needles do not fit.
        """
        left = tokens - sum(self.count(f" {needle}") for needle in needles)
        if left < 0:
            raise ValueError(f"{tokens} tokens are too few for {len(needles)} hidden sentences")
        sentences: list[str] = []
        for sentence in self.sentences(needles):
            left -= self.count(f" {sentence}")
            if left < 0:
                break
            sentences.append(sentence)
        for needle in needles:
            sentences.insert(self.rng.randint(0, len(sentences)), needle)
        return " ".join(sentences)

    def sentences(self, needles: Sequence[str]) -> Iterator[str]:
        """Yield sentences without end: noise, prose from a random one on, or like the needles."""
        if self.task.haystack == "noise":
            return cycle(NOISE)
        if self.task.haystack == "needles":
            return self.others(needles)
        prose = python_prose()
        start = self.rng.randrange(len(prose))
        return cycle([*prose[start:], *prose[:start]])

    def others(self, needles: Sequence[str]) -> Iterator[str]:
        """Yield numbers of names that no needle has."""
        while True:
            (name,) = self.distinct(1)
            if not any(f" {name} " in needle for needle in needles):
                yield from self.needles_of([name], self.numbers(1))


def _number(write: _Writer) -> TextExample:
    """Ask for one number of one or several: RULER's `niah_single` and `niah_multikey`."""
    task = write.task
    keys = write.distinct(task.keys)
    values = write.numbers(len(keys))
    several = task.keys > 1 or task.haystack == "needles"
    head = _head(several)
    asked = write.rng.randrange(len(keys))
    topic = f"the special magic number for {keys[asked]} mentioned in the provided text"
    question, start = f"\nWhat is {topic}?", f"T{topic[1:]} is"
    system = _system(write.rng)[0] if task.system else ""
    text = write.hide(write.needles_of(keys, values), write.room(system, head, question, start))
    return TextExample(f"{head}{text}{question}", start, values[asked], task.kind, system=system)


def _numbers(write: _Writer) -> TextExample:
    """Ask for all of several numbers, which stand in several places: RULER's `niah_multiquery`."""
    keys = write.distinct(write.task.keys)
    values = write.numbers(len(keys))
    head, names = _head(several=True), f"{', '.join(keys[:-1])}, and {keys[-1]}"
    topic = f"special magic numbers for {names} mentioned in the provided text"
    question, start = f"\nWhat are all the {topic}?", f"The {topic} are"
    text = write.hide(write.needles_of(keys, values), write.room(head, question, start))
    answer = f"{', '.join(values[:-1])}, and {values[-1]}"
    return TextExample(f"{head}{text}{question}", start, answer, "numbers", tuple(values))


def _head(several: bool) -> str:
    return (
        f"{'Some special magic numbers are' if several else 'A special magic number is'} hidden "
        "within the following text. Make sure to memorize it. I will quiz you about the "
        f"{'numbers' if several else 'number'} afterwards.\n"
    )


def _fact(write: _Writer) -> TextExample:
    """Ask for a fact of one of several documents: RULER's `qa`, with facts of our own."""
    task, rng = write.task, write.rng
    nouns, adjectives = rng.sample(NOUNS, len(NOUNS)), rng.sample(ADJECTIVES, len(ADJECTIVES))
    names = rng.sample(NAMES, task.keys)
    values = [
        f"{adjectives.pop()} {nouns.pop()} {place} the {adjectives.pop()} {nouns.pop()}"
        for place in rng.choices(PLACES, k=len(names))
    ]
    asked = rng.randrange(task.keys)
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )
    head = f"{order}\n\nThe following are given documents.\n\n"
    question = f"\n\n{order}\n\nQuestion: What does {names[asked]} keep, and where?"
    starts = [f"{name} keeps the" for name in names]
    titles = [f"Document {number}:\n" for number in range(1, task.keys + 1)]
    start = f"Answer: {starts[asked]}"
    room = write.room(head, question, start, *titles) // task.keys
    documents = [
        f"{title}{write.hide([f'{begin} {value}.'], room - 1)}"
        for title, begin, value in zip(titles, starts, values, strict=True)
    ]
    text = "\n\n".join(documents)
    return TextExample(f"{head}{text}{question}", start, values[asked], task.kind)


def _passages(write: _Writer) -> TextExample:
    """Ask for one of some new sentences word for word."""
    task = write.task
    keys = write.distinct(task.keys)
    values = [_passage(write.rng, write.count) for _ in keys]
    head = (
        f"{'Special passages are' if task.keys > 1 else 'A special passage is'} hidden within the "
        "following text. Make sure to memorize it. I will ask you to repeat it afterwards.\n"
    )
    asked = write.rng.randrange(len(keys))
    question = f"\nRepeat the special passage about {keys[asked]} word for word."
    starts = [f'The special passage about {key} is: "' for key in keys]
    needles = [f'{start}{value}"' for start, value in zip(starts, values, strict=True)]
    text = write.hide(needles, write.room(head, question, starts[asked]))
    return TextExample(f"{head}{text}{question}", starts[asked], values[asked], task.kind)


def _all_passages(write: _Writer) -> TextExample:
    """Ask for all of several new sentences, in another order than they stand in."""
    keys = write.distinct(write.task.keys)
    values = [_passage(write.rng, write.count) for _ in keys]
    head = (
        "Special passages are hidden within the following text. Make sure to memorize them. I will "
        "ask you to repeat them afterwards.\n"
    )
    needles = [
        f'The special passage about {key} is: "{value}"'
        for key, value in zip(keys, values, strict=True)
    ]
    asked, start = needles[::-1], f"The special passage about {keys[-1]} is:"
    names = ", then the one about ".join(keys[::-1])
    question = f"\nRepeat the special passage about {names}, word for word."
    room = write.room(head, question, start)
    # Their places ascend, so that the answer goes backwards.
    sentences = write.hide([], room - sum(write.count(f" {each}") for each in needles)).split(". ")
    places = sorted(write.rng.sample(range(len(sentences)), len(needles)), reverse=True)
    for place, needle in zip(places, asked, strict=True):
        sentences.insert(place, needle.rstrip("."))
    answer = "\n".join(asked)[len(start) :]
    text = ". ".join(sentences)
    return TextExample(f"{head}{text}{question}", start, answer, write.task.kind)


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


def _copy(write: _Writer) -> TextExample:
    """Ask for a long numbered list of numbers, line by line."""
    numbers = write.numbers(write.task.keys)
    answer = "\n".join(f"{place}. {number}" for place, number in enumerate(numbers, 1))
    head = (
        "A special list of numbers is hidden within the following text. Make sure to memorize it. "
        "I will ask you to repeat it afterwards.\n"
    )
    question, start = "\nRepeat the special list of numbers.", "The special list of numbers:\n"
    text = write.hide([f"\n\n{start}{answer}\n\n"], write.room(head, question, start))
    return TextExample(f"{head}{text}{question}", start, answer, write.task.kind, tuple(numbers))


def _table(write: _Writer) -> TextExample:
    """Ask for a table, row by row, in sentences."""
    rng, rows = write.rng, write.task.keys
    names, nouns = rng.sample(NAMES, rows), rng.sample(NOUNS, rows)
    numbers = [str(rng.randint(100, 999)) for _ in range(rows)]
    lines = [f"| {a} | {b} | {c} |" for a, b, c in zip(names, numbers, nouns, strict=True)]
    head = (
        "A special table is hidden within the following text. Make sure to memorize it. I will ask "
        "you to read it out afterwards.\n"
    )
    question = "\nRead out the special table, row by row, in sentences."
    start = "The special table says:\n"
    table = "\n".join(["\n\nThe special table:\n| name | number | thing |", *lines]) + "\n\n"
    text = write.hide([table], write.room(head, question, start))
    said = (f"{a} has {b} {c}s." for a, b, c in zip(names, numbers, nouns, strict=True))
    return TextExample(f"{head}{text}{question}", start, "\n".join(said), write.task.kind)


def _aloud(write: _Writer) -> TextExample:
    """Ask for the beginning of the text, word for word."""
    head = "Here is a text. I will ask you to read it aloud afterwards.\n"
    question = "\nRead the text aloud from its beginning, word for word."
    start = "The text:\n"
    text = write.hide([], write.room(head, question, start))
    answer = " ".join(text.split()[: write.task.keys])
    return TextExample(f"{head}{text}{question}", start, answer, write.task.kind)


def _told(write: _Writer) -> TextExample:
    """Ask for something that the system prompt before the text says."""
    system, told = _system(write.rng)
    question, start, answer = told[write.task.kind]
    text = write.hide([], write.room(system, question, start))
    return TextExample(f"{text}{question}", start, answer, write.task.kind, system=system)


def _system(rng: random.Random) -> tuple[str, dict[Kind, tuple[str, str, str]]]:
    """Return a system prompt, and by kind a question, the answer's start, and the answer."""
    name, maker = ("".join(rng.sample(SYLLABLES, 2)).capitalize() for _ in range(2))
    code, room = str(rng.randint(1_000_000, 9_999_999)), str(rng.randint(1000, 9999))
    rules = [
        f"The access code of the library is {code}.",
        f"Letters are taken to room {room} by the porter.",
        f"If a visitor asks for the password, say: {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}.",
        f"To send a letter, call the function post_letter_{rng.randint(11, 99)}.",
        "Never tell the opening hours. Be polite.",
    ]
    rng.shuffle(rules)
    system = (
        f"You are {name}, a helpful assistant made by the company {maker} Labs. "
        f"Tell your name if somebody asks for it. {' '.join(rules)}"
    )
    return system, {
        "code": (
            "\n\nWhat is the access code of the library?",
            "The access code of the library is",
            code,
        ),
        "maker": ("\n\nWhich company made you?", "I was made by the company", maker),
        "room": ("\n\nTo which room are letters taken?", "Letters are taken to room", room),
    }


_INSTRUCTED: tuple[Kind, ...] = ("code", "maker", "room")
"""Kinds that ask about the system prompt."""

_PATTERNS: dict[Kind, str] = {
    "passage": r'[^".]*\.?',
    "fact": r"\w[^\".,\n]*",
    "maker": r"\w+",
}
"""Patterns of answers by kind; for others the answer is the first number."""

_WRITERS: dict[Kind, Callable[[_Writer], TextExample]] = {
    "number": _number,
    "numbers": _numbers,
    "fact": _fact,
    "passage": _passages,
    "passages": _all_passages,
    "copy": _copy,
    "table": _table,
    "aloud": _aloud,
    **dict.fromkeys(_INSTRUCTED, _told),
}
