# SPDX-License-Identifier: Apache-2.0
"""How large the models and prompts are, and how often each thing is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models import Shape, small_llava
from benchmarks.prompts import QUESTION_TOKENS, image_prompt, text_prompt

BUDGET = 0.1
"""Fraction of the prompt that is kept where a line names no other."""

RECOMMENDED = {"policy": "reach", "budget": 0.2, "defer": 4}
"""The recommended method, budget and wait."""

COMMON = small_llava("common", 1024, 8, 16, 4, 64, 2816)
"""For the plugin's costs: computation and weights as in a real model, four queries a KV head."""
KV_BOUND = small_llava("kv-bound", 512, 8, 16, 8, 128, 1408, vocabulary=4096)
"""For the plugin's gain: caches far larger than the weights."""
DEEP = replace(small_llava("deep", 256, 36, 8, 2, 128, 704, vocabulary=4096), arch="llama")
"""For drafts: as many layers as in models of 8 billion parameters, so that the cache of a draft of
one layer has its usual share."""
DRAFT = replace(DEEP, name="draft", layers=1)
BRIEF = small_llava("brief", 256, 4, 8, 4, 32, 704, vocabulary=4096, dtype="float32")
"""For the cost of metrics: a step is nearly all vLLM's work on the host, where metrics are
collected. No step of a larger model is shorter."""


@dataclass(frozen=True)
class Workload:
    """A kind of prompt, see `image_prompt`.

    The plugin observes the last rows of the question, at most `observation_window`.
    """

    prompt_tokens: int
    question_tokens: int = QUESTION_TOKENS

    def prompt(self, shape: Shape, seed: int) -> dict[str, Any]:
        """Return a prompt in vLLM's format; a language model's is text alone."""
        if shape.arch == "llama":
            return text_prompt(self.prompt_tokens, seed)
        return image_prompt(shape, self.prompt_tokens, seed, self.question_tokens)


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
    """Sizes of the part `cuts`."""

    ceiling: int = 512
    """Tokens a head that are kept."""
    methods: tuple[str, ...] = ("snapkv", "streaming", "tgv", "rkv")
    """The first gives the long answer."""
    batch: int = 8
    prompt: Workload = Workload(1024)
    steps: int = 2000
    """Tokens of the long answer."""


@dataclass(frozen=True)
class HandoverScale:
    """Sizes of the part `handover`."""

    prompts: tuple[tuple[int, int], ...] = ((2, 6), (4, 2), (1, 12))
    """Pages of a prompt, each of 1,024 tokens, and how many such prompts are asked."""
    burst_requests: int = 24


@dataclass(frozen=True)
class Scale:
    """Sizes of all parts of a run; the defaults are those that the targets were set for."""

    parts: tuple[str, ...] = (
        *("costs", "methods", "gain", "grid", "recall", "drafts"),
        *("metrics", "waiting", "cuts", "ranks", "handover", "scheduler", "steps"),
    )
    """The parts that run when none are named."""
    rounds: int = 5
    first_token: Workload = Workload(2048)
    first_token_rounds: int = 15
    decode: Workload = Workload(1024)
    decode_steps: int = 24
    long: Workload = Workload(8192)
    long_rounds: int = 3
    overhead: Workload = Workload(640)
    overhead_batches: tuple[int, ...] = (8, 32)
    overhead_steps: int = 128  # a block
    wide: Workload = Workload(16384)
    wide_batch: int = 8
    wide_steps: int = 16
    grid: tuple[tuple[int, Workload], ...] = (
        *((1, Workload(2048)), (1, Workload(8192)), (4, Workload(2048))),
        *((4, Workload(8192)), (16, Workload(2048))),
    )
    """Batches and prompts of VL-Cache's table that fit a CPU."""
    burst: Workload = Workload(2048)
    burst_requests: int = 24
    burst_output: int = 128
    metrics: SwitchedScale = SwitchedScale(
        ((8, Workload(640)), (128, Workload(640))), fills=4, rounds=60
    )
    waiting: SwitchedScale = SwitchedScale(
        ((8, Workload(1024)), (8, Workload(4096)), (24, Workload(1024))),
        fills=2,
        rounds=25,
        burst_requests=40,
    )
    cuts: CutsScale = CutsScale()
    handover: HandoverScale = HandoverScale()
    scheduled_batch: int = 256
    scheduled_rounds: int = 60
    minutes: float = float("inf")
    """Time limit of the run."""
    has_targets: bool = True
    """Whether the sizes are those that the targets were set for."""


FULL = Scale()
QUICK = Scale(
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
    cuts=CutsScale(methods=("snapkv", "streaming"), batch=4, steps=600),
    scheduled_batch=128,
    scheduled_rounds=20,
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
    grid=((1, Workload(640)), (2, Workload(640))),
    burst=Workload(640),
    burst_requests=6,
    burst_output=4,
    metrics=SwitchedScale(((2, Workload(640)),), fills=1, rounds=1),
    waiting=SwitchedScale(((2, Workload(640)),), fills=1, rounds=1, burst_requests=6),
    cuts=CutsScale(methods=("snapkv", "streaming"), batch=2, prompt=Workload(704), steps=200),
    handover=HandoverScale(prompts=((1, 1),), burst_requests=2),
    scheduled_batch=8,
    scheduled_rounds=2,
)
"""Sizes that say nothing about speed: all code runs."""

SCALES = {"full": FULL, "quick": QUICK, "smoke": SMOKE}
