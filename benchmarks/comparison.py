# SPDX-License-Identifier: Apache-2.0
"""The comparisons: which arms, which prompts, in which order, and what is asked of the result."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.arm import Arm, ArmError, ArmProcess, Arms
from benchmarks.measurement import DecodeBytes, Line, Target, interval
from benchmarks.metrics import MetricsCost, MetricsScale
from benchmarks.schedulers import Timing, Traffic, measure
from benchmarks.shape import ModelShape
from benchmarks.workload import Workload
from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.policies import POLICY_NAMES

METHODS = POLICY_NAMES
BUDGET = 0.1
WORKSPACE = 64 << 20
"""Bound of each scratch buffer of the eviction, `workspace_bytes` of the kernels."""

PARTS = ("costs", "methods", "gain", "burst", "metrics", "traces", "scheduler")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How large and how often: the whole run, or the quick one."""

    rounds: int
    first_token_rounds: int
    decode_steps: int
    first_token: Workload
    decode: Workload
    long: Workload
    long_rounds: int
    wide: Workload
    wide_steps: int
    burst: Workload
    burst_requests: int
    burst_output: int
    burst_rounds: int
    overhead: Workload
    metrics: MetricsScale
    scheduler_rounds: int
    overhead_batches: tuple[int, ...] = (8, 32)


FULL = Scale(
    rounds=5,
    first_token_rounds=15,
    decode_steps=24,
    first_token=Workload(2048),
    decode=Workload(1024),
    long=Workload(8192),
    long_rounds=3,
    wide=Workload(16384),
    wide_steps=16,
    burst=Workload(2048),
    burst_requests=24,
    burst_output=128,
    burst_rounds=1,
    overhead=Workload(640),
    metrics=MetricsScale(
        batches=(8, 128),
        fills=(6, 4),
        rounds_per_fill=50,
        cycles=2,
        decode=Workload(640),
        first_token=Workload(2048),
        first_token_rounds=150,
        traced_fills=4,
        traced_rounds=300,
        traced_steps=3,
        calls=2000,
    ),
    scheduler_rounds=60,
)
QUICK = Scale(
    rounds=3,
    first_token_rounds=5,
    decode_steps=12,
    first_token=Workload(1024),
    decode=Workload(640),
    long=Workload(2048),
    long_rounds=2,
    wide=Workload(4096),
    wide_steps=6,
    burst=Workload(1280),
    burst_requests=24,
    burst_output=64,
    burst_rounds=1,
    overhead=Workload(640),
    metrics=MetricsScale(
        batches=(8, 32),
        fills=(1, 1),
        rounds_per_fill=20,
        cycles=1,
        decode=Workload(640),
        first_token=Workload(1280),
        first_token_rounds=20,
        traced_fills=1,
        traced_rounds=40,
        traced_steps=3,
        calls=500,
    ),
    scheduler_rounds=20,
)

COMMON = ModelShape("common", 1024, 8, 16, 4, 64, 2816)
"""Costs of the plugin: compute and weights as in a real model, four queries a KV head."""
BRIEF = ModelShape("brief", 256, 4, 8, 4, 32, 704, vocabulary=4096, dtype="float32")
"""Cost of metrics: a step that is nearly all vLLM's own work on the host, where theirs is done.
No step of a larger model is shorter."""
STEPS_PER_ROUND = 10
SCHEDULER_TRAFFIC = (
    Traffic("no request ends", 256, 1024, None),
    Traffic("2 requests begin and end in a step", 256, 1024, 128),
    Traffic("chunks of 64 tokens in a full pool", 256, 1024, 49, chunk=64, pool_blocks=3500),
    Traffic("chunks of 32 tokens in a full pool", 256, 1024, 33, chunk=32, pool_blocks=5000),
)
KV_BOUND = ModelShape("kv-bound", 512, 8, 16, 8, 128, 1408, vocabulary=4096)
"""Gain of the plugin: caches far larger than weights."""


def arms(
    shape: ModelShape, pool_tokens: int, block_size: int, flags: dict[str, Any], forced: bool
) -> list[Arm]:
    """Stock in its two guises, ours, and, if `forced`, ours at a budget of 1 that still evicts.

    All have a pool of the same bytes, and `flags`. *Production* adds nothing. The others share
    the block size.
    """
    stock = {**flags, "kv_cache_memory_bytes": pool_tokens * shape.kv_bytes_per_token}
    same = {**stock, "block_size": block_size}
    ours = {"policy": "tgv", "budget": BUDGET}
    everything = {"policy": "tgv", "budget": 1.0, "debug": {"evict_at_full_budget": True}}
    result = [
        Arm("production", stock),
        Arm("constrained", same),
        Arm("ours", {**same, "additional_config": {"kv_eviction": ours}}),
    ]
    if forced:
        result.append(Arm("forced", {**same, "additional_config": {"kv_eviction": everything}}))
    return result


def metrics_arms(
    shape: ModelShape, pool_tokens: int, block_size: int, flags: dict[str, Any]
) -> list[Arm]:
    """Ours with metrics and ours without, with one thread: what waits for a second core on a
    machine that is shared varies by more than what is looked for."""
    same = {
        **flags,
        "kv_cache_memory_bytes": pool_tokens * shape.kv_bytes_per_token,
        "block_size": block_size,
    }
    settings = {"policy": "tgv", "budget": BUDGET}
    return [
        Arm(name, {**same, "additional_config": {"kv_eviction": {**settings, "metrics": on}}}, 1)
        for name, on in (("metrics", True), ("without", False))
    ]


class Comparison:
    """Measures arms against each other and collects the lines of the report."""

    def __init__(self, scale: Scale, root: str, block_size: int, eager: bool, say: Say) -> None:
        self.scale = scale
        self.root = root
        self.block_size = block_size
        self.eager = eager
        self.say = say
        self.lines: list[Line] = []
        self.facts: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._seeds = itertools.count(0, 1000)

    def run(self, only: Sequence[str] = ()) -> None:
        """All of `PARTS`, or the named ones. A part that fails leaves the rest."""
        parts = (
            self._costs,
            self._methods,
            self._gain,
            self._burst,
            self._metrics,
            self._traces,
            self._scheduler,
        )
        for name, part in zip(PARTS, parts, strict=True):
            if only and name not in only:
                continue
            try:
                part()
            except ArmError as error:
                self.say(f"part `{name}` failed: {error}")
                self.failures[name] = str(error)

    # -- what it costs ------------------------------------------------------------------

    def _costs(self) -> None:
        scale, shape = self.scale, COMMON
        longest = max(
            scale.long.prompt_tokens * 5 // 4 + 512,
            8 * (scale.decode.prompt_tokens + scale.rounds * scale.decode_steps + 512),
            # Whole blocks of each request, and one more for what it decodes.
            max(scale.overhead_batches)
            * (scale.overhead.prompt_tokens + 256 + 2 * self.block_size),
        )
        with self._start("costs", shape, longest, forced=True) as arms:
            self._warm_up(arms)
            self._first_token(arms)
            self._full_budget_decode(arms)
            self._eviction_share(arms)
            self._eviction_memory(arms)
            for batch in scale.overhead_batches:
                self._host_overhead(arms, batch)

    def _first_token(self, arms: Arms) -> None:
        self.say("a. time to first token at budget 1.0")
        seconds: dict[str, list[float]] = {}
        for _, arm, seed in self._turns(arms, self.scale.first_token_rounds):
            result = arm.ask("prefill", workload=self.scale.first_token, seed=seed, budget=1.0)
            seconds.setdefault(arm.arm.name, []).append(result["seconds"])
        tokens = self.scale.first_token.prompt_tokens
        self._full_budget_lines(f"time to first token, {tokens} tokens", "s", "lower", seconds)

    def _full_budget_decode(self, arms: Arms) -> None:
        self.say("a. decode throughput at budget 1.0, batch 8")
        batch, workload = 8, self.scale.decode
        rates = self._decode(arms, batch, workload, 1.0)
        self._full_budget_lines(
            f"decode, batch {batch}, {workload.prompt_tokens} tokens", "tokens/s", "higher", rates
        )

    def _full_budget_lines(self, what: str, unit: str, better: Any, values: Any) -> None:
        skipped = {name: series for name, series in values.items() if name != "forced"}
        forced = {name: series for name, series in values.items() if name != "ours"}
        line = Line(f"a. budget 1.0: {what}", unit, better, skipped)
        line.require(0.97)
        self.lines.append(line)
        self.lines.append(
            Line(f"a. budget 1.0, all pages dealt anew: {what}", unit, better, forced, "forced")
        )

    def _decode(
        self, arms: Arms, batch: int, workload: Workload, budget: float
    ) -> dict[str, list[float]]:
        """Tokens per second of every round, from the median step."""
        seed = next(self._seeds)
        for arm in arms.processes.values():
            arm.ask("fill", workload=workload, batch=batch, seed=seed, budget=budget)
            arm.ask("decode", steps=4)
        rates: dict[str, list[float]] = {}
        for _, arm, _ in self._turns(arms, self.scale.rounds):
            result = arm.ask("decode", steps=self.scale.decode_steps)
            rate = batch / statistics.median(result["seconds"])
            rates.setdefault(arm.arm.name, []).append(rate)
        for arm in arms.processes.values():
            arm.ask("clear")
        return rates

    def _eviction_share(self, arms: Arms) -> None:
        """Twice: with a short question, and with more text than the observation window."""
        tokens = self.scale.long.prompt_tokens
        for question in (self.scale.long.question_tokens, 512):
            self.say(f"c. eviction's share of prefill: {tokens} tokens, a question of {question}")
            workload = Workload(tokens, question)
            seconds: dict[str, list[float]] = {}
            shares = []
            for _, arm, seed in self._turns(arms, self.scale.long_rounds, skip=("forced",)):
                result = arm.ask("prefill", workload=workload, seed=seed, budget=BUDGET)
                seconds.setdefault(arm.arm.name, []).append(result["seconds"])
                if arm.arm.name == "ours":
                    shares.append(100 * result["eviction"] / result["seconds"])
            what = f"{tokens} tokens, a question of {question}"
            share = Line(f"c. eviction's share of prefill: {what}", "%", "lower", {"ours": shares})
            share.targets.append(Target("<= 3 %", share.median("ours"), 3.0, "lower"))
            self.lines.append(share)
            self.lines.append(Line(f"c. time to first token: {what}", "s", "lower", seconds))

    def _eviction_memory(self, arms: Arms) -> None:
        self.say("e. memory of an eviction")
        workload, shape = Workload(self.scale.long.prompt_tokens, 512), COMMON
        seed = next(self._seeds)
        result = arms["ours"].ask("eviction_memory", workload=workload, seed=seed, budget=BUDGET)
        tokens = workload.prompt_tokens
        rows, queries = EvictionConfig.observation_window, shape.query_heads * shape.head_size
        bound = 4 * WORKSPACE + shape.layers * (
            40 * shape.kv_heads * tokens + 2 * rows * queries  # scores and ranking; kept queries
        )
        mib = 1 << 20
        line = Line(
            f"e. eviction beyond the pool, peak: {tokens} tokens, {rows} observed",
            "MiB",
            "lower",
            {"ours": [result["peak"] / mib]},
            notes=f"the prompt's cache is {tokens * shape.kv_bytes_per_token / mib:.0f} MiB",
            details=result,
        )
        target = f"<= {bound / mib:.0f} MiB, the stated bound"
        line.targets.append(Target(target, result["peak"], bound, "lower"))
        self.lines.append(line)

    def _host_overhead(self, arms: Arms, batch: int) -> None:
        self.say(f"f. metadata of a decode step, batch {batch}")
        seed = next(self._seeds)
        names = ("constrained", "ours")
        for name in names:
            arms[name].ask(
                "fill", workload=self.scale.overhead, batch=batch, seed=seed, budget=BUDGET
            )
        milliseconds: dict[str, list[float]] = {}
        parts: list[dict[str, float]] = []
        shares = []
        for _, arm, _ in self._turns(arms, self.scale.rounds, skip=("production", "forced")):
            result = arm.ask("decode", steps=self.block_size)
            spent = result["watches"]
            milliseconds.setdefault(arm.arm.name, []).append(1e3 * spent["metadata"])
            if arm.arm.name == "ours":
                shares.append(100 * spent["metadata"] / statistics.mean(result["seconds"]))
                parts.append({part: round(1e3 * value, 4) for part, value in spent.items()})
        for name in names:
            arms[name].ask("clear")
        line = Line(f"f. metadata of a step, batch {batch}", "ms", "lower", milliseconds)
        line.notes = f"{statistics.median(shares):.1f} % of ours' step"
        line.details = {"parts_ms": parts, "share_percent": shares}
        self.lines.append(line)

    def _methods(self) -> None:
        """The eviction of one prompt by every method; the question fills the window."""
        scale, workload = self.scale, Workload(self.scale.long.prompt_tokens, 512)
        pool = workload.prompt_tokens * 5 // 4 + 512
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
        with self._start("methods", COMMON, pool, only=("ours",)) as arms:
            self._warm_up(arms)
            for number in range(scale.long_rounds + 1):
                self.say(f"g. eviction by {len(METHODS)} methods, round {number} (0 warms up)")
                seed = next(self._seeds)
                for name in METHODS[number:] + METHODS[:number]:
                    result = arms["ours"].ask(
                        "eviction_parts", workload=workload, seed=seed, budget=BUDGET, policy=name
                    )
                    if number:
                        seconds[name].append(result)
        tokens = workload.prompt_tokens
        for name in METHODS:
            line = Line(
                f"g. {name}: one eviction, {tokens} tokens, a question of 512",
                "ms",
                "lower",
                {"ours": [1e3 * round_["all"] for round_ in seconds[name]]},
                details={"seconds": seconds[name]},
            )
            ratios = {}
            for part in ("statistics", "decision"):
                ratios[part] = statistics.median(
                    ours[part] / tgv[part]
                    for ours, tgv in zip(seconds[name], seconds["tgv"], strict=True)
                )
            extra = statistics.median(
                1e3 * (ours["all"] - random["all"])
                for ours, random in zip(seconds[name], seconds["random"], strict=True)
            )
            line.notes = (
                f"{extra:.1f} ms more than random; statistics {ratios['statistics']:.2f} x tgv, "
                f"selection and copy {ratios['decision']:.2f} x tgv"
            )
            if name != "h2o":  # which looks at every row
                line.targets.append(
                    Target("statistics <= 1.5 x tgv", ratios["statistics"], 1.5, "lower")
                )
            self.lines.append(line)

    # -- what it brings -----------------------------------------------------------------

    def _gain(self) -> None:
        scale, shape, batch = self.scale, KV_BOUND, 8
        tokens = batch * (scale.wide.prompt_tokens + 4 * self.block_size + 256)
        with self._start("gain", shape, tokens) as arms:
            self._warm_up(arms)
            for arm in arms.processes.values():
                self.say(f"b. filling caches of {arm.arm.name}")
                arm.ask(
                    "fill", workload=scale.wide, batch=batch, seed=0, budget=BUDGET, attend=False
                )
                arm.ask("decode", steps=2)
            self.say("b. decode bound by KV reads")
            rates: dict[str, list[float]] = {}
            cached: dict[str, list[float]] = {}
            for _, arm, _ in self._turns(arms, scale.rounds):
                result = arm.ask("decode", steps=scale.wide_steps)
                name = arm.arm.name
                rates.setdefault(name, []).append(batch / statistics.median(result["seconds"]))
                cached.setdefault(name, []).append(result["cached_tokens"])
        self._gain_line(shape, batch, rates, {n: statistics.mean(c) for n, c in cached.items()})

    def _gain_line(
        self,
        shape: ModelShape,
        batch: int,
        rates: dict[str, list[float]],
        cached_tokens: dict[str, float],
    ) -> None:
        reads = {
            name: DecodeBytes(shape.weight_bytes_per_step, tokens * shape.kv_bytes_per_token)
            for name, tokens in cached_tokens.items()
        }
        line = Line(
            f"b. budget {BUDGET}: decode, batch {batch}, {self.scale.wide.prompt_tokens} tokens",
            "tokens/s",
            "higher",
            rates,
            details={name: vars(read) for name, read in reads.items()},
        )
        notes = []
        for ratio in line.ratios():
            ideal = reads[ratio.against].ideal_speed_up(reads["ours"])
            text = f">= 0.85 of the ideal {ideal:.2f} x, {ratio.against}"
            line.targets.append(Target(text, ratio.median / ideal, 0.85))
            line.details[f"ideal_over_{ratio.against}"] = ideal
        gigabytes = {name: f"{read.total / 1e9:.2f}" for name, read in reads.items()}
        notes.append("GB read a step: " + ", ".join(f"{n} {g}" for n, g in gigabytes.items()))
        line.notes = "; ".join(notes)
        self.lines.append(line)

    def _burst(self) -> None:
        scale = self.scale
        requests, output, workload = scale.burst_requests, scale.burst_output, scale.burst
        # One more block for each: a request's tail rarely ends with a block.
        blocks = 4 * -(-(workload.prompt_tokens + output) // 128) + 1
        with self._start("burst", KV_BOUND, blocks * 128) as arms:
            self._warm_up(arms)
            results: dict[str, list[dict[str, float]]] = {}
            for number, arm, seed in self._turns(arms, scale.burst_rounds):
                self.say(f"d. {requests} requests at once, {arm.arm.name}, round {number + 1}")
                result = arm.ask(
                    "burst",
                    workload=workload,
                    requests=requests,
                    seed=seed,
                    max_tokens=output,
                    budget=BUDGET,
                )
                results.setdefault(arm.arm.name, []).append(result)

        def line(measure: str, unit: str, key: str) -> Line:
            rounds = {name: [r[key] for r in found] for name, found in results.items()}
            what = f"{requests} requests of {workload.prompt_tokens} + {output} tokens"
            return Line(f"d. {measure}: {what}", unit, "higher", rounds)

        running = line("peak running, pool of 4", "requests", "peak_running")
        running.targets.append(Target(">= 20 at once", running.median("ours"), 20))
        self.lines += [
            running,
            line("peak decoding in one step, pool of 4", "requests", "peak_decoding"),
            line("prompt and output together, pool of 4", "tokens/s", "tokens_per_second"),
            line("output, pool of 4", "tokens/s", "output_tokens_per_second"),
        ]

    # -- what our own bookkeeping costs -------------------------------------------------

    def _metrics(self) -> None:
        with self._start_metrics("metrics", max(self.scale.metrics.batches)) as arms:
            cost = MetricsCost(self.scale.metrics, BUDGET, self._seeds, self.say)
            cost.check(arms["metrics"], arms["without"])
            batches = zip(self.scale.metrics.batches, self.scale.metrics.fills, strict=True)
            for batch, fills in batches:
                self.lines += cost.decode(arms["metrics"], batch, fills)

    def _traces(self) -> None:
        with self._start_metrics("traces", 8) as arms:
            cost = MetricsCost(self.scale.metrics, BUDGET, self._seeds, self.say)
            cost.check(arms["metrics"], arms["without"])
            self.lines += cost.first_token(arms["metrics"])
            self.lines += cost.traced_decode(arms["metrics"], arms["without"])

    def _start_metrics(self, name: str, batch: int) -> Arms:
        scale = self.scale.metrics
        steps = 6 * 3 * scale.cycles * scale.rounds_per_fill
        longest = BUDGET * scale.decode.prompt_tokens + steps + 3 * self.block_size
        # While it prefills, a request has its whole prompt.
        pool_tokens = round(batch * longest) + 8 * scale.first_token.prompt_tokens
        self.say(f"starting the engines of part `{name}`")
        flags = {**self._flags(pool_tokens), "max_num_seqs": batch}
        chosen = metrics_arms(BRIEF, pool_tokens, self.block_size, flags)
        return self._launch(name, BRIEF, chosen)

    def _scheduler(self) -> None:
        for traffic in SCHEDULER_TRAFFIC:
            self.say(f"i. schedulers side by side, {traffic.running} running, {traffic.name}")
            steps = self.scale.scheduler_rounds * STEPS_PER_ROUND
            timing = measure(COMMON, self.root, BUDGET, traffic, steps)
            microseconds: dict[str, list[float]] = {"ours": [], "constrained": []}
            for first in range(0, steps, STEPS_PER_ROUND):
                round_ = slice(first, first + STEPS_PER_ROUND)
                for name, seconds, running in (
                    ("ours", timing.ours, timing.running),
                    ("constrained", timing.stock, timing.running_stock),
                ):
                    microseconds[name].append(1e6 * sum(seconds[round_]) / sum(running[round_]))
            self._scheduler_lines(traffic, microseconds, timing)

    def _scheduler_lines(
        self, traffic: Traffic, microseconds: dict[str, list[float]], timing: Timing
    ) -> None:
        what = f"{traffic.running} running, {traffic.name}"
        extra = [
            ours - stock
            for ours, stock in zip(*(microseconds[n] for n in ("ours", "constrained")), strict=True)
        ]
        line = Line(
            f"i. scheduler, more than stock: {what}", "us a request", "lower", {"ours": extra}
        )
        bounds = interval(extra)
        assert bounds is not None
        steps = len(timing.running)
        line.notes = (
            f"{timing.evicted / steps:.2f} evictions a step, {timing.prefilling:.0f} prompts in "
            f"flight, {sum(timing.running) / steps:.0f} running, {timing.waiting:.0f} waiting; "
            f"95 %: {bounds[0]:.2f} .. {bounds[1]:.2f}"
        )
        line.targets.append(Target("<= 50 us a running request", bounds[1], 50.0, "lower"))
        whole = Line(f"i. scheduler: {what}", "us a request", "lower", microseconds)
        self.lines += [whole, line]

    # -- common -------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        shape: ModelShape,
        pool_tokens: int,
        forced: bool = False,
        only: tuple[str, ...] = (),
    ) -> Arms:
        self.say(f"starting the engines of part `{name}`")
        chosen = arms(shape, pool_tokens, self.block_size, self._flags(pool_tokens), forced)
        return self._launch(name, shape, [arm for arm in chosen if not only or arm.name in only])

    def _flags(self, pool_tokens: int) -> dict[str, Any]:
        """What all arms of a part have in common."""
        flags: dict[str, Any] = {"max_model_len": min(pool_tokens - 512, 24576)}
        if self.eager:
            flags["enforce_eager"] = True
        return flags

    def _launch(self, name: str, shape: ModelShape, chosen: list[Arm]) -> Arms:
        running = Arms(chosen, shape, self.root)
        self.facts[name] = {n: process.facts for n, process in running.processes.items()}
        return running

    def _warm_up(self, arms: Arms) -> None:
        """One short request through every arm, not measured."""
        for arm in arms.processes.values():
            arm.ask("prefill", workload=Workload(1280), seed=next(self._seeds), budget=BUDGET)

    def _turns(
        self, arms: Arms, rounds: int, skip: tuple[str, ...] = ()
    ) -> Iterator[tuple[int, ArmProcess, int]]:
        """Rounds in which each arm has its turn, in an order that rotates; a seed a round."""
        processes = [arm for name, arm in arms.processes.items() if name not in skip]
        for number in range(rounds):
            seed = next(self._seeds)
            first = number % len(processes)
            for arm in (*processes[first:], *processes[:first]):
                yield number, arm, seed
