# SPDX-License-Identifier: Apache-2.0
"""The kernel that decodes compressed requests, by the version of FlashAttention that vLLM chose.

FlashAttention 2 and 3 read one page table for every KV head. FlashAttention 4, vLLM's choice on
Blackwell GPUs of capability 10.x, was not tried with such tables. It computes prompts there, as in
stock, and this package's own kernel decodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.logger import init_logger

from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError

logger = init_logger("vllm.tgvkv")

_OTHER_VERSION = (
    "--attention-config.flash_attn_version 3 (on Hopper) or 2 (for models without learned sinks)"
)


def refused_with(
    config: EvictionConfig, version: int | None, page_size: int | None, block_size: int
) -> tuple[str, str] | None:
    """Return what a version of FlashAttention does not run with, and the way out; None if it does.

    Args:
        version: of FlashAttention; None if it is not known.
        page_size: the only number of tokens of a page that its kernel reads; None if it reads any.
        block_size: tokens of a block of the cache.
    """
    if version != 4:
        return None
    if config.decode_kernel == "stock":
        return (
            "decode_kernel: stock on FlashAttention 4",
            f"use decode_kernel: auto, {_OTHER_VERSION},",
        )
    if config.summarises:
        return (
            "summaries of evicted tokens on FlashAttention 4",
            f"use a method without summaries, {_OTHER_VERSION},",
        )
    if page_size not in (None, block_size):
        return (
            f"blocks of {block_size} tokens on FlashAttention 4, whose kernel for heads of this "
            f"size reads {page_size} at a time",
            f"use --block-size {page_size}, {_OTHER_VERSION},",
        )
    return None


def with_decode_kernel(config: EvictionConfig, impl: Any, block_size: int) -> EvictionConfig:
    """Return the settings with the kernel that `decode_kernel: auto` stands for.

    Args:
        impl: attention of one evicted layer.
        block_size: tokens of a block of the cache.

    Raises:
        UnsupportedByEvictionError: for settings that vLLM's FlashAttention does not run with. It is
            known here at the latest: the process that checks settings may see no GPU.
    """
    version = getattr(impl, "vllm_flash_attn_version", None)  # on CUDA
    page_size = 128 if getattr(impl, "fa4_hd256", False) else None
    refused = refused_with(config, version, page_size, block_size)
    if refused is not None:
        what, way_out = refused
        raise UnsupportedByEvictionError(
            f"--kv-eviction does not work with {what} yet: {way_out} or leave out --kv-eviction"
        )
    if config.decode_kernel != "auto":
        return config
    if version != 4:
        return replace(config, decode_kernel="stock")
    logger.info_once(
        "KV eviction decodes with its own Triton kernel (decode_kernel: auto), because vLLM chose "
        "FlashAttention 4, which computes prompts. This has not run on a GPU yet; %s and "
        "decode_kernel: stock are the other way",
        _OTHER_VERSION,
    )
    return replace(config, decode_kernel="triton")
