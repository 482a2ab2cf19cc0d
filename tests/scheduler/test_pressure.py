# SPDX-License-Identifier: Apache-2.0
"""Who shrinks under pressure, when, and how much; who gets its prompt back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.scheduler.double import Double, Job, Setup

SIZE = 4


def job(name: str, num_prompt: int, answer: int, arrival: int = 0, **more: Any) -> Job:
    tokens = random.Random(name)
    prompt = tuple(tokens.randrange(3, 1000) for _ in range(num_prompt))
    return Job(name, prompt, answer, ((1, num_prompt // 2),), arrival=arrival, **more)


def setup(num_blocks: int, **more: Any) -> Setup:
    eviction = {
        "policy": "reach",
        "min_prompt_tokens": 8,
        "budget": 0.1,
        "debug": {"poison": True},
        **more.pop("eviction", {}),
    }
    return Setup(num_blocks, SIZE, max_model_len=512, eviction=eviction, **more)


def totals(double: Double) -> Any:
    return double.scheduler.records.counters


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_cut_while_there_is_room(ahead: bool) -> None:
    jobs = [job(f"r{i}", 80, 40) for i in range(4)]
    double = Double(setup(4 * 30, ahead=ahead))
    double.run(jobs)
    for each in jobs:
        double.assert_answered(each, aborted=False)
    assert not totals(double).cuts
    assert totals(double).requests_whole == 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_waiting_request_makes_others_shrink(ahead: bool) -> None:
    jobs = [job(f"r{i}", 160, 60, arrival=2 * i) for i in range(8)]
    double = Double(setup(3 * 55, ahead=ahead))
    double.run(jobs)
    print(totals(double), double.num_preemptions, double.num_steps, double.worker.num_restored)
    assert totals(double).cuts["pressure"]
    assert not double.num_preemptions
