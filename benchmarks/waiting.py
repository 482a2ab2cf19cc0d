# SPDX-License-Identifier: Apache-2.0
"""Parts `waiting` and `long`: costs of waiting for the answer, and of cutting while decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.arm import Arm, Arms
from benchmarks.bench import Bench, steps_to_fill
from benchmarks.measurement import Line, Target
from benchmarks.models import Shape
from benchmarks.remote import Remote
from benchmarks.scale import BUDGET, COMMON, KV_BOUND
from benchmarks.workload import Workload
from vllm_tgvkv.shared.cuts import Ceiling

BLOCK_SIZE = 32
"""Of all engines of the part."""
WAIT = 8
"""Tokens that the burst's requests wait for."""
ON, OFF, AGAIN = "waiting", "without", "without, again"
STATES = {ON: True, OFF: False, AGAIN: False}
STEPS_PER_ROUND = 6 * len(STATES)
"""All orders of the states."""
_TURN = 100
"""Tokens that an engine generates before it is the other's turn."""
_WARM_UP_STEPS = 8
_REQUESTS_IN_POOL = 4


def waiting(bench: Bench) -> Iterator[Line]:
    """Measure the lines j, but for those of `long_answer`."""
    with _wait_engine(bench) as arms:
        arms["waits"].ask("touch_query_pool")
        for batch, workload in bench.scale.waiting.decodes:
            yield from _decode(bench, arms["waits"], batch, workload)
        yield from _burst(bench, arms["waits"])
    with _ceiling_engine(bench) as arms:
        yield from _recuts(bench, arms["ceiling"])


def long_answer(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of an answer under a ceiling."""
    with _long_engines(bench) as arms:
        yield from _long_answer(bench, arms)


def _launch(
    bench: Bench,
    shape: Shape,
    pool_tokens: int,
    settings: dict[str, dict[str, Any] | None],
    max_num_seqs: int | None = None,
) -> Arms:
    """Start an engine for each of `settings`, which are those of the eviction, or None."""
    same = {**bench.engine_args(shape, pool_tokens), "block_size": BLOCK_SIZE}
    if max_num_seqs:
        same["max_num_seqs"] = max_num_seqs
    arms = [
        Arm(name, {**same, "additional_config": {"kv_eviction": chosen}} if chosen else same)
        for name, chosen in settings.items()
    ]
    return bench.launch("waiting", shape, arms)


# -- a wait -------------------------------------------------------------------------------


def _wait_engine(bench: Bench) -> Arms:
    longest, batch = longest_wait(bench), _largest_batch(bench)
    settings = {
        "policy": "snapkv",
        "budget": BUDGET,
        # Which makes room for the rows of all requests, of the prompt and of the answer.
        "defer": -(-batch * (longest + 256) // 8),
    }
    return _launch(bench, COMMON, wait_pool(bench), {"waits": settings})


def wait_pool(bench: Bench) -> int:
    """Return the tokens of a pool for all batches that wait, and for the burst."""
    waits = bench.scale.waiting.decodes
    pools = [
        bench.pool_for(batch, workload.prompt_tokens, longest_wait(bench))
        for batch, workload in waits
    ]
    return max(*pools, burst_pool(bench)) + BLOCK_SIZE  # one block is never given out


def longest_wait(bench: Bench) -> int:
    """Return the tokens of the answer that a batch waits for: more than it is measured."""
    scale = bench.scale.waiting
    steps = _WARM_UP_STEPS + STEPS_PER_ROUND * scale.rounds_per_fill + scale.recorded_steps
    return steps + max(steps_to_fill(batch, load.prompt_tokens) for batch, load in scale.decodes)


def _largest_batch(bench: Bench) -> int:
    return max(batch for batch, _ in bench.scale.waiting.decodes)


def _decode(bench: Bench, engine: Remote, batch: int, workload: Workload) -> Iterator[Line]:
    """Compare steps of requests that wait with steps in which their wait is set aside."""
    scale = bench.scale.waiting
    what = f"batch {batch}, {workload.prompt_tokens} tokens"
    rates: dict[str, dict[str, list[float]]] = _by_clock_and_state()
    steps: dict[str, dict[str, list[float]]] = _by_clock_and_state()
    recorded = []
    for number in range(scale.fills):
        bench.say(f"j. decode, waits switched from step to step, {what}, {number + 1}")
        engine.ask(
            "fill",
            workload=workload,
            batch=batch,
            seed=next(bench.seeds),
            budget=BUDGET,
            attend=False,
            defer=longest_wait(bench),
        )
        engine.ask("decode", steps=_WARM_UP_STEPS)
        for _ in range(scale.rounds_per_fill):
            found = engine.ask("decode_switched", states=STATES, cycles=1, what="waits")
            for name, clocks in found.items():
                for clock, seconds in clocks.items():
                    steps[clock][name] += [batch / each for each in seconds]
                    rates[clock][name].append(batch / statistics.median(seconds))
        recorded.append(engine.ask("wait_seconds", steps=scale.recorded_steps))
        engine.ask("clear")
    for ours, clock, title, unit in (
        (ON, "wall", "waiting", "tokens/s"),
        (ON, "cpu", "waiting, by CPU time", "tokens/CPU s"),
        (AGAIN, "wall", "control, twice without waiting", "tokens/s"),
        (AGAIN, "cpu", "control, by CPU time", "tokens/CPU s"),
    ):
        line = Line(f"j. {title}: decode, {what}", unit, "higher", {}, ours, against=(OFF,))
        line.rounds = {state: rates[clock][state] for state in (ours, OFF)}
        line.neighbours = {state: steps[clock][state] for state in (ours, OFF)}
        if ours == ON:
            line.require_surely(0.99, "of without")
        yield line
    yield _recording_line(what, recorded)


def _by_clock_and_state() -> dict[str, dict[str, list[float]]]:
    return {clock: {name: [] for name in STATES} for clock in ("wall", "cpu")}


def _recording_line(what: str, recorded: list[dict[str, float]]) -> Line:
    parts = ("plan", "find", "store")
    microseconds = [1e6 * sum(each[part] for part in parts) for each in recorded]
    step = 1e6 * statistics.median(each["step"] for each in recorded)
    line = Line(f"j. recording alone, {what}", "us a step", "lower", {ON: microseconds}, ON)
    line.against = ()
    line.notes = f"a step takes {step / 1e3:.1f} ms; " + ", ".join(
        f"{part}: {1e6 * statistics.median(each[part] for each in recorded):.0f} us"
        for part in parts
    )
    line.details = {"seconds": recorded}
    share = 100 * statistics.median(microseconds) / step
    line.targets.append(Target("<= 1 % of a step", share, 1.0, "lower"))
    return line


# -- scarce memory ------------------------------------------------------------------------


def burst_pool(bench: Bench) -> int:
    """Return the tokens of a pool that holds four requests with their full caches."""
    scale = bench.scale.waiting
    blocks = -(-(scale.burst.prompt_tokens + scale.burst_output) // BLOCK_SIZE)
    return (_REQUESTS_IN_POOL * blocks + 1) * BLOCK_SIZE


def _burst(bench: Bench, engine: Remote) -> Iterator[Line]:
    """Compare how many requests run at once: evicted after some tokens, and after none."""
    scale, seed = bench.scale.waiting, next(bench.seeds)
    ours = f"defer {WAIT}"
    results = {}
    for name, defer in (("defer 0", 0), (ours, WAIT)):
        bench.say(f"j. {scale.burst_requests} requests at once, {name}")
        results[name] = engine.ask(
            "burst",
            workload=scale.burst,
            requests=scale.burst_requests,
            seed=seed,
            max_tokens=scale.burst_output,
            budget=BUDGET,
            pool_tokens=burst_pool(bench),
            defer=defer,
        )
    what = (
        f"pool of {_REQUESTS_IN_POOL}: {scale.burst_requests} requests of "
        f"{scale.burst.prompt_tokens} + {scale.burst_output} tokens"
    )
    for measure, unit, key in (
        ("peak running", "requests", "peak_running"),
        ("mean running", "requests", "mean_running"),
        ("output", "tokens/s", "output_tokens_per_second"),
    ):
        rounds = {name: [result[key]] for name, result in results.items()}
        line = Line(f"j. {measure}, {what}", unit, "higher", rounds, ours, against=("defer 0",))
        if key == "peak_running":
            line.require(0.9, "of")
        yield line


# -- cuts while decoding ------------------------------------------------------------------


@dataclass(frozen=True)
class Period:
    """The steps of one period, in which every request of a batch is cut once."""

    plain: float
    """Seconds of a step in which nothing is cut or stored, median."""
    cuts: float
    """Seconds that cuts add, to their own steps and to the next, whose page tables are new."""
    storing: float
    """Seconds that storing queries adds to all steps in which some are stored."""
    evicting: float
    """Seconds in statistics, selection and copy, and in storing, by stopwatch."""
    steps: int

    @classmethod
    def of(cls, found: dict[str, list[float]], first: int, steps: int) -> Period:
        """Return the period of the steps from `first` on, of `ArmEngine.decode_with_cuts`.

        A step's own noise would add to many steps alike, so stored queries count by medians.

        Raises:
            ValueError: if no step is plain.
        """
        chosen = range(first, first + steps)
        seconds = found["seconds"]
        cut = {i for i in chosen if found["cuts"][i] or (i and found["cuts"][i - 1])}
        stored = [i for i in chosen if found["stored"][i] and i not in cut]
        plain = [seconds[i] for i in chosen if i not in cut and not found["stored"][i]]
        if not plain:
            raise ValueError("queries are stored or a cache is cut in every step")
        middle = statistics.median(plain)
        storing = 0.0
        if stored:
            median = statistics.median(seconds[i] for i in stored)
            storing = len(stored) * (median - middle)
        return cls(
            plain=middle,
            cuts=sum(seconds[i] - middle for i in cut),
            storing=storing,
            evicting=sum(found["eviction"][i] for i in chosen),
            steps=steps,
        )

    @property
    def share(self) -> float:
        """Share of the period that cuts and what they need take, in per cent."""
        extra = self.cuts + self.storing
        return 100 * extra / (self.steps * self.plain + extra)


def ceiling_prompt(ceiling: int) -> int:
    """Return the tokens of a prompt that exceeds a ceiling by four blocks."""
    return ceiling + 4 * BLOCK_SIZE


def period(ceiling: int) -> int:
    """Return the tokens from one cut under a ceiling to the next: its buffer and a block."""
    return (Ceiling.of(ceiling).buffer // BLOCK_SIZE + 1) * BLOCK_SIZE


def _ceiling_engine(bench: Bench) -> Arms:
    scale = bench.scale.waiting
    decoded = (scale.recut_periods + 2) * period(scale.ceiling) + 64
    pool = bench.pool_for(max(scale.recut_batches), ceiling_prompt(scale.ceiling), decoded)
    settings = {
        "policy": scale.recut_methods[0],
        "decode": {"max_tokens": scale.ceiling},
    }
    return _launch(bench, COMMON, pool, {"ceiling": settings})


def _recuts(bench: Bench, engine: Remote) -> Iterator[Line]:
    scale = bench.scale.waiting
    first, *others = scale.recut_methods
    cases = [(first, batch) for batch in scale.recut_batches]
    cases += [(method, scale.recut_batches[0]) for method in others]
    for method, batch in cases:
        tokens = period(scale.ceiling)
        bench.say(f"j. cuts every {tokens} tokens, {method}, batch {batch}")
        engine.ask(
            "fill",
            workload=Workload(ceiling_prompt(scale.ceiling)),
            batch=batch,
            seed=next(bench.seeds),
            budget=scale.ceiling,
            attend=False,
            policy=method,
        )
        engine.ask("decode", steps=tokens)  # until all have been cut once
        found = engine.ask("decode_with_cuts", steps=scale.recut_periods * tokens)
        engine.ask("clear")
        line = _recut_line(
            f"{method}, batch {batch}, {scale.ceiling} tokens kept", batch, found, tokens
        )
        if method == first:
            line.targets.append(Target("<= 2 %", line.median("ours"), 2.0, "lower"))
        yield line


def _recut_line(what: str, batch: int, found: dict[str, list[float]], tokens: int) -> Line:
    """Return the line of a batch whose requests are cut every `tokens` tokens."""
    starts = range(0, len(found["seconds"]), tokens)
    num_cuts = int(sum(found["cuts"]))
    if num_cuts != batch * len(starts):
        raise RuntimeError(f"{num_cuts} cuts instead of {batch * len(starts)}")
    periods = [Period.of(found, start, tokens) for start in starts]
    shares = [period.share for period in periods]
    line = Line(f"j. cuts every {tokens} tokens: {what}", "% of decode", "lower", {"ours": shares})

    def middle(values: Iterator[float]) -> float:
        return statistics.median(values)

    cut = middle(1e3 * p.cuts / batch for p in periods)
    watched = middle(1e3 * p.evicting / batch for p in periods)
    storing = middle(100 * p.storing / (p.steps * p.plain) for p in periods)
    line.notes = (
        f"a cut adds {cut:.0f} ms ({watched:.0f} ms in statistics, selection and copy), storing "
        f"queries {storing:.2f} %; a step takes {middle(1e3 * p.plain for p in periods):.1f} ms"
    )
    line.details = {"periods": [vars(period) for period in periods]}
    return line


# -- a long answer ------------------------------------------------------------------------


def _long_engines(bench: Bench) -> Arms:
    scale = bench.scale.waiting
    pool = bench.pool_for(scale.long_batch, scale.long_prompt.prompt_tokens, scale.long_steps)
    ours = {"policy": "snapkv", "decode": {"max_tokens": scale.long_ceiling}}
    return _launch(bench, KV_BOUND, pool, {"ours": ours, "constrained": None})


def _long_answer(bench: Bench, arms: Arms) -> Iterator[Line]:
    """Compare blocks and throughput by hundred tokens with stock, which keeps everything."""
    scale, batch, seed = bench.scale.waiting, bench.scale.waiting.long_batch, next(bench.seeds)
    for engine in arms.engines.values():
        engine.ask(
            "fill",
            workload=scale.long_prompt,
            batch=batch,
            seed=seed,
            budget=scale.long_ceiling,
            attend=False,
        )
    rates: dict[str, list[float]] = {name: [] for name in arms.engines}
    blocks: dict[str, list[float]] = {name: [] for name in arms.engines}
    cuts = 0
    for number, (name, engine, _) in enumerate(bench.turns(arms, scale.long_steps // _TURN)):
        if number % 10 == 0:
            bench.say(f"j. a long answer, batch {batch}, {_TURN * number // len(arms.engines)}")
        found = engine.ask("decode_with_cuts", steps=_TURN)
        rates[name].append(batch * _TURN / sum(found["seconds"]))
        blocks[name].append(max(found["blocks"]) / batch)
        cuts += int(sum(found["cuts"]))
    yield from long_lines(bench, rates, blocks, cuts)


def long_lines(
    bench: Bench, rates: dict[str, list[float]], blocks: dict[str, list[float]], cuts: int
) -> Iterator[Line]:
    """Return the lines of a long answer, from the values of each hundred tokens of both engines.

    Args:
        blocks: most blocks of a request in each.
        cuts: of all requests.
    """
    scale = bench.scale.waiting
    what = (
        f"a ceiling of {scale.long_ceiling}, batch {scale.long_batch}, "
        f"{scale.long_prompt.prompt_tokens} + {_TURN * len(rates['ours'])} tokens"
    )
    held = Line(f"j. blocks of a request: {what}", "blocks", "lower", blocks)
    # Ceiling and buffer, and the block that the next token is written to.
    most = (scale.long_ceiling + Ceiling.of(scale.long_ceiling).buffer) // BLOCK_SIZE + 1
    text = f"<= {most} at any time, ceiling and buffer and one"
    held.targets.append(Target(text, max(blocks["ours"]), most, "lower"))
    held.notes = f"{cuts / scale.long_batch:g} cuts of each request"
    yield held
    speed = Line(f"j. output: {what}", "tokens/s", "higher", rates)
    last = {name: _end_by_start(series) for name, series in rates.items()}
    speed.targets.append(Target(">= 0.95 of the first quarter at the end", last["ours"], 0.95))
    speed.notes = "last quarter by first: " + ", ".join(
        f"{name} {ratio:.3f}" for name, ratio in last.items()
    )
    speed.details = {
        "table": {
            "header": ["tokens generated"]
            + [f"{name}, {unit}" for unit in ("blocks", "tokens/s") for name in rates],
            "rows": [
                [_TURN * (i + 1)]
                + [series[name][i] for series in (blocks, rates) for name in rates]
                for i in range(len(rates["ours"]))
            ],
        }
    }
    yield speed


def _end_by_start(series: list[float]) -> float:
    """Return the median of the last quarter by that of the first."""
    quarter = max(len(series) // 4, 1)
    return statistics.median(series[-quarter:]) / statistics.median(series[:quarter])
