# SPDX-License-Identifier: Apache-2.0
"""Parts `costs` and `methods`: time and memory that the plugin adds to prefills and steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.bench import Arms, Bench
from benchmarks.measurement import Better, Line, Target
from benchmarks.scale import BUDGET, COMMON
from benchmarks.workload import Workload
from vllm_tgvkv.config.server import EvictionConfig

QUESTION = 512
"""Text tokens after the images that fill the observation window."""
_BATCH = 8
_WARM_UP_STEPS = 4


def costs(bench: Bench) -> Iterator[Line]:
    """Measure lines a, c and f."""
    with bench.start("costs", COMMON, pool_tokens(bench), forced=True) as arms:
        yield from _first_token(bench, arms)
        yield from _full_budget_decode(bench, arms)
        yield from _eviction_share(bench, arms)
        for batch in bench.scale.overhead_batches:
            yield _host_overhead(bench, arms, batch)


def pool_tokens(bench: Bench) -> int:
    """Return the tokens of the pool that the part `costs` needs."""
    scale = bench.scale
    decoded = _WARM_UP_STEPS + scale.rounds * scale.decode_steps
    overhead = scale.rounds * scale.overhead_steps
    return max(
        bench.pool_for(1, scale.long.prompt_tokens, 2),
        bench.pool_for(_BATCH, scale.decode.prompt_tokens, decoded),
        bench.pool_for(max(scale.overhead_batches), scale.overhead.prompt_tokens, overhead),
    )


def _first_token(bench: Bench, arms: Arms) -> Iterator[Line]:
    bench.say("a. time to first token at budget 1.0")
    workload = bench.scale.first_token
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, engine, seed in bench.turns(arms, bench.scale.first_token_rounds):
        result = engine.ask("prefill", workload=workload, seed=seed, budget=1.0)
        seconds[name].append(result["seconds"])
    what = f"time to first token, {workload.prompt_tokens} tokens"
    yield from _full_budget_lines(what, "s", "lower", seconds)


def _full_budget_decode(bench: Bench, arms: Arms) -> Iterator[Line]:
    """Compare tokens per second, each round's from its median step."""
    bench.say(f"a. decode throughput at budget 1.0, batch {_BATCH}")
    workload, seed = bench.scale.decode, next(bench.seeds)
    for engine in arms.engines.values():
        engine.ask("fill", workload=workload, batch=_BATCH, seed=seed, budget=1.0)
        engine.ask("decode", steps=_WARM_UP_STEPS)
    rates: dict[str, list[float]] = defaultdict(list)
    for name, engine, _ in bench.turns(arms, bench.scale.rounds):
        result = engine.ask("decode", steps=bench.scale.decode_steps)
        rates[name].append(_BATCH / statistics.median(result["seconds"]))
    for engine in arms.engines.values():
        engine.ask("clear")
    what = f"decode, batch {_BATCH}, {workload.prompt_tokens} tokens"
    yield from _full_budget_lines(what, "tokens/s", "higher", rates)


def _full_budget_lines(
    what: str, unit: str, better: Better, values: dict[str, list[float]]
) -> Iterator[Line]:
    skipped = {name: series for name, series in values.items() if name != "forced"}
    forced = {name: series for name, series in values.items() if name != "ours"}
    line = Line(f"a. budget 1.0: {what}", unit, better, skipped)
    line.require(0.97)
    yield line
    yield Line(f"a. budget 1.0, all pages dealt anew: {what}", unit, better, forced, "forced")


def _eviction_share(bench: Bench, arms: Arms) -> Iterator[Line]:
    """Compare with a short question, and with more text than the observation window."""
    tokens = bench.scale.long.prompt_tokens
    for question in (bench.scale.long.question_tokens, QUESTION):
        what = f"{tokens} tokens, a question of {question}"
        bench.say(f"c. eviction's share of prefill: {what}")
        workload = Workload(tokens, question)
        seconds: dict[str, list[float]] = defaultdict(list)
        shares = []
        for name, engine, seed in bench.turns(arms, bench.scale.long_rounds, skip=("forced",)):
            result = engine.ask("prefill", workload=workload, seed=seed, budget=BUDGET)
            seconds[name].append(result["seconds"])
            if name == "ours":
                shares.append(100 * result["eviction"] / result["seconds"])
        share = Line(f"c. eviction's share of prefill: {what}", "%", "lower", {"ours": shares})
        share.targets.append(Target("<= 3 %", share.median("ours"), 3.0, "lower"))
        yield share
        yield Line(f"c. time to first token: {what}", "s", "lower", seconds)


def _host_overhead(bench: Bench, arms: Arms, batch: int) -> Line:
    bench.say(f"f. metadata of a decode step, batch {batch}")
    seed = next(bench.seeds)
    names = ("constrained", "ours")
    for name in names:
        arms[name].ask("fill", workload=bench.scale.overhead, batch=batch, seed=seed, budget=BUDGET)
    milliseconds: dict[str, list[float]] = defaultdict(list)
    shares = []
    for name, engine, _ in bench.turns(arms, bench.scale.rounds, skip=("production", "forced")):
        result = engine.ask("decode", steps=bench.scale.overhead_steps)
        metadata = result["watches"]["metadata"]
        milliseconds[name].append(1e3 * metadata)
        if name == "ours":
            shares.append(100 * metadata / statistics.mean(result["seconds"]))
    for name in names:
        arms[name].ask("clear")
    line = Line(f"f. metadata of a step, batch {batch}", "ms", "lower", milliseconds)
    line.notes = f"{statistics.median(shares):.1f} % of our step"
    line.details = {"share_percent": shares}
    return line


def methods(bench: Bench) -> Iterator[Line]:
    """Measure line g, the eviction of one prompt by every method."""
    workload = Workload(bench.scale.long.prompt_tokens, QUESTION)
    pool = bench.pool_for(1, workload.prompt_tokens, 2)
    names = EvictionConfig().method_names[1:]
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    with bench.start("methods", COMMON, pool, only=("ours",)) as arms:
        for number in range(bench.scale.long_rounds + 1):
            bench.say(f"g. eviction by {len(names)} methods, round {number} (0 warms up)")
            seed = next(bench.seeds)
            for name in names[number:] + names[:number]:
                result = arms["ours"].ask(
                    "eviction_parts", workload=workload, seed=seed, budget=BUDGET, policy=name
                )
                if number:
                    parts[name].append(result)
    for name in names:
        yield _method_line(name, workload, parts)


def _method_line(name: str, workload: Workload, parts: dict[str, list[dict[str, float]]]) -> Line:
    def compared(part: str) -> float:
        pairs = zip(parts[name], parts["tgv"], strict=True)
        return statistics.median(this[part] / tgv[part] for this, tgv in pairs)

    pairs = zip(parts[name], parts["random"], strict=True)
    extra = statistics.median(1e3 * (this["all"] - random["all"]) for this, random in pairs)
    statistics_ratio = compared("statistics")
    line = Line(
        f"g. {name}: one eviction, {workload.prompt_tokens} tokens, "
        f"a question of {workload.question_tokens}",
        "ms",
        "lower",
        {"ours": [1e3 * round_["all"] for round_ in parts[name]]},
        notes=(
            f"{extra:.1f} ms more than random; statistics {statistics_ratio:.2f} x tgv, "
            f"selection and copy {compared('decision'):.2f} x tgv"
        ),
        details={"seconds": parts[name]},
    )
    if name != "h2o":  # it observes every row
        line.targets.append(Target("statistics <= 1.5 x tgv", statistics_ratio, 1.5, "lower"))
    return line
