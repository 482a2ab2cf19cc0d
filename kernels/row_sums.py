# SPDX-License-Identifier: Apache-2.0
"""Column sums over all rows of a prompt, accumulated while its chunks are prefilled."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import Attention, ObservedAttention


class RowSums(Attention):
    """Column sums of one layer over the text rows and over the vision rows of a prompt.

    Row i sees keys ``0..i``, so a chunk of rows does not depend on later chunks. The sums start at
    zero; :meth:`add` adds one chunk.
    """

    def __init__(self, num_sets: int, num_tokens: int, device: torch.device) -> None:
        self._sums = torch.zeros(num_sets, 2, num_tokens, device=device)

    def add(self, chunk: ObservedAttention, is_vision: Tensor) -> None:
        """Add the rows of ``chunk``; ``is_vision`` is bool ``[O]``, their modality."""
        weights = torch.stack((~is_vision, is_vision)).unsqueeze(0)
        self._sums[..., : chunk.num_keys] += chunk.mixed_column_sums(weights)

    @property
    def text_column_sums(self) -> Tensor:
        return self._sums[:, 0]

    @property
    def vision_column_sums(self) -> Tensor:
        return self._sums[:, 1]

    @property
    def column_sums(self) -> Tensor:
        return self._sums.sum(dim=1)
