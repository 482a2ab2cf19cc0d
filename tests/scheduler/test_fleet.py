# SPDX-License-Identifier: Apache-2.0
"""The formulas of `vllm_tgvkv.fleet` against vLLM's real scheduler under a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.fleet.capacity import Eviction, Server, capacity, pairs
from vllm_tgvkv.fleet.costs import Step, StepCosts
from vllm_tgvkv.fleet.mix import Mix, Prompt
from vllm_tgvkv.gain import FULL_ATTENTION, LayerKind
from vllm_tgvkv.shared.budget import Budget

KINDS = [LayerKind(FULL_ATTENTION, 1, bytes_per_token=1)]
"""A byte for each token, so that a pool in bytes is one in tokens."""


@dataclass(frozen=True)
class Seen:
    """Rates and sizes of a simulation in which requests always wait."""

    rate: float
    """Requests per second."""
    held: float
    """Requests at once, the mean over steps."""
    num_preemptions: int


def simulate(server: Server, mix: Mix, eviction: dict[str, Any] | None, count: int) -> Seen:
    """Serve `count` requests that all wait from the beginning, and time every step.

    The first third is a warm-up, and measuring ends when no request waits.
    """
    rng = random.Random(0)
    longest = max(each.tokens + 2 * each.answer for each in mix)
    setup = Setup(
        num_blocks=int(server.pool) // server.block_size,
        block_size=server.block_size,
        max_num_seqs=server.max_num_seqs,
        chunk=server.chunk,
        max_model_len=longest + 1,
        encoder_budget=count * longest,
        eviction=eviction,
    )
    double = Double(setup, check=False)
    kinds = rng.choices(mix, [each.weight for each in mix], k=count)
    for number, kind in enumerate(kinds):
        prompt = tuple(rng.randrange(3, 1000) for _ in range(kind.tokens))
        images = ((0, round(kind.num_visual)),) if kind.visual else ()
        # Answers of one length would begin and end together for ever.
        answer = rng.randint(max(kind.answer // 2, 1), kind.answer + kind.answer // 2)
        double.arrive(Job(f"r{number}", prompt, answer, images=images))
    clock = begun = 0.0
    num_ended, held = 0, []
    while double.scheduler.waiting:
        output = double.scheduler.schedule()
        clock += server.costs.seconds(step_of(double, output, kinds))
        double.num_preemptions += len(output.preempted_req_ids or ())
        result = double.worker.execute(output)
        double._in_flight.append((output, result))
        double.update()
        if len(double.finished) >= count // 3:
            if not begun:
                begun, num_ended = clock, len(double.finished)
            held.append(len(double.running))
    num_ended = len(double.finished) - num_ended
    return Seen(num_ended / (clock - begun), sum(held) / len(held), double.num_preemptions)


def step_of(double: Double, output: SchedulerOutput, kinds: Sequence[Prompt]) -> Step:
    """Return what a scheduled step computes."""
    num_pairs = num_read = num_rows = num_visual = 0.0
    for name, num_new in output.num_scheduled_tokens.items():
        request = double.scheduler.requests[name]
        # The scheduler has already counted the tokens of this step.
        end = request.num_computed_tokens
        if end <= request.num_prompt_tokens:
            num_pairs += pairs(KINDS, end, end - num_new)
            num_visual += num_new * kinds[int(name[1:])].visual
            continue
        row = double.worker.rows[name]
        region = double.worker.regions.get(row.blocks[0])
        num_read += end
        if region is not None:
            num_read += (len(region.blocks) - region.num_replaced) * double.setup.block_size
        num_rows += 1
    tokens = float(output.total_num_scheduled_tokens)
    return Step(tokens, num_pairs, num_read, num_rows, num_visual)


# An H100's figures with Qwen3-VL-8B's sizes: a token of the pool is 144 KiB there.
COSTS = StepCosts(
    host=1e-3, weights=6.5e-3, token=2.8e-5, pair=3.3e-11, read=6.3e-8, visual=9e-6, row=1e-5
)
SMALL = Server(KINDS, pool=8 * 1152, costs=COSTS, chunk=512, max_num_seqs=64)
LARGE = Server(KINDS, pool=10 * 2176, costs=COSTS, chunk=2048, max_num_seqs=256)
TOLERANCE = 0.15


@pytest.mark.parametrize(
    ("server", "mix"),
    [
        (SMALL, (Prompt(1024, 0.9, 128),)),
        (LARGE, (Prompt(2048, 0.9, 64, 1), Prompt(512, 0.5, 128, 2))),
    ],
    ids=["small", "large"],
)
@pytest.mark.parametrize(
    ("settings", "eviction"),
    [
        (None, None),
        ({"policy": "tgv", "budget": 0.2}, Eviction(Budget(fraction=0.2))),
        ({"policy": "reach"}, Eviction(Budget(fraction=0.2), pressure=True)),
    ],
    ids=["stock", "always", "pressure"],
)
def test_formulas_agree_with_the_scheduler(
    server: Server,
    mix: Mix,
    settings: dict[str, Any] | None,
    eviction: Eviction | None,
) -> None:
    found = capacity(server, mix, eviction)
    seen = simulate(server, mix, settings, count=max(4 * found.held, 60))
    assert found.rate == pytest.approx(seen.rate, rel=TOLERANCE)
    if eviction is None or not eviction.pressure:  # which leaves requests larger while it can
        assert found.held == pytest.approx(seen.held, rel=TOLERANCE)
    if eviction is None:
        assert found.limit == "memory"
    else:
        assert seen.rate > 1.2 * capacity(server, mix, None).rate


def test_where_computing_limits_nothing_is_gained() -> None:
    mix, eviction = (Prompt(1024, 0.9, 4),), Eviction(Budget(fraction=0.2), pressure=True)
    stock, found = capacity(SMALL, mix, None), capacity(SMALL, mix, eviction)
    assert stock.limit == "prompts"
    assert found == stock
    for settings in (None, {"policy": "reach"}):
        assert simulate(SMALL, mix, settings, 60).rate == pytest.approx(stock.rate, rel=0.05)
