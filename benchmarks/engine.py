# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven step by step through a pipe."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.arm import Arm
from benchmarks.shape import ModelShape, model_folder
from benchmarks.workload import Workload

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",  # an idle arm must not spin beside the busy one
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def serve(pipe: Connection, arm: Arm, shape: ModelShape, root: str) -> None:
    """Build the engine, then answer `(method, kwargs)` with `(ok, result)` until None comes."""
    os.environ.update(ENVIRONMENT)
    try:
        engine = Engine(arm, shape, root)
        pipe.send((True, engine.describe()))
        while (request := pipe.recv()) is not None:
            method, kwargs = request
            pipe.send((True, getattr(engine, method)(**kwargs)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


class Engine:
    """A vLLM engine of one arm, with its stopwatches."""

    def __init__(self, arm: Arm, shape: ModelShape, root: str) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from benchmarks.probe import Stopwatches

        self.arm = arm
        self.shape = shape
        start = time.perf_counter()
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_folder(Path(root), shape)),
                load_format="dummy",
                dtype=shape.dtype,
                limit_mm_per_prompt={"image": 64},
                seed=0,
                **arm.engine_args,
            )
        )
        self.start_seconds = time.perf_counter() - start
        self.core = self.engine.engine_core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        ((self.group,),) = self.runner.attn_groups
        self.watches = Stopwatches()
        self._watch()
        self._shuffler = random.Random(0)
        self._count = 0
        self._live: set[str] = set()

    def _watch(self) -> None:
        builder = self.group.get_metadata_builder()
        self.watches.watch(builder, "build", "metadata")
        if self.arm.evicts:
            from vllm_tgvkv import worker
            from vllm_tgvkv.observation import PromptObservation

            self.watches.watch(builder.evictor, "observe_layer", "eviction")
            self.watches.watch(builder.evictor, "take_outcomes", "outcomes")
            self.watches.watch(worker, "with_outcomes", "outcomes")
            for name in ("_add_sums", "_score_layer"):
                self.watches.watch(PromptObservation, name)
            self.watches.watch(builder.evictor, "_evict")
            self.watches.watch(builder, "_schedule", "schedules")
            for name in ("write_page_tables", "write_lengths"):
                self.watches.watch(builder.evictor.regions, name)

    def describe(self) -> dict[str, Any]:
        """Facts about the engine for the report."""
        config = self.engine.vllm_config
        return {
            "start_seconds": round(self.start_seconds, 1),
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "scheduler": type(self.core.scheduler).__name__,
            "compilation": str(config.compilation_config.mode),
            "attention": self.group.backend.__name__,
        }

    # -- requests -----------------------------------------------------------------------

    def _add(
        self,
        workload: Workload,
        seed: int,
        max_tokens: int,
        budget: float | None,
        trace: bool = False,
    ) -> str:
        prompt = workload.prompt(self.shape, seed)
        return self._submit(prompt, max_tokens, budget, trace=trace)

    def _submit(
        self,
        prompt: dict[str, Any],
        max_tokens: int,
        budget: float | None,
        policy: str | None = None,
        trace: bool = False,
    ) -> str:
        from vllm import SamplingParams

        wishes = {
            "kv_eviction_budget": budget,
            "kv_eviction": policy,
            "kv_eviction_trace": 1 if trace else None,
        }
        given = {name: value for name, value in wishes.items() if value is not None}
        extra = (given or None) if self.arm.evicts else None
        self._count += 1
        request_id = self.engine.add_request(
            f"{self.arm.name}-{self._count}",
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args=extra,
            ),
        )
        self._live.add(request_id)
        return request_id

    def clear(self) -> None:
        """Abort whatever is left and let the scheduler notice."""
        self.engine.abort_request(list(self._live), internal=True)
        self._live.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()

    # -- measurements -------------------------------------------------------------------

    def prefill(
        self, workload: Workload, seed: int, budget: float | None, trace: bool = False
    ) -> dict[str, float]:
        """Time one prompt alone: arrival to first token, and the eviction's part of it."""
        prompt = workload.prompt(self.shape, seed)
        self.watches.reset()
        start, cpu_start = time.perf_counter(), time.process_time()
        self._submit(prompt, 2, budget, trace=trace)
        while not self.engine.step():
            pass
        result = {
            "seconds": time.perf_counter() - start,
            "cpu": time.process_time() - cpu_start,
            "eviction": self.watches.seconds["eviction"],
            "outcomes": self.watches.seconds["outcomes"],
        }
        self.clear()
        return result

    def eviction_parts(
        self, workload: Workload, seed: int, budget: float, policy: str
    ) -> dict[str, float]:
        """Seconds of one prompt's eviction: statistics with scores, then decision with copy.

        The prompt's own attention is left out: what an eviction costs does not depend on it.
        """
        restore = _skip_prompt_attention()
        self.watches.reset()
        self._submit(workload.prompt(self.shape, seed), 2, budget, policy)
        while not self.engine.step():
            pass
        restore()
        spent = dict(self.watches.seconds)
        self.clear()
        return {
            "all": spent["eviction"],
            "statistics": spent["_score_layer"] + spent.get("_add_sums", 0.0),
            "decision": spent["_evict"],
        }

    def fill(
        self,
        workload: Workload,
        batch: int,
        seed: int,
        budget: float | None,
        attend: bool = True,
        trace: bool = False,
    ) -> dict[str, float]:
        """Prefill `batch` requests and leave them running.

        Without `attend` the prompts' attention is left out, in stock and in ours alike: decoding
        speed does not depend on the values in the cache, and 16k-token prompts take minutes.
        """
        restore = None if attend else _skip_prompt_attention()
        start = time.perf_counter()
        room = self.engine.vllm_config.model_config.max_model_len - workload.prompt_tokens
        for index in range(batch):
            self._add(workload, seed + index, room, budget, trace)
        started: set[str] = set()
        while len(started) < batch:
            started.update(output.request_id for output in self.engine.step())
        if restore:
            restore()
        self.watches.reset()
        return {"seconds": time.perf_counter() - start}

    def decode(self, steps: int) -> dict[str, Any]:
        """Time `steps` decode steps of whatever is running, one by one."""
        self.watches.reset()
        seconds, cpu_seconds = [], []
        for _ in range(steps):
            start, cpu_start = time.perf_counter(), time.process_time()
            outputs = self.engine.step()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
            assert len(outputs) == len(self._live), (len(outputs), len(self._live))
        return {
            "seconds": seconds,
            "cpu": cpu_seconds,
            "watches": {name: total / steps for name, total in self.watches.seconds.items()},
            "cached_tokens": self._cached_tokens(),
        }

    # -- metrics ------------------------------------------------------------------------

    @functools.cached_property
    def _collection(self) -> Any:
        from benchmarks.collection import Collection

        assert self.engine.logger_manager is not None, "vLLM's statistics are off"
        return Collection(
            self.core.scheduler,
            self.group.get_metadata_builder().evictor,
            self.engine.logger_manager.stat_loggers,
        )

    def collect(self, on: bool) -> None:
        """Switch the metrics of eviction on or off."""
        self._collection.switch(on)

    def collected(self) -> dict[str, Any]:
        """Which places collect, what Prometheus would read, counted evictions, kept traces."""
        from benchmarks.collection import exported

        return {
            "state": self._collection.state(),
            "exported": exported(),
            "counters": self.core.scheduler.eviction_counters.as_dict(),
            "traces": len(self._collection.evictor.traces.newest_first()),
        }

    def collection_microseconds(self, calls: int) -> dict[str, float]:
        """See `Collection.microseconds`; the metrics have to be on."""
        found: dict[str, float] = self._collection.microseconds(calls)
        return found

    def decode_switched(
        self, states: dict[str, bool], cycles: int
    ) -> dict[str, dict[str, list[float]]]:
        """Seconds of decode steps, wall and CPU, by state of the metrics, which are left on.

        The state changes with every step: the values of an index are those of neighbours. A cycle
        has all orders of the states, so that the growing caches favour none; they are shuffled,
        because a machine that is shared has rhythms of its own.
        """
        orders = list(itertools.permutations(states)) * cycles
        self._shuffler.shuffle(orders)
        spent: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in states}
        for name in itertools.chain.from_iterable(orders):
            self._collection.switch(states[name])
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = self.engine.step()
            spent[name]["wall"].append(time.perf_counter() - wall)
            spent[name]["cpu"].append(time.process_time() - cpu)
            assert len(outputs) == len(self._live), (len(outputs), len(self._live))
        self._collection.switch(True)
        return spent

    def _cached_tokens(self) -> float:
        """Tokens a step reads per layer and KV head, mean over both, all requests together."""
        scheduler = self.core.scheduler
        total = 0.0
        for request in scheduler.running:
            total += request.num_computed_tokens
            compression = getattr(
                scheduler.kv_cache_manager.coordinator.single_type_managers[0], "compressions", {}
            ).get(request.request_id)
            if compression is not None and compression.swapped:
                given = compression.num_full_blocks - compression.num_retained_blocks
                total -= given * self.engine.vllm_config.cache_config.block_size
        return total

    def burst(
        self, workload: Workload, requests: int, seed: int, max_tokens: int, budget: float | None
    ) -> dict[str, float]:
        """Serve `requests` that arrive at once; how many ran together, and how long it took."""
        prompts = [workload.prompt(self.shape, seed + index) for index in range(requests)]
        start = time.perf_counter()
        for prompt in prompts:
            self._submit(prompt, max_tokens, budget)
        peak_running = peak_decoding = 0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            running, _ = self.core.scheduler.get_request_counts()
            peak_running = max(peak_running, running)
            peak_decoding = max(peak_decoding, len(outputs))
        seconds = time.perf_counter() - start
        self._live.clear()
        return {
            "seconds": seconds,
            "tokens_per_second": requests * (workload.prompt_tokens + max_tokens) / seconds,
            "output_tokens_per_second": requests * max_tokens / seconds,
            "peak_running": peak_running,
            "peak_decoding": peak_decoding,
        }

    def eviction_memory(self, workload: Workload, seed: int, budget: float) -> dict[str, int]:
        """Peak bytes of one prompt's eviction, beyond the pool."""
        from benchmarks.probe import CallMemory

        evictor = self.group.get_metadata_builder().evictor
        memory = CallMemory()
        with memory.watching(evictor, "observe_layer"):
            self._add(workload, seed, 2, budget)
            while not self.engine.step():
                pass
        self.clear()
        return {"peak": memory.peak, "held_after": memory.held}


def _skip_prompt_attention() -> Callable[[], None]:
    """Let prompts pass without attention; returns the function that ends it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Stock

    original = Stock.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        metadata = given["attn_metadata"]
        if metadata is None or metadata.max_query_len <= 1:
            return original(self, *args, **kwargs)
        return given["output"].zero_()

    def restore() -> None:
        Stock.forward = original

    Stock.forward = forward
    return restore
