# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and ours side by side in one process, without a model.

Both get the same requests, step by step. What a model would answer, and what a worker would report
of evictions, is made up outside of the time that is measured.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.arm import ArmError
from benchmarks.shape import ModelShape, model_folder

BLOCK_SIZE = 16
"""As on GPUs: smaller blocks mean longer rows, and more to do for an eviction."""


@dataclass(frozen=True)
class Traffic:
    """So many running requests, each an image and a text around it, all of them evicted."""

    name: str
    running: int
    prompt_tokens: int
    output_tokens: int | None
    """None: no request ends. Else as many begin as end, spread evenly over the steps."""
    chunk: int = 0
    """Tokens of one prompt a step, so that several prefill at once; 0: all of it."""
    pool_blocks: int | None = None
    """Of ours, so few that prompts wait for each other; None, and stock: enough for all."""

    @property
    def steps_of_prompt(self) -> int:
        return -(-self.prompt_tokens // self.chunk) if self.chunk else 1

    @property
    def begin_per_step(self) -> int:
        """Few enough that all of a step's prompts run in it, and that they do not end in waves."""
        if self.output_tokens is None:
            return 4
        return max(1, self.running // (self.output_tokens + self.steps_of_prompt - 1))

    @property
    def warm_up(self) -> int:
        """Steps until all have begun and, if they end, as many have ended."""
        return 2 * self.running // self.begin_per_step + 16


@dataclass(frozen=True)
class Timing:
    """What a run of steps took with each scheduler."""

    stock: list[float]
    """Seconds of each step: additions, scheduling, update with the output."""
    ours: list[float]
    running: list[int]
    evicted: int
    """Evictions while it was measured."""
    prefilling: float
    """Prompts of ours that were in flight after a step, mean."""
    waiting: float
    """Requests of ours that waited after a step, mean."""
    running_stock: list[int]


def measure(shape: ModelShape, root: str, budget: float, traffic: Traffic, steps: int) -> Timing:
    """Time `steps` steps of both schedulers in a process of its own, after a warm-up.

    Raises:
        ArmError: if it raised there.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, shape, root, budget, traffic, steps).result()
        except Exception as error:
            raise ArmError(f"schedulers: {error!r}") from error


def _measure(shape: ModelShape, root: str, budget: float, traffic: Traffic, steps: int) -> Timing:
    from benchmarks.engine import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    kinds = {"stock": None, "ours": {"policy": "tgv", "budget": budget}}
    lanes = {name: _Lane(shape, root, kind, traffic) for name, kind in kinds.items()}
    stock, ours = lanes["stock"], lanes["ours"]
    for _ in range(traffic.warm_up):
        for lane in lanes.values():
            lane.step()
    assert len(stock.scheduler.running) >= 0.95 * traffic.running, "too few began"
    gc.collect()
    gc.freeze()
    evicted = ours.scheduler.eviction_counters.requests_evicted
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    running, running_stock, prefilling, waiting = [], [], [], []
    for number in range(steps):
        for name in ("ours", "stock") if number % 2 else ("stock", "ours"):
            seconds[name].append(lanes[name].step())
        running.append(len(ours.scheduler.running))
        running_stock.append(len(stock.scheduler.running))
        prefilling.append(len(ours.scheduler.manager.order.prefills))
        waiting.append(len(ours.scheduler.waiting))
        same = running_stock[-1] == running[-1]
        assert same or traffic.pool_blocks, "the schedulers went different ways"
    flight = sum(prefilling) / steps
    assert flight >= 64 or not traffic.pool_blocks, f"{flight:.0f} prompts are in flight: too few"
    held, _ = ours.scheduler.manager.num_held()
    held += prefilling[-1]
    assert held >= 0.9 * running[-1], f"{held} of {running[-1]} are compressed, or will be"
    return Timing(
        **seconds,
        running=running,
        evicted=ours.scheduler.eviction_counters.requests_evicted - evicted,
        prefilling=flight,
        waiting=sum(waiting) / steps,
        running_stock=running_stock,
    )


class _Lane:
    """One scheduler, the requests that it is given, and the outputs that are made up for it."""

    def __init__(
        self, shape: ModelShape, root: str, eviction: dict[str, Any] | None, traffic: Traffic
    ) -> None:
        self.shape = shape
        self.traffic = traffic
        config = _config(shape, root, eviction, traffic)
        self.scheduler = _scheduler(config, shape, traffic)
        self._hasher = _hasher(config)
        self._numbers = itertools.count()
        self._unfinished = 0
        self._policy = eviction["policy"] if eviction else ""

    def step(self) -> float:
        """Run one step and return the seconds it took."""
        arriving = list(self._arriving())
        self._unfinished += len(arriving)
        start = time.perf_counter()
        for request in arriving:
            self.scheduler.add_request(request)
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - start
        answer = self._answer(output)
        start = time.perf_counter()
        results = self.scheduler.update_from_output(output, answer)
        seconds += time.perf_counter() - start
        self._unfinished -= sum(o.finished for r in results.values() for o in r.outputs)
        return seconds

    def _arriving(self) -> Iterator[Any]:
        missing = self.traffic.running - self._unfinished
        for _ in range(min(missing, self.traffic.begin_per_step)):
            yield self._request(next(self._numbers))

    def _request(self, number: int) -> Any:
        """A request with an image and text that no other one has."""
        import numpy as np
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        tokens = np.random.default_rng(number).integers(0, 256, self.traffic.prompt_tokens)
        image = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image-{number}",
            mm_position=PlaceholderRange(offset=64, length=self.shape.tokens_per_image),
        )
        parameters = SamplingParams(
            max_tokens=self.traffic.output_tokens or 1 << 20, temperature=0.0, ignore_eos=True
        )
        return Request(
            request_id=f"request-{number}",
            prompt_token_ids=tokens.tolist(),
            sampling_params=parameters,
            pooling_params=None,
            mm_features=[image],
            block_hasher=self._hasher,
        )

    def _answer(self, output: Any) -> Any:
        """One token for every request whose prompt is done, and what came of the evictions."""
        from vllm.v1.outputs import ModelRunnerOutput

        from vllm_tgvkv.plan import Outcome, attach_outcomes, plan_of
        from vllm_tgvkv.stopwatch import PARTS

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests
            ],
        )
        outcomes = [
            Outcome(
                request_id=eviction.request_id,
                first_block=int(eviction.new_blocks[0]),
                num_blocks=None,
                method=eviction.method,
                seen={"text": 448, "vision": 576},
                kept={"text": 48, "vision": 58},
                seconds=dict.fromkeys(PARTS, 0.001),
            )
            for eviction in plan_of(output).evictions
        ]
        return attach_outcomes(answer, outcomes)


def _config(shape: ModelShape, root: str, eviction: dict[str, Any] | None, traffic: Traffic) -> Any:
    from vllm import EngineArgs

    additional = {"additional_config": {"kv_eviction": eviction}} if eviction else {}
    config = EngineArgs(
        model=str(model_folder(Path(root), shape)),
        load_format="dummy",
        dtype=shape.dtype,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=traffic.running,
        max_num_batched_tokens=8192,
        long_prefill_token_threshold=traffic.chunk,
        enforce_eager=True,
        **additional,
    ).create_engine_config()
    longest = traffic.prompt_tokens + (traffic.output_tokens or 4096)
    enough = (traffic.running + 8) * (longest // BLOCK_SIZE + 2)
    tight = traffic.pool_blocks if eviction else None
    config.cache_config.num_gpu_blocks = tight or enough
    return config


def _scheduler(config: Any, shape: ModelShape, traffic: Traffic) -> Any:
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_tgvkv.attention import evicting_spec
    from vllm_tgvkv.config import config_of

    register_all_kvcache_specs(config)
    spec: Any = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=getattr(torch, shape.dtype),
    )
    if config_of(config).active:
        spec = evicting_spec(spec)
    layers = [f"layer-{index}" for index in range(shape.layers)]
    cache = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


def _hasher(config: Any) -> Any:
    """As the engine's core makes it."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(BLOCK_SIZE, function)
