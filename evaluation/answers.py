# SPDX-License-Identifier: Apache-2.0
"""Answers, and the log from which an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

Key = tuple[str, int, str]
"""Task and number of the question, key of the arm."""


@dataclass(frozen=True)
class Answer:
    """An answer compared with the truth token by token, and the memory its request held.

    `hits` has one digit per token of the truth, its end token included: `1` if the answer has the
    token at the same place, else `0`.
    """

    task: str
    number: int
    arm: str
    text: str
    hits: str
    prompt_tokens: int
    kept_tokens: float
    blocks_before: int
    blocks_after: int
    right_tokens: int = 0
    """Tokens of the right answer, its end included; 0 where they were not recorded."""
    cuts: tuple[tuple[int, int, int], ...] = ()
    """Computed tokens of the answer at each eviction, and blocks held before it and after it."""

    @property
    def key(self) -> Key:
        return self.task, self.number, self.arm

    @property
    def is_exact(self) -> bool:
        """Return whether all tokens are right, the end token included."""
        return "0" not in self.hits

    @property
    def blocks_held(self) -> float:
        """Return the share of the prompt's blocks held while decoding."""
        return self.blocks_after / self.blocks_before

    @property
    def share(self) -> float:
        """Return the share of the answer's tokens that come before the first mistake."""
        tokens = self.hits[:-1]
        return (tokens + "0").index("0") / len(tokens)


class AnswerLog:
    """Answers as JSON lines, in one file per configuration.

    Each answer is written at once, so that an interrupted run loses at most one; an incomplete
    last line is dropped when the log is read.
    """

    def __init__(self, folder: Path, fingerprint: str, fresh: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"answers-{fingerprint}.jsonl"
        if fresh:
            self.path.unlink(missing_ok=True)
        self._answers = {answer.key: answer for answer in self._read()}
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def _read(self) -> Iterator[Answer]:
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8")
        whole, newline, rest = text.rpartition("\n")
        if rest:
            self.path.write_text(whole + newline, encoding="utf-8")
        yield from map(_parsed, whole.splitlines())

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._answers

    def __getitem__(self, key: Key) -> Answer:
        return self._answers[key]

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        self._answers[answer.key] = answer
        self._file.write(_line(answer))
        self._file.flush()


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def _parsed(line: str) -> Answer:
    values = json.loads(line)
    values["cuts"] = tuple(map(tuple, values.get("cuts", ())))
    return Answer(**values)
