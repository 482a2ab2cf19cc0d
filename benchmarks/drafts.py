# SPDX-License-Identifier: Apache-2.0
"""Part `drafts`: decode speed with a draft model, over full and over evicted caches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.bench import Bench, evicting
from benchmarks.measurement import Line, Target
from benchmarks.models import model_folder
from benchmarks.scale import BUDGET, DEEP, DRAFT

_BATCH = 8
_NUM_DRAFTS = 3
_ACCEPTED = 0.84
"""Probability that a draft is right if those before it are: 71 % of three drafts are accepted."""
_WARM_UP_STEPS = 8
"""More than the tokens that the recommended method waits for."""


def drafts(bench: Bench) -> Iterator[Line]:
    """Measure line e: stock, drafts alone, eviction alone, and both (ours)."""
    scale = bench.scale
    steps = _WARM_UP_STEPS + scale.rounds * scale.decode_steps
    tokens = bench.pool_for(_BATCH, scale.long.prompt_tokens, (1 + _NUM_DRAFTS) * steps)
    flags = {"block_size": bench.block_size, "max_model_len": min(tokens - 512, 24576)}
    settings = {"policy": "reach", "budget": BUDGET, "when": "always", "text_only": "evict"}
    drafting = {
        "speculative_config": {
            "method": "draft_model",
            "model": str(model_folder(bench.root, DRAFT)),
            "num_speculative_tokens": _NUM_DRAFTS,
        }
    }
    arms = {
        "constrained": flags,
        "drafts": {**flags, **drafting},
        "eviction": {**flags, **evicting(settings)},
        "ours": {**flags, **drafting, **evicting(settings)},
    }
    # The cache of the draft model is in the same pool.
    with bench.launch("drafts", DEEP, tokens + tokens // 8, arms) as running:
        what = f"decode, batch {_BATCH}, {scale.long.prompt_tokens} tokens"
        bench.say(f"e. {what}")
        running.ask("spoil_drafts", accepted=_ACCEPTED)
        running.ask("fill", workload=scale.long, batch=_BATCH, seed=0, budget=BUDGET, attend=False)
        running.ask("decode", steps=_WARM_UP_STEPS)
        found = bench.turns(running, scale.rounds, "decode", steps=scale.decode_steps)
    rates = {
        name: [each["tokens"] / sum(each["seconds"]) for each in rounds]
        for name, rounds in found.items()
    }
    alone = ("drafts", "eviction")
    line = Line(f"e. {what}", "tokens/s", "higher", rates, against=("constrained", *alone))
    least = min(line.ratio(name).median for name in alone)
    line.targets.append(Target(">= 1 of the better of both alone", least, 1))
    per_step = {
        name: statistics.mean(each["tokens"] / len(each["seconds"]) / _BATCH for each in rounds)
        for name, rounds in found.items()
    }
    line.details = {"tokens of a request in a step": per_step}
    yield line
