# SPDX-License-Identifier: Apache-2.0
"""Part `gain`: decode speed and concurrent requests where memory is the limit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.arm import Arms
from benchmarks.bench import STOCK_BLOCK_SIZE, Bench
from benchmarks.measurement import DecodeBytes, Line, Target
from benchmarks.scale import BUDGET, KV_BOUND

_WARM_UP_STEPS = 2
_REQUESTS_IN_POOL = 4


def gain(bench: Bench) -> Iterator[Line]:
    """Measure lines b and d."""
    scale = bench.scale
    decoded = _WARM_UP_STEPS + scale.rounds * scale.wide_steps
    pool = bench.pool_for(scale.wide_batch, scale.wide.prompt_tokens, decoded)
    burst_pool = _burst_pool(bench)
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


def _burst_pool(bench: Bench) -> int:
    """Return the tokens of a pool that holds four requests with their full caches."""
    longest = bench.scale.burst.prompt_tokens + bench.scale.burst_output
    # One block more: a request rarely ends with a full block.
    blocks = _REQUESTS_IN_POOL * -(-longest // STOCK_BLOCK_SIZE) + 1
    return blocks * STOCK_BLOCK_SIZE


def _burst(bench: Bench, arms: Arms, pool_tokens: int) -> Iterator[Line]:
    scale, workload = bench.scale, bench.scale.burst
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, engine, seed in bench.turns(arms, scale.burst_rounds):
        bench.say(f"d. {scale.burst_requests} requests at once, {name}")
        result = engine.ask(
            "burst",
            workload=workload,
            requests=scale.burst_requests,
            seed=seed,
            max_tokens=scale.burst_output,
            budget=BUDGET,
            pool_tokens=pool_tokens,
        )
        results[name].append(result)

    def line(measure: str, unit: str, key: str) -> Line:
        rounds = {name: [r[key] for r in found] for name, found in results.items()}
        what = (
            f"pool of {_REQUESTS_IN_POOL}: {scale.burst_requests} requests of "
            f"{workload.prompt_tokens} + {scale.burst_output} tokens"
        )
        return Line(f"d. {measure}, {what}", unit, "higher", rounds)

    running = line("peak running", "requests", "peak_running")
    running.targets.append(Target(">= 20 at once", running.median("ours"), 20))
    yield running
    yield line("peak decoding in one step", "requests", "peak_decoding")
    yield line("prompt and output together", "tokens/s", "tokens_per_second")
    yield line("output", "tokens/s", "output_tokens_per_second")
