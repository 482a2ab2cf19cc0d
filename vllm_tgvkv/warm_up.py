# SPDX-License-Identifier: Apache-2.0
"""A made-up prompt that is evicted before the first request, so that kernels are compiled."""

from __future__ import annotations

import numpy as np

from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.plan import Eviction, Observation, RowSumming, StepPlan
from vllm_tgvkv.prompt import PromptMap, VisionSpan, voters

_OLD_BLOCKS = np.arange(1, 6, dtype=np.int32)
_NEW_BLOCKS = np.array([6], dtype=np.int32)


def warm_up(evictor: Evictor) -> None:
    """Evict a made-up prompt with the server's method and budget.

    Call it before the cache is used: it writes the pool's first blocks and clears them again. A
    pool with fewer blocks is left alone; it is too small for eviction to be of use.
    """
    shape, pool = evictor.shape, evictor.pool
    num_blocks = 1 + len(_OLD_BLOCKS) + len(_NEW_BLOCKS)
    if pool.num_blocks < num_blocks:
        return
    plan = _plan(evictor)
    num_tokens = plan.evictions[0].prompt.num_tokens
    num_heads = shape.num_heads * shape.group_size
    queries = pool.raw.new_zeros(num_tokens, num_heads, shape.head_size)
    # Statistics of long prompts exceed the workspace and use other kernels.
    for workspace_bytes in (0, evictor.part.workspace_bytes):
        evictor.part.workspace_bytes = workspace_bytes
        evictor.begin_step(plan)
        evictor.prepare(lambda _: 0)
        for layer in range(shape.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
        evictor.begin_step(StepPlan(released=[int(_NEW_BLOCKS[0])]))
    evictor.take_outcomes()  # the scheduler does not know this prompt
    evictor.kept.clear()
    pool.raw[: num_blocks * pool.pages_per_block] = 0


def _plan(evictor: Evictor) -> StepPlan:
    """Build a step with the only chunk of a prompt of four full blocks and a tail."""
    name, config, size = "warm-up", evictor.config, evictor.shape.block_size
    prompt = PromptMap(4 * size + 1, (VisionSpan(size, 2 * size, None),))
    row_sets = config.build_policy(config.policy).row_sets
    voting = voters(prompt, row_sets, config.observation_window)
    plan = StepPlan()
    if len(voting.rows):
        plan.observations.append(Observation(name, 0, voting.rows, None))
    if voting.every_row:
        chunk = (0, prompt.num_tokens, _OLD_BLOCKS, prompt)
        plan.summings.append(RowSumming(name, config.policy, *chunk))
    plan.evictions.append(
        Eviction(
            request_id=name,
            method=config.policy,
            prompt=prompt,
            voters=voting,
            num_cached=0,
            guard=config.budget.guard(prompt.num_tokens, 2 * size, size),
            traced_budget=None,
            old_blocks=_OLD_BLOCKS,
            new_blocks=_NEW_BLOCKS,
            row_blocks=_NEW_BLOCKS,
        )
    )
    return plan
