# SPDX-License-Identifier: Apache-2.0
"""Parts `metrics` and `waiting`: what is switched on and off from step to step of one engine.

Two engines differ by more than such a small cost, if only by where their memory lies. One engine
that is switched differs by nothing else. A third state, off again, is the control.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.bench import Bench, evicting, steps_to_fill
from benchmarks.gain import burst, burst_lines, full_caches
from benchmarks.measurement import Line
from benchmarks.remote import Remote
from benchmarks.scale import BRIEF, BUDGET, COMMON, SwitchedScale

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
    args = {"block_size": bench.block_size, "max_num_seqs": batch}
    args |= evicting({"policy": "tgv", "budget": BUDGET})
    with bench.launch("metrics", BRIEF, pool, {"metrics": args}, threads=1) as arms:
        yield from _decode(bench, arms.engines["metrics"], "metrics", scale, None)


def waiting(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of requests that wait for their answer before they are evicted."""
    scale, longest = bench.scale.waiting, longest_wait(bench)
    batch = max(batch for batch, _ in scale.decodes)
    # The server's wait makes room for the rows of all requests, of the prompt and of the answer.
    settings = {"policy": "snapkv", "budget": BUDGET, "defer": -(-batch * (longest + 256) // 8)}
    args = {"block_size": BLOCK_SIZE, **evicting(settings)}
    with bench.launch("waiting", COMMON, wait_pool(bench), {"waits": args}) as arms:
        engine = arms.engines["waits"]
        engine.ask("touch_query_pool")
        yield from _decode(bench, engine, "waits", scale, longest)
        yield from _burst(bench, engine)


def _decode(
    bench: Bench, engine: Remote, what: str, scale: SwitchedScale, defer: int | None
) -> Iterator[Line]:
    """Compare neighbouring steps with and without, by wall clock and by CPU time."""
    letter = "h" if what == "metrics" else "j"
    for batch, workload in scale.decodes:
        rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(scale.fills):
            bench.say(f"{letter}. decode, {what} switched in each step, batch {batch}, {number}")
            given = {"workload": workload, "batch": batch, "budget": BUDGET, "defer": defer}
            engine.ask("fill", seed=next(bench.seeds), attend=False, **given)
            engine.ask("decode", steps=_WARM_UP_STEPS)
            for _ in range(scale.rounds):
                for state, clocks in engine.ask(
                    "decode_switched", states=STATES, what=what
                ).items():
                    for clock, seconds in clocks.items():
                        rates[state, clock] += [batch / each for each in seconds]
            engine.ask("clear")
        for state in (ON, AGAIN):
            for clock, unit in (("wall", "tokens/s"), ("cpu", "tokens/CPU s")):
                title = what if state == ON else f"control, twice without {what}"
                measure = (
                    f"{letter}. {title}: decode, batch {batch}, {workload.prompt_tokens} tokens"
                )
                line = Line(measure, unit, "higher", {}, state, against=(OFF,))
                line.neighbours = {name: rates[name, clock] for name in (state, OFF)}
                line.rounds = {n: [statistics.median(each)] for n, each in line.neighbours.items()}
                if state == ON:
                    line.require_surely(0.99, "of without")
                yield line


def wait_pool(bench: Bench) -> int:
    """Return the tokens of a pool for all batches that wait, and for the burst."""
    longest = longest_wait(bench)
    waits = bench.scale.waiting.decodes
    pools = [bench.pool_for(batch, load.prompt_tokens, longest) for batch, load in waits]
    # One block is never given out.
    return max(*pools, full_caches(bench, BLOCK_SIZE)) + BLOCK_SIZE


def longest_wait(bench: Bench) -> int:
    """Return the tokens of the answer that a batch waits for: more than it is measured."""
    scale = bench.scale.waiting
    fill = max(steps_to_fill(batch, load.prompt_tokens) for batch, load in scale.decodes)
    return _WARM_UP_STEPS + STEPS_PER_ROUND * scale.rounds + fill


def _burst(bench: Bench, engine: Remote) -> Iterator[Line]:
    """Compare how many requests run at once: evicted after some tokens, and after none."""
    ours, other = f"defer {WAIT}", "defer 0"
    requests = bench.scale.waiting.burst_requests
    given = {**burst(bench, requests), "pool_tokens": full_caches(bench, BLOCK_SIZE)}
    given["seed"] = next(bench.seeds)
    bench.say(f"j. {requests} requests at once")
    found = {
        name: [engine.ask("burst", defer=defer, **given)]
        for name, defer in ((other, 0), (ours, WAIT))
    }
    lines = burst_lines(bench, "j", requests, found, ours=ours, against=(other,))
    lines[0].require(0.9, "of")
    yield from lines
