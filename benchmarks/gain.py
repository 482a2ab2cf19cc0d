# SPDX-License-Identifier: Apache-2.0
"""Parts `gain`, `grid` and `recall`: decode speed, and concurrent requests in little memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.bench import STOCK_BLOCK_SIZE, Arms, Bench, evicting
from benchmarks.measurement import Line, Target
from benchmarks.scale import BUDGET, COMMON, KV_BOUND, RECOMMENDED, Workload

_WARM_UP_STEPS = 8
"""More than the tokens that the recommended method waits for."""
_REQUESTS_IN_POOL = 4
_WITHOUT = ("constrained", "final")
_RECALLING = 8
"""Requests that decode at once with recall."""


def gain(bench: Bench) -> Iterator[Line]:
    """Measure lines b and d."""
    scale = bench.scale
    decoded = _WARM_UP_STEPS + scale.rounds * scale.wide_steps
    pool = bench.pool_for(scale.wide_batch, scale.wide.prompt_tokens, decoded)
    burst_pool = full_caches(bench, STOCK_BLOCK_SIZE)
    # One block is never given out.
    tokens = max(pool, burst_pool + STOCK_BLOCK_SIZE)
    stock_and_ours = ("production", "constrained", "ours")
    with bench.start("gain", KV_BOUND, tokens, stock_and_ours) as arms:
        yield _decode(bench, arms)
        bench.say(f"d. {scale.burst_requests} requests at once")
        given = {**burst(bench, scale.burst_requests), "pool_tokens": burst_pool}
        found = bench.turns(arms, 1, "burst", **given)
        lines = burst_lines(bench, "d", scale.burst_requests, found)
        lines[0].targets.append(Target(">= 20 at once", lines[0].median("ours"), 20))
        yield from lines
        bench.say(f"o. {RECOMMENDED}")
        yield _first_token(bench, arms, "o", scale.first_token, RECOMMENDED)
        yield _decoded(bench, arms, "o", scale.wide_batch, scale.wide, RECOMMENDED)[0]
        found = bench.turns(arms, scale.rounds, "burst", **{**given, **RECOMMENDED})
    yield from burst_lines(bench, "o", scale.burst_requests, found)


def grid(bench: Bench) -> Iterator[Line]:
    """Measure lines s, by batch and prompt length as the tables of VL-Cache and AirCache."""
    scale = bench.scale
    decoded = _WARM_UP_STEPS + scale.rounds * scale.wide_steps
    pool = max(bench.pool_for(n, load.prompt_tokens, decoded) for n, load in scale.grid)
    with bench.start("grid", KV_BOUND, pool, ("constrained", "ours")) as arms:
        for load in dict.fromkeys(load for _, load in scale.grid):
            bench.say(f"s. first token, {load.prompt_tokens} tokens")
            yield _first_token(bench, arms, "s", load, {"budget": BUDGET})
        for batch, load in scale.grid:
            for budget in (0.5, BUDGET):
                yield _decoded(bench, arms, "s", batch, load, {"budget": budget})[0]


def _first_token(
    bench: Bench, arms: Arms, letter: str, workload: Workload, options: Mapping[str, Any]
) -> Line:
    """Return the line of one prompt alone, with options of its request."""
    found = bench.turns(arms, bench.scale.rounds, "prefill", workload=workload, **options)
    seconds = {name: [each["seconds"] for each in rounds] for name, rounds in found.items()}
    what = f"{letter}. time to first token, {workload.prompt_tokens} tokens"
    return Line(what, "s", "lower", seconds)


def _decode(bench: Bench, arms: Arms) -> Line:
    scale, batch = bench.scale, bench.scale.wide_batch
    line, found = _decoded(bench, arms, "b", batch, scale.wide, {"budget": BUDGET})
    read = {}
    for name, rounds in found.items():
        # A step reads every weight once, and every cached key and value.
        cached = statistics.mean(each["cached_tokens"] for each in rounds)
        read[name] = KV_BOUND.weight_bytes_per_step + cached * KV_BOUND.kv_bytes_per_token
    for ratio in line.ratios():
        ideal = read[ratio.against] / read["ours"]
        text = f">= 0.85 of the ideal {ideal:.2f} x, {ratio.against}"
        line.targets.append(Target(text, ratio.median / ideal, 0.85))
    line.details = {"bytes read by a step": read}
    return line


def _decoded(
    bench: Bench,
    arms: Arms,
    letter: str,
    batch: int,
    workload: Workload,
    options: Mapping[str, Any],
) -> tuple[Line, dict[str, list[Any]]]:
    """Return the line of a batch's decode steps, and what the arms said of each round.

    Args:
        options: of its requests.
    """
    scale, what = bench.scale, f"decode, batch {batch}, {workload.prompt_tokens} tokens"
    name = f"{letter}. budget {options['budget']}: {what}"
    bench.say(name)
    arms.ask("fill", workload=workload, batch=batch, seed=0, attend=False, **options)
    arms.ask("decode", steps=_WARM_UP_STEPS)
    found = bench.turns(arms, scale.rounds, "decode", steps=scale.wide_steps)
    arms.ask("clear")
    rates = {
        name: [batch / statistics.median(each["seconds"]) for each in rounds]
        for name, rounds in found.items()
    }
    return Line(name, "tokens/s", "higher", rates), found


_WAIT = 4
"""Tokens of the answer before the eviction, as recommended."""


def recall(bench: Bench) -> Iterator[Line]:
    """Measure lines l: ours recalls what it evicted, the arm `final` does not."""
    scale = bench.scale
    decoded = _WAIT + scale.rounds * scale.decode_steps
    burst_pool = full_caches(bench, bench.block_size)
    pool = bench.pool_for(_RECALLING, scale.decode.prompt_tokens, decoded)
    tokens = max(pool, burst_pool + bench.block_size)
    gib = 2 * tokens * COMMON.kv_bytes_per_token / 2**30
    settings = {"policy": "reach", "budget": BUDGET, "when": "always"}
    ours = {**settings, "recall": {"gib": gib}}
    flags = {"block_size": bench.block_size}
    chosen = {
        "constrained": flags,
        "final": {**flags, **evicting(settings)},
        "ours": {**flags, **evicting(ours)},
    }
    with bench.launch("recall", COMMON, tokens, chosen) as running:
        bench.say("l. decode with recall and without")
        given = {"workload": scale.decode, "batch": _RECALLING, "budget": BUDGET, "defer": _WAIT}
        running.ask("fill", seed=0, **given)
        running.ask("decode", steps=_WAIT)
        found = bench.turns(running, scale.rounds, "decode", steps=scale.decode_steps)
        running.ask("clear")
        rates = {
            name: [_RECALLING / statistics.mean(each["seconds"]) for each in rounds]
            for name, rounds in found.items()
        }
        what = f"decode, batch {_RECALLING}, {scale.decode.prompt_tokens} tokens"
        line = Line(f"l. recall: {what}", "tokens/s", "higher", rates, against=_WITHOUT)
        target = Target(">= 0.85 of final", line.ratio("final").median, 0.85)
        line.targets.append(target)
        yield line
        bench.say(f"l. {scale.burst_requests} requests at once")
        given = {**burst(bench, scale.burst_requests), "pool_tokens": burst_pool, "defer": _WAIT}
        bursts = bench.turns(running, 1, "burst", **given)
    lines = burst_lines(bench, "l", scale.burst_requests, bursts, against=_WITHOUT)
    target = Target(">= 0.9 as many as final", lines[0].ratio("final").median, 0.9)
    lines[0].targets.append(target)
    yield from lines


def full_caches(bench: Bench, block_size: int) -> int:
    """Return the tokens of a pool that holds four requests of a burst with their full caches.

    One block more, because a request rarely ends with a full block.
    """
    longest = bench.scale.burst.prompt_tokens + bench.scale.burst_output
    return (_REQUESTS_IN_POOL * -(-longest // block_size) + 1) * block_size


def burst(bench: Bench, requests: int) -> dict[str, Any]:
    """Return the arguments of `ArmEngine.burst` that all bursts have in common."""
    scale = bench.scale
    return {
        "workload": scale.burst,
        "requests": requests,
        "max_tokens": scale.burst_output,
        "budget": BUDGET,
    }


def burst_lines(
    bench: Bench,
    letter: str,
    requests: int,
    found: Mapping[str, Sequence[dict[str, float]]],
    **options: Any,
) -> list[Line]:
    """Return the lines of the figures of `ArmEngine.burst`, with the options of `Line`."""
    scale = bench.scale
    what = (
        f"pool of {_REQUESTS_IN_POOL}: {requests} requests of "
        f"{scale.burst.prompt_tokens} + {scale.burst_output} tokens"
    )
    lines = []
    for key, measure, unit in (
        ("peak_running", "peak running", "requests"),
        ("tokens_per_second", "prompt and output together", "tokens/s"),
        ("output_tokens_per_second", "output", "tokens/s"),
    ):
        rounds = {name: [each[key] for each in results] for name, results in found.items()}
        lines.append(Line(f"{letter}. {measure}, {what}", unit, "higher", rounds, **options))
    return lines
