# SPDX-License-Identifier: Apache-2.0
"""Random workloads of a model in which some layers have a sliding window.

Their blocks come from the same pool. Blocks out of a window go back while a prompt is computed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.scheduler.double import BLOCK_BYTES, Double, Job, Setup, make_scheduler
from tests.scheduler.test_simulation import (
    Workload,
    make_workload,
    run_all,
    saturate,
    server,
    settings,
)
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError


def with_window(workload: Workload, seed: int) -> Workload:
    """Return a workload in which a request also needs blocks for a window.

    The pool has room for one request at a time and more.
    """
    rng, setup = random.Random(f"window of {seed}"), workload.setup
    window = rng.choice((2, 1, 5)) * setup.block_size - rng.choice((0, 1))
    in_flight = setup.chunk * (2 if setup.ahead else 1)
    most = -(-min(window - 1 + in_flight, setup.max_model_len) // setup.block_size) + 1
    bigger = replace(setup, window=window, drafts=0, num_blocks=setup.num_blocks + most)
    return replace(workload, setup=bigger)


def test_random_workloads_with_windows_end_and_leave_nothing_behind() -> None:
    """Every block of both groups is recounted after each step."""
    totals = run_all(lambda seed: with_window(make_workload(seed), seed), 30)
    assert totals["evictions"] > 60
    assert totals["later cuts"] > 8
    assert totals["preemptions"] > 15


def test_a_ceiling_below_one_block_of_the_model_is_refused() -> None:
    """vLLM may have made the blocks longer than `--block-size`."""
    settings = {"policy": "snapkv", "decode": {"max_tokens": 63}}
    with pytest.raises(UnsupportedByEvictionError, match="63 and blocks of 64 tokens"):
        make_scheduler(Setup(block_size=64, eviction=settings))
    make_scheduler(Setup(block_size=32, eviction=settings))


def test_a_request_fits_with_its_window_or_keeps_everything() -> None:
    """Behind the cut it holds what it retained, its tail, and the blocks of its window."""
    size, blocks = 16, 20
    settings = {"policy": "snapkv", "budget": 0.25, "min_prompt_tokens": size}
    job = Job("a", tuple(range(3, 3 + blocks * size)), answer=4)
    # The whole prompt, five blocks to copy into; the window, a step, and a block they may cut.
    needed = blocks + 5 + (2 + 2 + 1)
    for pool, evictions in ((needed, 1), (needed - 1, 0)):
        setup = Setup(
            num_blocks=pool,
            max_num_seqs=1,
            chunk=2 * size,
            window=2 * size + 1,
            prefix_caching=False,
            eviction={**settings, "text_only": "evict"},
        )
        double = Double(setup)
        held = []
        double.arrive(job)
        while not double.is_idle:
            double.step()
            held.append(setup.num_blocks - double.num_free)
        assert double.worker.num_evictions == evictions
        skipped = double.scheduler.records.counters.requests_skipped
        assert skipped == ({} if evictions else {"pool_too_small": 1})
        assert double.answers["a"] == double.worker.expected(job)
        # Token 321 opens a block; of the window's 33 tokens three blocks remain.
        assert [n for n in held if n][-1] == (5 if evictions else blocks) + 1 + 3
        double.assert_empty()


@pytest.mark.parametrize("window", [50, 256])
def test_prompts_that_prefill_together_leave_each_other_room_for_windows(window: int) -> None:
    """No prompt is computed twice. Answers are so short that hardly one opens a block."""
    loads = itertools.product((64, 128), (False, True))
    for seed, (long_prefill, ahead) in enumerate(loads):
        setup = server(settings(budget=0.1), long_prefill)
        setup = replace(setup, window=window, ahead=ahead, block_size=8, num_blocks=470)
        load = saturate(setup, seed, (100, 1800), (2, 2))
        assert not load.num_preemptions, (long_prefill, ahead)
        assert load.num_running > 2


def test_a_prefill_waits_for_the_windows_of_an_earlier_one() -> None:
    """Of 28 blocks each takes 10 for its prompt, and up to 8 for its window."""
    setup = Setup(
        28,
        eviction=settings(budget=0.3),
        chunk=64,
        long_prefill=32,
        max_model_len=224,
        prefix_caching=False,
        window=80,
    )
    double = Double(setup)
    jobs = [Job(name, tuple(range(3, 3 + 150)), 4, ((4, 100),)) for name in "ab"]
    double.run(jobs)
    assert double.worker.num_evictions == 2
    assert not double.num_preemptions


def test_blocks_that_another_request_shares_are_not_given_back() -> None:
    """The pool has as many more free blocks as the report tells, with and without a twin."""
    size = 16
    own = {"kv_eviction_report": 1, "kv_eviction_budget": 0.25}
    prompt = tuple(range(3, 3 + 20 * size + 5))
    found = []
    for has_twin, window in itertools.product((False, True), (0, 50)):
        free, given_back = [], 0
        for xargs in (own, {"kv_eviction": "none"}):
            double = Double(Setup(128, size, window=window, eviction=settings("streaming")))
            if has_twin:
                twin = Job("twin", prompt, 30, ((4, 100),), xargs={"kv_eviction": "none"})
                double.arrive(twin)
                double.step()
            double.arrive(Job("r", prompt, 9, ((4, 100),), xargs=xargs))
            report = double.scheduler.records.reports.get("r")
            for _ in range(4):
                double.step()
            assert "r" in double.running
            free.append(double.num_free)
            if report is not None:
                memory = report.memory
                given_back = memory.given_back // BLOCK_BYTES
                windows = memory.windows // BLOCK_BYTES
                assert windows == (4 if window else 0)  # the last 49 tokens of 325
                assert memory.before - memory.after == 16 * BLOCK_BYTES
                assert double.scheduler.manager.others.held(["r"]) == (windows, 0, 0)
        assert free[0] - free[1] == given_back
        found.append(given_back)
    assert found[0] == found[1] == 16
    assert found[2] < 0  # the region is the request's own, and the prompt is still the twin's
