# SPDX-License-Identifier: Apache-2.0
"""Parts `metrics` and `traces`: their cost in throughput, first token and microseconds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.arm import Arm
from benchmarks.bench import Bench
from benchmarks.measurement import Line, Target, interval
from benchmarks.remote import Remote, RemoteError
from benchmarks.scale import BRIEF, BUDGET
from benchmarks.workload import Workload

ON, OFF, AGAIN, TRACED = "metrics", "without", "without, again", "traced"
STATES = {ON: True, OFF: False, AGAIN: False}
_TRACED_BATCH = 8


def metrics(bench: Bench) -> Iterator[Line]:
    """Measure the lines h of metrics."""
    scale = bench.scale.metrics
    with _started(bench, "metrics", max(scale.batches)) as cost:
        for batch, fills in zip(scale.batches, scale.fills, strict=True):
            yield from cost.decode(batch, fills)


def traces(bench: Bench) -> Iterator[Line]:
    """Measure the lines h of first tokens and of traces."""
    with _started(bench, "traces", _TRACED_BATCH) as cost:
        yield from cost.first_token()
        yield from cost.traced_decode()


@contextmanager
def _started(bench: Bench, part: str, batch: int) -> Iterator[MetricsCost]:
    """Start an engine and check it.

    It computes with one thread: waiting for a second core of a shared machine varies by more than
    metrics cost.
    """
    scale = bench.scale.metrics
    steps = 6 * 3 * scale.cycles * scale.rounds_per_fill
    longest = BUDGET * scale.decode.prompt_tokens + steps + 3 * bench.block_size
    # A prefilling request has its whole prompt.
    pool_tokens = round(batch * longest) + 8 * scale.first_token.prompt_tokens
    same = {
        **bench.engine_args(BRIEF, pool_tokens),
        "max_num_seqs": batch,
        "block_size": bench.block_size,
    }
    eviction = {"additional_config": {"kv_eviction": {"policy": "tgv", "budget": BUDGET}}}
    with bench.launch(part, BRIEF, [Arm(ON, {**same, **eviction}, 1)]) as running:
        cost = MetricsCost(bench, running[ON])
        cost.check()
        yield cost


def _by_clock_and_state() -> dict[str, dict[str, list[float]]]:
    return {clock: {name: [] for name in STATES} for clock in ("wall", "cpu")}


class MetricsCost:
    """Measures an engine whose metrics are switched on and off."""

    def __init__(self, bench: Bench, on: Remote) -> None:
        self.scale = bench.scale.metrics
        self.seeds = bench.seeds
        self.say = bench.say
        self.on = on

    # -- checks -------------------------------------------------------------------------

    def check(self) -> None:
        """Check what the engine collects, switched on and off.

        Raises:
            RemoteError: if a figure would not be the cost of metrics.
        """
        on = self.on
        with_metrics = on.ask("collected")
        requests = "vllm:kv_eviction_requests_total tgv"
        counted = with_metrics["counters"]["requests_evicted"]
        self._require(counted > 0, "nothing was evicted")
        self._require(with_metrics["exported"].get(requests) == counted, "evictions not exported")
        seconds = "vllm:kv_eviction_seconds_count tgv statistics"
        self._require(with_metrics["exported"].get(seconds) == counted, "no seconds exported")
        self._require(all(with_metrics["state"].values()), "metrics are not collected everywhere")
        tokens = with_metrics["exported"].get("vllm:generation_tokens_total", 0)
        self._require(tokens > 0, "vLLM's statistics are off")

        on.ask("collect", on=False)
        on.ask("prefill", workload=Workload(1280), seed=next(self.seeds), budget=BUDGET)
        switched = on.ask("collected")
        on.ask("collect", on=True)
        self._require(not any(switched["state"].values()), "metrics are collected somewhere")
        self._require(switched["exported"][requests] == counted, "exported while switched off")
        self._require(switched["counters"]["requests_evicted"] == counted + 1, "nothing evicted")

        traced = "vllm_xargs kv_eviction_trace leaves no trace"
        request = {"workload": Workload(1280), "budget": BUDGET}
        before = on.ask("collected")["traces"]
        on.ask("prefill", **request, seed=next(self.seeds), trace=True)
        self._require(on.ask("collected")["traces"] == before + 1, traced)

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise RemoteError(f"metrics: {otherwise}")

    # -- decode -------------------------------------------------------------------------

    def decode(self, batch: int, fills: int) -> list[Line]:
        """Compare throughput by wall clock and by CPU time, with a control; time the code alone."""
        scale, workload, engine = self.scale, self.scale.decode, self.on
        rates: dict[str, dict[str, list[float]]] = _by_clock_and_state()
        steps: dict[str, dict[str, list[float]]] = _by_clock_and_state()
        for number in range(fills):
            if number:
                engine.ask("clear")
            self.say(f"h. decode, metrics switched from step to step, batch {batch}, {number + 1}")
            self._fill(engine, batch)
            for _ in range(scale.rounds_per_fill):
                found = engine.ask("decode_switched", states=STATES, cycles=scale.cycles)
                for name, clocks in found.items():
                    for clock, seconds in clocks.items():
                        steps[clock][name] += [batch / each for each in seconds]
                        rates[clock][name].append(batch / statistics.median(seconds))
        step = batch / statistics.median(steps["wall"][OFF])
        microseconds = self._microseconds(batch, step)
        engine.ask("clear")
        what = f"decode, batch {batch}, {workload.prompt_tokens} tokens"

        def line(ours: str, clock: str, name: str, unit: str) -> Line:
            made = Line(f"h. {name}: {what}", unit, "higher", {}, ours, against=(OFF,))
            made.rounds = {state: rates[clock][state] for state in (ours, OFF)}
            made.neighbours = {state: steps[clock][state] for state in (ours, OFF)}
            return made

        wall = line(ON, "wall", "metrics", "tokens/s")
        wall.require_surely(0.99, "of without")
        cpu = line(ON, "cpu", "metrics, by CPU time", "tokens/CPU s")
        cpu.require_surely(0.99, "of without")
        controls = [
            line(AGAIN, "wall", "control, twice without metrics", "tokens/s"),
            line(AGAIN, "cpu", "control, by CPU time", "tokens/CPU s"),
        ]
        return [wall, cpu, *controls, microseconds]

    def _fill(self, engine: Remote, batch: int, trace: bool = False) -> None:
        engine.ask(
            "fill",
            workload=self.scale.decode,
            batch=batch,
            seed=next(self.seeds),
            budget=BUDGET,
            trace=trace,
        )
        engine.ask("decode", steps=8)

    def _microseconds(self, batch: int, step: float) -> Line:
        self.say(f"h. the code of metrics alone, batch {batch}")
        found = [self.on.ask("collection_microseconds", calls=self.scale.calls) for _ in range(5)]
        typical = {key: statistics.median(each[key] for each in found) for key in found[0]}
        per_step = [
            each["each step"] + step * (each["gauges, once a second"] - each["each step"])
            for each in found
        ]
        share = 1e-4 * statistics.median(per_step) / step
        line = Line(f"h. metrics alone, batch {batch}", "us a step", "lower", {ON: per_step}, ON)
        line.against = ()
        line.notes = f"a step takes {1e3 * step:.1f} ms; " + ", ".join(
            f"{key}: {value:.1f} us" for key, value in typical.items()
        )
        line.details = {"microseconds": found, "step_seconds": step}
        line.targets.append(Target("<= 1 % of a step", share, 1.0, "lower"))
        return line

    # -- evictions ----------------------------------------------------------------------

    def first_token(self) -> list[Line]:
        """Compare time to first token and its eviction: without metrics, with them, traced."""
        engine, workload, states = self.on, self.scale.first_token, (OFF, ON, TRACED)
        self.say(f"h. time to first token, {workload.prompt_tokens} tokens")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in states}
        shuffler = random.Random(0)
        for _ in range(self.scale.first_token_rounds):
            for name in shuffler.sample(states, len(states)):
                engine.ask("collect", on=name != OFF)
                result = engine.ask(
                    "prefill",
                    workload=workload,
                    seed=next(self.seeds),
                    budget=BUDGET,
                    trace=name == TRACED,
                )
                results[name].append(result)
        engine.ask("collect", on=True)
        lines = []
        for ours, other in ((ON, OFF), (TRACED, ON)):
            for measure, unit, key in (
                ("time to first token", "ms", "seconds"),
                ("time to first token, by CPU time", "CPU ms", "cpu"),
                ("one eviction", "ms", "eviction"),
                ("report of an eviction", "ms", "outcomes"),
            ):
                what = f"h. {ours}: {measure}, {workload.prompt_tokens} tokens"
                values = {n: [1e3 * r[key] for r in results[n]] for n in (ours, other)}
                lines.append(self._difference(what, unit, values, ours, other))
        return lines

    @staticmethod
    def _difference(
        what: str, unit: str, values: dict[str, list[float]], ours: str, other: str
    ) -> Line:
        """Return a line whose note says how much more one state takes than another."""
        line = Line(what, unit, "lower", values, ours, against=(other,))
        pairs = zip(values[ours], values[other], strict=True)
        more = [one - two for one, two in pairs]
        line.notes = f"{statistics.median(more):.2f} {unit} more than {other}"
        if bounds := interval(more):
            line.notes += f" (95 %: {bounds[0]:.2f} .. {bounds[1]:.2f})"
        return line

    def traced_decode(self) -> list[Line]:
        """Compare the throughput of a traced batch with one that is not, in two engines.

        They swap roles, so that a difference between the engines cancels in the geometric mean.
        """
        batch, workload, scale = _TRACED_BATCH, self.scale.decode, self.scale
        one, other = self.on, self.off
        for engine in (one, other):
            engine.ask("collect", on=False)
        halves: dict[tuple[str, str], tuple[list[float], list[float]]] = {
            (name, clock): ([], []) for name in (OFF, TRACED) for clock in ("seconds", "cpu")
        }
        for number in range(2 * scale.traced_fills):
            self.say(f"h. decode of traced requests, batch {batch}, {number + 1}")
            roles = {TRACED: one, OFF: other} if number % 2 else {OFF: one, TRACED: other}
            for name, engine in roles.items():
                self._fill(engine, batch, trace=name == TRACED)
            for round_ in range(scale.traced_rounds):
                for name in (OFF, TRACED) if round_ % 2 else (TRACED, OFF):
                    result = roles[name].ask("decode", steps=scale.traced_steps)
                    for clock in ("seconds", "cpu"):
                        rate = batch / statistics.median(result[clock])
                        halves[name, clock][number % 2].append(rate)
            for engine in roles.values():
                engine.ask("clear")
        what = f"decode, batch {batch}, {workload.prompt_tokens} tokens"
        lines = []
        for title, unit, clock in (
            ("traced", "tokens/s", "seconds"),
            ("traced, by CPU time", "tokens/CPU s", "cpu"),
        ):
            rates = {
                name: [
                    statistics.geometric_mean(pair)
                    for pair in zip(*halves[name, clock], strict=True)
                ]
                for name in (OFF, TRACED)
            }
            line = Line(f"h. {title}: {what}", unit, "higher", rates, TRACED, against=(OFF,))
            line.require_surely(0.99, "of without")
            lines.append(line)
        return lines
