# SPDX-License-Identifier: Apache-2.0
"""A hybrid's scheduler: some groups of layers have a state for each request, in the same pool.

With prefix caching, the state at the end of a chunk is cached if a block ends there. With a draft
model, requests have blocks for the states after drafts. Each step
starts from the state of the last one, or from a cached one, and `WorkerDouble` checks whose it is.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.double import Double, Job, Setup
from tests.scheduler.test_simulation import Workload, make_workload, prompt, run_all, settings
from vllm_tgvkv.scheduler import scheduler

SIZE = 16


def with_states(workload: Workload, seed: int) -> Workload:
    """Return a workload with states, in a pool with room for one request and its states.

    Half of its requests ask what an earlier one asked.
    """
    rng, setup = random.Random(f"states of {seed}"), workload.setup
    num_groups, num_steps = rng.choice((1, 3)), 2 if setup.ahead else 1
    most = num_groups * (1 + setup.lookahead + setup.prefix_caching * num_steps)
    sparse = 2 * setup.block_size * max(setup.drafts, 1)
    setup = replace(
        setup,
        states=num_groups,
        retention=rng.choice((0, None, sparse)) if setup.prefix_caching else None,
        num_blocks=setup.num_blocks + most,
    )
    jobs: list[Job] = []
    for job in workload.jobs:
        if jobs and rng.random() < 0.5:
            asked = rng.choice(jobs)
            answer = min(job.answer, setup.max_model_len - len(asked.prompt))
            job = replace(
                job, prompt=asked.prompt, images=asked.images, answer=answer, max_tokens=0
            )
        jobs.append(job)
    return replace(workload, setup=setup, jobs=jobs)


def test_random_workloads_with_states_end_and_leave_nothing_behind() -> None:
    """Each step finds its request's state, in its own blocks or in the prefix cache."""
    totals = run_all(lambda seed: with_states(make_workload(seed), seed), 40)
    assert totals["evictions"] > 40
    assert totals["later cuts"] > 15
    assert totals["preemptions"] > 15
    assert totals["hits"] > 40


def hybrid(**fields: Any) -> Double:
    """Return a server of a model with states and windows; every state that can be cached is."""
    given: dict[str, Any] = {"eviction": settings(), "retention": None, "num_blocks": 200}
    return Double(Setup(**{"block_size": SIZE, "states": 2, "window": 40, **given, **fields}))


def test_blocks_that_leave_little_choice_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones, and a budget that keeps too few for layers to differ."""
    lines: list[str] = []

    def warning(message: str, *values: Any) -> None:
        if "give 0." not in (line := message % values):  # a budget that may have meant a percentage
            lines.append(line)

    monkeypatch.setattr(scheduler.logger, "warning", warning)
    few = "prompts of fewer than {} tokens"
    for size, fields, wanted in (
        (256, {"policy": "snapkv"}, []),
        (528, {"policy": "snapkv"}, ["blocks have 528 tokens", "--block-size 16"]),
        (16, {"policy": "tgv", "budget": 0.05}, [few.format(640)]),
        (16, {"policy": "tgv", "budget": 0.05, "floor_pages": 2}, [few.format(960)]),
        (16, {"policy": "tgv", "budget": 31}, ["in every prompt"]),
        (16, {"policy": "tgv", "budget": 32}, []),
        (16, {"policy": "tgv", "budget": 0.05, "floor_pages": 0}, []),
        (16, {"policy": "tgv", "budget": 0.05, "min_prompt_tokens": 640}, []),
    ):
        hybrid(block_size=size, max_model_len=8 * size, eviction=settings(**fields))
        assert len(lines) == bool(wanted), fields
        assert all(part in lines[0] for part in wanted)
        lines.clear()


def cached_ends(double: Double, job: Job) -> list[set[int]]:
    """Return by group the ends of blocks of a job and its answer that are in the prefix cache."""
    tokens = (*job.prompt, *double.answers[job.name])
    hashes = replace(job, prompt=tokens).request(SIZE).block_hashes
    groups = range(len(double.scheduler.kv_cache_config.kv_cache_groups))
    return [
        {
            (i + 1) * SIZE
            for i, block_hash in enumerate(hashes)
            if double.pool.get_cached_block(block_hash, [group])
        }
        for group in groups
    ]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("xargs", [{}, {"kv_eviction_defer": 20}, {"kv_eviction": "none"}])
def test_no_block_behind_a_cut_is_cached_in_any_group(xargs: dict[str, Any], ahead: bool) -> None:
    """Also if the request is preempted and computes its answer again, over the evicted cache."""
    double = hybrid(ahead=ahead)
    first = Job("first", prompt(1, 100), 90, ((4, 80),), xargs=xargs)
    double.arrive(first)
    while len(double.answers["first"]) < 70:
        double.step()
    double.preempt("first")
    double.run([])
    cuts = double.worker.planned.get("first")
    last = min(cuts) if cuts else 189
    ends = cached_ends(double, first)
    assert all(ends)
    assert max(end for group in ends for end in group) == last // SIZE * SIZE


def test_a_state_over_an_evicted_cache_is_nobodys_prefix() -> None:
    """Even if another request has cached keys of the same tokens, computed over the whole cache."""
    double = hybrid()
    first = Job("first", prompt(1, 100), 90, ((4, 80),))
    double.run([first])
    turns = (*first.prompt, *double.answers["first"])
    whole = {"kv_eviction": "none"}
    double.run([Job("second", turns, 2, first.images, xargs=whole)])
    full, _, *states = cached_ends(double, first)
    assert full == set(range(SIZE, len(turns), SIZE))
    # Its chunks end there: a second ask takes over the last state, a longer one as well.
    assert states == [{80, 96, 176}] * 2
    for name, length in (("third", 170), ("fourth", 150)):
        job = Job(name, (*turns[:length], 3, 4), 10, first.images, xargs=whole)
        double.run([job])
        assert double.answers[name] == double.worker.expected(job)


def test_a_hit_ends_with_a_state_before_the_first_row_that_votes() -> None:
    """A later state of the same prompt is passed over, and the same request hits all of it."""
    double = hybrid(eviction=settings(policy="snapkv", observation_window=24), chunk=64)
    hits = {}
    for name, xargs in (
        ("cold", {}),
        ("warm", {}),
        ("whole", {"kv_eviction": "none"}),
        ("again", {}),
    ):
        job = Job(name, prompt(1, 230), 20, ((4, 100),), xargs=xargs)
        double.run([job])
        assert double.answers[name] == double.worker.expected(job)
        hits[name] = double.worker.num_cached[name]
    # Rows from 206 on vote; the last block ends at 224.
    assert hits == {"cold": 0, "warm": 192, "whole": 224, "again": 192}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_fits_with_its_states_or_keeps_everything(ahead: bool) -> None:
    """It holds the state that each step in flight starts from, and the last one's result."""
    blocks, groups = 20, 3
    eviction = settings(policy="snapkv", budget=0.25, text_only="evict")
    job = Job("a", tuple(range(3, 3 + blocks * SIZE)), answer=40)
    # The whole prompt, five blocks to copy into, and the states.
    needed = blocks + 5 + groups * (3 if ahead else 2)
    for pool, evictions in ((needed, 1), (needed - 1, 0)):
        setup = Setup(pool, max_num_seqs=1, chunk=SIZE, states=groups, eviction=eviction)
        double = Double(replace(setup, ahead=ahead))
        most = 0
        double.arrive(job)
        while not double.is_idle:
            double.step()
            most = max(most, pool - double.num_free)
        assert double.worker.num_evictions == evictions
        assert double.num_preemptions == 0
        double.assert_empty()
