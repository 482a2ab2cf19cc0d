# SPDX-License-Identifier: Apache-2.0
"""A made-up prompt that is evicted before the first request, so that kernels are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels.checks import indexable
from vllm_tgvkv.kernels.sketch import sketch_bytes
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.plan import Choice, ColumnSumChunk, Eviction, Failure, Observation, StepPlan
from vllm_tgvkv.shared.prompt import CHOICE_ROWS, PromptMap, VisionSpan, Voters, voters
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.outcomes import Outcomes, PendingOutcome

_PROMPT_BLOCKS = np.arange(1, 6, dtype=np.int32)
_NAME = "warm-up"


class WarmUpError(RuntimeError):
    """The server's method does not run on this machine."""


def warm_up(evictor: Evictor) -> None:
    """Evict a made-up prompt with the server's method and budget, twice if it can cut again.

    If the server waits for answers, the prompt has some tokens of one. If it recalls, tokens are
    chosen again. Call it before the cache is used: it writes the pool's first blocks and clears
    them again. A pool or a tier with fewer blocks is left alone; it is too small to be of use.

    Raises:
        WarmUpError: if the eviction fails. A server would fail every request in the same way.
    """
    pool, config = evictor.pool, evictor.config
    policy = config.build_policy(config.policy)
    size, tier_blocks, num_sketch = pool.shape.block_size, None, 0
    num_tokens = 4 * size + 1  # four full blocks and a tail
    if config.recall is not None and evictor.recaller is not None:
        tier_blocks = np.arange(num_tokens // size, dtype=np.int32)
        if evictor.recaller.tier.num_blocks < len(tier_blocks):
            return
        in_bytes = sketch_bytes(size * len(tier_blocks), pool.shape.head_size, config.recall.sketch)
        num_sketch = -(-in_bytes // pool.raw[0].nbytes)
    # A block of tokens, and summaries of both kinds of them.
    first_region = np.arange(3 if policy.summaries else 1 + num_sketch, dtype=np.int32)
    first_region += 1 + len(_PROMPT_BLOCKS)
    second_region = first_region + len(first_region)
    num_blocks = 1 + int(second_region[-1])
    if pool.num_blocks < num_blocks:
        return
    prompt = PromptMap(num_tokens, (VisionSpan(size, 2 * size, None),))
    budget, defer = config.first_eviction(config.policy)
    guard = budget.guard(num_tokens, 2 * size, size)
    num_answer = min(defer, size - 1)  # as many as the tail holds
    blocks = (_PROMPT_BLOCKS, first_region, size)
    plans = [made_up_step(config, prompt, guard, *blocks, num_answer)]
    (eviction,) = plans[0].evictions
    plans[0].evictions = [replace(eviction, num_sketch=num_sketch, tier_blocks=tier_blocks)]
    if config.keeps_positions and policy.cuts_again:
        plans.append(_later_step(plans[0].evictions[0], size, second_region))
    # Statistics of long prompts exceed the workspace and use other kernels.
    for workspace_bytes in (0, evictor.context.workspace_bytes):
        evictor.context.workspace_bytes = workspace_bytes
        _run(evictor, plans)
    evictor.kept.clear()
    pool.raw[: num_blocks * pool.shape.num_pairs] = 0


def _run(evictor: Evictor, plans: Sequence[StepPlan]) -> None:
    """Evict, choose again, read what is left of summaries, and release the regions."""
    shape = evictor.shape
    num_heads = shape.num_heads * shape.group_size
    size = 5 * shape.block_size, num_heads, shape.head_size
    zeros = torch.zeros(size, dtype=evictor.query_dtype, device=evictor.pool.raw.device)
    queries = indexable(zeros)
    for plan in plans:
        evictor.begin_step(plan)
        evictor.prepare(lambda _: 0)
        for layer in range(shape.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
        evictor.evict_stored()
    ended: list[PendingOutcome | Failure]
    ended, evictor.ended = evictor.ended, []
    recaller, worked = evictor.recaller, not any(isinstance(part, Failure) for part in ended)
    if worked and recaller is not None and recaller.choose(_choice(evictor, plans[-1])) is None:
        ended[0] = Failure(_NAME, "no tokens could be chosen again")
    # All ranks learn of a failure on one of them, which would not take part in what follows.
    for outcome in Outcomes(ended, evictor.context, evictor.traces).of_stage():
        if isinstance(outcome, Failure):
            raise _failed(evictor, outcome.error)
    if evictor.summaries.are_used:
        _read_summaries(evictor, plans[-1].evictions[0], queries)
    regions = [int(plan.evictions[0].new_blocks[0]) for plan in plans]
    evictor.begin_step(StepPlan(released=regions, unrecallable=[_NAME]))


def _failed(evictor: Evictor, error: str) -> WarmUpError:
    return WarmUpError(
        f"the eviction that warms up method {evictor.config.policy!r} failed: {error}. The log has "
        "the traceback above. If memory ran out, lower --gpu-memory-utilization or "
        "--max-model-len; if a kernel did not compile, run "
        "python -m vllm_tgvkv.kernels.gpu.compile and check Triton and the driver; or choose "
        "another method with --kv-eviction, or leave out --kv-eviction"
    )


def _choice(evictor: Evictor, plan: StepPlan) -> Choice:
    """Return a choice after the plan's eviction, in which as many rows vote as in any."""
    assert evictor.config.recall is not None, "nothing comes back"
    (eviction,) = plan.evictions
    num_tokens = eviction.prompt.num_tokens + eviction.num_answer
    rows = np.arange(num_tokens - min(CHOICE_ROWS, evictor.config.recall.every), num_tokens)
    tail = eviction.old_blocks[eviction.num_replaced :]
    return Choice(_NAME, num_tokens, rows, np.arange(1, len(rows) + 1), tail)


def made_up_step(
    config: EvictionConfig,
    prompt: PromptMap,
    guard: Guard | None,
    old_blocks: np.ndarray,
    new_blocks: np.ndarray,
    block_size: int,
    num_answer: int = 0,
) -> StepPlan:
    """Build a step that computes a prompt and evicts it from old to new blocks.

    The eviction has waited for `num_answer` tokens of the answer, which the step computes as well.
    """
    row_sets = config.build_policy(config.policy).row_sets
    voting = voters(prompt, row_sets, config.observation_window, num_answer)
    computed = prompt.followed_by(num_answer)
    eviction = Eviction(
        request_id=_NAME,
        method=config.policy,
        prompt=prompt,
        voters=voting,
        num_cached=0,
        guard=guard,
        traced_budget=None,
        old_blocks=old_blocks,
        num_replaced=prompt.num_tokens // block_size,
        new_blocks=new_blocks,
        row_blocks=new_blocks,
        num_answer=num_answer,
    )
    plan = StepPlan(evictions=[eviction])
    if len(voting.rows):
        plan.observations.append(Observation(_NAME, 0, voting.rows, None))
    if voting.every_row:
        chunk = (0, computed.num_tokens, old_blocks, computed)
        plan.summings.append(ColumnSumChunk(_NAME, config.policy, *chunk))
    return plan


def _read_summaries(evictor: Evictor, eviction: Eviction, queries: torch.Tensor) -> None:
    """Attend to the summaries of a region, as a decode step does in every layer."""
    shape = evictor.shape
    outputs = queries[0].view(shape.num_heads, shape.group_size, shape.head_size).clone()
    evictor.summaries.merge(
        outputs,
        outputs.new_zeros(shape.group_size, shape.num_heads, dtype=torch.float32),
        outputs,
        evictor.context.to_device(eviction.new_blocks).unsqueeze(0),
        evictor.context.to_device(np.ones(1, np.int32)),
        layer=0,
        scale=1.0,
    )


def _later_step(first: Eviction, block_size: int, region: np.ndarray) -> StepPlan:
    """Build a step that ends the last prompt block with tokens of the answer and cuts again."""
    num_tokens = first.prompt.num_tokens
    num_full = num_tokens // block_size
    num_answer = (num_full + 1) * block_size - num_tokens
    rows = np.arange(num_tokens, num_tokens + num_answer)
    row = np.zeros_like(first.old_blocks)
    row[: len(first.new_blocks)] = first.new_blocks
    row[num_full:] = first.old_blocks[num_full:]
    eviction = replace(
        first,
        voters=Voters(dict.fromkeys(first.voters.kinds, rows), rows, every_row=False),
        old_blocks=row,
        new_blocks=region,
        row_blocks=region,
        num_answer=num_answer,
        num_replaced=num_full,
        guard=None,
        is_first=False,
        is_whole=False,
    )
    return StepPlan(observations=[Observation(_NAME, num_tokens, rows, None)], evictions=[eviction])
