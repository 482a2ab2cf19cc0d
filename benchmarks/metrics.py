# SPDX-License-Identifier: Apache-2.0
"""What metrics and traces cost: decode throughput, time to first token, microseconds a step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.arm import ArmError, ArmProcess
from benchmarks.measurement import Line, Target, interval
from benchmarks.workload import Workload

ON, OFF, AGAIN, TRACED = "metrics", "without", "without, again", "traced"
STATES = {ON: True, OFF: False, AGAIN: False}


def _by_clock_and_state() -> dict[str, dict[str, list[float]]]:
    return {clock: {name: [] for name in STATES} for clock in ("wall", "cpu")}


@dataclass(frozen=True)
class MetricsScale:
    """How large and how often."""

    batches: tuple[int, ...]
    fills: tuple[int, ...]
    """For each of the batches, how often it begins anew: long contexts make steps long."""
    rounds_per_fill: int
    cycles: int
    """Of all orders of the states in a round."""
    decode: Workload
    first_token: Workload
    first_token_rounds: int
    traced_fills: int
    traced_rounds: int
    """In each fill."""
    traced_steps: int
    calls: int


class MetricsCost:
    """Measures an engine whose metrics are on, and takes a look at one that has none."""

    def __init__(
        self,
        scale: MetricsScale,
        budget: float,
        seeds: Iterator[int],
        say: Callable[[str], None],
    ) -> None:
        self.scale = scale
        self.budget = budget
        self.seeds = seeds
        self.say = say

    # -- is it what it is called --------------------------------------------------------

    def check(self, on: ArmProcess, off: ArmProcess) -> None:
        """Both collect, and only what they should; a switched engine is as one that has none.

        Raises:
            ArmError: where a figure would not be that of metrics.
        """
        for arm in (on, off):
            arm.ask("prefill", workload=Workload(1280), seed=next(self.seeds), budget=self.budget)
        with_metrics, without = on.ask("collected"), off.ask("collected")
        requests = "vllm:kv_eviction_requests_total tgv"
        counted = with_metrics["counters"]["requests_evicted"]
        self._require(counted > 0, "nothing was evicted")
        self._require(with_metrics["exported"].get(requests) == counted, "evictions not exported")
        seconds = "vllm:kv_eviction_seconds_count tgv statistics"
        self._require(with_metrics["exported"].get(seconds) == counted, "no seconds exported")
        self._require(all(with_metrics["state"].values()), "metrics are not collected everywhere")
        for collected in (with_metrics, without):
            tokens = collected["exported"].get("vllm:generation_tokens_total", 0)
            self._require(tokens > 0, "vLLM's statistics are off")
        self._require(without["counters"]["requests_evicted"] > 0, "nothing was evicted without")
        found = [name for name in without["exported"] if "kv_eviction" in name]
        self._require(not found, f"metrics: false exports {found}")

        on.ask("collect", on=False)
        on.ask("prefill", workload=Workload(1280), seed=next(self.seeds), budget=self.budget)
        switched = on.ask("collected")
        on.ask("collect", on=True)
        self._require(switched["state"] == without["state"], "a switched engine differs")
        self._require(switched["exported"][requests] == counted, "exported while switched off")
        self._require(switched["counters"]["requests_evicted"] == counted + 1, "nothing evicted")

        traced = "vllm_xargs kv_eviction_trace leaves no trace"
        request = {"workload": Workload(1280), "budget": self.budget}
        before = on.ask("collected")["traces"]
        on.ask("prefill", **request, seed=next(self.seeds), trace=True)
        self._require(on.ask("collected")["traces"] == before + 1, traced)

    @staticmethod
    def _require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise ArmError(f"metrics: {otherwise}")

    # -- decode -------------------------------------------------------------------------

    def decode(self, engine: ArmProcess, batch: int, fills: int) -> list[Line]:
        """Throughput by wall clock and by CPU time, with a control; then the code by itself."""
        scale, workload = self.scale, self.scale.decode
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
        microseconds = self._microseconds(engine, batch, step)
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

    def _fill(self, engine: ArmProcess, batch: int, trace: bool = False) -> None:
        engine.ask(
            "fill",
            workload=self.scale.decode,
            batch=batch,
            seed=next(self.seeds),
            budget=self.budget,
            trace=trace,
        )
        engine.ask("decode", steps=8)

    def _microseconds(self, engine: ArmProcess, batch: int, step: float) -> Line:
        self.say(f"h. the code of metrics by itself, batch {batch}")
        found = [engine.ask("collection_microseconds", calls=self.scale.calls) for _ in range(5)]
        typical = {key: statistics.median(each[key] for each in found) for key in found[0]}
        per_step = [
            each["each step"] + step * (each["gauges, once a second"] - each["each step"])
            for each in found
        ]
        share = 1e-4 * statistics.median(per_step) / step
        line = Line(
            f"h. metrics by themselves, batch {batch}", "us a step", "lower", {ON: per_step}, ON
        )
        line.against = ()
        line.notes = f"a step takes {1e3 * step:.1f} ms; " + ", ".join(
            f"{key}: {value:.1f} us" for key, value in typical.items()
        )
        line.details = {"microseconds": found, "step_seconds": step}
        line.targets.append(Target("<= 1 % of a step", share, 1.0, "lower"))
        return line

    # -- evictions ----------------------------------------------------------------------

    def first_token(self, engine: ArmProcess) -> list[Line]:
        """Time to first token and of the eviction in it: without metrics, with them, traced."""
        workload, states = self.scale.first_token, (OFF, ON, TRACED)
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
                    budget=self.budget,
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
        """A line whose note says how much more one state takes than another."""
        line = Line(what, unit, "lower", values, ours, against=(other,))
        pairs = zip(values[ours], values[other], strict=True)
        more = [one - two for one, two in pairs]
        line.notes = f"{statistics.median(more):.2f} {unit} more than {other}"
        if bounds := interval(more):
            line.notes += f" (95 %: {bounds[0]:.2f} .. {bounds[1]:.2f})"
        return line

    def traced_decode(self, one: ArmProcess, other: ArmProcess) -> list[Line]:
        """Throughput of a batch that was traced beside one that was not, in two engines.

        They change places, and what one of them is faster by falls out of the geometric mean.
        """
        batch, workload, scale = 8, self.scale.decode, self.scale
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
