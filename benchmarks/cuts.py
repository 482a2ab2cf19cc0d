# SPDX-License-Identifier: Apache-2.0
"""Parts `cuts` and `long`: the cost of cutting caches again and again while they grow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import Arms, Bench
from benchmarks.measurement import Line, Target
from benchmarks.models import Shape
from benchmarks.remote import Remote
from benchmarks.scale import COMMON, KV_BOUND
from benchmarks.switched import BLOCK_SIZE
from benchmarks.workload import Workload
from measure.arm import Arm
from vllm_tgvkv.shared.cuts import Ceiling

_TURN = 100
"""Tokens that an engine generates before it is the other's turn."""


def cuts(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of cuts under a ceiling."""
    with _ceiling_engine(bench) as arms:
        yield from _recuts(bench, arms["ceiling"])


def long_answer(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of an answer under a ceiling."""
    with _long_engines(bench) as arms:
        yield from _long_answer(bench, arms)


def _launch(
    bench: Bench, shape: Shape, pool_tokens: int, settings: dict[str, dict[str, Any] | None]
) -> Arms:
    """Start an engine for each of `settings`, which are those of the eviction, or None."""
    same = {**bench.engine_args(shape, pool_tokens), "block_size": BLOCK_SIZE}
    arms = []
    for name, chosen in settings.items():
        more = {"additional_config": {"kv_eviction": chosen}} if chosen else {}
        arms.append(Arm(name=name, server={**same, **more}))
    return bench.launch("cuts", shape, arms)


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


def period(ceiling: int) -> int:
    """Return the tokens from one cut under a ceiling to the next: its buffer and a block."""
    return (Ceiling.of(ceiling).buffer // BLOCK_SIZE + 1) * BLOCK_SIZE


def ceiling_prompt(ceiling: int) -> int:
    """Return the tokens of a prompt that exceeds a ceiling by four blocks."""
    return ceiling + 4 * BLOCK_SIZE


def _ceiling_engine(bench: Bench) -> Arms:
    scale = bench.scale.cuts
    decoded = (scale.recut_periods + 2) * period(scale.ceiling) + 64
    pool = bench.pool_for(max(scale.recut_batches), ceiling_prompt(scale.ceiling), decoded)
    settings = {
        "policy": scale.recut_methods[0],
        "decode": {"max_tokens": scale.ceiling},
    }
    return _launch(bench, COMMON, pool, {"ceiling": settings})


def _recuts(bench: Bench, engine: Remote) -> Iterator[Line]:
    scale = bench.scale.cuts
    first, *others = scale.recut_methods
    cases = [(first, batch) for batch in scale.recut_batches]
    cases += [(method, scale.recut_batches[0]) for method in others]
    tokens = period(scale.ceiling)
    for method, batch in cases:
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
        what = f"{method}, batch {batch}, {scale.ceiling} tokens kept"
        line = _recut_line(what, batch, found, tokens)
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


def _long_engines(bench: Bench) -> Arms:
    scale = bench.scale.cuts
    pool = bench.pool_for(scale.long_batch, scale.long_prompt.prompt_tokens, scale.long_steps)
    ours = {"policy": "snapkv", "decode": {"max_tokens": scale.long_ceiling}}
    return _launch(bench, KV_BOUND, pool, {"ours": ours, "constrained": None})


def _long_answer(bench: Bench, arms: Arms) -> Iterator[Line]:
    """Compare blocks and throughput by hundred tokens with stock, which keeps everything."""
    scale, batch, seed = bench.scale.cuts, bench.scale.cuts.long_batch, next(bench.seeds)
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
    scale = bench.scale.cuts
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
