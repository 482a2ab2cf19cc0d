# SPDX-License-Identifier: Apache-2.0
"""Where kept pages are: by layer and head over some questions, by patch for one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from evaluation.arms import EvaluatedArm
from evaluation.engine import AnsweringEngine, Kept
from evaluation.questions import Question
from evaluation.record import Patches, Pictures

BUDGET = 0.1
QUESTIONS = 40
TASK = "value"
MAX_STORED = 256
"""Evictions that the engine stores."""


def take_pictures(
    engine: AnsweringEngine, methods: Sequence[str], num_questions: int = QUESTIONS
) -> Pictures:
    """Ask every method the first questions of one task and collect what it keeps."""
    arms = [EvaluatedArm(method, BUDGET) for method in methods]
    questions = [Question(TASK, number) for number in range(num_questions)]
    per_batch = max(MAX_STORED // len(arms), 1)
    texts: dict[str, str] = {}
    pages: dict[str, list[np.ndarray]] = defaultdict(list)
    patches: dict[str, np.ndarray] = {}
    pairs = 0
    for start in range(0, num_questions, per_batch):
        batch = questions[start : start + per_batch]
        for answer in engine.answers((question, arms) for question in batch):
            if answer.number == 0:
                texts[answer.arm] = answer.text
        asked = {(question.task, question.number) for question in batch}
        # Evictions of the previous batch may still be stored.
        for kept in _latest(engine.kept()):
            task, number, arm = kept.key
            if (task, number) in asked:
                pages[arm].append(kept.counts)
                if number == 0:
                    pairs, patches[arm] = kept.counts.size, count_patches(kept)
    return Pictures(
        BUDGET,
        num_questions,
        {arm.method: np.mean(pages[arm.key], axis=0).tolist() for arm in arms},
        Patches(
            TASK,
            0,
            pairs,
            {arm.method: patches[arm.key].tolist() for arm in arms},
            {arm.method: texts[arm.key] for arm in arms},
        ),
    )


def _latest(records: Iterable[Kept]) -> Iterable[Kept]:
    return {kept.key: kept for kept in records}.values()


def count_patches(kept: Kept) -> np.ndarray:
    """Return the number of (layer, head) pairs that keep each patch of the first image."""
    start, length = kept.images[0]
    inside = kept.positions[(kept.positions >= start) & (kept.positions < start + length)]
    side = math.isqrt(length)
    return np.bincount(inside - start, minlength=length).reshape(side, side)
