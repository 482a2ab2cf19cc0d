# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention that vLLM will choose, before a layer is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import set_current_vllm_config

from vllm_tgvkv.shared.layer_types import evicted_head_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def reads_cache(vllm_config: VllmConfig, dtype: str) -> bool:
    """Return whether vLLM's FlashAttention reads a quantised cache on this GPU.

    True where this process sees no GPU. The worker sees it, where vLLM builds no layer for such a
    cache that FlashAttention does not read.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils

    if current_platform.get_device_capability() is None:
        return True
    head_size = evicted_head_size(vllm_config.model_config)
    with set_current_vllm_config(vllm_config):
        return fa_utils.flash_attn_supports_kv_cache_dtype(
            dtype, head_size=head_size, head_size_v=head_size, supports_fa4_hd256=True
        )


def flash_version(vllm_config: VllmConfig) -> tuple[int | None, int | None]:
    """Return the version for layers with full attention, and the only page size that it reads.

    The version is None where this process sees no GPU, unless the user named one; the page size is
    None where it reads any.
    """
    from vllm.v1.attention.backends import fa_utils  # slow, and not needed for `vllm serve --help`

    head_size = evicted_head_size(vllm_config.model_config)
    with set_current_vllm_config(vllm_config):
        found = fa_utils.get_flash_attn_version(head_size=head_size, supports_fa4_hd256=True)
    version = found or vllm_config.attention_config.flash_attn_version
    is_dedicated = version == 4 and fa_utils.uses_fa4_hd256_kernel(head_size)
    return version, fa_utils.FA4_HD256_PAGE_SIZE if is_dedicated else None
