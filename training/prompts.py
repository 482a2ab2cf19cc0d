# SPDX-License-Identifier: Apache-2.0
"""Examples as tokens: with the text a second time for KVzap, in packed documents for TrimKV."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

from training.lines import Example, Message

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""KVzip's words between a text and its repetition."""

BEGIN, END, ANSWER = "@@begin@@", "@@end@@", "@@answer@@"
"""Marks in a rendered conversation. Each part between them is tokenized by itself."""


class TrainingError(RuntimeError):
    """A model or data that gates cannot be trained with; the message says why."""


@dataclass(frozen=True)
class Prompt:
    """Tokens of one sequence."""

    ids: Tensor
    """int64 `[S]`."""
    labelled: Tensor
    """Whether a token is predicted in training, bool `[S]`; the first of a document is not."""
    documents: Tensor
    """Number of each token's document, int64 `[S]`."""
    keys: slice = field(default_factory=lambda: slice(0))
    """Tokens of the text that is repeated."""
    rows: slice = field(default_factory=lambda: slice(0))
    """Tokens of its repetition."""

    @property
    def positions(self) -> Tensor:
        """Return each token's place in its document, int64 `[S]`."""
        tokens = torch.arange(len(self.ids))
        starts = torch.where(self.documents.diff(prepend=self.documents[:1] - 1) != 0, tokens, 0)
        return tokens - starts.cummax(0).values


class Prompter:
    """The tokenizer of a model, and its chat template."""

    def __init__(self, folder: str, tokens: int) -> None:
        """Load it; `tokens` is the longest sequence for TrimKV, or text for KVzap."""
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        self.tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self.tokens = tokens

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def repeated(self, example: Example) -> Prompt:
        """Return a text or a user's message, and its repetition by the assistant.

        A text of more than `tokens` tokens is cut.

        Raises:
            TrainingError: if there is no text.
        """
        again = self._encode(example.context)[: self.tokens]
        if not len(again):
            raise TrainingError(f"{example.name} has no text to repeat")
        user = {"role": "user", "content": f"{BEGIN}{example.context}{END}{INSTRUCTION}"}
        rendered = self._render([user, {"role": "assistant", "content": ANSWER}])
        head, rest = rendered.split(BEGIN)
        text, rest = rest.split(END)
        joint, tail = rest.split(ANSWER)
        before = self._encode(head)
        parts = [before, self._encode(text)[: self.tokens], self._encode(joint), again]
        _, text_end, start, end = itertools.accumulate(len(part) for part in parts)
        ids = torch.cat([*parts, self._encode(tail)])
        return Prompt(
            ids,
            torch.zeros_like(ids, dtype=torch.bool),
            torch.zeros_like(ids),
            keys=slice(len(before), text_end),
            rows=slice(start, end),
        )

    def dialogue(self, example: Example) -> Prompt:
        """Return a text, all of it labelled, or a conversation with its last answer labelled.

        Raises:
            TrainingError: if a conversation has more than `tokens` tokens or no answer.
        """
        if example.text is not None:
            ids, start = self._encode(example.text)[: self.tokens], 1
        else:
            *messages, last = example.messages
            if last["role"] != "assistant":
                raise TrainingError(f"{example.name} does not end with an answer of the assistant")
            rendered = self._render([*messages, {"role": "assistant", "content": ANSWER}])
            head, tail = (self._encode(part) for part in rendered.split(ANSWER))
            ids, start = torch.cat([head, self._encode(last["content"]), tail]), len(head)
        if len(ids) > self.tokens or len(ids) <= start:
            raise TrainingError(
                f"{example.name} has {len(ids)} tokens; a sequence may have {self.tokens} "
                "(--tokens), and at least one is predicted"
            )
        return Prompt(ids, torch.arange(len(ids)) >= start, torch.zeros_like(ids))

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self._processor.apply_chat_template(list(messages), tokenize=False)
        return text

    def _encode(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.int64)


def pack(prompts: Sequence[Prompt]) -> Prompt:
    """Return one sequence of documents."""
    return Prompt(
        torch.cat([prompt.ids for prompt in prompts]),
        torch.cat([prompt.labelled for prompt in prompts]),
        torch.cat([torch.full_like(prompt.ids, n) for n, prompt in enumerate(prompts)]),
    )


class Stream:
    """Endless sequences of packed examples, in a new order each time round.

    `position` says how many examples were taken; a stream that is made with it goes on there.
    """

    def __init__(
        self, prompter: Prompter, examples: Sequence[Example], seed: int, position: int = 0
    ) -> None:
        self.position = position
        self._prompter, self._examples, self._seed = prompter, examples, seed

    def __next__(self) -> Prompt:
        packed: list[Prompt] = []
        room = self._prompter.tokens
        for prompt in self._prompts():
            room -= len(prompt.ids)
            if room < 0:
                break
            packed.append(prompt)
        self.position += len(packed)
        return pack(packed)

    def _prompts(self) -> Iterator[Prompt]:
        for position in itertools.count(self.position):
            epoch, place = divmod(position, len(self._examples))
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
            yield self._prompter.dialogue(self._examples[order[place]])
