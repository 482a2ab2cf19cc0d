# SPDX-License-Identifier: Apache-2.0
"""A made-up prompt that is evicted before the first request, so that kernels are compiled."""

from __future__ import annotations

import numpy as np

from vllm_tgvkv.budget import Guard
from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.plan import Eviction, Failure, Observation, RowSumming, StepPlan
from vllm_tgvkv.prompt import PromptMap, VisionSpan, voters

_OLD_BLOCKS = np.arange(1, 6, dtype=np.int32)
_NEW_BLOCKS = np.array([6], dtype=np.int32)


class WarmUpError(RuntimeError):
    """The server's method does not run on this machine."""


def warm_up(evictor: Evictor) -> None:
    """Evict a made-up prompt with the server's method and budget.

    Call it before the cache is used: it writes the pool's first blocks and clears them again. A
    pool with fewer blocks is left alone; it is too small for eviction to be of use.

    Raises:
        WarmUpError: if the eviction fails. A server would fail every request in the same way.
    """
    shape, pool = evictor.shape, evictor.pool
    num_blocks = 1 + len(_OLD_BLOCKS) + len(_NEW_BLOCKS)
    if pool.num_blocks < num_blocks:
        return
    config, size = evictor.config, shape.block_size
    num_tokens = 4 * size + 1  # four full blocks and a tail
    prompt = PromptMap(num_tokens, (VisionSpan(size, 2 * size, None),))
    guard = config.budget.guard(num_tokens, 2 * size, size)
    plan = made_up_step(config, config.policy, prompt, guard, _OLD_BLOCKS, _NEW_BLOCKS)
    num_heads = shape.num_heads * shape.group_size
    queries = pool.raw.new_zeros(num_tokens, num_heads, shape.head_size)
    # Statistics of long prompts exceed the workspace and use other kernels.
    for workspace_bytes in (0, evictor.part.workspace_bytes):
        evictor.part.workspace_bytes = workspace_bytes
        evictor.begin_step(plan)
        evictor.prepare(lambda _: 0)
        for layer in range(shape.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
        for ended in evictor.ended:
            if isinstance(ended, Failure):
                raise WarmUpError(
                    f"the eviction that warms up method {evictor.config.policy!r} failed: "
                    f"{ended.error}. The log has the traceback above. If memory ran out, lower "
                    "--gpu-memory-utilization or --max-model-len; if a kernel did not compile, run "
                    "python -m vllm_tgvkv.kernels.gpu.compile and check Triton and the driver; or "
                    "choose another method with --kv-eviction, or leave out --kv-eviction"
                )
        evictor.begin_step(StepPlan(released=[int(_NEW_BLOCKS[0])]))
    evictor.take_outcomes()  # the scheduler does not know this prompt
    evictor.kept.clear()
    pool.raw[: num_blocks * pool.pages_per_block] = 0


def made_up_step(
    config: EvictionConfig,
    method: str,
    prompt: PromptMap,
    guard: Guard | None,
    old_blocks: np.ndarray,
    new_blocks: np.ndarray,
) -> StepPlan:
    """Build a step with the only chunk of a prompt, which is evicted from old to new blocks."""
    name = "warm-up"
    voting = voters(prompt, config.build_policy(method).row_sets, config.observation_window)
    plan = StepPlan()
    if len(voting.rows):
        plan.observations.append(Observation(name, 0, voting.rows, None))
    if voting.every_row:
        chunk = (0, prompt.num_tokens, old_blocks, prompt)
        plan.summings.append(RowSumming(name, method, *chunk))
    plan.evictions.append(
        Eviction(
            request_id=name,
            method=method,
            prompt=prompt,
            voters=voting,
            num_cached=0,
            guard=guard,
            traced_budget=None,
            old_blocks=old_blocks,
            new_blocks=new_blocks,
            row_blocks=new_blocks,
        )
    )
    return plan
