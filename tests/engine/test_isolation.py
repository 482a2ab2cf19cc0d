# SPDX-License-Identifier: Apache-2.0
"""No request ever reads another request's pages: a thousand mixed requests, each read checked.

The scheduler's record of block owners is the reference. Before every step's attention, each page
that a row is about to read is checked against it, for every layer and head. Released blocks are
filled with NaN, which would appear in the log-probabilities.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.questions import album
from tests.engine.running import Ask, SteppedEngine, engine
from tests.models import random_text
from vllm_tgvkv.attention.base import EvictingMetadata
from vllm_tgvkv.attention.cpu import EvictingCPUMetadataBuilder, VirtualSequences

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.slow]

NUM_REQUESTS = 1000
METHODS = ("tgv", "snapkv", "pyramidkv", "adakv", "streaming", "random", "none")
BUDGETS: tuple[Any, ...] = (0.1, 0.3, 0.6, 70, "auto:0.8")
NUM_BLOCKS = 61
"""About three of the longest prompts: requests wait, and some are preempted."""


@dataclass
class Guard:
    """Checks every step's page tables before they are used."""

    running: SteppedEngine
    num_pages: int = 0
    num_ragged_steps: int = 0
    names: list[str] = field(default_factory=list)
    """Request ids of the ragged rows, in their order."""

    def check(self, common: Any, metadata: EvictingMetadata[VirtualSequences]) -> None:
        names = self._batch()[: common.num_reqs]
        evicted = self._evicted_in_this_step()
        held = {name: self._held(name) | evicted.get(name, set()) for name in names}
        size = self.running.evictor.shape.block_size
        for row, name in enumerate(names):
            num_blocks = math.ceil(int(common.seq_lens[row]) / size)
            blocks = set(common.block_table_tensor[row, :num_blocks].tolist())
            # The row of a compressed request has the null block where blocks were released.
            assert blocks - held[name] <= {0}, f"{name} has blocks of others"
        for ragged in metadata.ragged:
            self._check_pages(ragged, held, size)

    def _check_pages(self, ragged: Any, held: dict[str, set[int]], size: int) -> None:
        self.num_ragged_steps += 1
        shape = self.running.evictor.shape
        pages_per_block = shape.num_pairs
        for row, name in enumerate(self.names):
            allowed = torch.zeros(NUM_BLOCKS + 1, dtype=torch.bool)
            allowed[list(held[name])] = True
            assert not allowed[0]
            for layer in range(shape.num_layers):
                for head in range(shape.num_heads):
                    length = int(ragged.lengths[layer, row, head])
                    pages = ragged.tables[layer, row, head, : math.ceil(length / size)]
                    assert allowed[pages // pages_per_block].all(), f"{name} reads others' pages"
                    assert len(pages.unique()) == len(pages)
                    self.num_pages += len(pages)

    def _batch(self) -> list[str]:
        worker = self.running.core.model_executor.driver_worker.worker
        return list(worker.model_runner.input_batch.req_ids)

    def _held(self, name: str) -> set[int]:
        blocks = self.running.scheduler.manager.req_to_blocks[name]
        return {block.block_id for block in blocks if not block.is_null}

    def _evicted_in_this_step(self) -> dict[str, set[int]]:
        """Return the blocks that evicted requests read for the last time in this step."""
        plan = self.running.evictor.plan
        return {e.request_id: set(e.old_blocks.tolist()) for e in plan.evictions}


@pytest.fixture(scope="module")
def running(tiny_model: Callable[..., Path]) -> Iterator[SteppedEngine]:
    debug = {"poison": True}
    settings = {"policy": "tgv", "budget": 0.2, "debug": debug}
    options = {"max_num_batched_tokens": 256, "block_size": 16, "max_model_len": 512}
    folder = tiny_model("llava", image_size=56)
    with engine(folder, settings, num_gpu_blocks_override=NUM_BLOCKS, **options) as found:
        yield found


def a_request(rng: random.Random, seed: int) -> Ask:
    xargs = {"kv_eviction": rng.choice(METHODS), "kv_eviction_budget": rng.choice(BUDGETS)}
    if xargs["kv_eviction"] in ("streaming", "random"):
        xargs["kv_eviction_budget"] = 0.3
    size = {"max_tokens": rng.randint(1, 24), "logprobs": 0}
    if rng.random() < 0.1:
        return Ask(random_text(seed, rng.randint(1, 200)), xargs=xargs, **size)
    lengths = [rng.randint(1, 160) for _ in range(rng.choice((2, 2, 2, 3)))]
    # Few different prompts, so that equal prompts run at the same time.
    return album(seed % 300, *lengths, xargs=xargs, **size)


def test_a_thousand_requests_read_their_own_pages_only(
    running: SteppedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, rng = Guard(running), random.Random(random.getrandbits(32))
    make_ragged = EvictingCPUMetadataBuilder._make_ragged
    build = EvictingCPUMetadataBuilder.build

    def checked_rows(builder: Any, common: Any, rows: torch.Tensor) -> Any:
        batch = guard._batch()
        guard.names = [batch[row] for row in rows.tolist()]
        return make_ragged(builder, common, rows)

    def checked_build(builder: Any, prefix: int, common: Any, *args: Any) -> Any:
        metadata = build(builder, prefix, common, *args)
        guard.check(common, metadata)
        return metadata

    monkeypatch.setattr(EvictingCPUMetadataBuilder, "_make_ragged", checked_rows)
    monkeypatch.setattr(EvictingCPUMetadataBuilder, "build", checked_build)
    waiting = [a_request(rng, seed) for seed in range(NUM_REQUESTS)]
    lengths: dict[str, int] = {}
    finished, num_aborted, num_preempted = 0, 0, 0
    resets = [NUM_REQUESTS * part // 4 for part in (3, 2, 1)]
    preempt = running.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal num_preempted
        num_preempted += 1
        preempt(*args, **kwargs)

    monkeypatch.setattr(running.scheduler, "_preempt_request", counted)
    while waiting or lengths:
        while waiting and len(lengths) < 12:
            ask = waiting.pop()
            lengths[running.add(ask)] = ask.max_tokens
        for output in running.step():
            if not output.finished:
                continue
            (completion,) = output.outputs
            assert len(completion.token_ids) == lengths.pop(output.request_id)
            values = [
                step[t].logprob
                for step, t in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            assert all(math.isfinite(value) for value in values)
            finished += 1
        if resets and finished >= resets[-1] and len(running.scheduler.running) > 1:
            # This preempts all running requests, so some preemption is certain.
            resets.pop()
            running.engine.reset_prefix_cache(reset_running_requests=True)
        if lengths and rng.random() < 0.01:
            gone = rng.choice(list(lengths))
            running.engine.abort_request([gone])
            del lengths[gone]
            num_aborted += 1
    running.assert_empty()
    assert finished + num_aborted == NUM_REQUESTS
    assert running.counters["requests_evicted"] > NUM_REQUESTS / 3
    # The traffic had everything that it is meant to have.
    assert min(guard.num_ragged_steps, num_aborted) > 0
    assert not resets
    assert num_preempted >= 6
    assert guard.num_pages > 10_000
    print(
        f"{guard.num_pages} pages, {guard.num_ragged_steps} steps with compressed requests, "
        f"{num_aborted} aborted, {num_preempted} preempted"
    )
