# SPDX-License-Identifier: Apache-2.0
"""Part `cuts`: the cost of cutting caches again and again while they grow."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Bench, evicting
from benchmarks.measurement import Line, Target
from benchmarks.scale import KV_BOUND
from benchmarks.switched import BLOCK_SIZE
from vllm_tgvkv.shared.cuts import Ceiling

_TURN = 100
"""Tokens that an engine generates before it is the other's turn."""


def period(ceiling: int) -> int:
    """Return the tokens from one cut under a ceiling to the next: its buffer and a block."""
    return (Ceiling.of(ceiling).buffer // BLOCK_SIZE + 1) * BLOCK_SIZE


def cuts(bench: Bench) -> Iterator[Line]:
    """Measure the lines j of a ceiling: what cuts cost, and a long answer against stock's."""
    scale = bench.scale.cuts
    first, *others = scale.methods
    batch, tokens, prompt = scale.batch, period(scale.ceiling), scale.prompt
    steps = max(scale.steps, 2 * tokens)
    pool = bench.pool_for(batch, prompt.prompt_tokens, steps)
    ours = evicting({"policy": first, "decode": {"max_tokens": scale.ceiling}})
    same: dict[str, Any] = {"block_size": BLOCK_SIZE}
    both = {"ours": {**same, **ours}, "constrained": same}
    given = {"workload": prompt, "budget": scale.ceiling, "batch": batch, "attend": False}
    with bench.launch("cuts", KV_BOUND, pool, both) as arms:
        bench.say(f"j. a long answer, batch {batch}")
        arms.ask("fill", seed=next(bench.seeds), **given)
        found = bench.turns(arms, scale.steps // _TURN, "decode", steps=_TURN)
        arms.ask("clear")
        yield from long_lines(bench, found)
        for method in (first, *others):
            bench.say(f"j. cuts every {tokens} tokens, {method}, batch {batch}")
            engine = arms.engines["ours"]
            engine.ask("fill", seed=next(bench.seeds), policy=method, **given)
            engine.ask("decode", steps=tokens)  # until all have been cut once
            whole_period = engine.ask("decode", steps=tokens)
            engine.ask("clear")
            what = f"{method}, batch {batch}, {scale.ceiling} tokens kept"
            yield _cuts_line(what, batch, whole_period)


def _cuts_line(what: str, batch: int, found: dict[str, list[float]]) -> Line:
    num_cuts, tokens = sum(found["cuts"]), len(found["cuts"])
    if num_cuts != batch:
        raise RuntimeError(f"{num_cuts} cuts instead of {batch} in {tokens} steps")
    share = {"ours": [share_of_cuts(found)]}
    line = Line(f"j. cuts every {tokens} tokens: {what}", "% of decode", "lower", share)
    each = 1e3 * sum(found["eviction"]) / num_cuts
    line.notes = f"{each:.0f} ms of a cut in statistics, selection and copy"
    return line


def share_of_cuts(found: dict[str, list[float]]) -> float:
    """Return the share of decode time that cuts take, and what they need, in per cent.

    Counted is what steps take more than plain ones: those that cut and the next ones, whose page
    tables are new, and those that store queries. A step's own noise would add to many steps alike,
    so the latter count by medians.

    Args:
        found: what `ArmEngine.decode` returned for the steps in which every request is cut once.

    Raises:
        ValueError: if no step is plain.
    """
    seconds, steps = found["seconds"], range(len(found["seconds"]))
    cut = {i for i in steps if found["cuts"][i] or (i and found["cuts"][i - 1])}
    stored = [seconds[i] for i in steps if found["stored"][i] and i not in cut]
    others = [seconds[i] for i in steps if i not in cut and not found["stored"][i]]
    if not others:
        raise ValueError("queries are stored or a cache is cut in every step")
    plain = statistics.median(others)
    extra = sum(seconds[i] - plain for i in cut)
    if stored:
        extra += len(stored) * (statistics.median(stored) - plain)
    return 100 * extra / (len(steps) * plain + extra)


def long_lines(bench: Bench, found: dict[str, list[dict[str, Any]]]) -> Iterator[Line]:
    """Return the lines of a long answer, from the turns of both engines."""
    scale, batch = bench.scale.cuts, bench.scale.cuts.batch
    blocks = {name: [max(t["blocks"]) / batch for t in turns] for name, turns in found.items()}
    rates = {
        name: [batch * len(t["seconds"]) / sum(t["seconds"]) for t in turns]
        for name, turns in found.items()
    }
    what = (
        f"a ceiling of {scale.ceiling}, batch {batch}, "
        f"{scale.prompt.prompt_tokens} + {_TURN * len(rates['ours'])} tokens"
    )
    held = Line(f"j. blocks of a request: {what}", "blocks", "lower", blocks)
    # Ceiling and buffer, and the block that the next token is written to.
    most = (scale.ceiling + Ceiling.of(scale.ceiling).buffer) // BLOCK_SIZE + 1
    text = f"<= {most} at any time, ceiling and buffer and one"
    held.targets.append(Target(text, max(blocks["ours"]), most, "lower"))
    yield held
    speed = Line(f"j. output: {what}", "tokens/s", "higher", rates)
    last = {name: _end_by_start(series) for name, series in rates.items()}
    speed.targets.append(Target(">= 0.95 of the first quarter at the end", last["ours"], 0.95))
    ends = ", ".join(f"{name} {ratio:.3f}" for name, ratio in last.items())
    speed.notes = f"last quarter by first: {ends}"
    yield speed


def _end_by_start(series: list[float]) -> float:
    """Return the median of the last quarter by that of the first."""
    quarter = max(len(series) // 4, 1)
    return statistics.median(series[-quarter:]) / statistics.median(series[:quarter])
