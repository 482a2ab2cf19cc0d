# SPDX-License-Identifier: Apache-2.0
"""Numbers beside the cache, one float32 for each key: outputs of gates, and sums of attention.

They lie as the keys do, in a page of each block for each (layer, KV head).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.cache.row_keys import RowKeys


class KeyNumbers:
    """Numbers of cached tokens, float32 `[num_blocks, L, H, N]`: 4 bytes for each key.

    A layer's tap writes outputs of gates with the keys, at the same slots. So they belong to
    whatever request a block belongs to: a block that the prefix cache shares shares them, and one
    that is computed again has them again.
    """

    def __init__(self, num_blocks: int, shape: CacheShape, device: torch.device) -> None:
        size = (num_blocks, shape.num_layers, shape.num_heads, shape.block_size)
        self.values = torch.zeros(size, dtype=torch.float32, device=device)
        self.layers = self.values.unbind(1)
        """Of each layer, float32 `[num_blocks, H, N]`."""

    def move(self, sources: Tensor, blocks: Tensor) -> None:
        """Copy the numbers of kept tokens to the pages of a region.

        Args:
            sources: int32 or int64 `[k * L * H, N]`, page * N + slot, as for the keys.
            blocks: the region's blocks, int32 `[k]`.
        """
        found = self.values.flatten().index_select(0, sources.flatten())
        self.values.flatten(1).index_copy_(0, blocks.long(), found.view(len(blocks), -1))

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Fill blocks with a value."""
        self.values[async_tensor_h2d(list(blocks), self.values.device)] = value


class CarriedScores(KeyNumbers):
    """Scores of the keys of compressed requests, to which the next cut adds.

    A cut writes them where the keys are, and moves the kept tokens' scores with their keys.
    """

    def __init__(self, num_blocks: int, shape: CacheShape, device: torch.device) -> None:
        super().__init__(num_blocks, shape, device)
        self._num_scored = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        """By a region's first block, how many first tokens of the request were scored."""

    def read(self, keys: RowKeys, layer: int, num_layers: int) -> Tensor:
        """Return the scores of a compressed row by position, float32 `[num_layers * H, n]`.

        Tokens that came after the last cut have 0.
        """
        found = keys.read(self.values, layer, num_layers)
        num_scored = self._num_scored.index_select(0, keys.blocks[:1])
        positions = torch.arange(found.shape[1], device=found.device)
        return torch.where(positions < num_scored, found, 0)

    def write(self, keys: RowKeys, scores: Tensor, layer: int) -> None:
        """Store the scores of some layers by position, `[num_layers * H, n]`."""
        slots = keys.places(layer, len(scores) // keys.shape.num_heads)
        self.values.view(-1).index_copy_(0, slots.flatten(), scores.flatten())

    def end_cut(self, first_block: int, num_tokens: int) -> None:
        """Store that a region's request had `num_tokens` tokens, which all have scores."""
        self._num_scored[first_block].fill_(num_tokens)
