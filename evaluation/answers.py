# SPDX-License-Identifier: Apache-2.0
"""Answers, and the log from which an interrupted evaluation continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.arms import Arm, identity
from evaluation.memory import Cut
from vllm_tgvkv.judge.log import whole_lines

Key = tuple[str, int, str]
"""Task and number of the question, and the arm's identity."""


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
    cuts: tuple[Cut, ...] = ()
    sketch_blocks: int = 0
    """Part of `blocks_after` that holds a sketch, for recall."""
    recalled: tuple[float, ...] = ()
    """Tokens that each choice brought back, mean over layers and heads."""
    tokens_per_step: float = 0.0
    """Tokens of the answer that a step gave, without the first; 0 where there were no drafts."""

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

    def said_of(self, full: Answer) -> float:
        """Return the share of the full cache's right tokens that are right here as well.

        Both were given the right answer token by token.
        """
        pairs = zip(self.hits[:-1], full.hits[:-1], strict=True)
        said = [mine == "1" for mine, wanted in pairs if wanted == "1"]
        return sum(said) / max(len(said), 1)

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
        self._file = self.path.open("a", encoding="utf-8")

    def _read(self) -> Iterator[Answer]:
        for line in whole_lines(self.path):
            values: dict[str, Any] = json.loads(line)
            values["cuts"] = tuple(map(tuple, values.get("cuts", ())))
            yield Answer(**{**values, "recalled": tuple(values.get("recalled", ()))})

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, asked: tuple[str, int, Arm]) -> bool:
        task, number, arm = asked
        return (task, number, identity(arm)) in self._answers

    def __getitem__(self, asked: tuple[str, int, Arm]) -> Answer:
        """Return the answer to the question of a task and a number by an arm."""
        task, number, arm = asked
        return self._answers[task, number, identity(arm)]

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        self._answers[answer.key] = answer
        self._file.write(json.dumps(asdict(answer)) + "\n")
        self._file.flush()
