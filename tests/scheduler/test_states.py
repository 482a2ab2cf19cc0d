# SPDX-License-Identifier: Apache-2.0
"""Any order of arrivals, steps, preemptions, aborts and resets keeps the pool consistent.

A long run: `make test-scheduler EXAMPLES=5000`, or `SCHEDULER_EXAMPLES=5000 python -m pytest -s
tests/scheduler/test_states.py`.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.scheduler import pressure

NUM_EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "220"))
SIZE = 4
LONGEST = 96
BUDGETS = (0.1, 0.4, 1.0, "auto:0.9,min=0.05,max=0.6")


CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"defer": 3, "query_rows": 43},
    {"defer": 9, "query_rows": 60},
    {"decode": {"schedule": [[0, 0.7], [2, 0.5], [9, 0.1]]}, "answer_rows": 5, "query_rows": 45},
    {"decode": {"schedule": [[4, 0.9], [5, 0.3]]}, "answer_rows": 8, "query_rows": 44},
    {"decode": {"max_tokens": 8}, "answer_rows": 6, "defer": 2, "query_rows": 42},
    {"decode": {"max_tokens": 24}, "answer_rows": 40, "query_rows": 50},
    {"decode": {"on_request": True}, "answer_rows": 5, "query_rows": 50},
    {"when": "pressure", "query_rows": 43},
    {"when": "pressure", "defer": 2, "query_rows": 50},
    {"when": "pressure", "defer": 7, "query_rows": 60},
)
"""Settings of waits, later cuts and pressure. One request fits the query pool, seldom two."""

OWN: tuple[dict[str, Any], ...] = (
    {},
    {"kv_eviction_schedule": "none"},
    {"kv_eviction_schedule": "1:0.8,3:0.4,8:0.1"},
    {"kv_eviction_schedule": [[0, 0.5], [6, 0.2]]},
    {"kv_eviction_max_tokens": 12},
    {"kv_eviction": "none"},
    {"kv_eviction_when": "pressure"},
    {"kv_eviction_when": "pressure", "kv_eviction_budget": 0.1},
    {"kv_eviction_when": "always"},
)
"""Options of requests; a server without memory for later cuts refuses some of them."""


class SchedulerMachine(RuleBasedStateMachine):
    """Random events on a `Double`, which recounts all blocks and checks all slots it reads."""

    num_steps = 0
    num_evictions = 0
    num_later = 0
    num_preemptions = 0
    num_errors = 0
    num_under_pressure = 0
    num_restored = 0

    @initialize(
        num_blocks=st.integers(LONGEST // SIZE, 3 * LONGEST // SIZE),
        chunk=st.sampled_from((8, 29, 64)),
        long_prefill=st.sampled_from((0, 5, 8)),
        policy=st.sampled_from(("fcfs", "priority")),
        method=st.sampled_from(("tgv", "h2o")),
        budget=st.sampled_from(BUDGETS),
        prefix_caching=st.booleans(),
        ahead=st.booleans(),
        poison=st.booleans(),
        cuts=st.sampled_from(CUTS),
        states=st.sampled_from((0, 0, 2)),
        retention=st.sampled_from((0, None)),
    )
    def start(
        self,
        num_blocks: int,
        states: int,
        method: str,
        budget: Any,
        poison: bool,
        cuts: dict[str, Any],
        **options: Any,
    ) -> None:
        given = {} if "schedule" in cuts.get("decode", ()) else {"budget": budget}
        if cuts.keys() & {"decode", "when"} and isinstance(budget, str):
            given.update(dict.fromkeys(given, 0.6))
        eviction = {
            "policy": method,
            **given,
            **cuts,
            "min_prompt_tokens": 8,
            "observation_window": 8,
            "debug": {"poison": poison, "evict_at_full_budget": True},
        }
        setup = Setup(
            num_blocks=num_blocks + 3 * states,
            block_size=SIZE,
            max_num_seqs=6,
            max_model_len=LONGEST,
            states=states,
            eviction=eviction,
            **options,
        )
        self.double = Double(setup)
        self.jobs: list[Job] = []
        self.aborted: set[str] = set()

    @rule(
        head=st.integers(0, 2),
        shared=st.integers(0, LONGEST // 2),
        own=st.integers(2, LONGEST // 3),
        answer=st.integers(1, LONGEST // 7),
        image=st.integers(0, 40),
        priority=st.integers(0, 2),
        cuts=st.sampled_from(OWN),
        fails=st.sampled_from(("", "", "", "", "observe", "evict")),
    )
    def arrive(
        self,
        head: int,
        shared: int,
        own: int,
        answer: int,
        image: int,
        priority: int,
        cuts: dict[str, Any],
        fails: str,
    ) -> None:
        name = f"r{len(self.jobs)}"
        tokens = random.Random(head)
        prompt = [tokens.randrange(3, 1000) for _ in range(shared)]
        tokens = random.Random(name)
        prompt += [tokens.randrange(3, 1000) for _ in range(own)]
        length = min(image, len(prompt) - 2)
        job = Job(
            name,
            tuple(prompt),
            answer,
            ((1, length),) if length > 0 else (),
            xargs=cuts,
            priority=priority,
            arrival=len(self.jobs),
            fails=fails,
        )
        self.jobs.append(job)
        self.double.arrive(job)

    @precondition(lambda self: self.double.finished)
    @rule(data=st.data(), own=st.integers(1, 8), answer=st.integers(1, 12))
    def follow(self, data: st.DataObject, own: int, answer: int) -> None:
        """Send a second turn: an earlier prompt, its answer and something new."""
        name = data.draw(st.sampled_from(sorted(self.double.finished)))
        before = self.double.worker.jobs[name]
        prompt = [*before.prompt, *self.double.answers[name], *range(3, 3 + own)]
        if len(prompt) + answer > LONGEST:
            return
        name = f"r{len(self.jobs)}"
        job = Job(name, tuple(prompt), answer, before.images, arrival=len(self.jobs))
        self.jobs.append(job)
        self.double.arrive(job)

    @precondition(lambda self: not self.double.is_idle)
    @rule(turns=st.integers(1, 14))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.double.step()

    @precondition(lambda self: self.double.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempt any request; vLLM would choose the last one."""
        self.double.preempt(data.draw(st.sampled_from(self.double.running)))

    @precondition(lambda self: self.double.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.double.scheduler.requests)))
        self.aborted.add(name)
        self.double.abort(name)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.double.reset_prefix_cache(running)

    def teardown(self) -> None:
        if not hasattr(self, "double"):
            return
        double = self.double
        double.run([])
        for job in self.jobs:
            double.assert_answered(job, job.name in self.aborted)
        cls = SchedulerMachine
        cls.num_steps += double.num_steps
        cls.num_evictions += double.worker.num_evictions
        cls.num_later += double.worker.num_later
        cls.num_preemptions += double.num_preemptions
        cls.num_errors += len(double.errors)
        cls.num_under_pressure += double.scheduler.records.counters.cuts["pressure"]
        cls.num_restored += double.worker.num_restored


def test_no_order_of_events_loses_a_block_or_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_RESTORE_EVERY", 1), ("_RESTORE_AFTER", 3), ("_ROOM", 0.0)):
        monkeypatch.setattr(pressure, name, value)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        SchedulerMachine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            database=None,
            derandomize="SCHEDULER_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
    found = SchedulerMachine
    print(
        f"{found.num_steps} steps, {found.num_evictions} evictions, {found.num_later} of them "
        f"later cuts, {found.num_preemptions} preemptions, {found.num_errors} prompts that failed, "
        f"{found.num_under_pressure} cuts under pressure, {found.num_restored} prompts restored"
    )
    assert found.num_steps > 30 * NUM_EXAMPLES  # more than 6,000, as it is run in CI
    assert found.num_evictions > NUM_EXAMPLES
    assert found.num_later > NUM_EXAMPLES // 4
    assert found.num_preemptions > NUM_EXAMPLES
    assert found.num_errors > NUM_EXAMPLES // 4
    assert found.num_under_pressure > NUM_EXAMPLES // 4
    assert found.num_restored > NUM_EXAMPLES // 50
