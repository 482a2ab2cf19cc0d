# SPDX-License-Identifier: Apache-2.0
"""The engines that are measured on a GPU and their phases, by importance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.models import LLAVA_7B, QWEN3_VL_8B, Shape, tiny

BUDGET = 0.1
REACH = {"policy": "reach", "when": "always", "budget": BUDGET}
"""The plugin's settings: the method that users begin with, also while memory is ample."""
SETTLING = 8
"""Steps after its first token until a request has been cut: `reach` waits for four of them."""
SETUPS = ("production", "ours", "constrained", "triton")
"""Stock with its defaults, the plugin, stock with the plugin's flags, the plugin's own kernel."""
OURS = ("ours", "triton")


@dataclass(frozen=True)
class Traffic:
    """Requests of one kind that arrive at once."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    images: bool = True

    @property
    def request_tokens(self) -> int:
        """Return the tokens of prompt and output of one request."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Scale:
    """How large and how often."""

    shapes: tuple[Shape, ...] = (QWEN3_VL_8B, LLAVA_7B)
    image: Traffic = Traffic(32, 8192, 512)
    """Requests that all fit the ample pool."""
    scarce_requests: int = 48
    """Number of such requests that compete for the scarce pool."""
    scarce_pool: int = 6
    """Number of requests that the scarce pool holds with their full cache."""
    text: Traffic = Traffic(64, 1024, 256, images=False)
    prefills: tuple[int, ...] = (8192, 32768)
    prefill_rounds: int = 3
    decode_batch: int = 64
    decode_prompt: int = 1024
    decode_steps: int = 64
    pool_bytes: int = 42 << 30
    """Upper bound of the ample pool; models with large caches get fewer requests."""
    max_model_len: int = 33024
    engine_args: dict[str, Any] = field(default_factory=dict)
    setups: tuple[str, ...] = SETUPS
    is_brief: bool = False
    """Whether kernels and all but the first phases are left out."""


FULL = Scale()
QUICK = Scale(
    shapes=(QWEN3_VL_8B,),
    image=Traffic(16, 8192, 128),
    scarce_requests=24,
    scarce_pool=4,
    text=Traffic(32, 1024, 64, images=False),
    prefill_rounds=2,
    decode_steps=32,
    pool_bytes=24 << 30,
)
FIRST = replace(
    QUICK,
    image=Traffic(32, 8192, 128),
    scarce_requests=48,
    scarce_pool=6,
    pool_bytes=42 << 30,
    prefills=(8192,),
    setups=("ours", "production"),
    is_brief=True,
)
SMOKE = Scale(
    shapes=(tiny(LLAVA_7B),),
    image=Traffic(3, 256, 6),
    scarce_requests=3,
    scarce_pool=2,
    text=Traffic(2, 140, 4, images=False),
    prefills=(256,),
    prefill_rounds=1,
    decode_batch=2,
    decode_prompt=192,
    decode_steps=3,
    pool_bytes=1 << 22,
    max_model_len=512,
    engine_args={"enforce_eager": True, "max_num_seqs": 8, "block_size": 32},
    setups=("production", "ours"),
)
FIRST_SMOKE = replace(SMOKE, setups=FIRST.setups, is_brief=True)
SCALES = {"full": FULL, "quick": QUICK, "first": FIRST, "smoke": SMOKE, "first-smoke": FIRST_SMOKE}


@dataclass(frozen=True)
class Phase:
    """One measurement: a method of `GpuEngine` and its arguments."""

    name: str
    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class EnginePlan:
    """One engine and its phases, which run in their own process."""

    shape: Shape
    name: str
    scale: Scale

    @property
    def title(self) -> str:
        """Return the name of this part of the run."""
        return f"{self.shape.name}, {self.name}"

    @property
    def num_image_requests(self) -> int:
        """Return the number of requests that fit the ample pool with their full cache."""
        request_bytes = self.scale.image.request_tokens * self.shape.kv_bytes_per_token
        return max(2, min(self.scale.image.requests, self.scale.pool_bytes // request_bytes))

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of the pool, the same for all engines of a model."""
        # A block per request for its partial last one, and room for evictions in flight.
        tokens = self.num_image_requests * (self.scale.image.request_tokens + 64)
        return max(tokens, self.scale.max_model_len + 512)

    def engine_args(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine that differ from its defaults."""
        common = {"max_model_len": self.scale.max_model_len, **self.scale.engine_args}
        if self.name in OURS:
            kernel = {"decode_kernel": "triton"} if self.name == "triton" else {}
            return {**common, "additional_config": {"kv_eviction": {**REACH, **kernel}}}
        if self.name == "constrained":
            return {**common, "attention_backend": "FLASH_ATTN", "block_size": 16}
        return common

    def phases(self) -> Iterator[Phase]:
        """Yield what is measured on this engine, by importance."""
        scale = self.scale
        ample = replace(scale.image, requests=self.num_image_requests)
        num_scarce = min(scale.scarce_requests, 8 * scale.scarce_pool)
        scarce = replace(scale.image, requests=num_scarce)
        pool = scale.scarce_pool * (scale.image.request_tokens + 64)
        decode = {
            "batch": scale.decode_batch,
            "prompt_tokens": scale.decode_prompt,
            "steps": scale.decode_steps,
        }
        warm_up = replace(ample, requests=2, output_tokens=SETTLING)
        rounds = scale.prefill_rounds
        prefills = [
            Phase(f"prefill {tokens}", "prefill", {"prompt_tokens": tokens, "rounds": rounds})
            for tokens in scale.prefills
        ]
        yield Phase("warm-up", "throughput", {"traffic": warm_up})
        yield Phase("ample", "throughput", {"traffic": ample})
        yield Phase("scarce", "throughput", {"traffic": scarce, "pool_tokens": pool})
        if scale.is_brief:
            yield from prefills
            return
        if self.shape != scale.shapes[0] or self.name == "constrained":
            return
        yield Phase("decode", "decode", decode)
        if self.name == "triton":
            return
        yield from prefills
        if self.name == "ours":
            yield Phase("full budget", "throughput", {"traffic": ample, "budget": 1.0})
        yield Phase("text", "throughput", {"traffic": scale.text})


def engine_plans(scale: Scale) -> Iterator[EnginePlan]:
    """Yield all engines by importance: of the first model, then stock and ours of the others."""
    first, *others = scale.shapes
    for name in scale.setups:
        yield EnginePlan(first, name, scale)
    for shape in others:
        for name in ("production", "ours"):
            yield EnginePlan(shape, name, scale)


def build_engine(plan: EnginePlan, scratch: str) -> Any:
    """Start an engine. vLLM is imported in its own process only."""
    from benchmarks.gpu.engine import GpuEngine

    return GpuEngine(plan.shape, Path(scratch, "model"), plan.pool_tokens, plan.engine_args())
