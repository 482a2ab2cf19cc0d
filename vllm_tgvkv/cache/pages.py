# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache as head pages that any layer can address.

In vLLM's layout BLHNC one buffer is ordered by block, layer, KV head, slot, content. So a block
consists of L * H equal pages, and page `(block * L + layer) * H + head` is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.kernels.checks import indexable

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Element types of a quantised cache, by vLLM's `--kv-cache-dtype`.

A layer has one scale for all of its keys and one for its values. So a page can move within its
layer unchanged, and a mean may be taken before or after scaling.
"""


class PageLayoutError(RuntimeError):
    """vLLM's cache has a layout or a page format that this package does not support."""


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache: L layers, H KV heads of G query heads each, head size D, N slots a block.

    H counts the heads of this tensor-parallel rank, and L the layers of this pipeline stage.
    """

    num_layers: int
    num_heads: int
    group_size: int
    head_size: int
    block_size: int

    @property
    def num_pairs(self) -> int:
        """Number of (layer, KV head) pairs, which is the number of pages in a block."""
        return self.num_layers * self.num_heads


@dataclass(frozen=True)
class PagePool:
    """Views of the whole KV cache; nothing is copied.

    `raw` is [num_pages, 2 * N * D], uint8 in a quantised cache. `keys` and `values` are logical
    views [num_pages, N, D] with the strides of the attention kernel's page format; in a quantised
    cache they are fp8, divided by their layer's scale.
    """

    raw: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    shape: CacheShape

    @property
    def num_blocks(self) -> int:
        return self.raw.shape[0] // self.shape.num_pairs

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Fill blocks with a value; vLLM's CPU kernel reads the NaN of e4m3 as 240."""
        view = self.raw.view(self.num_blocks, -1)
        stored = indexable(torch.tensor(value, dtype=self.keys.dtype)).item()
        view[async_tensor_h2d(list(blocks), view.device)] = stored


def page_pool(
    layer_caches: Sequence[torch.Tensor],
    group_size: int,
    slots_first: bool,
    dtype: torch.dtype | None = None,
) -> PagePool:
    """Build the pool from vLLM's per-layer views [num_blocks, H, N, 2 * D], in layer order.

    With `slots_first` a page is [N, 2 * D], each slot's key before its value, as in FlashAttention.
    Otherwise keys are stored [D, N] and then values [N, D], as in vLLM's CPU kernels, which
    `check_page_format` verifies. `dtype` is one of `FP8` if the cache is quantised.

    Raises:
        PageLayoutError: if the views do not interleave in one buffer as BLHNC.
    """
    first = layer_caches[0]
    num_layers = len(layer_caches)
    num_blocks, num_heads, block_size, content = first.shape
    page = block_size * content
    strides = (num_layers * num_heads * page, page, content, 1)
    for layer, cache in enumerate(layer_caches):
        offset = cache.storage_offset() - first.storage_offset()
        if (
            cache.shape != first.shape
            or cache.stride() != strides
            or cache.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or offset != layer * num_heads * page
        ):
            raise PageLayoutError(
                f"layer {layer}'s KV cache has shape {tuple(cache.shape)}, strides "
                f"{cache.stride()} and offset {offset}; layout BLHNC needs shape "
                f"{tuple(first.shape)}, strides {strides} and offset {layer * num_heads * page}: "
                "unset VLLM_KV_CACHE_LAYOUT or leave out --kv-eviction"
            )
    num_pages = num_blocks * num_layers * num_heads
    raw = first.as_strided((num_pages, page), (page, 1), first.storage_offset())
    head_size = content // 2
    pages = raw if dtype is None else raw.view(dtype)
    if slots_first:
        keys, values = pages.view(num_pages, block_size, content).split(head_size, dim=2)
    else:
        keys, values = pages.view(num_pages, 2, -1).unbind(1)
        values = values.unflatten(1, (block_size, head_size))
        keys = keys.unflatten(1, (head_size, block_size)).transpose(1, 2)
    shape = CacheShape(num_layers, num_heads, group_size, head_size, block_size)
    return PagePool(raw, keys, values, shape)
