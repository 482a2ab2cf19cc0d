# SPDX-License-Identifier: Apache-2.0
"""Layers of a prompt that are scored together: launches on a GPU, memory and results.

Where launches are counted, tensors are those of the device `meta`, as in `test_memory.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.configs import AdjustedConfig
from tests.inputs import Launches, NoKernel, gates, replace_kernels
from tests.unit.test_ranks import LAYERS, Model, both, settings, step
from vllm_tgvkv.cache.pages import CacheShape, page_pool
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import gates_of
from vllm_tgvkv.shared.plan import Failure, Observation, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, Voters
from vllm_tgvkv.worker import due, observation
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.outcomes import PendingOutcome
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages
from vllm_tgvkv.worker.warm_up import made_up_step

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = CacheShape(num_layers=36, num_heads=8, group_size=4, head_size=128, block_size=16)
"""Qwen3-VL-8B's."""
NUM_HEADS = SHAPE.num_heads * SHAPE.group_size


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> NoKernel:
    """Run the code of the GPU, and count launches instead of running kernels."""
    return replace_kernels(monkeypatch)


def evictor_of(config: EvictionConfig, num_tokens: int) -> Evictor:
    num_blocks = 2 * (-(-num_tokens // SHAPE.block_size)) + 2
    size = (num_blocks, SHAPE.num_layers, SHAPE.num_heads, SHAPE.block_size, 2 * SHAPE.head_size)
    cache = torch.empty(size, dtype=torch.bfloat16, device="meta")
    pool = page_pool(cache.unbind(1), SHAPE.group_size, slots_first=True)
    return Evictor(config, pool, Ranks(), Stages(SHAPE.num_layers))


def plan_of(config: EvictionConfig, num_tokens: int, stored: bool) -> StepPlan:
    """Build the step of a prompt's last chunk; with `stored`, all its rows are in the pool."""
    num_blocks = -(-num_tokens // SHAPE.block_size)
    old = np.arange(1, num_blocks + 1, dtype=np.int32)
    prompt = PromptMap(num_tokens, (VisionSpan(100, num_tokens - 500, None),))
    new = old[: num_blocks // 10] + num_blocks
    plan = made_up_step(config, prompt, None, old, new, SHAPE.block_size)
    if stored:
        (seen,), (eviction,) = plan.observations, plan.evictions
        rows = np.arange(1, len(seen.rows) + 1)
        plan.observations = [Observation(seen.request_id, 0, seen.rows, rows)]
        plan.evictions = [replace(eviction, stored=rows)]
    return plan


def observe(evictor: Evictor, plan: StepPlan, num_tokens: int, kernel: NoKernel) -> tuple[int, int]:
    """Run a step up to its decision; return the launches of its layers by torch and by Triton."""
    queries = torch.empty(num_tokens, NUM_HEADS, SHAPE.head_size, device="meta").bfloat16()
    evictor.begin_step(plan)
    evictor.prepare(lambda _: 0)
    if evictor._current:
        (seen,) = evictor._current
    else:
        (eviction,) = plan.evictions
        seen = evictor._observation_of(eviction.request_id)
        seen.begin_chunk(0, None, None, eviction)
    before = kernel.num_launches
    with torch.inference_mode(), Launches() as launches:
        for layer in range(SHAPE.num_layers - 1):
            evictor.observe_layer(layer, queries, 1.0)
        # Without the decision, which follows the last layer.
        if evictor._stored is not None:
            evictor._stored.store(layer + 1, queries)
            seen.see_stored([1.0] * SHAPE.num_layers)
        else:
            seen.see_layer(SHAPE.num_layers - 1, queries, 1.0)
    assert seen.error is None
    assert seen.num_shown == SHAPE.num_layers
    return len(launches.names), kernel.num_launches - before


@pytest.mark.parametrize("stored", [False, True], ids=["one chunk", "stored"])
@pytest.mark.parametrize(
    ("granularity", "num_tokens", "num_batches"),
    [("layer", 2000, 1), ("layer", 8000, 3), ("head", 2000, 6), ("head", 8000, 18)],
)
def test_an_eviction_takes_few_launches_for_each_batch_of_layers(
    kernel: NoKernel, granularity: str, num_tokens: int, num_batches: int, stored: bool
) -> None:
    """The kernels that read queries and keys, and 15 of torch. Layer by layer it would be 756.

    Each layer's queries are copied while it runs: to wait, or into the query pool.
    """
    config = AdjustedConfig.from_mapping({"policy": "tgv", "granularity": granularity})
    evictor = evictor_of(config, num_tokens)
    plan = plan_of(config, num_tokens, stored)
    by_torch, by_triton = observe(evictor, plan, num_tokens, kernel)
    copies = SHAPE.num_layers * (2 if stored else 1)
    assert by_triton == 4 * num_batches
    assert by_torch <= copies + 15 * num_batches
    assert by_torch + by_triton < 756 / 1.5


@pytest.mark.parametrize(
    ("method", "num_tokens", "most"),
    [
        *((method, 2000, 80) for method in ("reach", "snapkv", "adakv", "tgv", "pyramidkv")),
        *((method, 8000, 120) for method in ("reach", "snapkv", "tgv", "kvzap")),
        ("reach", 32000, 180),
        ("h2o_accumulated", 2000, 100),
    ],
)
def test_a_later_cut_takes_few_launches(
    kernel: NoKernel, method: str, num_tokens: int, most: int
) -> None:
    """From the row's keys to the region's state, and nothing of it happens in the layers.

    Layer by layer it would be about 1,000.
    """
    num_kept = num_tokens // SHAPE.block_size // 20
    decode = {"schedule": [[0, 0.4], [16, 0.3]]}
    fields: dict[str, Any] = {"policy": method, "decode": decode}
    if method == "h2o_accumulated":
        fields["methods"] = {method: {"base": "h2o", "score": method}}
    elif (kind := gates_of(method)) is not None:
        fields["gates"] = gates(kind, SHAPE.num_layers, SHAPE.num_heads)
    config = AdjustedConfig.from_mapping(fields)
    evictor = evictor_of(config, num_tokens)
    plan = plan_of(config, num_tokens, stored=False)
    (first,) = plan.evictions
    region, fresh = first.new_blocks[:num_kept], first.new_blocks[num_kept : 2 * num_kept]
    rows = np.arange(num_tokens - 16, num_tokens)
    row = np.zeros_like(first.old_blocks)
    row[:num_kept] = region
    row[first.num_replaced :] = first.old_blocks[first.num_replaced :]
    later = replace(
        first,
        voters=Voters(dict.fromkeys(first.voters.kinds, rows), rows, every_row=False),
        old_blocks=row,
        new_blocks=fresh,
        stored=np.arange(1, len(rows) + 1),
        is_first=False,
        is_whole=False,
    )
    last = Observation(first.request_id, num_tokens - 1, rows[-1:], later.stored[-1:])
    evictor.regions.add(first.request_id, int(region[0]), num_kept, first.num_replaced, 0)
    evictor.record_decodes(64)
    evictor.begin_step(StepPlan(observations=[last], evictions=[later]))
    assert not evictor.has_work(may_be_graph=True), "the step may be a graph"
    before = kernel.num_launches
    with Launches() as launches:
        evictor.evict_stored()
    assert not evictor.ended
    assert evictor.regions.owns(first.request_id)
    assert len(launches.names) + kernel.num_launches - before <= most


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 100])
def test_queries_that_wait_fit_the_workspace(kernel: NoKernel, num_prompts: int) -> None:
    """However many prompts end in one step, unless one layer's queries are more."""
    config, num_tokens = EvictionConfig.from_mapping({"policy": "tgv"}), 2000
    evictor = evictor_of(config, num_tokens)
    one, plan = plan_of(config, num_tokens, stored=False), StepPlan()
    for name in map(str, range(num_prompts)):
        plan.observations += [replace(part, request_id=name) for part in one.observations]
        plan.evictions += [replace(part, request_id=name) for part in one.evictions]
    evictor.begin_step(plan)
    evictor.prepare(lambda _: 0)
    of_layer = sum(len(part.rows) for part in plan.observations) * 2 * NUM_HEADS * SHAPE.head_size
    (at_once,) = {seen.due.layers_at_once for seen in evictor._current if seen.due is not None}
    assert at_once == 1 or at_once * of_layer <= evictor.context.workspace_bytes
    assert at_once == SHAPE.num_layers or (at_once + 1) * of_layer > evictor.context.workspace_bytes


@pytest.mark.parametrize("at_once", [2, LAYERS])
@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("method", ["tgv", "vlcache", "aircache", "snapkv"])
def test_layers_scored_together_keep_what_each_alone_keeps(
    monkeypatch: pytest.MonkeyPatch, method: str, granularity: str, at_once: int
) -> None:
    """The same scores and tokens, with queries that wait and queries from the query pool."""
    config, model = settings(granularity), Model.random()
    for budget in (0.4, "auto:0.7,min=0.05,max=0.95"):
        plan = step(config, both(method), budget)
        alone = model.evict(Ranks(), config, plan)
        (second,) = (part for part in plan.observations if part.request_id == "second")
        rows = np.arange(1, len(second.rows) + 1)
        plan.observations[plan.observations.index(second)] = replace(second, stored=rows)
        plan.evictions[1] = replace(plan.evictions[1], stored=rows)
        with monkeypatch.context() as patch:
            patch.setattr(due, "_layers_at_once", lambda *_: at_once)
            together = model.evict(Ranks(), config, plan)
        for name in ("first", "second"):
            assert torch.equal(together.kept(name), alone.kept(name)), (budget, name)
        traced = [run.evictor.traces.find("first") for run in (alone, together)]
        assert traced[0] is not None
        assert traced[1] is not None
        assert np.array_equal(traced[0].scores, traced[1].scores)


@pytest.mark.parametrize(
    ("part", "method", "stored"),
    [("due_eviction", "tgv", False), ("due_eviction", "tgv", True), ("summed_rows", "h2o", False)],
)
def test_memory_that_runs_out_before_the_layers_fails_one_prompt(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch, part: str, method: str, stored: bool
) -> None:
    """While the plan's parts go to the device. The other prompt of the step is evicted."""
    config, num_tokens = EvictionConfig.from_mapping({"policy": method}), 2000
    evictor, plan = evictor_of(config, num_tokens), StepPlan()
    one = plan_of(config, num_tokens, stored)
    for number, name in enumerate(("first", "second")):
        blocks = one.evictions[0].new_blocks + number * len(one.evictions[0].new_blocks)
        plan.observations += [replace(each, request_id=name) for each in one.observations]
        plan.summings += [replace(each, request_id=name) for each in one.summings]
        plan.evictions += [replace(one.evictions[0], request_id=name, new_blocks=blocks)]
    real, calls = getattr(observation, part), []

    def run_out(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("made up")
        return real(*args)

    monkeypatch.setattr(observation, part, run_out)
    queries = torch.empty(num_tokens, NUM_HEADS, SHAPE.head_size, device="meta").bfloat16()
    evictor.begin_step(plan)
    with torch.inference_mode():
        evictor.prepare(lambda _: 0)
        for layer in range(SHAPE.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
        evictor.evict_stored()
    assert [type(ended) for ended in evictor.ended] == [Failure, PendingOutcome]
    assert evictor.ended[0] == Failure("first", "OutOfMemoryError: made up")
    assert evictor.regions.owns("first"), "a step that is scheduled ahead may read it"
    assert not evictor.observations
