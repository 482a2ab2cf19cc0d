# SPDX-License-Identifier: Apache-2.0
"""Parts `costs`, `methods` and `scheduler`: time that the plugin adds to prefills and steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.bench import Arms, Bench, evicting
from benchmarks.measurement import Better, Line, Target
from benchmarks.scale import BRIEF, BUDGET, COMMON, Workload
from vllm_tgvkv.config.server import EvictionConfig

QUESTION = 512
"""Text tokens after the images that fill the observation window."""
_BATCH = 8
_WARM_UP_STEPS = 4


def costs(bench: Bench) -> Iterator[Line]:
    """Measure lines a, c and f."""
    with bench.start("costs", COMMON, pool_tokens(bench)) as arms:
        yield from _full_budget(bench, arms)
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


def _full_budget(bench: Bench, arms: Arms) -> Iterator[Line]:
    """Compare times to the first token, and tokens per second, each round's by its median step."""
    bench.say("a. time to first token at budget 1.0")
    workload = bench.scale.first_token
    found = bench.turns(
        arms, bench.scale.first_token_rounds, "prefill", workload=workload, budget=1.0
    )
    seconds = {name: [each["seconds"] for each in rounds] for name, rounds in found.items()}
    what = f"time to first token, {workload.prompt_tokens} tokens"
    yield from _full_budget_lines(what, "s", "lower", seconds)

    bench.say(f"a. decode throughput at budget 1.0, batch {_BATCH}")
    workload = bench.scale.decode
    arms.ask("fill", workload=workload, batch=_BATCH, seed=next(bench.seeds), budget=1.0)
    arms.ask("decode", steps=_WARM_UP_STEPS)
    found = bench.turns(arms, bench.scale.rounds, "decode", steps=bench.scale.decode_steps)
    arms.ask("clear")
    rates = {
        name: [_BATCH / statistics.median(each["seconds"]) for each in rounds]
        for name, rounds in found.items()
    }
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
        given = {"workload": Workload(tokens, question), "budget": BUDGET}
        found = bench.turns(arms, bench.scale.long_rounds, "prefill", ("forced",), **given)
        shares = [100 * each["eviction"] / each["seconds"] for each in found["ours"]]
        share = Line(f"c. eviction's share of prefill: {what}", "%", "lower", {"ours": shares})
        share.targets.append(Target("<= 3 %", share.median("ours"), 3.0, "lower"))
        yield share
        seconds = {name: [each["seconds"] for each in rounds] for name, rounds in found.items()}
        yield Line(f"c. time to first token: {what}", "s", "lower", seconds)


def _host_overhead(bench: Bench, arms: Arms, batch: int) -> Line:
    bench.say(f"f. metadata of a decode step, batch {batch}")
    seed, workload = next(bench.seeds), bench.scale.overhead
    for name in ("constrained", "ours"):
        arms.engines[name].ask("fill", workload=workload, batch=batch, seed=seed, budget=BUDGET)
    skip = ("production", "forced")
    found = bench.turns(arms, bench.scale.rounds, "decode", skip, steps=bench.scale.overhead_steps)
    arms.ask("clear")
    milliseconds = {
        name: [1e3 * statistics.mean(each["metadata"]) for each in rounds]
        for name, rounds in found.items()
    }
    shares = [100 * sum(each["metadata"]) / sum(each["seconds"]) for each in found["ours"]]
    line = Line(f"f. metadata of a step, batch {batch}", "ms", "lower", milliseconds)
    line.notes = f"{statistics.median(shares):.1f} % of our step"
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
            given = {"workload": workload, "seed": next(bench.seeds), "budget": BUDGET}
            for name in names[number:] + names[:number]:
                result = arms.engines["ours"].ask("eviction_parts", policy=name, **given)
                if number:
                    parts[name].append(result)
    for name in names:
        yield _method_line(name, workload, parts)


def _method_line(name: str, workload: Workload, parts: dict[str, list[dict[str, float]]]) -> Line:
    def compared(part: str) -> float:
        pairs = zip(parts[name], parts["tgv"], strict=True)
        return statistics.median(this[part] / tgv[part] for this, tgv in pairs)

    line = Line(
        f"g. {name}: one eviction, {workload.prompt_tokens} tokens, "
        f"a question of {workload.question_tokens}",
        "ms",
        "lower",
        {"ours": [1e3 * each["all"] for each in parts[name]]},
        notes=(
            f"statistics {compared('statistics'):.2f} x tgv, "
            f"selection and copy {compared('decision'):.2f} x tgv"
        ),
        details={"seconds": parts[name]},
    )
    if name != "h2o":  # it observes every row
        share = compared("statistics")
        line.targets.append(Target("statistics <= 1.5 x tgv", share, 1.5, "lower"))
    return line


_PRESSURE = evicting({"policy": "reach", "budget": BUDGET, "when": "pressure"})
"""Engine argument of requests that pressure might evict."""


def scheduler(bench: Bench) -> Iterator[Line]:
    """Measure lines i: the scheduler's time for a running request.

    Once while none ends, of requests that are evicted and of others that pressure might evict and
    does not, and once while as many begin and end in a pool for an eighth of them. There ours runs
    more at a time, and each counts for its own.
    """
    scale, batch, steps = bench.scale, bench.scale.scheduled_batch, 10
    tokens, rounds = scale.overhead.prompt_tokens, scale.scheduled_rounds
    pool = bench.pool_for(batch, tokens, steps * rounds)
    # Small blocks, as on GPUs, mean long rows; vLLM has no smaller ones on a CPU. With one thread,
    # nothing waits for a second core.
    flags = {"block_size": 32, "max_num_seqs": batch}
    arms = {
        "constrained": flags,
        "ours": {**flags, **evicting({"policy": "tgv", "budget": BUDGET})},
        "pressure": {**flags, **_PRESSURE},
    }
    given = {"workload": scale.overhead, "budget": BUDGET}
    with bench.launch("scheduler", BRIEF, pool, arms, threads=1) as running:
        bench.say(f"i. scheduling of {batch} running requests")
        running.ask("fill", batch=batch, seed=next(bench.seeds), attend=False, **given)
        found = bench.turns(running, rounds, "decode", steps=steps)
        running.ask("clear")
        _check_no_cuts(found)
        seconds = {
            name: [sum(each["scheduling"]) / steps / batch for each in of_arm]
            for name, of_arm in found.items()
        }
        yield from _scheduler_lines(f"{batch} running, no request ends", seconds)
        bench.say(f"i. scheduling of {batch} requests in a small pool")
        given |= {"requests": batch, "max_tokens": 32, "pool_tokens": max(batch // 8, 2) * tokens}
        found = bench.turns(running, 1 + rounds // 20, "burst", **given)
        seconds = {n: [each["scheduling_of_one"] for each in x] for n, x in found.items()}
        yield from _scheduler_lines(f"{batch} begin and end in a full pool", seconds)


def _scheduler_lines(what: str, seconds: dict[str, list[float]]) -> Iterator[Line]:
    rounds = {name: [1e6 * each for each in series] for name, series in seconds.items()}
    for ours, kind in (("ours", ""), ("pressure", ", under pressure")):
        shown = {name: rounds[name] for name in ("constrained", ours)}
        line = Line(f"i. scheduler: {what}{kind}", "us a request", "lower", shown, ours)
        more = line.median(ours) - line.median("constrained")
        text = "<= 50 us a running request more than stock"
        line.targets.append(Target(text, more, 50.0, "lower"))
        yield line


def _check_no_cuts(found: dict[str, list[dict[str, list[float]]]]) -> None:
    """Check that no step that `decode` measured had a cut.

    Raises:
        RuntimeError: if a step had one.
    """
    if any(sum(each["cuts"]) for of_arm in found.values() for each in of_arm):
        raise RuntimeError("steps without a cut are measured, and one had some")


def steps(bench: Bench) -> Iterator[Line]:
    """Measure lines k: whole steps of requests that pressure might evict, and does not.

    The tiny model shows the work on the host; in the larger one a step costs what it costs there.
    """
    scale, batch, number = bench.scale, bench.scale.scheduled_batch, 10
    flags = {"block_size": bench.block_size, "max_num_seqs": batch}
    arms = {"constrained": flags, "pressure": {**flags, **_PRESSURE}}
    given = {"workload": scale.overhead, "budget": BUDGET, "attend": False}
    for shape, rounds in (
        (BRIEF, scale.scheduled_rounds),
        (COMMON, -(-scale.scheduled_rounds // 4)),
    ):
        pool = bench.pool_for(batch, scale.overhead.prompt_tokens, number * rounds)
        with bench.launch(f"steps {shape.name}", shape, pool, arms, threads=1) as running:
            bench.say(f"k. steps of {batch} running requests, {shape.name}")
            running.ask("fill", batch=batch, seed=next(bench.seeds), **given)
            found = bench.turns(running, rounds, "decode", steps=number)
        _check_no_cuts(found)
        medians = {
            name: [1e3 * statistics.median(each["seconds"]) for each in of_arm]
            for name, of_arm in found.items()
        }
        what = f"k. steps: {batch} running under pressure, none is cut, {shape.name}"
        line = Line(what, "ms", "lower", medians, "pressure")
        line.require(0.995)
        yield line
