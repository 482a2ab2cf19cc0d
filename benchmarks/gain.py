# SPDX-License-Identifier: Apache-2.0
"""Part `gain`: decode speed and concurrent requests where memory is the limit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import STOCK_BLOCK_SIZE, Arms, Bench
from benchmarks.measurement import DecodeBytes, Line, Target
from benchmarks.scale import BUDGET, KV_BOUND

_WARM_UP_STEPS = 2
_REQUESTS_IN_POOL = 4


def gain(bench: Bench) -> Iterator[Line]:
    """Measure lines b and d."""
    scale = bench.scale
    decoded = _WARM_UP_STEPS + scale.rounds * scale.wide_steps
    pool = bench.pool_for(scale.wide_batch, scale.wide.prompt_tokens, decoded)
    longest = scale.burst.prompt_tokens + scale.burst_output
    burst_pool = full_caches(longest, STOCK_BLOCK_SIZE)
    # One block is never given out.
    tokens = max(pool, burst_pool + STOCK_BLOCK_SIZE)
    with bench.start("gain", KV_BOUND, tokens) as arms:
        yield _decode(bench, arms)
        yield from _burst(bench, arms, burst_pool)


def _decode(bench: Bench, arms: Arms) -> Line:
    scale, batch = bench.scale, bench.scale.wide_batch
    for name, engine in arms.engines.items():
        bench.say(f"b. filling caches of {name}")
        engine.ask("fill", workload=scale.wide, batch=batch, seed=0, budget=BUDGET, attend=False)
        engine.ask("decode", steps=_WARM_UP_STEPS)
    bench.say("b. decode bound by KV reads")
    rates: dict[str, list[float]] = defaultdict(list)
    cached: dict[str, list[float]] = defaultdict(list)
    for name, engine, _ in bench.turns(arms, scale.rounds):
        result = engine.ask("decode", steps=scale.wide_steps)
        rates[name].append(batch / statistics.median(result["seconds"]))
        cached[name].append(result["cached_tokens"])
    for engine in arms.engines.values():
        engine.ask("clear")
    line = Line(
        f"b. budget {BUDGET}: decode, batch {batch}, {scale.wide.prompt_tokens} tokens",
        "tokens/s",
        "higher",
        rates,
    )
    reads = {
        name: DecodeBytes(
            KV_BOUND.weight_bytes_per_step, statistics.mean(tokens) * KV_BOUND.kv_bytes_per_token
        )
        for name, tokens in cached.items()
    }
    line.details = {name: vars(read) for name, read in reads.items()}
    shares = []
    for ratio in line.ratios():
        ideal = reads[ratio.against].ideal_speed_up(reads["ours"])
        share = ratio.median / ideal
        text = f">= 0.85 of the ideal {ideal:.2f} x, {ratio.against}"
        line.targets.append(Target(text, share, 0.85))
        line.details[f"ideal_over_{ratio.against}"] = ideal
        shares.append(f"{share:.3f} of the ideal {ideal:.2f} x {ratio.against}")
    gigabytes = ", ".join(f"{name} {read.total / 1e9:.2f}" for name, read in reads.items())
    line.notes = f"{', '.join(shares)}; GB read a step: {gigabytes}"
    return line


def full_caches(longest: int, block_size: int) -> int:
    """Return the tokens of a pool that holds four requests with their full caches.

    One block more, because a request rarely ends with a full block.

    Args:
        longest: tokens of a prompt and its answer.
    """
    return (_REQUESTS_IN_POOL * -(-longest // block_size) + 1) * block_size


def _burst(bench: Bench, arms: Arms, pool_tokens: int) -> Iterator[Line]:
    scale = bench.scale
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, engine, seed in bench.turns(arms, scale.burst_rounds):
        bench.say(f"d. {scale.burst_requests} requests at once, {name}")
        result = engine.ask(
            "burst",
            workload=scale.burst,
            requests=scale.burst_requests,
            seed=seed,
            max_tokens=scale.burst_output,
            budget=BUDGET,
            pool_tokens=pool_tokens,
        )
        results[name].append(result)
    for key in ("peak_running", "tokens_per_second", "output_tokens_per_second"):
        rounds = {name: [r[key] for r in found] for name, found in results.items()}
        line = burst_line(bench, "d", key, scale.burst_requests, rounds)
        if key == "peak_running":
            line.targets.append(Target(">= 20 at once", line.median("ours"), 20))
        yield line


_MEASURES = {
    "peak_running": ("peak running", "requests"),
    "tokens_per_second": ("prompt and output together", "tokens/s"),
    "output_tokens_per_second": ("output", "tokens/s"),
}


def burst_line(
    bench: Bench,
    letter: str,
    key: str,
    requests: int,
    rounds: dict[str, list[float]],
    **options: Any,
) -> Line:
    """Return the line of a figure of `ArmEngine.burst`, with the options of `Line`."""
    measure, unit = _MEASURES[key]
    scale = bench.scale
    what = (
        f"pool of {_REQUESTS_IN_POOL}: {requests} requests of "
        f"{scale.burst.prompt_tokens} + {scale.burst_output} tokens"
    )
    return Line(f"{letter}. {measure}, {what}", unit, "higher", rounds, **options)
