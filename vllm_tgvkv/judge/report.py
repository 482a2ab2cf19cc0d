# SPDX-License-Identifier: Apache-2.0
"""What was found: figures of each arm, a table, and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from textwrap import fill

from vllm_tgvkv.judge.asking import FULL, Answer
from vllm_tgvkv.judge.questions import Question
from vllm_tgvkv.judge.statistics import Estimate, mcnemar, paired_difference, wilson

METHOD = (
    "Intervals are 95 %: right and same by Wilson's score, the difference to the full cache by "
    "Newcombe's score for paired shares (1998, method 10). p is McNemar's exact test, two-sided "
    "and not corrected for the number of arms. Stopped: answers that ended by themselves; the "
    "others have max_tokens."
)


@dataclass(frozen=True)
class Figures:
    """Figures of one arm."""

    arm: str
    right: Estimate | None
    """Share of the questions with an expected answer that it answers right; None without any."""
    difference: Estimate | None
    """`right` minus the full cache's, question by question."""
    p: float | None
    same: Estimate | None
    """Share of all questions that it answers as the full cache does, letter by letter and with
    its reasoning; None for the full cache."""
    stopped: float
    tokens: float
    """Of an answer, mean."""
    kept: float
    """Share of the prompt, mean."""


def figures(
    questions: Sequence[Question], answers: Mapping[str, Sequence[Answer]]
) -> list[Figures]:
    """Return the figures of each arm."""

    def rights(arm: str) -> list[bool]:
        found = zip(questions, answers[arm], strict=True)
        judged = [question.is_right(answer.text) for question, answer in found]
        return [right for right in judged if right is not None]

    full, found = rights(FULL), []
    for arm, given in answers.items():
        right = rights(arm)
        pairs = list(zip(right, full, strict=True))
        both, gained, lost, neither = (
            pairs.count(each)
            for each in ((True, True), (True, False), (False, True), (False, False))
        )
        same = [
            (a.reasoning, a.text) == (b.reasoning, b.text)
            for a, b in zip(given, answers[FULL], strict=True)
        ]
        is_compared = bool(right) and arm != FULL
        found.append(
            Figures(
                arm,
                wilson(sum(right), len(right)) if right else None,
                paired_difference(both, gained, lost, neither) if is_compared else None,
                mcnemar(gained, lost) if is_compared else None,
                None if arm == FULL else wilson(sum(same), len(same)),
                fmean(answer.stopped for answer in given),
                fmean(answer.tokens for answer in given),
                fmean(answer.kept for answer in given),
            )
        )
    return found


def table(found: Sequence[Figures], expected: int, total: int, failed: int) -> Iterator[str]:
    """Yield the lines of the table; `expected` of `total` questions have an expected answer.

    `failed` others are in no figure.
    """
    left_out = f" {failed} more {'is' if failed == 1 else 'are'} left out: no answer in some row."
    yield f"{total} questions, {expected} with an expected answer.{left_out if failed else ''}"
    yield ""
    yield (
        f"{'':22}{'right':>17}{'minus full':>25}{'p':>7}{'same as full':>17}"
        f"{'stopped':>9}{'tokens':>8}{'kept':>7}"
    )
    for each in found:
        p = "" if each.p is None else f"{each.p:.3f}"
        points = "" if each.difference is None else each.difference.points
        yield (
            f"{each.arm:22}{each.right or '':>17}{points:>25}{p:>7}{each.same or '':>17}"
            f"{each.stopped:>9.0%}{each.tokens:>8.1f}{each.kept:>7.0%}"
        )
    yield ""
    yield fill(METHOD, 100)


WIDTH, LEFT, ROW = 640, 190, 34


def picture(found: Sequence[Figures], total: int) -> str:
    """Return an SVG: for each arm a share with its interval, and how many answers stopped."""
    has_right = found[0].right is not None
    title = "right answers" if has_right else "same answers as the full cache"
    height = ROW * len(found) + 70

    def x(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - 30)

    parts = [
        f'<text x="12" y="18">{title} (dot, 95 %), answers that stopped (ring); '
        f"{total} questions</text>"
    ]
    for percent in (0, 25, 50, 75, 100):
        at = x(percent / 100)
        parts += [
            f'<line x1="{at}" x2="{at}" y1="30" y2="{height - 30}" stroke="#ddd"/>',
            f'<text x="{at}" y="{height - 12}" text-anchor="middle">{percent} %</text>',
        ]
    for row, each in enumerate(found):
        y, share = 50 + ROW * row, each.right if has_right else each.same
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(each.arm)}</text>',
            f'<circle cx="{x(each.stopped)}" cy="{y}" r="9" fill="none" stroke="#b5480f" '
            'stroke-width="2"/>',
        ]
        if share is not None:
            parts += [
                f'<line x1="{x(share.low)}" x2="{x(share.high)}" y1="{y}" y2="{y}" '
                'stroke="#1f5fa8" stroke-width="3"/>',
                f'<circle cx="{x(share.mean)}" cy="{y}" r="6" fill="#1f5fa8"/>',
            ]
    style = 'font-family="sans-serif" font-size="13" fill="#222"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
