# SPDX-License-Identifier: Apache-2.0
"""How large the models and prompts are, and how often each thing is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.models import small_llava
from benchmarks.workload import SchedulerLoad, Workload

BUDGET = 0.1
"""Fraction of the prompt that is kept where a line names no other."""

COMMON = small_llava("common", 1024, 8, 16, 4, 64, 2816)
"""For the plugin's costs: computation and weights as in a real model, four queries a KV head."""
KV_BOUND = small_llava("kv-bound", 512, 8, 16, 8, 128, 1408, vocabulary=4096)
"""For the plugin's gain: caches far larger than the weights."""
BRIEF = small_llava("brief", 256, 4, 8, 4, 32, 704, vocabulary=4096, dtype="float32")
"""For the cost of metrics: a step is nearly all vLLM's work on the host, where metrics are
collected. No step of a larger model is shorter."""


@dataclass(frozen=True)
class SwitchedScale:
    """Sizes of a part that switches something from step to step."""

    decodes: tuple[tuple[int, Workload], ...]
    """Batches, and their prompts."""
    fills: int
    """How often each batch starts again from its prompts: long contexts make steps long."""
    rounds: int
    """Rounds of a fill, each with all orders of the states."""
    burst_requests: int = 0
    """Requests that arrive at once, in a part that measures them."""


@dataclass(frozen=True)
class CutsScale:
    """Sizes of the parts `cuts` and `long`."""

    ceiling: int
    """Tokens a head that are kept where caches are cut again and again."""
    recut_batches: tuple[int, ...]
    recut_methods: tuple[str, ...]
    """The first is measured in all batches, the others in the first batch."""
    recut_periods: int
    """Cuts of each request that are measured."""
    long_batch: int
    long_prompt: Workload
    long_ceiling: int
    long_steps: int
    """Tokens that are generated under the ceiling."""


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts of a run."""

    parts: tuple[str, ...]
    """The parts that run when none are named."""
    rounds: int
    first_token: Workload
    first_token_rounds: int
    decode: Workload
    decode_steps: int
    long: Workload
    long_rounds: int
    overhead: Workload
    overhead_batches: tuple[int, ...]
    overhead_steps: int
    wide: Workload
    wide_batch: int
    wide_steps: int
    burst: Workload
    burst_requests: int
    burst_output: int
    burst_rounds: int
    metrics: SwitchedScale
    waiting: SwitchedScale
    cuts: CutsScale
    schedulers: tuple[SchedulerLoad, ...]
    scheduler_rounds: int
    minutes: float = float("inf")
    """Time limit of the run."""
    has_targets: bool = True
    """Whether the sizes are those that the targets were set for."""


FULL = Scale(
    parts=("costs", "methods", "gain", "metrics", "waiting", "cuts", "long", "scheduler"),
    rounds=5,
    first_token=Workload(2048),
    first_token_rounds=15,
    decode=Workload(1024),
    decode_steps=24,
    long=Workload(8192),
    long_rounds=3,
    overhead=Workload(640),
    overhead_batches=(8, 32),
    overhead_steps=128,  # a block
    wide=Workload(16384),
    wide_batch=8,
    wide_steps=16,
    burst=Workload(2048),
    burst_requests=24,
    burst_output=128,
    burst_rounds=1,
    metrics=SwitchedScale(((8, Workload(640)), (128, Workload(640))), fills=4, rounds=60),
    waiting=SwitchedScale(
        ((8, Workload(1024)), (8, Workload(4096)), (24, Workload(1024))),
        fills=2,
        rounds=25,
        burst_requests=40,
    ),
    cuts=CutsScale(
        ceiling=8192,
        recut_batches=(1, 4),
        recut_methods=("snapkv", "streaming", "tgv", "rkv"),
        recut_periods=1,
        long_batch=8,
        long_prompt=Workload(1024),
        long_ceiling=512,
        long_steps=2000,
    ),
    schedulers=(
        SchedulerLoad("no request ends", 256, 1024, None),
        SchedulerLoad("2 requests begin and end in a step", 256, 1024, 128),
        SchedulerLoad(
            "chunks of 64 tokens in a full pool", 256, 1024, 49, chunk=64, pool_blocks=3500
        ),
        SchedulerLoad(
            "chunks of 32 tokens in a full pool", 256, 1024, 33, chunk=32, pool_blocks=5000
        ),
    ),
    scheduler_rounds=60,
)

QUICK = replace(
    FULL,
    parts=("costs", "gain", "scheduler"),
    rounds=3,
    first_token=Workload(1024),
    first_token_rounds=4,
    decode=Workload(640),
    decode_steps=12,
    long=Workload(2048),
    long_rounds=2,
    overhead_batches=(32,),
    overhead_steps=32,
    wide=Workload(4096),
    wide_steps=6,
    burst=Workload(1280),
    burst_requests=12,
    burst_output=32,
    metrics=SwitchedScale(((8, Workload(640)),), fills=1, rounds=20),
    waiting=SwitchedScale(((8, Workload(640)),), fills=1, rounds=20, burst_requests=16),
    cuts=CutsScale(
        ceiling=2048,
        recut_batches=(1,),
        recut_methods=("snapkv", "streaming"),
        recut_periods=1,
        long_batch=4,
        long_prompt=Workload(1024),
        long_ceiling=512,
        long_steps=600,
    ),
    scheduler_rounds=20,
    minutes=10.0,
    has_targets=False,
)

SMOKE = replace(
    QUICK,
    parts=FULL.parts,
    minutes=FULL.minutes,
    rounds=1,
    first_token=Workload(640),
    first_token_rounds=1,
    decode_steps=2,
    long=Workload(1280),
    long_rounds=1,
    overhead_batches=(2,),
    wide=Workload(640),
    wide_batch=2,
    wide_steps=2,
    burst=Workload(640),
    burst_requests=6,
    burst_output=4,
    metrics=SwitchedScale(((2, Workload(640)),), fills=1, rounds=1),
    waiting=SwitchedScale(((2, Workload(640)),), fills=1, rounds=1, burst_requests=6),
    cuts=CutsScale(
        ceiling=640,
        recut_batches=(2,),
        recut_methods=("snapkv", "streaming"),
        recut_periods=1,
        long_batch=2,
        long_prompt=Workload(704),
        long_ceiling=512,
        long_steps=200,
    ),
    schedulers=(SchedulerLoad("2 requests begin and end in a step", 64, 1024, 32),),
    scheduler_rounds=2,
)
"""Sizes that say nothing about speed: all code runs."""

SCALES = {"full": FULL, "quick": QUICK, "smoke": SMOKE}
