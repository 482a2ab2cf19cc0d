# SPDX-License-Identifier: Apache-2.0
"""The platforms of vLLM that eviction runs on, and what it can do on each."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tgvkv.cache.pages import FP8

_DRAFTS = ("ngram", "draft_model", "eagle", "eagle3")


@dataclass(frozen=True)
class Platform:
    """Classes by name, which a worker imports when it needs them, and capabilities."""

    worker_cls: str
    attention_backend: str
    """The backend of vLLM that the plugin's backend extends; no other can be used."""
    has_other_backends: bool = True
    """Whether vLLM may choose another for some models, which it says by naming it."""
    decode_kernels: tuple[str, ...] = ("auto", "stock")
    """Values of the setting `decode_kernel`."""
    supports_ray: bool = False
    """Whether Ray may start workers and engines. vLLM itself has no Ray resource for CPUs."""
    shares_experts: bool = True
    """Whether vLLM can share a mixture's experts among engines and, as wholes, among ranks."""
    drafts: tuple[str, ...] = _DRAFTS
    """Methods of speculative decoding."""
    hybrid_drafts: tuple[str, ...] = ()
    """The same for models some of whose layers hold states."""
    recall_tiers: tuple[str, ...] = ("memory",)
    """Values of the setting `recall.tier`."""
    most_head_size: int | None = None
    """Most values of a head in layers with full attention, but for FlashAttention 4; None if the
    backend takes any."""
    skips_hidden_keys: bool = False
    """Whether keys in front of a window are never read. Others are, with a weight of 0."""
    ignores_image_prefixes: bool = False
    """Whether vLLM's attention is causal inside images as well, for every model."""
    cache_is_on_host: bool = False
    """Whether a KV connector reads the cache itself where it has buffers on the host."""
    quantised_caches: tuple[str, ...] = ()
    """Values of `--kv-cache-dtype` for caches that are quantised."""
    fp8_multiple: int = 16
    """Tokens of a block and values of a head in them are multiples of it."""
    fp8_model_dtype: str | None = None
    """Dtype of the model that they need; None for any."""
    supports_model_runner_v2: bool = True
    prunes_videos: bool = True
    """Whether vLLM's model runner can drop tokens of videos."""
    has_flash_versions: bool = False
    """Whether vLLM chooses among versions of FlashAttention by the GPU."""


CPU = Platform(
    "vllm_tgvkv.worker.cpu.EvictionCPUWorker",
    "CPU_ATTN",
    has_other_backends=False,
    shares_experts=False,
    drafts=(*_DRAFTS, "mtp"),
    hybrid_drafts=("ngram", "mtp"),
    recall_tiers=("memory", "file"),
    skips_hidden_keys=True,
    cache_is_on_host=True,
    ignores_image_prefixes=True,
    quantised_caches=tuple(FP8),
    fp8_multiple=32,
    supports_model_runner_v2=False,
    prunes_videos=False,
)
CUDA = Platform(
    "vllm_tgvkv.worker.cuda.EvictionGPUWorker",
    "FLASH_ATTN",
    decode_kernels=("auto", "stock", "triton"),
    supports_ray=True,
    most_head_size=256,
    quantised_caches=("fp8", "fp8_e4m3"),
    fp8_model_dtype="bfloat16",  # FlashAttention writes no other output for queries in fp8
    has_flash_versions=True,
)


def eviction_platform() -> Platform | None:
    """Return the platform vLLM runs on; None if eviction does not support it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU
    if current_platform.is_cuda():
        return CUDA
    return None
