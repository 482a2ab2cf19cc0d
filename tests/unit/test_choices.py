# SPDX-License-Identifier: Apache-2.0
"""Choices of recall on a GPU: few launches, bounded memory, and nothing that waits.

Tensors are on the device `meta`, and Triton's kernels are replaced by nothing, as in
`test_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.inputs import Launches, NoKernel, replace_kernels
from tests.unit.test_memory import LiveBytes
from tests.unit.test_policies import NoSynchronisation
from vllm_tgvkv.cache.pages import CacheShape, PagePool, page_pool
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels.exchange import Exchange, fetch_tokens
from vllm_tgvkv.kernels.sketch import sketch_bytes
from vllm_tgvkv.recall.tier import MemoryTier, Tier
from vllm_tgvkv.shared.plan import Choice
from vllm_tgvkv.shared.prompt import PromptMap
from vllm_tgvkv.worker import memory
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.memory import Sizes
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.recaller import Recaller
from vllm_tgvkv.worker.stages import Stages
from vllm_tgvkv.worker.warm_up import WarmUpError, made_up_step, warm_up

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = CacheShape(num_layers=32, num_heads=8, group_size=4, head_size=128, block_size=16)
"""Llama 3's with 8B parameters."""
SIZE, PAIRS = SHAPE.block_size, SHAPE.num_pairs


class OnMeta(Tier):
    """A tier without content."""

    def __init__(self, pool: PagePool, num_blocks: int) -> None:
        super().__init__(pool, num_blocks)
        self._memory = self._keys.new_empty(num_blocks, self._slots, self._width)

    def exchange(self, exchange: Exchange, stored: torch.Tensor) -> Callable[[], None]:
        fetch_tokens(self._memory, self._keys, self._values, stored, exchange)
        return lambda: None

    def _store(self, pool_blocks: torch.Tensor, blocks: np.ndarray) -> None:
        self._gather(pool_blocks, self._memory[: len(blocks)])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> NoKernel:
    return replace_kernels(monkeypatch)


def evictor_of(config: EvictionConfig, pool: PagePool, tier: Tier) -> Evictor:
    scales = [1.0] * pool.shape.num_layers
    make = partial(Recaller, tier=tier, options=config.recall, scales=scales)
    return Evictor(config, pool, Ranks(), Stages(pool.shape.num_layers), recaller=make)


def recalling(num_tokens: int, num_kept: int, **recall: Any) -> tuple[EvictionConfig, Evictor]:
    """Return an evictor on `meta` that has cut a prompt to some blocks, and a sketch."""
    settings = {"policy": "reach", "when": "always", "recall": {"gib": 1, **recall}}
    config = EvictionConfig.from_mapping(settings)
    assert config.recall is not None
    blocks = num_tokens // SIZE
    page_bytes = 2 * SIZE * 2 * SHAPE.head_size
    in_bytes = sketch_bytes(num_tokens, SHAPE.head_size, config.recall.sketch)
    num_sketch = -(-in_bytes // page_bytes)
    size = (2 * blocks + 600 + num_sketch, SHAPE.num_layers, SHAPE.num_heads, SIZE, 256)
    cache = torch.empty(size, dtype=torch.bfloat16, device="meta")
    pool = page_pool(cache.unbind(1), SHAPE.group_size, slots_first=True)
    evictor = evictor_of(config, pool, OnMeta(pool, blocks))
    old = np.arange(1, blocks + 1, dtype=np.int32)
    new = blocks + 1 + np.arange(num_kept + num_sketch, dtype=np.int32)
    plan = made_up_step(config, PromptMap(num_tokens, ()), None, old, new, SIZE)
    (eviction,) = plan.evictions
    tier_blocks = np.arange(blocks, dtype=np.int32)
    plan.evictions = [replace(eviction, num_sketch=num_sketch, tier_blocks=tier_blocks)]
    shape = num_tokens, SHAPE.num_heads * SHAPE.group_size, SHAPE.head_size
    queries = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    evictor.begin_step(plan)
    with torch.inference_mode(), NoSynchronisation():
        evictor.prepare(lambda _: 0)
        for layer in range(SHAPE.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
        evictor.evict_stored()
    assert [type(ended).__name__ for ended in evictor.ended] == ["PendingOutcome"], evictor.ended
    return config, evictor


def choose(config: EvictionConfig, evictor: Evictor, prompt: int, answer: int) -> None:
    """Choose again after some tokens of the answer."""
    recaller, recall = evictor.recaller, config.recall
    assert recaller is not None
    assert recall is not None
    rows = np.arange(prompt + answer - recall.every, prompt + answer)
    tail = np.arange(1, 2 + answer // SIZE, dtype=np.int32)
    choice = Choice("warm-up", prompt + answer, rows, np.arange(recall.every), tail)
    with NoSynchronisation():
        chosen = recaller.choose(choice)
        recaller.begin_step([])
    assert chosen is not None, recaller.take_failed()
    assert chosen[0].num_moved.shape == ()


def test_a_choice_takes_few_launches(kernel: NoKernel) -> None:
    """As `docs/recall.md` has it: three parts of the layers, then what is common to all of them."""
    config, evictor = recalling(8192, 51)
    for answer in (3, 6):
        choose(config, evictor, 8192, answer)
    before, launches = kernel.num_launches, Launches()
    with launches:
        choose(config, evictor, 8192, 9)
    # Sketches and pooling of each part, then the tokens and their exchange.
    assert kernel.num_launches - before == 2 * 3 + 2
    assert len(launches.names) <= 54 * 3 + 42


@pytest.mark.parametrize(("tokens", "answer"), [(1 << 16, 9), (1 << 12, 9), (1 << 15, 1 << 15)])
def test_a_choice_takes_no_more_than_is_set_aside(
    kernel: NoKernel, tokens: int, answer: int
) -> None:
    """With every token kept, and votes of earlier choices. Half may be the answer."""
    config, evictor = recalling(tokens, tokens // SIZE)
    assert config.recall is not None
    with LiveBytes() as live:
        for more in (0, 3, 6):
            choose(config, evictor, tokens, answer + more)
    whole = tokens + answer + 6
    sizes = Sizes(SHAPE, 2, whole, 0, 1, whole // SIZE, evictor.context.workspace_bytes, whole)
    found = memory._of_choice(config.recall, config.build_policy("reach"), sizes)
    found += 4 * 3 * PAIRS * tokens  # the row's votes
    assert 0.3 * found <= live.most <= found


@pytest.mark.parametrize("tier_blocks", [8, 3])
@pytest.mark.parametrize("policy", ["reach", "snapkv"])
def test_a_warm_up_chooses_again(
    policy: str, tier_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the cuts, and leaves nothing. A tier that is too small for any prompt is left alone."""
    caches = torch.zeros(30, 2, 2, 16, 32).unbind(1)
    pool = page_pool(caches, 2, slots_first=True)
    config = EvictionConfig.from_mapping({"policy": policy, "recall": {"gib": 1, "every": 5}})
    evictor, chosen = evictor_of(config, pool, MemoryTier(pool, tier_blocks)), list[Choice]()
    recaller = evictor.recaller
    assert recaller is not None
    score = recaller._score

    def scored(row: Any, choice: Choice) -> Any:
        chosen.append(choice)
        return score(row, choice)

    monkeypatch.setattr(recaller, "_score", scored)
    warm_up(evictor)
    assert [len(choice.rows) for choice in chosen] == ([5, 5] if tier_blocks == 8 else [])
    assert not pool.raw.any()
    assert not any((recaller._rows, evictor.regions.num_live, recaller.take_failed()))
    if tier_blocks == 8:
        monkeypatch.setattr(recaller, "_score", None)
        with pytest.raises(WarmUpError, match=r"no tokens could be chosen again\. The log has"):
            warm_up(evictor)
