# SPDX-License-Identifier: Apache-2.0
"""Column sums over all rows of a prompt, accumulated while its chunks are prefilled."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import Attention, ObservedAttention, not_computed


class RowSums(Attention):
    """Column sums over all rows of a prompt, or over its text rows and over its vision rows.

    The S token sets belong to one layer or to several. Row i sees keys `0..i`, so a chunk of
    rows does not depend on later chunks. The sums start at zero; `add` adds one chunk.
    """

    def __init__(
        self, num_sets: int, num_tokens: int, device: torch.device, by_modality: bool = False
    ) -> None:
        self._sums = torch.zeros(num_sets, 1 + by_modality, num_tokens, device=device)

    def add(self, chunk: ObservedAttention, is_vision: Tensor, first_set: int = 0) -> None:
        """Add the rows of a chunk, observed in some or all layers.

        Args:
            is_vision: bool `[O]`, the rows' modality.
            first_set: index of the chunk's first token set among all.
        """
        sums = self._sums[first_set : first_set + chunk.num_groups, :, : chunk.num_keys]
        if self._sums.shape[1] == 1:
            sums += chunk.column_sums.unsqueeze(1)
        else:
            weights = torch.stack((~is_vision, is_vision)).unsqueeze(0)
            sums += chunk.mixed_column_sums(weights)

    def of_sets(self, sets: slice) -> RowSums:
        """Return the sums of some of the token sets."""
        part = copy(self)
        part._sums = self._sums[sets]
        return part

    @property
    def memory(self) -> Tensor:
        """One number for each token, float32 `[S, P]`: to be overwritten once sums were used."""
        return self._sums[:, 0]

    @property
    def text_column_sums(self) -> Tensor:
        return self._of_modality(0)

    @property
    def vision_column_sums(self) -> Tensor:
        return self._of_modality(1)

    @property
    def column_sums(self) -> Tensor:
        return self._sums.sum(dim=1)

    def _of_modality(self, part: int) -> Tensor:
        if self._sums.shape[1] == 1:
            raise ValueError(not_computed("modality_sums"))
        return self._sums[:, part]
