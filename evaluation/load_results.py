# SPDX-License-Identifier: Apache-2.0
"""Replies under load, and what a point of the plot says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reply:
    """An answer, and when it came, in seconds since the first question of its point."""

    task: str
    number: int
    text: str
    is_right: bool
    prompt_tokens: int
    tokens: int
    """Of the answer, its end included."""
    ended: bool
    """Whether the model ended it, before the limit."""
    asked: float
    first: float
    """When its first token came."""
    last: float
    pieces: int = 0
    """In which its text came; a piece may hold several tokens."""

    def tokens_until(self, moment: float) -> float:
        """Return the tokens computed by then: the prompt's, and of the answer in proportion."""
        if moment < self.first:
            return 0.0
        told = 1.0
        if moment < self.last:
            told = (moment - self.first) / (self.last - self.first)
        return self.prompt_tokens + told * self.tokens


@dataclass(frozen=True)
class Point:
    """All replies of an arm at a load."""

    arm: str
    load: float
    in_flight: int
    cpu_seconds: float
    """Processor time of the server's processes."""
    preemptions: float
    counts: Mapping[str, float]
    """Increase of the plugin's counters."""
    replies: Sequence[Reply]


@dataclass(frozen=True)
class Summary:
    """A point of the plot: one arm at one load."""

    arm: str
    load: float
    in_flight: int
    questions: int
    right: dict[str, int]
    """Right answers by task."""
    same: float
    """Share of answers that are stock's at the smallest load, letter by letter."""
    ended: float
    """Share of answers that the model ended."""
    answer_tokens: float
    """Mean."""
    tokens_per_second: float
    """Of prompts and answers, until the last question is asked: so long all places are taken."""
    tokens_per_cpu_second: float
    """All tokens over the processor time of the server's processes, which other programs of the
    machine disturb less."""
    requests_per_second: float
    """Until the last answer has ended."""
    ttft_median: float
    ttft_p95: float
    preemptions: float
    counts: dict[str, float]

    @property
    def num_right(self) -> int:
        return sum(self.right.values())


def summarise(point: Point, reference: Sequence[Reply]) -> Summary:
    """Return the figures of a point, its answers compared with `reference`."""
    replies, total = point.replies, len(point.replies)
    texts = {(reply.task, reply.number): reply.text for reply in reference}
    waits = [reply.first - reply.asked for reply in replies]
    end = max(reply.last for reply in replies)
    full = max(reply.asked for reply in replies) if total > point.in_flight else end
    right = dict.fromkeys(dict.fromkeys(reply.task for reply in replies), 0)
    for reply in replies:
        right[reply.task] += reply.is_right
    tokens = sum(reply.prompt_tokens + reply.tokens for reply in replies)
    return Summary(
        arm=point.arm,
        load=point.load,
        in_flight=point.in_flight,
        questions=total,
        right=right,
        same=sum(r.text == texts[r.task, r.number] for r in replies) / total,
        ended=sum(reply.ended for reply in replies) / total,
        answer_tokens=sum(reply.tokens for reply in replies) / total,
        tokens_per_second=sum(reply.tokens_until(full) for reply in replies) / full,
        tokens_per_cpu_second=tokens / point.cpu_seconds,
        requests_per_second=total / end,
        ttft_median=float(np.median(waits)),
        ttft_p95=float(np.quantile(waits, 0.95)),
        preemptions=point.preemptions,
        counts={name: count for name, count in point.counts.items() if count},
    )


@dataclass(frozen=True)
class LoadResult:
    """The points of one kind of questions, and the facts of how they were made."""

    facts: dict[str, Any]
    points: list[Summary]


def read_points(part: dict[str, Any]) -> LoadResult:
    """Return the points of one kind of questions as the file has them."""
    return LoadResult(part["facts"], [Summary(**point) for point in part["points"]])
