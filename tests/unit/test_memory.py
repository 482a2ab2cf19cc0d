# SPDX-License-Identifier: Apache-2.0
"""Memory outside the pool: what evictions really allocate, at the size of a long prompt.

Tensors of the device `meta` have sizes and no content, and the Triton kernels are replaced by
nothing. So evictions of any length run here as they would on a GPU, and every tensor is counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.worker.gpu_worker import Worker

from tests.conftest import ROOT
from vllm_tgvkv import memory, worker_cuda
from vllm_tgvkv.budget import Guard
from vllm_tgvkv.config import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.kernels import gpu, select
from vllm_tgvkv.manager import EvictingSpec
from vllm_tgvkv.memory import Sizes, memory_outside_pool
from vllm_tgvkv.observation import WORKSPACE_BYTES
from vllm_tgvkv.pages import CacheShape, page_pool
from vllm_tgvkv.policies import POLICY_NAMES
from vllm_tgvkv.prompt import PromptMap, VisionSpan
from vllm_tgvkv.ranks import Ranks
from vllm_tgvkv.regions import Regions
from vllm_tgvkv.stages import Stages
from vllm_tgvkv.warm_up import made_up_step
from vllm_tgvkv.worker_cuda import EvictionGPUWorker, memory_of

triton = pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = CacheShape(num_layers=8, num_heads=8, group_size=4, head_size=128, block_size=16)
TOKENS = 1 << 17
SIZES = Sizes(
    SHAPE,
    element_bytes=2,
    max_tokens=TOKENS,
    step_tokens=TOKENS,
    max_rows=256,
    table_width=TOKENS // 16,
    workspace_bytes=WORKSPACE_BYTES,
)
LAYER_METHODS = [name for name in POLICY_NAMES if name != "adakv"]
METHODS = [
    *((name, "head") for name in POLICY_NAMES),
    *((name, "layer") for name in LAYER_METHODS),
]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on `meta` that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        known = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        before = {x.untyped_storage()._cdata for x in known}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self._live.values()))
        return result


class NoKernel:
    """Takes the place of a Triton kernel and does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **kwargs: None


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of the GPU, without its kernels."""
    from vllm_tgvkv.kernels.gpu import apportion, copy, statistics
    from vllm_tgvkv.kernels.gpu import select as triton_select

    monkeypatch.setattr(gpu, "on_cpu", True)
    for module in (apportion, copy, triton_select, statistics):
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, NoKernel())


def settings(policy: str, granularity: str | None = None, **others: Any) -> EvictionConfig:
    return EvictionConfig.from_mapping({"policy": policy, "granularity": granularity, **others})


def most_bytes(config: EvictionConfig, guarded: bool, num_tokens: int = TOKENS) -> int:
    """Return the most bytes that evicting one prompt takes, with the whole prompt retained."""
    num_blocks = num_tokens // SHAPE.block_size
    size = (2 * num_blocks + 2, SHAPE.num_layers, SHAPE.num_heads, SHAPE.block_size, 2 * SHAPE.head_size)
    cache = torch.empty(size, dtype=torch.bfloat16, device="meta")
    pool = page_pool(cache.unbind(1), slots_first=True)
    evictor = Evictor(config, SHAPE, pool, Ranks(), Stages(SHAPE.num_layers))
    old = np.arange(1, num_blocks + 1, dtype=np.int32)
    prompt = PromptMap(num_tokens, (VisionSpan(100, num_tokens - 2000, None),))
    guard = Guard(0.9, 1) if guarded else None
    plan = made_up_step(config, config.policy, prompt, guard, old, old + num_blocks)
    heads = SHAPE.num_heads * SHAPE.group_size
    queries = torch.empty(num_tokens, heads, SHAPE.head_size, dtype=torch.bfloat16, device="meta")
    evictor.begin_step(plan)
    with torch.inference_mode(), LiveBytes() as live:
        evictor.prepare(lambda _: 0)
        for layer in range(SHAPE.num_layers):
            evictor.observe_layer(layer, queries, 1.0)
    assert [type(ended).__name__ for ended in evictor.ended] == ["PendingOutcome"], evictor.ended
    return live.most


def bytes_of_prompts(config: EvictionConfig, sizes: Sizes = SIZES) -> int:
    lines = memory._of_method(config, config.build_policy(config.policy), sizes)
    return sum(lines.values())


@pytest.mark.parametrize(("method", "granularity"), METHODS)
def test_an_eviction_takes_no_more_than_is_set_aside(
    no_kernels: None, method: str, granularity: str
) -> None:
    config = settings(method, granularity)
    guarded = config.build_policy(method).score.rows != "none"
    # One prompt in one chunk, so no second prompt's tokens.
    alone = replace(SIZES, max_tokens=TOKENS // 2, step_tokens=TOKENS // 2)
    most = most_bytes(config, guarded, TOKENS // 2)
    print(f"{method:16} {granularity:6} {most / 2**20:8.1f} {bytes_of_prompts(config, alone) / 2**20:8.1f}")
    assert most <= bytes_of_prompts(config, alone)
