# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine on a GPU in this process, and the measurements on it.

The engine's core runs in the process of its front end (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), with
asynchronous scheduling as by default, so that steps can be driven and timed. Images are
preprocessed before the clock starts: this CPU work is the same for all engines and would hide the
GPU's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure.engines import LocalEngine, set_environment

set_environment()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402

from benchmarks.gpu.plan import BUDGET, SETTLING, Traffic  # noqa: E402
from benchmarks.gpu.timing import DeviceStopwatch, launches, synchronize  # noqa: E402
from benchmarks.models import Shape, model_folder  # noqa: E402
from benchmarks.probe import Stopwatches, reduced_pool  # noqa: E402
from benchmarks.prompts import image_prompt, text_prompt  # noqa: E402

_NUM_TEMPLATES = 4
"""Prompts that are preprocessed for each length; others are copies whose images are renamed."""


class GpuEngine:
    """A vLLM engine with its stopwatches; `evicts` tells whether the plugin is on."""

    def __init__(
        self, shape: Shape, root: Path | str, pool_tokens: int | None, engine_args: dict[str, Any]
    ) -> None:
        """Start vLLM with a pool of `pool_tokens`; without them vLLM sizes it by its profile."""
        self.shape = shape
        self.evicts = "additional_config" in engine_args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.eviction = DeviceStopwatch(self.device)
        self.eviction_host = Stopwatches()
        if self.evicts:
            from vllm_tgvkv.worker.evictor import Evictor

            for name in ("observe_layer", "evict_stored"):  # in the layers, and after them
                self.eviction.wrap(Evictor, name)
                self.eviction_host.watch(Evictor, name, "eviction")
        defaults = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "kv_cache_memory_bytes": pool_tokens and pool_tokens * shape.kv_bytes_per_token,
            "limit_mm_per_prompt": {"image": 128, "video": 0}
            if shape.arch != "llava"
            else {"image": 128},
            "seed": 0,
        }
        begin = time.perf_counter()
        options = defaults | engine_args
        self.parts = LocalEngine(model_folder(root, shape), as_served=True, **options)
        self.engine = self.parts.engine
        self.start_seconds = time.perf_counter() - begin
        self.core = self.parts.core
        self.host = Stopwatches()
        self._templates: dict[int, list[EngineCoreRequest]] = {}
        self._count = 0
        self._seed = 0

    def describe(self) -> dict[str, Any]:
        """Return the settings that vLLM arrived at."""
        return {"start_seconds": round(self.start_seconds, 1), **self.parts.facts()}

    # -- measurements -------------------------------------------------------------------

    def throughput(
        self, traffic: Traffic, budget: float | None = None, pool_tokens: int | None = None
    ) -> dict[str, Any]:
        """Serve `traffic` that arrives at once; return tokens a second and how many ran together.

        Decoding alone is measured in steps in which every request gets a token; None if there are
        none. `ideal` is how much faster a step is that reads `BUDGET` of the prompts, by bytes.

        `pool_tokens` reduces the pool to blocks for that number of tokens.
        """
        xargs = budget_xargs(budget)
        requests = [self.request(traffic, xargs) for _ in range(traffic.requests)]
        before = self.num_evicted()
        scheduler = self.core.scheduler
        with reduced_pool(scheduler, pool_tokens) if pool_tokens else nullcontext():
            synchronize(self.device)
            begin = time.perf_counter()
            self.submit(requests)
            running, full_steps, last = [], [], begin
            while self.engine.has_unfinished_requests():
                num_outputs = len(self.engine.step())
                running.append(self.core.scheduler.get_request_counts()[0])
                if num_outputs:
                    last_but_one, last = last, time.perf_counter()
                if num_outputs == traffic.requests:
                    full_steps.append(last - last_but_one)
            synchronize(self.device)
            seconds = time.perf_counter() - begin
            self._settle()
        decode = traffic.requests / statistics.median(full_steps) if full_steps else None
        weights = self.shape.weight_bytes_per_step
        of_token = traffic.requests * self.shape.kv_bytes_per_token
        prompts, answers = of_token * traffic.prompt_tokens, of_token * traffic.output_tokens / 2
        few = weights + BUDGET * prompts + answers
        return {
            "decode_tokens_per_second": decode,
            "ideal": (weights + prompts + answers) / few,
            "seconds": seconds,
            "tokens_per_second": traffic.requests * traffic.request_tokens / seconds,
            "output_tokens_per_second": traffic.requests * traffic.output_tokens / seconds,
            "peak_running": max(running),
            "steps": len(running),
            "evicted": self.num_evicted() - before,
        }

    def prefill(
        self, prompt_tokens: int, rounds: int, budget: float | None = None
    ) -> dict[str, float]:
        """Time prompts alone: from arrival to first token, and the eviction."""
        traffic = Traffic(1, prompt_tokens, SETTLING)
        return self.time_prefills(lambda: self.request(traffic, budget_xargs(budget)), rounds)

    def time_prefills(
        self, make_request: Callable[[], EngineCoreRequest], rounds: int
    ) -> dict[str, float]:
        """Time requests alone: to the first token, and the eviction on device and host.

        The eviction may come later, when the answer has begun. The device's time contains its waits
        for the host.
        """
        seconds, parts, host = [], [], []
        for number in range(rounds + 1):
            request = make_request()
            self.eviction.take()
            self.eviction_host.reset()
            synchronize(self.device)
            begin = time.perf_counter()
            self.submit([request])
            while not self.engine.step():
                pass
            elapsed = time.perf_counter() - begin
            self.drain()
            if number > 0:  # the first one warms up
                seconds.append(elapsed)
                parts.append(self.eviction.take())
                host.append(self.eviction_host.seconds["eviction"])
        result = {"seconds": statistics.median(seconds)}
        if self.evicts:
            result["eviction_seconds"] = statistics.median(parts)
            result["eviction_host_seconds"] = statistics.median(host)
            shares = [part / whole for part, whole in zip(parts, seconds, strict=True)]
            result["eviction_share"] = statistics.median(shares)
        return result

    def time_cuts(
        self, make_request: Callable[[], EngineCoreRequest], rounds: int
    ) -> list[dict[str, float]]:
        """Time the cuts that follow a step, of requests that run alone, and count their launches.

        The device is idle before each, and its time contains its waits for the host.
        """
        evictor, counts = self.parts.evictor, list[int]()
        timed = [self._cuts(make_request()) for _ in range(rounds + 1)][1:]  # the first warms up
        evict = evictor.evict_stored

        def counted() -> None:
            if evictor.plan.evictions:
                counts.append(launches(evict, self.device))

        setattr(evictor, "evict_stored", counted)  # noqa: B010
        try:
            self._cuts(make_request())
        finally:
            del evictor.evict_stored  # restores the class's method
        return [
            {
                "host_seconds": statistics.median(host for host, _ in cuts),
                "device_seconds": statistics.median(device for _, device in cuts),
                "launches": count,
            }
            for *cuts, count in zip(*timed, counts, strict=True)
        ]

    def _cuts(self, request: EngineCoreRequest) -> list[tuple[float, float]]:
        """Serve a request; return the seconds of each cut on host and device."""
        found = []
        self.submit([request])
        while self.engine.has_unfinished_requests():
            self.eviction.take()
            self.eviction_host.reset()
            self.engine.step()
            if self.eviction_host.calls["eviction"] and self.parts.evictor.plan.evictions:
                found.append((self.eviction_host.seconds["eviction"], self.eviction.take()))
        self._settle()
        return found

    def decode(
        self, batch: int, prompt_tokens: int, steps: int, budget: float | None = None
    ) -> dict[str, float]:
        """Time decode steps of `batch` requests, and the host's work in them."""
        traffic = Traffic(batch, prompt_tokens, 2 * steps + 64)
        self.start([self.request(traffic, budget_xargs(budget)) for _ in range(batch)])
        self.step(SETTLING)
        begin = time.perf_counter()
        counts = [len(self.engine.step()) for _ in range(steps)]
        synchronize(self.device)
        wall = time.perf_counter() - begin
        assert all(count in (0, batch) for count in counts), counts
        host = self.host_seconds(steps)
        self.abort()
        return {"step_seconds": wall / steps, **host}

    def host_seconds(self, steps: int) -> dict[str, float]:
        """Time the host's work in steps, with the device idle before every one.

        So no wait for the device counts as work.
        """
        with self._host_watched():
            self.step(steps)
            total = sum(self.host.seconds.values()) / self.host.calls["execute_model"]
            parts = {f"host_{name}": s / steps for name, s in self.host.seconds.items()}
        return {"host_seconds": total, **parts}

    def start(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Add requests, and step until each has its first token."""
        waiting = {request.request_id for request in requests}  # vLLM appends to it
        self.submit(requests)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}

    # -- requests -----------------------------------------------------------------------

    def request(
        self, traffic: Traffic, xargs: Mapping[str, Any] | None = None
    ) -> EngineCoreRequest:
        """Return a preprocessed request with images, or text, that the engine has not seen.

        `xargs` are options of the eviction, which stock vLLM does not get.
        """
        if not traffic.images:
            prompt = text_prompt(traffic.prompt_tokens, self._count)
            return self.preprocess(prompt, traffic.output_tokens, xargs)
        templates = self._templates.setdefault(traffic.prompt_tokens, [])
        if len(templates) < _NUM_TEMPLATES:
            self._seed += 1
            prompt = image_prompt(self.shape, traffic.prompt_tokens, self._seed)
            template = self.preprocess(prompt, traffic.output_tokens)
            length = len(template.prompt_token_ids or ())
            assert length == traffic.prompt_tokens, (length, traffic.prompt_tokens)
            templates.append(template)
        template = templates[self._count % len(templates)]
        request = EngineCoreRequest(
            **{field: getattr(template, field) for field in template.__struct_fields__}
        )
        self._count += 1
        name = request.request_id = f"request-{self._count}"
        request.sampling_params = self._sampling(traffic.output_tokens, xargs)
        request.mm_features = [
            replace(feature, identifier=f"{name}-{place}", mm_hash=f"{name}-{place}")
            for place, feature in enumerate(template.mm_features or ())
        ]
        return request

    def preprocess(
        self,
        prompt: Mapping[str, Any],
        output_tokens: int,
        xargs: Mapping[str, Any] | None = None,
    ) -> EngineCoreRequest:
        """Return a request with a prompt in vLLM's format."""
        self._count += 1
        return self.engine.input_processor.process_inputs(
            f"request-{self._count}",
            prompt,
            self._sampling(output_tokens, xargs),
            supported_tasks=self.engine.get_supported_tasks(),
        )

    def _sampling(self, output_tokens: int, xargs: Mapping[str, Any] | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=dict(xargs) if xargs and self.evicts else None,
        )

    def submit(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Add requests."""
        for request in requests:
            request.arrival_time = time.time()
            assert request.sampling_params is not None
            self.engine.add_request(request.request_id, request, request.sampling_params)

    def drain(self) -> None:
        """Step until no request is left."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self._settle()

    def abort(self, requests: Sequence[EngineCoreRequest] | None = None) -> None:
        """End requests that were added, by default all."""
        if requests is None:
            names = list(self.engine.output_processor.request_states)
        else:
            names = [request.request_id for request in requests]
        self.engine.abort_request(names, internal=True)
        self._settle()

    def step(self, steps: int) -> None:
        """Run steps, and wait for the device."""
        for _ in range(steps):
            self.engine.step()
        synchronize(self.device)

    def _settle(self) -> None:
        """Let the engine finish the batches in flight and process their end."""
        self.step(4)

    # -- instruments --------------------------------------------------------------------

    @contextmanager
    def _host_watched(self) -> Iterator[None]:
        """Time the host's work in every step inside the block, with the device idle before it."""
        owners = {
            "schedule": self.core.scheduler,
            "execute_model": self.core.model_executor,
            "sample_tokens": self.core.model_executor,
            "update_from_output": self.core.scheduler,
        }
        self.host.reset()
        for name, owner in owners.items():
            self.host.watch(owner, name)
        watched = self.core.model_executor.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            synchronize(self.device)
            return watched(*args, **kwargs)

        self.core.model_executor.execute_model = execute_model
        try:
            yield
        finally:
            for name, owner in owners.items():
                delattr(owner, name)  # restores the class's method

    def num_evicted(self) -> int:
        """Return the number of requests evicted so far, the proof that eviction was on."""
        if not self.evicts:
            return 0
        return int(self.core.scheduler.records.counters.requests_evicted)


def budget_xargs(budget: float | None) -> dict[str, float] | None:
    """Return the options of a request with a budget of its own, None for the server's."""
    return {"kv_eviction_budget": budget} if budget else None
