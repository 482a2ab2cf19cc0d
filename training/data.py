# SPDX-License-Identifier: Apache-2.0
"""Examples to train on: JSON lines, `{"text": TEXT}` or `{"messages": [...]}`, and their tokens.

Messages are those of chat completions with strings as `content`. The last tenth of the lines is
held out. KVzap's prompts have the text a second time; TrimKV's sequences are packed documents.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoProcessor

HELD_OUT = 10
"""One line in this many is held out, from the end."""

INSTRUCTION = "\n\nRepeat the previous context exactly."
"""KVzip's words between a text and its repetition."""

BEGIN, END, ANSWER = "@@begin@@", "@@end@@", "@@answer@@"
"""Marks in a rendered conversation. Each part between them is tokenized by itself."""


class TrainingError(RuntimeError):
    """A model or data that gates cannot be trained with; the message says why."""


@dataclass(frozen=True)
class Example:
    """One line: a text, or messages."""

    name: str
    """File and line, for messages."""
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    @classmethod
    def read(cls, line: str, name: str) -> Example:
        """Read a line.

        Raises:
            ValueError: if it is not of the form above.
        """
        try:
            found = json.loads(line)
            text, messages = found.get("text"), tuple(found.get("messages", ()))
            if isinstance(text, str) != (not messages):
                raise ValueError("it has either `text` or `messages`")
            if not all(m["role"] and isinstance(m["content"], str) for m in messages):
                raise ValueError("gates are trained on texts: every `content` is a string")
            return cls(name, text, messages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} is no example ({reason}); see docs/gates.md") from error

    @property
    def context(self) -> str:
        """Return the text, or the first user's message."""
        if self.text is not None:
            return self.text
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")


def read_examples(file: Path) -> tuple[list[Example], list[Example]]:
    """Return the examples of a file for training, and the held-out ones.

    Raises:
        ValueError: if a line is wrong, or there are fewer than two.
    """
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    examples = [Example.read(line, f"{file}:{number}") for number, line in lines if line.strip()]
    held_out = max(len(examples) // HELD_OUT, 1)
    if len(examples) <= held_out:
        raise ValueError(f"{file} has {len(examples)} examples; at least two are needed")
    return examples[:-held_out], examples[-held_out:]


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
        head, rest = self._render([user, {"role": "assistant", "content": ANSWER}]).split(BEGIN)
        text, rest = rest.split(END)
        joint, tail = rest.split(ANSWER)
        parts = [self._encode(head), self._encode(text)[: self.tokens], self._encode(joint), again]
        begin, text_end, start, end = itertools.accumulate(len(part) for part in parts)
        ids = torch.cat([*parts, self._encode(tail)])
        none = torch.zeros_like(ids)
        return Prompt(ids, none.bool(), none, keys=slice(begin, text_end), rows=slice(start, end))

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

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        text: str = self._processor.apply_chat_template(list(messages), tokenize=False)
        return text

    def _encode(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.int64)


def packed(prompts: Sequence[Prompt]) -> Prompt:
    """Return one sequence of documents."""
    return Prompt(
        torch.cat([prompt.ids for prompt in prompts]),
        torch.cat([prompt.labelled for prompt in prompts]),
        torch.cat([torch.full_like(prompt.ids, n) for n, prompt in enumerate(prompts)]),
    )


def sequences(prompter: Prompter, examples: Sequence[Example], seed: int) -> Iterator[Prompt]:
    """Yield sequences of packed examples without end, in a new order each time round."""
    documents: list[Prompt] = []
    for epoch in itertools.count():
        for index in np.random.default_rng([seed, epoch]).permutation(len(examples)):
            prompt = prompter.dialogue(examples[index])
            if sum(len(each.ids) for each in [*documents, prompt]) > prompter.tokens:
                yield packed(documents)
                documents = []
            documents.append(prompt)
