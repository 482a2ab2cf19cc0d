# SPDX-License-Identifier: Apache-2.0
"""Random workloads on the real scheduler: each request ends, and no block or token is lost.

A long run: `make test-scheduler WORKLOADS=5000`. `SCHEDULER_WORKLOADS=1 SCHEDULER_FIRST=4711` runs
number 4711 again.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.blocks.admission import PrefillOrder
from vllm_tgvkv.blocks.manager import EvictingManager
from vllm_tgvkv.scheduler import pressure

NUM_WORKLOADS = int(os.environ.get("SCHEDULER_WORKLOADS", "120"))
FIRST = int(os.environ.get("SCHEDULER_FIRST", "0"))
POLICIES = ("tgv", "snapkv", "h2o", "streaming")
BUDGETS = (0.05, 0.1, 0.3, 0.6, 1.0, 16)
GUARDS = ("auto:0.9,min=0.05,max=0.6", "auto:0.5,min=0.3,max=1")


@dataclasses.dataclass
class Workload:
    setup: Setup
    jobs: list[Job]
    aborts: dict[int, str]
    """Requests to abort, by turn."""
    resets: set[int]
    """Turns before which all running requests are preempted and the prefix cache is emptied."""
    preemptions: dict[int, int]
    """Requests to preempt besides, by turn: their places among those that run."""


def make_workload(seed: int) -> Workload:
    rng = random.Random(seed)
    size = rng.choice((4, 16))
    longest = rng.choice((12, 24, 40)) * size
    chunk = rng.choice((size, 3 * size + 1, 8 * size, 64 * size))
    policy, window = rng.choice(POLICIES), rng.choice((1, 2 * size))
    cuts = make_cuts(rng, size, longest, window)
    decode, has_cuts = cuts.get("decode", {}), bool(cuts.keys() & {"decode", "when"})
    # `auto` guards attention, which `streaming` does not compute, and has no later cuts.
    guarded = () if policy == "streaming" or decode or "when" in cuts else GUARDS
    setup = Setup(
        # Room for one request at a time up to room for all.
        num_blocks=int((longest // size) * rng.choice((1.0, 1.0, 1.1, 1.3, 3))) + rng.randint(1, 6),
        block_size=size,
        max_num_seqs=min(chunk, rng.choice((1, 3, 8, 64))),
        chunk=chunk,
        long_prefill=rng.choice((0, 0, size + 1, 2 * size)),
        max_model_len=longest,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        prefix_caching=rng.random() < 0.7,
        ahead=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.0, 0.05)),
        encoder_budget=rng.choice((longest, 4 * longest)),
        eviction={
            "policy": policy,
            **({} if "schedule" in decode else {"budget": rng.choice((*BUDGETS, *guarded))}),
            "min_prompt_tokens": rng.choice((size, size, 6 * size)),
            "observation_window": window,
            "sinks": rng.choice((0, 4)),
            "debug": {"poison": rng.random() < 0.3, "evict_at_full_budget": rng.random() < 0.3},
            **cuts,
        },
    )
    heads = [tuple(rng.randrange(3, 1000) for _ in range(longest)) for _ in range(3)]
    gap = rng.choice((0.0, 0.3, 2.0))
    jobs = [
        make_job(rng, f"r{i}", heads, size, longest, int(i * gap * rng.random()), has_cuts)
        for i in range(rng.randint(2, 24))
    ]
    aborts = {rng.randrange(60): job.name for job in jobs if rng.random() < 0.1}
    resets = {rng.randrange(80)} if rng.random() < 0.2 else set()
    preemptions = {rng.randrange(120): rng.randrange(64) for _ in range(rng.choice((0, 1, 6)))}
    # vLLM refuses to reset a cache whose blocks are freed later.
    setup = dataclasses.replace(setup, reads=not resets and rng.random() < 0.5)
    return Workload(with_drafts(setup, rng), jobs, aborts, resets, preemptions)


def with_drafts(setup: Setup, rng: random.Random) -> Setup:
    """Return the setup with a draft model, whose blocks one request has room for, or as it is."""
    drafts, lookahead = rng.choice((0, 0, 0, 1, 3)), rng.choice((1, 3))
    if not drafts:
        return setup
    more = -(-setup.max_model_len // (drafts * setup.block_size))
    return dataclasses.replace(
        setup, num_blocks=setup.num_blocks + more, drafts=drafts, lookahead=lookahead, reads=False
    )


def make_pressed(seed: int) -> Workload:
    """Return bursts of requests on a server that holds a few of them whole."""
    rng = random.Random(seed)
    size = rng.choice((4, 16))
    longest, chunk = rng.choice((24, 40)) * size, rng.choice((3 * size + 1, 8 * size, 64 * size))
    setup = Setup(
        num_blocks=int((longest // size) * rng.uniform(1, 5)) + 1,
        block_size=size,
        max_num_seqs=rng.choice((4, min(chunk, 64))),
        chunk=chunk,
        max_model_len=longest,
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        prefix_caching=rng.random() < 0.8,
        ahead=rng.random() < 0.5,
        watermark=rng.choice((0.0, 0.0, 0.05)),
        states=rng.choice((0, 0, 0, 2)),
        eviction={
            "policy": rng.choice(("reach", "reach", "snapkv", "streaming")),
            "when": "pressure",
            "budget": rng.choice((0.05, 0.2, 0.4)),
            "text_only": "evict",
            "min_prompt_tokens": size,
            "debug": {"poison": rng.random() < 0.5, "check_integrity": True},
        },
    )
    if setup.eviction["policy"] == "reach" and rng.random() < 0.5:
        # Room for all prompts, or for one.
        gib = rng.choice((4, 1)) * (longest // size) * 128 * size / 2**30
        setup.eviction["recall"] = {"every": rng.choice((1, 3, 8)), "gib": gib}
    setup = dataclasses.replace(setup, num_blocks=setup.num_blocks + 8 * setup.states)
    heads = [tuple(rng.randrange(3, 1000) for _ in range(longest)) for _ in range(2)]
    jobs = []
    for i in range(rng.randint(4, 30)):
        num_prompt = rng.randint(longest // 4, longest - 8)
        shared = rng.choice((0, 0, 0, num_prompt // 2, num_prompt))
        prompt = rng.choice(heads)[:shared]
        prompt += tuple(rng.randrange(3, 1000) for _ in range(num_prompt - shared))
        options = {"kv_eviction_when": "always"} if rng.random() < 0.1 else {}
        answer = rng.randint(1, longest - num_prompt)
        job = Job(f"r{i}", prompt, answer, xargs=options, arrival=rng.choice((0, 40, 90)) + i)
        jobs.append(dataclasses.replace(job, priority=rng.randrange(3)))
    aborts = {rng.randrange(60): job.name for job in jobs if rng.random() < 0.05}
    preemptions = {rng.randrange(120): rng.randrange(64) for _ in range(rng.choice((0, 0, 3)))}
    resets = {rng.randrange(80)} if rng.random() < 0.1 else set()
    has_one_group = not (setup.window or setup.states)
    setup = dataclasses.replace(setup, reads=has_one_group and not resets and rng.random() < 0.5)
    return Workload(with_drafts(setup, rng), jobs, aborts, resets, preemptions)


def make_steps(rng: random.Random, first: int, last: int, most: int) -> list[tuple[int, float]]:
    """Return a schedule with a random number of cuts between these tokens of the answer."""
    steps = sorted(rng.sample(range(first, last), rng.randint(1, most)))
    return list(
        zip(steps, sorted((rng.uniform(0.05, 1) for _ in steps), reverse=True), strict=True)
    )


def make_cuts(rng: random.Random, size: int, longest: int, window: int) -> dict[str, Any]:
    """Return settings of waits and later cuts, with few rows in the query pool."""
    defer, rows = rng.choice((0, 0, 1, 5, 2 * size)), rng.choice((1, 7, 3 * size))
    ceiling = rng.choice((size, 2 * size + 1, longest // 4))
    later = make_steps(rng, defer + 1, defer + 6 * size, 3)
    steps = [(defer, rng.uniform(later[0][1], 1)), *later]
    found: dict[str, Any] = rng.choice(
        (
            {"defer": defer},
            {"decode": {"schedule": [list(step) for step in steps]}},
            {"defer": defer, "decode": {"on_request": True}},
            {"defer": defer, "decode": {"max_tokens": ceiling}},
            {"defer": defer, "when": "pressure"},
            {"defer": min(defer, size), "when": "pressure"},
        )
    )
    found["answer_rows"] = rows
    if rng.random() < 0.7:
        found["query_rows"] = max(window + 32 + defer, rows) + rng.choice((0, 3, 40))
    return found


def make_options(rng: random.Random, size: int, longest: int, has_cuts: bool) -> dict[str, Any]:
    """Return a request's options.

    Some requests have a schedule or a ceiling, or none of the server's. Some are refused: first
    waits that are too long, `auto` with later cuts.
    """
    options = {
        "kv_eviction": "none" if rng.random() < 0.15 else None,
        "kv_eviction_budget": rng.choice((0.05, 0.5, 1.0)) if rng.random() < 0.3 else None,
        "kv_eviction_report": 1 if rng.random() < 0.3 else None,
        "kv_eviction_defer": rng.choice((0, 3, 8)) if rng.random() < 0.2 else None,
    }
    if has_cuts and rng.random() < 0.3:
        options["kv_eviction_when"] = rng.choice(("pressure", "always"))
    found = {name: value for name, value in options.items() if value is not None}
    if rng.random() < 0.1:
        found["kv_eviction_protected_tokens"] = rng.choice((1, 2 * size + 1, longest))
    kind = rng.choice(("server", "server", "none", "schedule", "ceiling", "ceiling"))
    if not has_cuts or kind == "server":
        return found
    if kind == "none":
        found[rng.choice(("kv_eviction_schedule", "kv_eviction_max_tokens"))] = "none"
    if kind == "schedule":
        steps = make_steps(rng, 0, 2 * size, 4)
        found["kv_eviction_schedule"] = ",".join(f"{n}:{budget}" for n, budget in steps)
        found.pop("kv_eviction_budget", None)
        found.pop("kv_eviction_defer", None)
        found.pop("kv_eviction_when", None)
    if kind == "ceiling":
        found.pop("kv_eviction_when", None)
        found["kv_eviction_max_tokens"] = rng.choice((size, 3 * size - 1, longest // 3))
    return found


def make_job(
    rng: random.Random,
    name: str,
    heads: list[tuple[int, ...]],
    size: int,
    longest: int,
    arrival: int,
    has_cuts: bool,
) -> Job:
    """Return a request, often with images and a prefix that others share."""
    num_prompt = rng.randint(2, longest - 2)
    shared = rng.choice((0, 0, num_prompt // 2, num_prompt))
    own = tuple(rng.randrange(3, 1000) for _ in range(num_prompt - shared))
    answer = rng.choice((1, 2, rng.randint(1, longest - num_prompt)))
    images: list[tuple[int, int]] = []
    start = 0
    while rng.random() < 0.6 and num_prompt - start > 4:
        offset = rng.randint(start, num_prompt - 3)
        images.append((offset, rng.randint(1, num_prompt - 1 - offset)))
        start = sum(images[-1])
    return Job(
        name,
        rng.choice(heads)[:shared] + own,
        answer,
        tuple(images),
        max_tokens=rng.choice((0, longest - num_prompt)),
        xargs=make_options(rng, size, longest, has_cuts),
        priority=rng.randrange(3),
        arrival=arrival,
        fails=rng.choice(("observe", "evict")) if rng.random() < 0.08 else "",
    )


def run(workload: Workload, seed: int) -> Double:
    """Serve a workload; `Double` checks all blocks and slots after every step."""
    double = Double(workload.setup, seed)
    jobs = sorted(workload.jobs, key=lambda job: job.arrival)
    left = list(jobs)
    # Enough to run one after the other, with a few preemptions each.
    patience = 200 + 12 * sum(
        job.answer + len(job.prompt) // min(workload.setup.chunk, workload.setup.block_size) + 2
        for job in jobs
    )
    for turn in itertools.count():
        assert turn < patience, f"{sorted(double.scheduler.requests)} starve"
        while left and left[0].arrival <= turn:
            double.arrive(left.pop(0))
        if (name := workload.aborts.get(turn)) in double.scheduler.requests:
            double.abort(name)
        if turn in workload.preemptions and (running := double.running):
            double.preempt(running[workload.preemptions[turn] % len(running)])
        if turn in workload.resets:
            double.reset_prefix_cache()
        if not left and double.is_idle:
            break
        double.step()
    double.assert_empty()
    for job in jobs:
        double.assert_answered(job, job.name in workload.aborts.values())
    if workload.setup.policy == "fcfs":
        order = [job.name for job in jobs if job.name in set(double.admitted)]
        assert double.admitted == order, "requests were admitted out of order"
    return double


@pytest.fixture(autouse=True)
def restored_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_RESTORE_EVERY", 1), ("_RESTORE_AFTER", 3), ("_ROOM", 0.0)):
        monkeypatch.setattr(pressure, name, value)


def run_all(make: Callable[[int], Workload], number: int) -> Counter[str]:
    """Run workloads with the seeds 0, 1, ...; return the numbers of events in all of them."""
    totals: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + number):
        workload = make(seed)
        try:
            double = run(workload, seed)
        except BaseException as error:
            raise AssertionError(f"workload {seed}: {workload.setup}") from error
        totals["evictions"] += double.worker.num_evictions
        totals["later cuts"] += double.worker.num_later
        totals["preemptions"] += double.num_preemptions
        totals["errors"] += len(double.errors)
        totals["under pressure"] += double.scheduler.records.counters.cuts["pressure"]
        totals["restored"] += double.worker.num_restored
        totals["hits"] += sum(cached > 0 for cached in double.worker.num_cached.values())
        if not (seed + 1) % 500:
            print(f"{seed + 1} workloads: {dict(totals)}", flush=True)
    return totals


def test_random_workloads_end_and_leave_nothing_behind() -> None:
    totals = run_all(make_workload, NUM_WORKLOADS)
    assert (
        totals["evictions"] > 2 * NUM_WORKLOADS
    )  # some requests ask for what their server refuses
    assert totals["later cuts"] > NUM_WORKLOADS // 2
    assert totals["preemptions"] > NUM_WORKLOADS // 2
    assert totals["errors"] > NUM_WORKLOADS // 20


def test_random_workloads_under_pressure_end_and_leave_nothing_behind() -> None:
    """Half as many: their requests are more and longer."""
    number = (NUM_WORKLOADS + 1) // 2
    totals = run_all(make_pressed, number)
    assert totals["under pressure"] > 3 * number
    assert totals["later cuts"] > number // 2
    assert totals["restored"] > number // 8
    assert totals["preemptions"] > number // 2


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 1000) for _ in range(length))


def settings(policy: str = "tgv", budget: Any = 0.2, **more: Any) -> dict[str, Any]:
    return {"policy": policy, "budget": budget, "min_prompt_tokens": 16, **more}


def test_a_preempted_request_is_evicted_again_however_long_its_answer_is() -> None:
    """Prompt, answer and fresh blocks together exceed the pool; they never exist together."""
    setup = Setup(14, eviction=settings(budget=0.5), chunk=512, max_model_len=224)
    double = Double(setup)
    job = Job("r", prompt(1, 128), 90, ((4, 100),))
    double.arrive(job)
    for _ in range(85):
        double.step()
    double.preempt("r")
    double.run([])
    assert double.worker.num_evictions == 2
    assert double.answers["r"] == double.worker.expected(job)
    assert not double.scheduler.records.counters.requests_skipped


def test_blocks_of_a_withdrawn_chunk_are_nobodys_prefix() -> None:
    """With priorities a request may be preempted in the same step that scheduled its chunk.

    vLLM has entered the chunk's blocks in its prefix cache by then, and stock 0.32 reads them.
    """
    setup = Setup(
        20, eviction=settings(), policy="priority", chunk=100, long_prefill=64, max_model_len=320
    )
    double = Double(setup)
    low = Job("low", prompt(1, 300), 4, ((4, 200),), priority=5)
    high = Job("high", prompt(2, 15), 60, ((4, 8),), xargs={"kv_eviction": "none"})
    double.arrive(low)
    double.step()
    double.arrive(high)
    double.run([])
    assert double.num_preemptions
    assert double.answers["low"] == double.worker.expected(low)


def test_a_withdrawn_last_chunk_gives_its_fresh_blocks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    withdrawn = []
    pop = EvictingManager.pop_blocks_for_free

    def pop_and_look(manager: EvictingManager, name: str) -> Any:
        compression = manager.compressions.get(name)
        withdrawn.extend(compression.reserved if compression else ())
        return pop(manager, name)

    monkeypatch.setattr(EvictingManager, "pop_blocks_for_free", pop_and_look)
    for num_blocks, length in itertools.product(range(18, 22), (14, 15, 16)):
        setup = Setup(
            num_blocks,
            eviction=settings(budget=0.4),
            policy="priority",
            chunk=100,
            long_prefill=64,
            max_model_len=320,
        )
        double = Double(setup)
        double.arrive(Job("low", prompt(1, 220), 4, ((4, 200),), priority=5))
        double.step()
        double.arrive(Job("high", prompt(2, length), 80, xargs={"kv_eviction": "none"}))
        double.run([])
    assert withdrawn


def test_what_a_preemption_undid_takes_no_blocks_from_a_second_eviction() -> None:
    """The first outcome arrives after the second eviction, whose region may start equally."""
    setup = Setup(64, eviction=settings(budget="auto:0.9,min=0.1,max=1"), ahead=True)
    double = Double(setup)
    double.arrive(Job("r", prompt(1, 160), 20, ((4, 100),)))
    double.schedule()
    double.reset_prefix_cache()
    double.schedule()
    manager = double.scheduler.manager
    first_block = manager.req_to_blocks["r"][0].block_id
    _, result = double._in_flight[0]
    (outcome,) = result.outcomes
    outcome = dataclasses.replace(outcome, first_block=first_block, num_retained=1)
    result.outcomes = [outcome]
    double.update()
    assert manager.compressions["r"].num_retained > 1
    double.run([])
    assert double.scheduler.records.counters.requests_evicted == 1


def test_a_replay_does_not_take_its_prompt_whole_from_the_cache() -> None:
    """A twin that is not evicted caches the prompt and answer of a preempted request.

    A method without observation rows allows any hit. One that reaches behind the prompt would leave
    no chunk that ends with the prompt, so no step for the eviction.
    """
    setup = Setup(16, eviction=settings("streaming", 0.5), chunk=64, max_model_len=256)
    double = Double(setup)
    image = ((4, 40),)
    double.arrive(Job("twin", prompt(1, 64), 60, image, xargs={"kv_eviction": "none"}))
    for _ in range(10):
        double.step()
    double.arrive(Job("evicted", prompt(1, 64), 60, image))
    while not double.worker.num_evictions:
        double.step()
    double.step()
    request = double.scheduler.requests["evicted"]
    twin = double.scheduler.requests["twin"]
    assert twin.num_computed_tokens >= request.num_prompt_tokens
    # Give it the twin's answer, which fills more than a block.
    answered = list(twin.output_token_ids)
    double.preempt("evicted")
    request._output_token_ids.clear()
    del request._all_token_ids[64:], request.block_hashes[:]
    request.append_output_token_ids(answered)
    double.schedule()
    assert double.worker.num_evictions == 2


# -- admission --------------------------------------------------------------------------


@dataclasses.dataclass
class Load:
    """Totals of a saturated server."""

    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_running: float
    """Mean while requests wait."""

    @property
    def cost(self) -> float:
        """Time in empty steps; a full step takes twice as long as an empty one."""
        return self.num_steps + self.num_tokens / 512


def saturate(setup: Setup, seed: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
    """Serve forty requests that arrive at once."""
    rng = random.Random(seed)
    double = Double(setup, check=False)
    for i in range(40):
        length = rng.randint(*prompts)
        images = ((4, length - 40),)
        double.arrive(Job(f"r{i}", prompt(i, length), rng.randint(*answers), images))
    running = []
    while not double.is_idle:
        double.step()
        if double.scheduler.waiting:
            running.append(len(double.running))
    return Load(
        double.num_steps,
        double.num_tokens,
        double.num_preemptions,
        sum(running) / max(len(running), 1),
    )


def server(eviction: dict[str, Any] | None, long_prefill: int = 0, num_blocks: int = 256) -> Setup:
    return Setup(
        num_blocks,
        chunk=512,
        long_prefill=long_prefill,
        max_model_len=2048,
        prefix_caching=False,
        encoder_budget=8192,
        eviction=eviction,
    )


def without_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit as vLLM does: every request that fits now, even if other prefills need the blocks."""
    monkeypatch.setattr(PrefillOrder, "admit", lambda *_: None)


def test_running_requests_count_by_what_they_hold() -> None:
    """At a budget of 0.1 several times as many run, without more preemptions."""
    shape = (1, (600, 1000), (20, 60))
    stock = saturate(server(None), *shape)
    evicting = saturate(server(settings(budget=0.1)), *shape)
    assert evicting.num_running > 3 * stock.num_running
    assert evicting.cost < 0.5 * stock.cost
    assert evicting.num_preemptions < stock.num_preemptions


@pytest.mark.parametrize("long_prefill", [0, 64, 128])
def test_prefills_do_not_take_each_others_blocks(
    long_prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is computed again with several prompts in flight, and one at a time is no slower."""
    costs, tokens = [], []
    shapes = [(1, (600, 1000), (20, 60)), (2, (100, 1800), (10, 100))]
    for _ in range(2):
        loads = [
            saturate(server(settings(budget=0.1), long_prefill), seed, *shape)
            for seed, *shape in shapes
        ]
        costs.append(sum(load.cost for load in loads))
        tokens.append(sum(load.num_tokens for load in loads))
        without_order(monkeypatch)
    assert costs[0] <= 1.01 * costs[1]
    if long_prefill:
        assert tokens[0] < 0.9 * tokens[1]


def test_a_prefill_waits_for_blocks_that_an_earlier_one_is_about_to_give_back() -> None:
    """If asked for one more block, vLLM would preempt the earlier one of equal priority.

    The two could preempt each other forever.
    """
    setup = Setup(
        39,
        eviction=settings(budget=0.6),
        policy="priority",
        chunk=128,
        long_prefill=17,
        prefix_caching=False,
    )
    images = ((4, 200),)
    double = Double(setup)
    double.run([Job("a", prompt(3, 306), 9, images), Job("b", prompt(4, 285), 9, images)])
    assert double.worker.num_evictions == 2
    assert not double.num_preemptions


def test_a_prefill_that_waits_for_the_encoder_is_not_waited_for() -> None:
    """The second holds the encoder's cache and the first the blocks: one has to continue."""
    setup = Setup(28, eviction=settings(), chunk=64, long_prefill=32, encoder_budget=160)
    jobs = [
        Job("first", prompt(1, 320), 4, ((100, 160),)),
        Job("second", prompt(2, 320), 4, ((1, 160),)),
    ]
    double = Double(setup)
    double.run(jobs)
    assert double.worker.num_evictions >= 2
