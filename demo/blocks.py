# SPDX-License-Identifier: Apache-2.0
"""Questions and answers as rows of tokens, with what each row should predict.

A *block* is a chat about the pages of a prompt. It sees the prompt up to the pages and itself, so
that several of them can follow the same pages and no answer leaks into another question.
"""

import re
from dataclasses import dataclass, replace

import numpy as np
import torch

from demo import chat
from demo.pages import KEYS
from demo.tasks import Example, Turn

IGNORE = -100

KEY = re.compile(rf"\b[{KEYS}]\b")
"""A key in a question."""

BRIEF = {
    "value": "{}",
    "row": "Row of {}?",
    "two_images": "{} and {}?",
    "compare": "Larger, {} or {}?",
    "chat": "{}",
}
"""The shortest phrase of each task."""


@dataclass(frozen=True)
class Blocks:
    """Blocks side by side in R rows, with the same lengths in all of B prompts.

    ``tokens [B, R]`` questions and answers, padded; ``owners [R]`` the block of a row and
    ``offsets [R]`` its place there. What follows is a token or ``IGNORE``, ``[B, R]``:
    ``targets`` the next token where it belongs to an answer, and ``choices`` those of them that are
    keys: few, but what a question is about; where a question names a key, ``leads`` the first
    character of its value, and ``partners`` the other key of its row (or itself) if the task is
    ``row``.

    Where a row belongs to a question, from the first of its keys on, ``asked [B, R]`` is a row of
    ``outlook [K, V]``, else ``IGNORE``: how often each token occurs in the answer, as a
    distribution.
    """

    tokens: torch.Tensor
    owners: torch.Tensor
    offsets: torch.Tensor
    targets: torch.Tensor
    choices: torch.Tensor
    leads: torch.Tensor
    partners: torch.Tensor
    asked: torch.Tensor
    outlook: torch.Tensor

    def to(self, device: torch.device) -> "Blocks":
        return Blocks(**{name: value.to(device) for name, value in vars(self).items()})


def make_blocks(examples: list[list[Example]]) -> Blocks:
    """Lay out ``examples``: a row for each prompt, with an example for each block."""
    padding = np.array([chat.TOKENS[chat.PAD], *4 * [IGNORE]])[:, None, None]
    columns = [np.empty((len(padding), len(examples), 0), np.int64)]
    starts: list[int] = []
    outlook = [np.zeros(chat.VOCABULARY_SIZE, np.float32)]
    for column in zip(*examples, strict=True):
        blocks = [_spell(example, outlook) for example in column]
        length = max(block.shape[1] for block in blocks)
        columns.append(np.tile(padding, (1, len(blocks), length)))
        for rows, block in zip(columns[-1].swapaxes(0, 1), blocks, strict=True):
            rows[:, : block.shape[1]] = block
        starts.extend(range(length))
    offsets = torch.tensor(starts, dtype=torch.int64)
    tokens, targets, leads, partners, asked = torch.from_numpy(np.concatenate(columns, 2))
    is_key = torch.isin(targets, torch.tensor([chat.TOKENS[key] for key in KEYS]))
    return Blocks(
        tokens=tokens,
        owners=(offsets == 0).cumsum(0) - 1,
        offsets=offsets,
        targets=targets,
        choices=targets.where(is_key, IGNORE),
        leads=leads,
        partners=partners,
        asked=asked,
        outlook=torch.from_numpy(np.stack(outlook)),
    )


def shorten(example: Example) -> Example:
    """Return ``example`` with the shortest phrases."""

    def short(task: str, question: str) -> str:
        return BRIEF[task].format(*KEY.findall(question))

    history = tuple(replace(t, question=short("value", t.question)) for t in example.history)
    return replace(example, history=history, question=short(example.task, example.question))


def _spell(example: Example, outlook: list[np.ndarray]) -> np.ndarray:
    """Return tokens, targets, leads, partners and asked of a block, ``[5, length]``.

    The distributions of its answers are added to ``outlook``.
    """
    first = {entry.key: entry.value[0] for page in example.pages for entry in page.entries}
    row = [source.entry.key for source in example.sources if example.task == "row"]
    other = dict(zip(row, reversed(row), strict=True))
    turns = []
    for number, turn in enumerate([*example.history, Turn(example.question, example.answer)]):
        start = [chat.TOKENS[chat.USER]] if number else []
        question = [*start, *chat.encode(turn.question), chat.TOKENS[chat.ASSISTANT]]
        answer = [*chat.encode(turn.answer), chat.TOKENS[chat.EOS]]
        rows = np.full((5, len(question) + len(answer)), IGNORE)
        tokens, targets, leads, partners, asked = rows
        tokens[:] = question + answer
        targets[len(question) - 1 : -1] = answer
        for match in KEY.finditer(turn.question):
            place = len(start) + match.start()
            leads[place] = chat.TOKENS[first[match[0]]]
            if other:
                partners[place] = chat.TOKENS[other[match[0]]]
            asked[place : len(question)] = len(outlook)
        turns.append(rows)
        counts = np.bincount(answer[:-1], minlength=chat.VOCABULARY_SIZE)
        outlook.append((counts / counts.sum()).astype(np.float32))
    return np.concatenate(turns, 1)
