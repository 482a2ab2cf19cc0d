# SPDX-License-Identifier: Apache-2.0
"""Outputs of the gates for cached tokens: one number for each key.

The numbers lie as the keys do, in a page of each block for each (layer, KV head). The layer's tap
writes them with the keys, at the same slots. So they belong to whatever request a block belongs to:
a block that the prefix cache shares shares them, and one that is computed again has them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import CacheShape


class GateOutputs:
    """Outputs of the gates, float32 `[num_blocks, L, H, N]`: 4 bytes for each key."""

    def __init__(self, num_blocks: int, shape: CacheShape, device: torch.device) -> None:
        size = (num_blocks, shape.num_layers, shape.num_heads, shape.block_size)
        self.values = torch.zeros(size, dtype=torch.float32, device=device)
        self.layers = self.values.unbind(1)
        """Of each layer, float32 `[num_blocks, H, N]`."""

    def move(self, sources: Tensor, blocks: Tensor) -> None:
        """Copy the outputs of kept tokens to the pages of a region.

        Args:
            sources: int32 or int64 `[k * L * H, N]`, page * N + slot, as for the keys.
            blocks: the region's blocks, int32 `[k]`.
        """
        found = self.values.flatten().index_select(0, sources.flatten())
        self.values.flatten(1).index_copy_(0, blocks.long(), found.view(len(blocks), -1))

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Fill blocks with a value."""
        self.values[async_tensor_h2d(list(blocks), self.values.device)] = value
