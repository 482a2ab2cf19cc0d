# SPDX-License-Identifier: Apache-2.0
"""Answers, and the log from which an interrupted evaluation continues."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
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
    def first(self) -> bool:
        """Return whether the first token is right, which is computed from the full cache."""
        return self.hits[0] == "1"

    @property
    def later(self) -> float:
        """Return the share of right tokens among those computed from the kept tokens."""
        return self.hits.count("1", 1) / (len(self.hits) - 1)

    @property
    def blocks_held(self) -> float:
        """Return the share of the prompt's blocks held while decoding."""
        return self.blocks_after / self.blocks_before

    @property
    def tokens_held(self) -> float:
        return self.kept_tokens / self.prompt_tokens


def compare(answer: Sequence[int], truth: Sequence[int]) -> str:
    """Return `Answer.hits` of token ids that both end with the end token."""
    padded = [*answer, *[-1] * len(truth)]
    return "".join("01"[given == right] for given, right in zip(padded, truth, strict=False))


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


def write_answers(answers: Iterable[Answer], path: Path) -> None:
    """Write answers to a compressed file, whose bytes depend on nothing else."""
    text = "".join(map(_line, answers))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_answers(path: Path) -> dict[Key, Answer]:
    """Return the answers of such a file by their keys."""
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    return {answer.key: answer for answer in map(_parsed, lines)}


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def _parsed(line: str) -> Answer:
    values = json.loads(line)
    values["cuts"] = tuple(map(tuple, values.get("cuts", ())))
    return Answer(**values)
