# SPDX-License-Identifier: Apache-2.0
"""Outputs of the gates for cached tokens: one number for each key.

The numbers lie as the keys do, in a page of each block for each (layer, KV head). They are written
with the keys, at the same slots. So they belong to whatever request a block belongs to: a block
that the prefix cache shares shares them, and one that is computed again has them again.
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
        self._shape = shape
        size = (num_blocks, shape.num_layers, shape.num_heads, shape.block_size)
        self.values = torch.zeros(size, dtype=torch.float32, device=device)
        self._layers = self.values.unbind(1)

    def store(self, layer: int, slots: Tensor, outputs: Tensor) -> None:
        """Store one layer's outputs of a batch of T tokens.

        Args:
            slots: int64 `[T]`, block * N + slot; -1 for tokens that only fill a graph, whose
                outputs go to the block that nobody reads, 0.
            outputs: float32 `[T or more, H]`.
        """
        slots, size = slots.clamp(min=0), self._shape.block_size
        self._layers[layer][slots // size, :, slots % size] = outputs[: len(slots)]

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
