# SPDX-License-Identifier: Apache-2.0
"""Word pieces that the tower knows, and how a text becomes a sequence of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from measure.text_tasks import (
    ADJECTIVES,
    JOINTS,
    NOISE,
    NOUNS,
    PLACES,
    VERBS,
    python_prose,
)

COMMON = 7500
"""Pieces of the tokenizer that are known whatever texts use: it numbers them by frequency."""

LONGEST = 18
"""Most letters of a known piece."""

_LETTERS = {*range(0x180), *range(0x2010, 0x2040)}
"""Code points that may be shown: Latin letters and punctuation. Cyrillic ones look the same."""

NEEDLES = 400
"""Made-up needles in the texts that say how often a piece is used."""


class UnknownLetterError(ValueError):
    """A text has a letter that no known piece shows."""


class Vocabulary:
    """Known word pieces, in an order of their own: a piece's index is its neuron in the tower."""

    def __init__(self, tokenizer: Any, ids: Sequence[int]) -> None:
        """Take SmolLM2's tokenizer and the token of each piece."""
        self.tokenizer = tokenizer
        self.ids = list(ids)
        self.texts: list[str] = [tokenizer.decode([token]) for token in ids]

    @classmethod
    def of_tasks(cls, tokenizer: Any) -> Vocabulary:
        """Return the pieces that the tasks' texts use, with the most frequent ones of English."""
        used = set(piece_counts(tokenizer)) | set(range(COMMON))
        return cls(tokenizer, [i for i in sorted(used) if _can_be_drawn(tokenizer, i)])

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.texts)}

    @cached_property
    def _index_of_token(self) -> dict[int, int]:
        return {token: index for index, token in enumerate(self.ids)}

    def split(self, text: str) -> list[int]:
        """Return the indices of the pieces that show a text.

        The tokenizer's own pieces where they are known; others are split into the longest known
        ones from the left.

        Raises:
            UnknownLetterError: naming the letter.
        """
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        indices: list[int] = []
        for is_known, some in groupby(tokens, self._index_of_token.__contains__):
            if is_known:
                indices += [self._index_of_token[token] for token in some]
            else:  # several may be bytes of one letter
                indices += self._longest(self.tokenizer.decode(list(some)))
        return indices

    def _longest(self, text: str) -> Iterator[int]:
        while text:
            for end in range(min(len(text), LONGEST + 1), 0, -1):
                if (index := self._index.get(text[:end])) is not None:
                    break
            else:
                raise UnknownLetterError(f"pages cannot show {text[0]!r}; leave it out of the text")
            yield index
            text = text[end:]


def piece_counts(tokenizer: Any) -> Counter[int]:
    """Return how often each token comes in prose, noise, the words of needles, and needles."""
    words = [*ADJECTIVES, *NOUNS, *(f"{noun}s" for noun in NOUNS), *VERBS, *PLACES, *JOINTS]
    words += [word.title() for word in words]
    texts = [*words, *_needles(), *NOISE, *python_prose()]
    texts += [f" {text}" for text in texts]
    counts: Counter[int] = Counter()
    for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        counts.update(tokens)
    return counts


def _needles() -> Iterator[str]:
    """Yield sentences in the tasks' words, always the same."""
    rng = random.Random(0)
    for _ in range(NEEDLES):
        adjective, noun, verb = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS)
        name, value = f"{adjective}-{noun}", rng.randint(1_000_000, 9_999_999)
        yield f"One of the special magic numbers for {name} is: {value}."
        yield f'The special passage about {name} is: "The {adjective} {noun} {verb} {value % 100}'


def _can_be_drawn(tokenizer: Any, token: int) -> bool:
    """Return whether a token is a line end, a space or printable letters, with or without one."""
    if token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder:
        return False
    text = tokenizer.decode([token])
    letters = text.removeprefix(" ")
    if text in ("\n", " "):
        return True
    known = all(letter.isprintable() and ord(letter) in _LETTERS for letter in letters)
    return bool(letters) and " " not in letters and known and len(letters) <= LONGEST
