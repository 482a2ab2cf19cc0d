# SPDX-License-Identifier: Apache-2.0
"""Checks of a first run on a GPU that neither the tests nor `benchmarks.gpu` make.

`python -m benchmarks.gpu.checks NAME RESULTS [--smoke]` runs one function of `CHECKS`, which
appends its figures to RESULTS. It fails if the function raises, or if the plugin logs an error
where no request may fail.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import REACH, SETTLING, Traffic
from benchmarks.gpu.timing import launches
from benchmarks.models import QWEN3_VL_8B, QWEN_IMAGE, Shape, tiny
from measure.engines import set_environment

if TYPE_CHECKING:
    from benchmarks.gpu.engine import GpuEngine

ON_CUDA = torch.cuda.is_available()
UNCOMPRESSED = {"kv_eviction": "none"}
"""Options of a request that keeps its whole cache."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its traffic, in tokens unless stated."""

    shape: Shape = QWEN3_VL_8B
    positions: int = 262_144
    """Longest sequence that the real model allows."""
    max_model_len: int = 33_024
    pool: int = 240_000
    chunk: int = 8192
    """Prefilled in one step."""
    prompts: tuple[int, ...] = (1024, 8192, 32_768)
    last_chunk: int = 64
    frames: int = 32
    """Of a video."""
    short_prompt: int = 512
    long_prompt: int = 32_000
    batches: tuple[int, ...] = (1, 32, 64, 124, 125, 256)
    """Requests that decode together, ascending."""
    live: int = 512
    """Compressed requests beside a prefill."""
    steps: int = 32
    rounds: int = 3
    huge_prompts: tuple[int, ...] = (32_768, 126_976, 65_536, 98_304)
    max_huge: int = 10_000
    """Most huge prompts that are served."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)


FULL = Sizes()
SMOKE = Sizes(
    shape=tiny(QWEN3_VL_8B),
    positions=1024,
    max_model_len=512,
    pool=4096,
    chunk=128,
    prompts=(256,),
    last_chunk=16,
    frames=4,
    short_prompt=192,
    long_prompt=448,
    batches=(1, 3),
    live=3,
    steps=2,
    rounds=1,
    huge_prompts=(256, 448),
    max_huge=4,
    engine_args={"enforce_eager": True, "max_num_seqs": 8, "block_size": 32},
)
LAYOUT = "BLHNC" if ON_CUDA else "LBHNC"
"""The plugin's layout of the cache; vLLM's CPU backend has only its own."""


@dataclass(frozen=True)
class Run:
    """Where a check finds its sizes and leaves its figures."""

    sizes: Sizes
    journal: Journal
    scratch: Path
    seconds: float
    """Time for a check that lasts as long as it is given."""
    command: Sequence[str]
    """Arguments that run another check with the same sizes and results, behind its name."""

    def figure(self, name: str, value: float | str) -> None:
        """Record and print one figure; its name tells the unit."""
        value = round(value, 3) if isinstance(value, float) else value
        self.journal.write(figure=name, value=value)
        print(f"{name}: {value}", flush=True)

    def engine(
        self,
        pool: int | None,
        eviction: Mapping[str, Any] | None,
        shape: Shape | None = None,
        **engine_args: Any,
    ) -> GpuEngine:
        """Start vLLM, with the plugin unless `eviction` is None."""
        from benchmarks.gpu.engine import GpuEngine

        if eviction is not None:
            engine_args["additional_config"] = {"kv_eviction": {**REACH, **eviction}}
        engine_args = {"max_model_len": self.sizes.max_model_len, **engine_args}
        engine_args = {**self.sizes.engine_args, **engine_args}
        engine = GpuEngine(shape or self.sizes.shape, self.scratch, pool, engine_args)
        self.journal.write(engine=engine.describe())
        return engine


def require(condition: bool, what: str) -> None:
    """Fail the check unless `condition` holds."""
    if not condition:
        raise RuntimeError(what)


def used_gib() -> float:
    """Return the device's memory that is in use, by whatever."""
    if not ON_CUDA:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


# -- checks -----------------------------------------------------------------------------


def compile_kernels(run: Run) -> None:
    """Build every Triton kernel for this device; without one, a single kernel for 9.0."""
    from vllm_tgvkv.kernels.gpu.compile import main as build

    cc, only = "90", ["--only", "copy"]
    if ON_CUDA:
        major, minor = torch.cuda.get_device_capability()
        cc, only = f"{major}{minor}", []
    require(build(["--cc", cc, *only]) == 0, "a kernel does not build, or spills registers")
    run.figure("capability", cc)


def smoke(run: Run) -> None:
    """Serve two small prompts without graphs; both are evicted."""
    shape = replace(tiny(QWEN3_VL_8B), head_size=64)
    engine = run.engine(4096, {}, shape, max_model_len=512, max_num_seqs=8, enforce_eager=True)
    served = engine.throughput(Traffic(2, 256, 8))
    run.figure("start, s", engine.start_seconds)
    run.figure("evicted", served["evicted"])
    require(served["evicted"] == 2, "both prompts should have been evicted")


def defaults(run: Run) -> None:
    """Start with vLLM's defaults and the model's real length; no kernel compiles afterwards."""
    sizes = run.sizes
    if ON_CUDA:
        from vllm_tgvkv.worker.cuda import EvictionGPUWorker as worker
    else:
        from vllm_tgvkv.worker.cpu import EvictionCPUWorker as worker
    for name, what in (
        ("initialize_from_config", "cache and page tables"),
        ("compile_or_warm_up_model", "warm-up and graphs"),
    ):
        setattr(worker, name, _weighed(run, getattr(worker, name), what))
    engine = run.engine(
        None,
        {},
        max_model_len=sizes.positions,
        hf_overrides={"text_config": {"max_position_embeddings": sizes.positions}},
        jit_monitor_mode="error",
        **({} if ON_CUDA else {"kv_cache_memory_bytes": 1 << 24}),
    )
    run.figure("start, s", engine.start_seconds)
    served = engine.throughput(Traffic(sizes.rounds, sizes.prompts[0], 64))
    run.figure("in use after traffic, GiB", used_gib())
    require(served["evicted"] == sizes.rounds, f"{served['evicted']} of {sizes.rounds} evicted")


def _weighed(run: Run, function: Callable[..., Any], what: str) -> Callable[..., Any]:
    def weighed(*args: Any, **kwargs: Any) -> Any:
        before = used_gib()
        result = function(*args, **kwargs)
        run.figure(f"{what}, GiB", used_gib() - before)
        return result

    return weighed


def layout(run: Run) -> None:
    """Compare stock vLLM's default layout of the cache with the plugin's."""
    for name in (None, LAYOUT):
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_KV_CACHE_LAYOUT"}
        if name:
            environment["VLLM_KV_CACHE_LAYOUT"] = name
        command = [sys.executable, "-m", "benchmarks.gpu.checks", "stock", *run.command]
        subprocess.run(command, env=environment, check=True)


def stock(run: Run) -> None:
    """Time prefill and decode of stock vLLM with the plugin's backend and blocks."""
    sizes = run.sizes
    name = os.environ.get("VLLM_KV_CACHE_LAYOUT", "default layout")
    flash = {"attention_backend": "FLASH_ATTN", "block_size": 16} if ON_CUDA else {}
    engine = run.engine(sizes.pool, None, **flash)
    tokens = sizes.prompts[min(1, len(sizes.prompts) - 1)]
    prefill = engine.prefill(tokens, sizes.rounds)
    run.figure(f"{name}: prefill of {tokens}, ms", 1e3 * prefill["seconds"])
    batch = sizes.batches[-1] // 4 or 1
    step = engine.decode(batch, 2 * sizes.short_prompt, sizes.steps)["step_seconds"]
    run.figure(f"{name}: decode step at batch {batch}, ms", 1e3 * step)


def decode(run: Run) -> None:
    """Time decode steps at growing batches, then at shrinking ones with one long request."""
    sizes = run.sizes
    engine = run.engine(sizes.pool, {})
    # Every request lives until the end, so that each is prefilled once.
    output = len(sizes.batches) * 3 * (sizes.steps + 2 * SETTLING) + sizes.batches[-1]
    requests: list[Any] = []
    for batch in sizes.batches:
        new = [
            engine.request(Traffic(1, sizes.short_prompt, output))
            for _ in range(batch - len(requests))
        ]
        engine.start(new)
        requests += new
        _time_steps(run, engine, f"batch {batch}")
    long = engine.request(Traffic(1, sizes.long_prompt, output), UNCOMPRESSED)
    engine.start([long])
    for batch in reversed(sizes.batches):
        engine.abort(requests[batch:])
        del requests[batch:]
        _time_steps(run, engine, f"batch {batch} and one of {sizes.long_prompt}")


def _time_steps(run: Run, engine: GpuEngine, what: str) -> None:
    """Time steps once all requests have been cut."""
    steps, running = run.sizes.steps, engine.core.scheduler.get_request_counts()[0]
    engine.step(SETTLING)
    begin = time.perf_counter()
    engine.step(steps)
    seconds = (time.perf_counter() - begin) / steps
    left = engine.core.scheduler.get_request_counts()[0]
    require(running == left, f"{running - left} requests ended while they were timed")
    number = launches(lambda: engine.step(4), engine.device) / 4 / engine.shape.layers
    run.figure(f"{what}, ms a step", f"{1e3 * seconds:.2f}, {number:.1f} launches a layer")


def evictions(run: Run) -> None:
    """Time evictions on host and device, and mixed steps with many compressed requests."""
    sizes = run.sizes
    engine = run.engine(
        sizes.pool,
        {"decode": {"on_request": True}},
        max_num_batched_tokens=sizes.chunk,
        limit_mm_per_prompt={"image": 128, "video": 1},
        **({"max_num_seqs": max(sizes.live + 1, 1024)} if ON_CUDA else {}),
    )
    chunked = 2 * sizes.chunk + sizes.last_chunk
    for tokens in (*sizes.prompts, chunked):
        what = f"prompt of {tokens}"
        if tokens == chunked:
            what += f", last chunk of {sizes.last_chunk}"
        _tell_eviction(run, what, engine.prefill(tokens, sizes.rounds))
    usual = sizes.prompts[min(1, len(sizes.prompts) - 1)]
    for method in ("reach", "tgv"):
        _tell_cuts(run, engine, method, usual)
    seeds = iter(range(1000))

    def video() -> Any:
        xargs = {"kv_eviction": "snapkv"}
        return engine.preprocess(_video_prompt(sizes, next(seeds)), 2, xargs)

    _tell_eviction(
        run, f"video of {sizes.frames}, snapkv", engine.time_prefills(video, sizes.rounds)
    )

    output = 8 * (sizes.steps + 8) + sizes.live
    traffic = Traffic(1, sizes.short_prompt, output)
    engine.start([engine.request(traffic) for _ in range(sizes.live)])
    host = engine.host_seconds(sizes.steps)["host_seconds"]
    run.figure(f"host, decode step of {sizes.live}, ms", 1e3 * host)
    long = engine.request(Traffic(1, sizes.long_prompt, 2), UNCOMPRESSED)
    engine.submit([long])
    host = engine.host_seconds(min(4, sizes.steps))["host_seconds"]
    states = engine.core.scheduler.requests
    require(
        states[long.request_id].num_computed_tokens < sizes.long_prompt,
        "the long prompt ended before all mixed steps were timed",
    )
    run.figure(f"host, mixed step of {sizes.live}, ms", 1e3 * host)


def _tell_eviction(run: Run, what: str, found: Mapping[str, float]) -> None:
    host, device = 1e3 * found["eviction_host_seconds"], 1e3 * found["eviction_seconds"]
    require(found["eviction_seconds"] > 0, f"{what}: nothing was evicted")
    run.figure(
        what,
        f"host {host:.1f} ms, device {device:.1f} ms, {100 * found['eviction_share']:.1f} % of "
        f"{1e3 * found['seconds']:.0f} ms to the first token",
    )


def _tell_cuts(run: Run, engine: GpuEngine, method: str, tokens: int) -> None:
    """Time a cut that waited for the answer, and a later one. Steps are graphs, and both follow."""
    after = 4, 24
    xargs = {"kv_eviction": method, "kv_eviction_schedule": "{}:0.5,{}:0.25".format(*after)}
    traffic = Traffic(1, tokens, after[-1] + SETTLING)
    cuts = engine.time_cuts(lambda: engine.request(traffic, xargs), run.sizes.rounds)
    for answer_tokens, cut in zip(after, cuts, strict=True):
        host, device = 1e3 * cut["host_seconds"], 1e3 * cut["device_seconds"]
        run.figure(
            f"{method}, {tokens} tokens, cut after {answer_tokens} of the answer",
            f"host {host:.1f} ms, device {device:.1f} ms, {cut['launches']} launches",
        )


def _video_prompt(sizes: Sizes, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    side = 8 * sizes.shape.pixels_per_token
    frames = rng.integers(0, 256, (sizes.frames, side, side, 3), dtype=np.uint8)
    told = {
        "fps": 2.0,
        "duration": sizes.frames / 2,
        "total_num_frames": sizes.frames,
        "frames_indices": list(range(sizes.frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    text = QWEN_IMAGE.replace("image_pad", "video_pad")
    question = " What happens in this video?" * 3
    return {"prompt": text + question, "multi_modal_data": {"video": [(frames, told)]}}


def recall(run: Run) -> None:
    """Time decode steps with recall and without; the tier is in pinned memory."""
    sizes = run.sizes
    batch, tokens = sizes.batches[-1] // 4 or 1, 2 * sizes.short_prompt
    gib = 2 * batch * tokens * sizes.shape.kv_bytes_per_token / 2**30
    engine = run.engine(sizes.pool, {"recall": {"gib": gib}})
    for comes_back in (1, 0):
        traffic = Traffic(1, tokens, 4 * (sizes.steps + SETTLING) + batch)
        xargs = {"kv_eviction_recall": comes_back}
        requests = [engine.request(traffic, xargs) for _ in range(batch)]
        engine.start(requests)
        engine.step(sizes.steps)  # all choose
        _time_steps(run, engine, f"{'with' if comes_back else 'without'} recall, batch {batch}")
        engine.abort(requests)


def memory(run: Run) -> None:
    """Serve huge prompts in nearly all of the device's memory: requests may fail, vLLM may not."""
    sizes = run.sizes
    longest = max(sizes.huge_prompts) + 512
    engine = run.engine(
        None,
        {"policy": "snapkv", "budget": "auto:0.9"},
        max_model_len=longest,
        max_num_batched_tokens=sizes.chunk,
        hf_overrides={"text_config": {"max_position_embeddings": longest}},
        **({"gpu_memory_utilization": 0.97} if ON_CUDA else {"kv_cache_memory_bytes": 1 << 24}),
    )
    lengths = cycle(sizes.huge_prompts)
    ends: Counter[str] = Counter()
    until, number, lowest = time.monotonic() + run.seconds, 0, float("inf")
    while (time.monotonic() < until and number < sizes.max_huge) or sum(ends.values()) < number:
        in_time = time.monotonic() < until and number < sizes.max_huge
        if in_time and engine.engine.get_num_unfinished_requests() < 3:
            engine.submit([engine.request(Traffic(1, next(lengths), 64))])
            number += 1
        for output in engine.engine.step():
            if output.finished:
                ends[str(output.outputs[0].finish_reason)] += 1
        if ON_CUDA:
            lowest = min(lowest, torch.cuda.mem_get_info()[0] / 2**30)
    run.figure("requests by how they ended", ", ".join(f"{k} {n}" for k, n in ends.items()))
    run.figure("evicted", engine.num_evicted())
    run.figure("least free memory, GiB", lowest if ON_CUDA else 0.0)
    require(engine.num_evicted() > 0, "no request was evicted")


CHECKS: dict[str, Callable[[Run], None]] = {
    "compile": compile_kernels,
    "smoke": smoke,
    "defaults": defaults,
    "layout": layout,
    "stock": stock,
    "decode": decode,
    "evictions": evictions,
    "recall": recall,
    "memory": memory,
}
REQUESTS_MAY_FAIL = (memory,)


class Errors(logging.Handler):
    """Keeps what the plugin logs as errors, such as evictions that failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message, with the exception."""
        error = record.exc_info and record.exc_info[1]
        self.messages.append(record.getMessage() + (f": {error!r}" if error else ""))


def main() -> int:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("results", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny, without a GPU: no measurement")
    parser.add_argument("--seconds", type=float, default=80.0, help="of traffic in `memory`")
    options = parser.parse_args()
    set_environment()
    errors = Errors()
    logging.getLogger("vllm.tgvkv").addHandler(errors)
    check = CHECKS[options.check]
    journal = Journal(options.results, part=options.check)
    sizes = SMOKE if options.smoke else FULL
    command = [str(options.results), *(["--smoke"] if options.smoke else [])]
    with tempfile.TemporaryDirectory() as scratch:
        check(Run(sizes, journal, Path(scratch), options.seconds, command))
    if errors.messages and check not in REQUESTS_MAY_FAIL:
        print(f"ERROR {len(errors.messages)} in the log, first: {errors.messages[0]}", flush=True)
        return 1
    if errors.messages:
        journal.write(figure="requests that failed", value=len(errors.messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
