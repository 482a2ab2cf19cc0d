# SPDX-License-Identifier: Apache-2.0
"""Examples as tokens: with the text a second time for KVzap, in packed documents for TrimKV."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

from training.examples import Example, Message

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
    """int64 ``[S]``."""
    labelled: Tensor
    """Whether a token is predicted in training, bool ``[S]``; the first of a document is not."""
    documents: Tensor
    """int64 ``[S]``."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the model for images."""
    keys: slice = field(default_factory=lambda: slice(0))
    """Tokens of the text that is repeated."""
    rows: slice = field(default_factory=lambda: slice(0))
    """Tokens of its repetition."""

    @property
    def has_images(self) -> bool:
        return bool(self.inputs)

    @property
    def positions(self) -> Tensor:
        """Return each token's place in its document, int64 ``[S]``."""
        tokens = torch.arange(len(self.ids))
        starts = torch.where(self.documents.diff(prepend=self.documents[:1] - 1) != 0, tokens, 0)
        return tokens - starts.cummax(0).values


class Prompter:
    """The tokenizer or processor of a model."""

    def __init__(self, folder: str, tokens: int) -> None:
        """Load it; `tokens` is the longest sequence for TrimKV, or text for KVzap."""
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.image_token: str | None = getattr(self.processor, "image_token", None)
        self.tokens = tokens

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def repeated(self, example: Example) -> Prompt:
        """Return a text or a user's message, and its repetition by the assistant.

        A text of more than `tokens` tokens is cut. Images are repeated as the text that
        `repeat` of the example gives.

        Raises:
            TrainingError: if there is no text, or too long a one for images.
        """
        content, again = example.context()
        parts = [
            {"type": "text", "text": BEGIN},
            *content,
            {"type": "text", "text": f"{END}{INSTRUCTION}"},
        ]
        user: Message = {"role": "user", "content": parts}
        if not example.images:
            user = {"role": "user", "content": "".join(part["text"] for part in parts)}
        rendered = self._render([user, {"role": "assistant", "content": ANSWER}])
        head, rest = rendered.split(BEGIN)
        text, rest = rest.split(END)
        joint, tail = rest.split(ANSWER)
        inputs: dict[str, Tensor] = {}
        if example.images:
            ids, inputs = self._encode_images(example, head + text)
            first = ids == self.tokenizer.convert_tokens_to_ids(self.image_token)
            start = int(first.nonzero()[0])
            if str(self.image_token) not in head:
                start = min(start, self.count(head))
        else:
            start, body = self.count(head), self._encode(text)[: self.tokens]
            ids = torch.cat([self._encode(head), body])
        before, repetition = torch.cat([ids, self._encode(joint)]), self._encode(again)
        if example.images and len(repetition) > self.tokens:
            raise TrainingError(
                f"{example.name} has a `repeat` of {len(repetition)} tokens, and images cannot be "
                f"cut with it; allow more than {self.tokens} (--tokens)"
            )
        found = torch.cat([before, repetition[: self.tokens]])
        keys, rows = slice(start, len(ids)), slice(len(before), len(found))
        if keys.start == keys.stop or rows.start == rows.stop:
            raise TrainingError(f"{example.name} has no text to repeat")
        whole = torch.cat([found, self._encode(tail)])
        documents = torch.zeros_like(whole)
        unlabelled = torch.zeros_like(whole, dtype=torch.bool)
        return Prompt(whole, unlabelled, documents, _padded(inputs, len(whole)), keys, rows)

    def dialogue(self, example: Example) -> Prompt:
        """Return a text, all of it labelled, or a conversation with its last answer labelled.

        Raises:
            TrainingError: if a conversation has more than `tokens` tokens or no answer.
        """
        inputs: dict[str, Tensor] = {}
        if example.text is not None:
            ids = self._encode(example.text)[: self.tokens]
            start = 1
        else:
            *messages, last = example.messages
            if last["role"] != "assistant" or not isinstance(last["content"], str):
                raise TrainingError(f"{example.name} does not end with an answer of the assistant")
            rendered = self._render([*messages, {"role": "assistant", "content": ANSWER}])
            head, tail = rendered.split(ANSWER)
            ids = self._encode(head)
            if example.images:
                ids, inputs = self._encode_images(example, head)
            start = len(ids)
            ids = torch.cat([ids, self._encode(last["content"]), self._encode(tail)])
        if len(ids) > self.tokens or len(ids) <= start:
            raise TrainingError(
                f"{example.name} has {len(ids)} tokens; a sequence may have {self.tokens} "
                "(--tokens), and at least one is predicted"
            )
        labelled = torch.arange(len(ids)) >= start
        return Prompt(ids, labelled, torch.zeros_like(ids), _padded(inputs, len(ids)))

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self.processor.apply_chat_template(list(messages), tokenize=False)
        return text

    def _encode(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.int64)

    def _encode_images(self, example: Example, text: str) -> tuple[Tensor, dict[str, Tensor]]:
        if self.image_token is None:
            raise TrainingError(f"{example.name} has images, and the model's processor takes none")
        images = [Image.open(path).convert("RGB") for path in example.images]
        found = self.processor(
            text=[text], images=images, return_tensors="pt", add_special_tokens=False
        )
        inputs = {
            name: tensor
            for name, tensor in found.items()
            if isinstance(tensor, Tensor) and name not in ("input_ids", "attention_mask")
        }
        ids: Tensor = found["input_ids"][0]
        return ids, inputs


def _padded(inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Return inputs of which those with a value for each token have zeros for those that follow."""
    return {
        name: torch.nn.functional.pad(x, (0, length - x.shape[1])) if "token_type" in name else x
        for name, x in inputs.items()
    }


def pack(prompts: Sequence[Prompt]) -> Prompt:
    """Return one sequence of documents without images."""
    (first, *others) = prompts
    if not others:
        return first
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
            if room < 0 or (packed and prompt.has_images):
                break
            packed.append(prompt)
            self.position += 1
            if prompt.has_images:
                break
        return pack(packed)

    def _prompts(self) -> Iterator[Prompt]:
        for position in itertools.count(self.position):
            epoch, place = divmod(position, len(self._examples))
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
            yield self._prompter.dialogue(self._examples[order[place]])
