# SPDX-License-Identifier: Apache-2.0
"""What metrics and traces cost: decode throughput, time to first token, microseconds a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.arm import ArmError, ArmProcess
from benchmarks.measurement import Line, Target
from benchmarks.workload import Workload

ON, OFF, AGAIN, TRACED = "metrics", "without", "without, again", "traced"
STATES = {ON: True, OFF: False, AGAIN: False}


@dataclass(frozen=True)
class MetricsScale:
    """How large and how often."""

    batches: tuple[int, ...]
    decode_rounds: tuple[int, ...]
    """For each of the batches."""
    cycles: int
    """Of all orders of the states in a round."""
    decode: Workload
    first_token: Workload
    first_token_rounds: int
    traced_rounds: int
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

    def decode(self, engine: ArmProcess, batch: int, rounds: int) -> list[Line]:
        """Throughput by wall clock and by CPU time, with a control; then the code by itself."""
        scale, workload = self.scale, self.scale.decode
        self.say(f"h. filling caches of a batch of {batch}")
        seed = next(self.seeds)
        engine.ask("fill", workload=workload, batch=batch, seed=seed, budget=self.budget)
        engine.ask("decode", steps=8)
        self.say(f"h. decode throughput, metrics switched from step to step, batch {batch}")
        rates: dict[str, dict[str, list[float]]] = {
            clock: {name: [] for name in STATES} for clock in ("wall", "cpu")
        }
        for _ in range(rounds):
            found = engine.ask("decode_switched", states=STATES, cycles=scale.cycles)
            for name, clocks in found.items():
                for clock, seconds in clocks.items():
                    rates[clock][name].append(batch / seconds)
        step = batch / statistics.median(rates["wall"][OFF])
        microseconds = self._microseconds(engine, batch, step)
        engine.ask("clear")
        what = f"decode, batch {batch}, {workload.prompt_tokens} tokens"
        wall, cpu = (
            Line(
                f"h. metrics: {what}{of}",
                unit,
                "higher",
                {name: series for name, series in rates[clock].items() if name != AGAIN},
                ON,
                against=(OFF,),
            )
            for clock, of, unit in (
                ("wall", "", "tokens/s"),
                ("cpu", ", by CPU time", "tokens/CPU s"),
            )
        )
        wall.require_surely(0.99, "of without")
        control = Line(
            f"h. control, twice without metrics: {what}",
            "tokens/s",
            "higher",
            {name: rates["wall"][name] for name in (AGAIN, OFF)},
            AGAIN,
            against=(OFF,),
        )
        return [wall, cpu, control, microseconds]

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
        """Time to first token and of the eviction in it, in turn without, with, and traced."""
        workload = self.scale.first_token
        self.say(f"h. time to first token, {workload.prompt_tokens} tokens")
        names = (OFF, ON, TRACED)
        orders = list(itertools.permutations(names))
        first: dict[str, list[float]] = {name: [] for name in names}
        eviction: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self.scale.first_token_rounds):
            for name in orders[number % len(orders)]:
                engine.ask("collect", on=name != OFF)
                result = engine.ask(
                    "prefill",
                    workload=workload,
                    seed=next(self.seeds),
                    budget=self.budget,
                    trace=name == TRACED,
                )
                first[name].append(result["seconds"])
                eviction[name].append(1e3 * (result["eviction"] + result["outcomes"]))
        engine.ask("collect", on=True)
        lines = []
        for ours, against in ((ON, OFF), (TRACED, ON)):
            for what, unit, values in (
                (f"time to first token, {workload.prompt_tokens} tokens", "s", first),
                (f"one eviction, {workload.prompt_tokens} tokens", "ms", eviction),
            ):
                rounds = {name: values[name] for name in (ours, against)}
                line = Line(f"h. {ours}: {what}", unit, "lower", rounds, ours, against=(against,))
                more = statistics.median(
                    one - other for one, other in zip(values[ours], values[against], strict=True)
                )
                line.notes = f"{1e3 * more if unit == 's' else more:.2f} ms more than {against}"
                lines.append(line)
        return lines

    def traced_decode(self, engine: ArmProcess) -> Line:
        """Throughput of a batch that was traced beside one that was not."""
        batch, workload = 8, self.scale.decode
        self.say(f"h. decode throughput of traced requests, batch {batch}")
        rates: dict[str, list[float]] = {ON: [], TRACED: []}
        for number in range(self.scale.traced_rounds):
            for name in (ON, TRACED) if number % 2 else (TRACED, ON):
                engine.ask(
                    "fill",
                    workload=workload,
                    batch=batch,
                    seed=next(self.seeds),
                    budget=self.budget,
                    trace=name == TRACED,
                )
                engine.ask("decode", steps=4)
                seconds = engine.ask("decode", steps=self.scale.traced_steps)["seconds"]
                rates[name].append(batch / statistics.median(seconds))
                engine.ask("clear")
        what = f"decode, batch {batch}, {workload.prompt_tokens} tokens"
        line = Line(f"h. traced: {what}", "tokens/s", "higher", rates, TRACED, against=(ON,))
        line.require_surely(0.99, "of metrics")
        return line
