# SPDX-License-Identifier: Apache-2.0
"""Parts `metrics` and `waiting`: what is switched on and off from step to step of one engine.

Two engines differ by more than such a small cost, if only by where their memory lies. One engine
that is switched differs by nothing else. A third state, off again, is the control.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from benchmarks.bench import Bench, steps_to_fill
from benchmarks.gain import burst_line, full_caches
from benchmarks.measurement import Line
from benchmarks.remote import Remote
from benchmarks.scale import BRIEF, BUDGET, COMMON
from benchmarks.workload import Workload
from measure.arm import Arm

ON, OFF, AGAIN = "on", "off", "off, again"
STATES = {ON: True, OFF: False, AGAIN: False}
STEPS_PER_ROUND = 6 * len(STATES)
"""All orders of the states."""
BLOCK_SIZE = 32
"""Of the engine whose requests wait, as of those whose caches are cut while they decode."""
WAIT = 8
"""Tokens that the burst's requests wait for."""
_WARM_UP_STEPS = 8


def metrics(bench: Bench) -> Iterator[Line]:
    """Measure the lines h: decoding with and without metrics.

    One thread: waiting for a second core of a shared machine varies by more than metrics cost.
    """
    scale = bench.scale.metrics
    batch = max(batch for batch, _ in scale.decodes)
    longest = max(load.prompt_tokens for _, load in scale.decodes)
    pool = bench.pool_for(batch, longest, _WARM_UP_STEPS + STEPS_PER_ROUND * scale.rounds)
    args = {**bench.engine_args(BRIEF, pool), "block_size": bench.block_size}
    settings = {"policy": "tgv", "budget": BUDGET}
    args |= {"max_num_seqs": batch, "additional_config": {"kv_eviction": settings}}
    with bench.launch("metrics", BRIEF, [Arm(name="metrics", server=args, threads=1)]) as arms:
        for batch, workload in scale.decodes:
            yield from _decode(bench, arms["metrics"], "metrics", batch, workload)


def waiting(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of requests that wait for their answer before they are evicted."""
    scale = bench.scale.waiting
    batch = max(batch for batch, _ in scale.decodes)
    args = {**bench.engine_args(COMMON, wait_pool(bench)), "block_size": BLOCK_SIZE}
    # The server's wait makes room for the rows of all requests, of the prompt and of the answer.
    wait = -(-batch * (longest_wait(bench) + 256) // 8)
    settings = {"policy": "snapkv", "budget": BUDGET, "defer": wait}
    args["additional_config"] = {"kv_eviction": settings}
    with bench.launch("waiting", COMMON, [Arm(name="waits", server=args)]) as arms:
        engine = arms["waits"]
        engine.ask("touch_query_pool")
        for batch, workload in scale.decodes:
            yield from _decode(bench, engine, "waits", batch, workload)
        yield from _burst(bench, engine)


def _decode(
    bench: Bench,
    engine: Remote,
    what: Literal["metrics", "waits"],
    batch: int,
    workload: Workload,
) -> Iterator[Line]:
    """Compare neighbouring steps with and without, by wall clock and by CPU time."""
    scale = bench.scale.metrics if what == "metrics" else bench.scale.waiting
    letter, defer = ("h", None) if what == "metrics" else ("j", longest_wait(bench))
    steps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(scale.fills):
        bench.say(f"{letter}. decode, {what} switched from step to step, batch {batch}, {number}")
        engine.ask(
            "fill",
            workload=workload,
            batch=batch,
            seed=next(bench.seeds),
            budget=BUDGET,
            attend=False,
            defer=defer,
        )
        engine.ask("decode", steps=_WARM_UP_STEPS)
        for _ in range(scale.rounds):
            found = engine.ask("decode_switched", states=STATES, what=what)
            for name, clocks in found.items():
                for clock, seconds in clocks.items():
                    steps[name, clock] += [batch / each for each in seconds]
        engine.ask("clear")
    for name in (ON, AGAIN):
        for clock, unit in (("wall", "tokens/s"), ("cpu", "tokens/CPU s")):
            title = what if name == ON else f"control, twice without {what}"
            measure = f"{letter}. {title}: decode, batch {batch}, {workload.prompt_tokens} tokens"
            line = Line(measure, unit, "higher", {}, name, against=(OFF,))
            line.neighbours = {state: steps[state, clock] for state in (name, OFF)}
            line.rounds = {n: [statistics.median(each)] for n, each in line.neighbours.items()}
            if name == ON:
                line.require_surely(0.99, "of without")
            yield line


def wait_pool(bench: Bench) -> int:
    """Return the tokens of a pool for all batches that wait, and for the burst."""
    longest = longest_wait(bench)
    waits = bench.scale.waiting.decodes
    pools = [bench.pool_for(batch, load.prompt_tokens, longest) for batch, load in waits]
    return max(*pools, burst_pool(bench)) + BLOCK_SIZE  # one block is never given out


def longest_wait(bench: Bench) -> int:
    """Return the tokens of the answer that a batch waits for: more than it is measured."""
    scale = bench.scale.waiting
    fill = max(steps_to_fill(batch, load.prompt_tokens) for batch, load in scale.decodes)
    return _WARM_UP_STEPS + STEPS_PER_ROUND * scale.rounds + fill


def burst_pool(bench: Bench) -> int:
    """Return the tokens of a pool that holds four requests with their full caches."""
    scale = bench.scale
    return full_caches(scale.burst.prompt_tokens + scale.burst_output, BLOCK_SIZE)


def _burst(bench: Bench, engine: Remote) -> Iterator[Line]:
    """Compare how many requests run at once: evicted after some tokens, and after none."""
    ours, other = f"defer {WAIT}", "defer 0"
    seed = next(bench.seeds)
    results = {}
    for name, defer in ((other, 0), (ours, WAIT)):
        bench.say(f"j. {bench.scale.waiting.burst_requests} requests at once, {name}")
        results[name] = engine.ask(
            "burst",
            workload=bench.scale.burst,
            requests=bench.scale.waiting.burst_requests,
            seed=seed,
            max_tokens=bench.scale.burst_output,
            budget=BUDGET,
            pool_tokens=burst_pool(bench),
            defer=defer,
        )
    requests = bench.scale.waiting.burst_requests
    for key in ("peak_running", "output_tokens_per_second"):
        rounds = {name: [result[key]] for name, result in results.items()}
        line = burst_line(bench, "j", key, requests, rounds, ours=ours, against=(other,))
        if key == "peak_running":
            line.require(0.9, "of")
        yield line
