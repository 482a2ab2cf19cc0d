# SPDX-License-Identifier: Apache-2.0
"""Requests of one server that are evicted again by their own schedules and ceilings, or not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from tests.scheduler.double import Double, Job, Setup, make_scheduler

SIZE = 16
PROMPT = 200  # twelve full blocks and a tail of eight tokens
ANSWER = 130

ASKED: dict[str, dict[str, Any]] = {
    "default": {},
    "schedule": {"kv_eviction_schedule": "2:0.6,9:0.3,30:0.1"},
    "pairs": {"kv_eviction_schedule": [[0, 0.5], [17, 0.2]]},
    "late": {"kv_eviction_schedule": "40:0.3"},
    "never": {"kv_eviction_schedule": "128:0.3,129:0.2,9000:0.1"},
    "ceiling": {"kv_eviction_budget": 0.25, "kv_eviction_defer": 0, "kv_eviction_max_tokens": 64},
    "high": {"kv_eviction_defer": 5, "kv_eviction_max_tokens": 500, "kv_eviction_budget": 0.5},
    "whole": {"kv_eviction_budget": 1.0, "kv_eviction_defer": 0, "kv_eviction_max_tokens": 240},
    "whole at first": {"kv_eviction_schedule": "9:1,20:0.5"},
    "once": {"kv_eviction_schedule": "none", "kv_eviction_budget": 0.5, "kv_eviction_defer": 3},
    "protected": {
        "kv_eviction_schedule": "2:0.6,9:0.3,30:0.1",
        "kv_eviction_protected_tokens": 40,
    },
    "protected, ceiling": {
        "kv_eviction_budget": 0.1,
        "kv_eviction_defer": 0,
        "kv_eviction_max_tokens": 16,
        "kv_eviction_protected_tokens": 40,
    },
    "all protected": {"kv_eviction_schedule": "2:0.3", "kv_eviction_protected_tokens": 9 * PROMPT},
    "off": {"kv_eviction": "none"},
    "wrong": {"kv_eviction_schedule": "2:0.3,9:0.6"},
}
CUTS: dict[str, list[tuple[int, int]]] = {
    # Tokens of the answer, and blocks of the region, by hand.
    "schedule": [(2, 7), (9, 3), (30, 1)],
    "pairs": [(0, 5), (17, 2)],
    "late": [(40, 3)],
    "never": [(128, 3)],
    "ceiling": [(0, 2), (56, 4), (88, 4), (120, 4)],
    "high": [(5, 5)],
    "whole": [(0, 12), (104, 15)],
    "whole at first": [(9, 12), (20, 5)],
    "once": [(3, 5)],
    # Three blocks for what is protected, and one for the floor.
    "protected": [(2, 7), (9, 4)],
    "protected, ceiling": [(0, 4), (24, 4), (56, 4), (88, 4), (120, 4)],
    "all protected": [],
    "off": [],
}
SERVERS: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "on_request": ({"budget": 0.25, "decode": {"on_request": True}, "answer_rows": 6}, [(0, 2)]),
    "schedule": (
        {"decode": {"schedule": [[4, 0.4], [12, 0.2]]}, "answer_rows": 9},
        [(4, 4), (12, 2)],
    ),
    "ceiling": (
        {"budget": 0.25, "defer": 1, "decode": {"max_tokens": 48}, "answer_rows": 5},
        [(1, 2), (40, 3), (72, 3), (104, 3)],
    ),
}
"""Settings, and the cuts of a request that names none."""


def jobs() -> list[Job]:
    found = []
    for name, xargs in ASKED.items():
        tokens = random.Random(name)
        prompt = tuple(tokens.randrange(3, 1000) for _ in range(PROMPT))
        xargs = {**xargs, "kv_eviction_report": 1}
        found.append(Job(name, prompt, ANSWER, ((4, 100),), xargs=xargs))
    return found


def setup(server: str, num_blocks: int = 256, **options: Any) -> Setup:
    settings = {"policy": "tgv", "min_prompt_tokens": SIZE, "debug": {"check_integrity": True}}
    return Setup(num_blocks, SIZE, eviction={**settings, **SERVERS[server][0]}, **options)


def arrive(double: Double, job: Job) -> Any:
    """Add a request and return its report, which the scheduler goes on to fill.

    None for a request with wrong options. The API server refuses it; the scheduler serves it whole.
    """
    double.arrive(job)
    return double.scheduler.records.reports.get(job.name)


def blocks(report: Any, cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return tokens of the answer and all blocks that are held after each of these cuts."""
    is_ceiling = report.decode is not None and "max_tokens" in report.decode
    found = []
    for index, (at, retained) in enumerate(cuts):
        num_replaced = (PROMPT + at * (is_ceiling and index > 0)) // SIZE
        found.append((at, -(-(PROMPT + at) // SIZE) - num_replaced + retained))
    return found


def assert_cut(server: str, name: str, report: Any) -> None:
    if name == "wrong":
        assert report is None
        return
    wanted = SERVERS[server][1] if name == "default" else CUTS[name]
    found = [(cut.answer_tokens, cut.blocks_after) for cut in report.cuts]
    assert found == blocks(report, wanted), name
    if wanted:
        assert report.kept_text_tokens + report.kept_vision_tokens == report.kept_tokens
        assert (report.vision_tokens, report.kept_vision_tokens) == (1, 1)
        # The double takes a second for each eviction; a preemption repeats some.
        assert set(report.seconds) == {"copy"}
        assert report.seconds["copy"] >= len(wanted)
    else:
        assert report.seconds is None


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
@pytest.mark.parametrize("server", SERVERS)
def test_every_request_of_a_batch_has_its_own_cuts(server: str, ahead: bool) -> None:
    """The cuts that were counted by hand, and those that the request has alone."""
    double = Double(setup(server, ahead=ahead))
    reports = {job.name: arrive(double, job) for job in jobs()}
    double.run([])
    for job in jobs():
        assert double.answers[job.name] == double.worker.expected(job), job.name
        assert_cut(server, job.name, reports[job.name])
        alone = Double(setup(server, ahead=ahead))
        report = arrive(alone, job)
        alone.run([])
        assert report == reports[job.name], job.name
    skipped = double.scheduler.records.counters.requests_skipped
    assert skipped == {"policy_none": 1, "budget_covers_prompt": 1, "invalid_request": 1}


@pytest.mark.parametrize("server", SERVERS)
def test_preemptions_and_aborts_change_no_others_cuts(server: str) -> None:
    """In a pool that is too small for all of them, with chunks and a preemption every few steps."""
    double = Double(setup(server, num_blocks=48, chunk=80, max_num_seqs=5))
    reports = {job.name: arrive(double, job) for job in jobs()}
    rng = random.Random(server)
    aborted = rng.sample(sorted(set(ASKED) - {"ceiling"}), 2)
    steps = 0
    while not double.is_idle:
        double.step()
        steps += 1
        running = [name for name in double.running if len(double.answers[name]) > 1]
        if running and steps % 37 == 0:
            double.preempt(rng.choice(running))
        for name in aborted:
            if name in double.running and len(double.answers[name]) > 20:
                double.abort(name)
    double.assert_empty()
    for job in jobs():
        double.assert_answered(job, job.name in aborted)
        if job.name not in aborted:
            assert_cut(server, job.name, reports[job.name])
    assert steps > 37 * 3


def test_under_a_ceiling_of_its_own_a_request_holds_a_flat_number_of_blocks() -> None:
    double = Double(setup("on_request"))
    long = dataclasses.replace(jobs()[list(ASKED).index("ceiling")], answer=600)
    report = arrive(double, long)
    double.arrive(dataclasses.replace(jobs()[0], answer=600))
    held: dict[str, list[int]] = {"ceiling": [], "default": []}
    while not double.is_idle:
        double.step()
        for name in double.running:
            row = double.scheduler.manager.req_to_blocks[name]
            held[name].append(sum(not block.is_null for block in row))
    assert len(report.cuts) > 15
    most = (64 + 16) // SIZE
    assert max(held["ceiling"][60:]) == most + 1  # and the block that is being written
    assert held["default"][-1] > 30


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, 3 * SIZE + 5, 200])
@pytest.mark.parametrize("ceiling", [None, 96])
def test_a_ceiling_holds_for_prompts_that_are_too_short_for_a_budget(
    length: int, ceiling: int | None
) -> None:
    """They are kept whole until the answer has reached it; those of less than a block always."""
    settings = {**setup("on_request").eviction, "min_prompt_tokens": 100}
    own = {} if ceiling is None else {"kv_eviction_max_tokens": ceiling}
    tokens = random.Random(length)
    prompt = tuple(tokens.randrange(3, 1000) for _ in range(length))
    answers = {"short": 30, "long": 400}
    reports, skipped, held = {}, {}, {}
    for name, answer in answers.items():
        double = Double(Setup(256, SIZE, eviction=settings))
        image = (2, length - 4)
        job = Job(name, prompt, answer, (image,), xargs={**own, "kv_eviction_report": 1})
        reports[name] = arrive(double, job)
        held[name] = 0
        while not double.is_idle:
            double.step()
            if name in double.running:
                row = double.scheduler.manager.req_to_blocks[name]
                held[name] = sum(not block.is_null for block in row)
        skipped[name] = double.scheduler.records.counters.requests_skipped
        assert double.answers[name] == double.worker.expected(job)
    if length == 200:
        assert not any(skipped.values())
        assert {report.cuts[0].answer_tokens for report in reports.values()} == {0}
    elif length < SIZE or ceiling is None:
        assert all(found == {"prompt_too_short": 1} for found in skipped.values())
    else:
        assert skipped == {"short": {"prompt_too_short": 1}, "long": {}}
        first, *later = reports["long"].cuts
        assert (first.answer_tokens, first.blocks_before) == (0, first.blocks_after)
        assert len(later) > 5
        assert {cut.blocks_after for cut in later} == {ceiling // SIZE}
        assert held["long"] <= (ceiling + 32) // SIZE + 1


def test_blocks_of_a_running_request_are_vllms_number() -> None:
    """Ours is found in a shorter way, which every running request takes in every step."""
    double = Double(setup("schedule"))
    for job in jobs()[:6]:
        arrive(double, job)
    num_compared = 0
    for _ in range(30):
        double.step()
        manager = double.scheduler.manager
        for name, num_tokens in itertools.product(double.running, (PROMPT, PROMPT + 40, 400)):
            if manager.compressions[name].cut is None:
                given = name, num_tokens, (), num_tokens, 0, num_tokens
                found = manager.get_num_blocks_to_allocate(*given)
                assert found == FullAttentionManager.get_num_blocks_to_allocate(manager, *given)
                num_compared += 1
    assert num_compared > 50
    double.run([])


@pytest.mark.parametrize("budget", [0.3, "auto:0.9"])
def test_long_prompts_with_auto_in_every_head_need_a_server_whose_budget_it_is(budget: Any) -> None:
    """On a GPU there is memory for 700 tokens. A request's `auto` counts its tokens twice."""
    setup = Setup(
        96,
        chunk=100,
        max_model_len=600,
        prefix_caching=False,
        eviction={"policy": "snapkv", "budget": budget, "min_prompt_tokens": 16},
    )
    double = Double(setup)
    double.scheduler.sets_memory_aside = True
    jobs = [
        Job(f"{method} {length}", tuple(range(3, 3 + length)), 4, ((4, 100),), xargs=xargs)
        for method in ("snapkv", "tgv")
        for length in (350, 351)
        for xargs in [{"kv_eviction": method, "kv_eviction_budget": "auto:0.9"}]
    ]
    double.run(jobs)
    counters = double.scheduler.records.counters
    too_long = {"auto_too_long": 1} if budget == 0.3 else {}
    assert counters.requests_skipped == too_long
    assert counters.requests_evicted == 4 - len(too_long)


def test_a_server_whose_budget_is_few_tokens_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Who gives 10 may mean 10 %."""
    with caplog.at_level("WARNING", "vllm.tgvkv"):
        make_scheduler(Setup(eviction={"policy": "snapkv", "budget": 200}))
        assert "tokens per head" not in caplog.text
        make_scheduler(Setup(eviction={"policy": "snapkv", "budget": 10}))
    assert "budget 10 is 10 tokens per head; for 10 % of the prompt give 0.1" in caplog.text
