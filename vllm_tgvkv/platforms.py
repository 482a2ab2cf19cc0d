# SPDX-License-Identifier: Apache-2.0
"""The platforms of vLLM that eviction runs on, and what it brings for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """Names of classes; none is imported before a worker needs it."""

    worker_cls: str
    attention_backend: str
    """The backend of vLLM that ours extends; no other can be used."""
    decode_kernels: tuple[str, ...] = ("stock",)
    """What the setting `decode_kernel` may be."""


_CPU = Platform("vllm_tgvkv.worker_cpu.EvictionCPUWorker", "CPU_ATTN")
_CUDA = Platform(
    "vllm_tgvkv.worker_cuda.EvictionGPUWorker", "FLASH_ATTN", decode_kernels=("stock", "triton")
)


def eviction_platform() -> Platform | None:
    """What eviction brings for the platform vLLM runs on; None if it does not support it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _CPU
    if current_platform.is_cuda():
        return _CUDA
    return None
