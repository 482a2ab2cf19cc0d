# SPDX-License-Identifier: Apache-2.0
"""Part `scheduler`: vLLM's scheduler and ours side by side in one process, without a model.

Both get the same requests, step by step. The model's tokens and the worker's reports of evictions
are made up outside the time that is measured.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.bench import Bench
from benchmarks.measurement import Line, Target, interval
from benchmarks.models import Shape, model_folder
from benchmarks.remote import Remote
from benchmarks.scale import BUDGET, COMMON
from benchmarks.workload import SchedulerLoad
from vllm_tgvkv.attention.base import evicting_spec
from vllm_tgvkv.config.server import config_of
from vllm_tgvkv.shared.plan import Outcome, attach_outcomes, plan_of
from vllm_tgvkv.worker.stopwatch import PARTS

BLOCK_SIZE = 16
"""As on GPUs: smaller blocks mean longer rows, and more work for an eviction."""
STEPS_PER_ROUND = 10


def scheduler(bench: Bench) -> Iterator[Line]:
    """Measure line i."""
    steps = bench.scale.scheduler_rounds * STEPS_PER_ROUND
    for load in bench.scale.schedulers:
        bench.say(f"i. schedulers side by side, {load.running} running, {load.name}")
        pair = Remote("schedulers", Schedulers, bench.root, load, deadline=bench.deadline)
        try:
            pair.wait_until_built()
            yield from _lines(load, pair.ask("measure", steps=steps))
        finally:
            pair.close()


@dataclass(frozen=True)
class Timing:
    """Durations of a run of steps with each scheduler, and what happened in them."""

    stock: list[float]
    """Seconds of each step: additions, scheduling, update with the output."""
    ours: list[float]
    running: list[int]
    """Of ours, after each step."""
    running_stock: list[int]
    evicted: int
    prefilling: float
    """Prompts of ours in flight after a step, mean."""
    waiting: float
    """Requests of ours that waited after a step, mean."""


def _lines(load: SchedulerLoad, timing: Timing) -> Iterator[Line]:
    what = f"{load.running} running, {load.name}"
    steps = len(timing.running)
    microseconds: dict[str, list[float]] = {"ours": [], "constrained": []}
    for first in range(0, steps, STEPS_PER_ROUND):
        round_ = slice(first, first + STEPS_PER_ROUND)
        for name, seconds, running in (
            ("ours", timing.ours, timing.running),
            ("constrained", timing.stock, timing.running_stock),
        ):
            microseconds[name].append(1e6 * sum(seconds[round_]) / sum(running[round_]))
    yield Line(f"i. scheduler: {what}", "us a request", "lower", microseconds)
    pairs = zip(microseconds["ours"], microseconds["constrained"], strict=True)
    extra = [ours - stock for ours, stock in pairs]
    line = Line(f"i. scheduler, more than stock: {what}", "us a request", "lower", {"ours": extra})
    low, high = interval(extra) or (min(extra), max(extra))
    line.notes = (
        f"{timing.evicted / steps:.2f} evictions a step, {timing.prefilling:.0f} prompts in "
        f"flight, {sum(timing.running) / steps:.0f} running, {timing.waiting:.0f} waiting; "
        f"95 %: {low:.2f} .. {high:.2f}"
    )
    line.targets.append(Target("<= 50 us a running request", high, 50.0, "lower"))
    yield line


class Schedulers:
    """Both schedulers with the same load, warmed up."""

    def __init__(self, root: str, load: SchedulerLoad) -> None:
        self.load = load
        self.stock = _Lane(COMMON, root, None, load)
        self.ours = _Lane(COMMON, root, {"policy": "tgv", "budget": BUDGET}, load)
        for _ in range(load.warm_up):
            self.stock.step()
            self.ours.step()
        num_running = len(self.stock.scheduler.running)
        assert num_running >= 0.95 * load.running, f"only {num_running} requests run"
        gc.collect()
        gc.freeze()

    def measure(self, steps: int) -> Timing:
        """Time `steps` steps of both schedulers in turn."""
        lanes, load = {"stock": self.stock, "ours": self.ours}, self.load
        ours, stock = self.ours.scheduler, self.stock.scheduler
        evicted = ours.records.counters.requests_evicted
        seconds: dict[str, list[float]] = {name: [] for name in lanes}
        running, running_stock, prefilling, waiting = [], [], [], []
        for number in range(steps):
            for name in ("ours", "stock") if number % 2 else ("stock", "ours"):
                seconds[name].append(lanes[name].step())
            running.append(len(ours.running))
            running_stock.append(len(stock.running))
            prefilling.append(
                sum(r.num_computed_tokens < r.num_prompt_tokens for r in ours.running)
            )
            waiting.append(len(ours.waiting))
            same = running_stock[-1] == running[-1]
            assert same or load.pool_blocks, "the schedulers run different requests"
        mean = sum(prefilling) / steps
        assert mean >= load.running / 4 or not load.pool_blocks, f"{mean:.0f} in flight"
        held, _ = ours.manager.num_held()
        held += prefilling[-1]
        assert held >= 0.9 * running[-1], f"{held} of {running[-1]} are compressed, or will be"
        return Timing(
            **seconds,
            running=running,
            running_stock=running_stock,
            evicted=ours.records.counters.requests_evicted - evicted,
            prefilling=mean,
            waiting=sum(waiting) / steps,
        )


class _Lane:
    """One scheduler, its requests, and the outputs that are made up for it."""

    def __init__(
        self, shape: Shape, root: str, eviction: dict[str, Any] | None, load: SchedulerLoad
    ) -> None:
        self.shape = shape
        self.load = load
        config = _config(shape, root, eviction, load)
        self.scheduler = _scheduler(config, shape)
        self._hasher = _hasher(config)
        self._numbers = itertools.count()
        self._unfinished = 0

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

    def _arriving(self) -> Iterator[Request]:
        missing = self.load.running - self._unfinished
        for _ in range(min(missing, self.load.begin_per_step)):
            yield self._request(next(self._numbers))

    def _request(self, number: int) -> Request:
        """Return a request with an image and text that no other has."""
        tokens = np.random.default_rng(number).integers(0, 256, self.load.prompt_tokens)
        image = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image-{number}",
            mm_position=PlaceholderRange(offset=64, length=self.shape.tokens_per_image),
        )
        parameters = SamplingParams(
            max_tokens=self.load.output_tokens or 1 << 20, temperature=0.0, ignore_eos=True
        )
        return Request(
            request_id=f"request-{number}",
            prompt_token_ids=tokens.tolist(),
            sampling_params=parameters,
            pooling_params=None,
            mm_features=[image],
            block_hasher=self._hasher,
        )

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for each request past its prompt, and the outcomes of evictions."""
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
                num_retained=None,
                method=eviction.method,
                seen={"text": 448, "vision": 576},
                kept={"text": 48, "vision": 58},
                seconds=dict.fromkeys(PARTS, 0.001),
            )
            for eviction in plan_of(output).evictions
        ]
        return attach_outcomes(answer, outcomes)


def _config(
    shape: Shape, root: str, eviction: dict[str, Any] | None, load: SchedulerLoad
) -> VllmConfig:
    additional = {"additional_config": {"kv_eviction": eviction}} if eviction else {}
    config = EngineArgs(
        model=str(model_folder(root, shape)),
        load_format="dummy",
        dtype=shape.dtype,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_seqs=load.running,
        max_num_batched_tokens=8192,
        long_prefill_token_threshold=load.chunk,
        enforce_eager=True,
        **additional,
    ).create_engine_config()
    longest = load.prompt_tokens + (load.output_tokens or 4096)
    enough = (load.running + 8) * (longest // BLOCK_SIZE + 2)
    tight = load.pool_blocks if eviction else None
    config.cache_config.num_gpu_blocks = tight or enough
    return config


def _scheduler(config: VllmConfig, shape: Shape) -> Any:
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


def _hasher(config: VllmConfig) -> Callable[[Request], list[Any]]:
    """Return the block hasher that the engine's core would use."""
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    return get_request_block_hasher(BLOCK_SIZE, function)
