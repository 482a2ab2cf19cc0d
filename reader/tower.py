# SPDX-License-Identifier: Apache-2.0
"""The recogniser of word pieces: what a tower of CLIP's form computes when its patches do not mix.

A patch's ink goes through a linear map, a normalisation and one block of the residual stream. The
last layer has a neuron for each known piece, whose input u is near the logarithm of the piece's
probability: the normaliser is trained to be 1. `relu(1 + u / MARGIN)` is then about 1 for the piece
that the patch shows and 0 for the others, and the neurons' outputs are the embeddings of their
pieces in the language model, as they are. So the tower is trained as a classifier, and never sees
the language model.

The first map's rows have the mean 0, and a normalisation follows it: paper, ink and contrast do not
matter, and an empty patch is nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from reader.layout import PATCH

FEATURES = 320
"""Width of the residual stream that recognises."""

NEURONS = 1408
"""Neurons of the first block."""

EMBEDDING = 576
"""Width of SmolLM2's embeddings: a second part of the residual stream, 0 before the last layer."""

EPSILON = 1e-5
"""Of CLIP's normalisations."""

MARGIN = 4.0
"""Distance in u over which a neuron of the last layer goes from 0 to 1."""


class Norm(nn.Module):
    """CLIP's layer norm over features and empty embedding: the latter count as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised features, `[n, FEATURES]`."""
        width = FEATURES + EMBEDDING
        hidden = hidden.float()
        mean = hidden.sum(-1, keepdim=True) / width
        variance = hidden.square().sum(-1, keepdim=True) / width - mean.square()
        return (hidden - mean) * (variance + EPSILON).rsqrt() * self.weight + self.bias


class Recogniser(nn.Module):
    """Ink of patches in, logarithms of the pieces' probabilities out."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, FEATURES, bias=False)
        self.norm_0 = Norm()
        self.norm_1 = Norm()
        self.up = nn.Linear(FEATURES, NEURONS)
        self.down = nn.Linear(NEURONS, FEATURES)
        self.norm_2 = Norm()
        self.pieces = nn.Linear(FEATURES, pieces)

    def patch_weight(self) -> Tensor:
        """Return the first map, `[FEATURES, PATCH * PATCH]`, without what paper's colour adds."""
        return self.patch.weight - self.patch.weight.mean(1, keepdim=True)

    def features(self, ink: Tensor) -> Tensor:
        """Return what the last layer reads, `[n, FEATURES]`.

        Args:
            ink: of patches, `[n, PATCH * PATCH]` in 0..1.
        """
        hidden = self.norm_0(functional.linear(ink, self.patch_weight()))
        block = self.down(functional.relu(self.up(self.norm_1(hidden))))
        return self.norm_2(hidden + block)

    def forward(self, ink: Tensor) -> Tensor:
        """Return u, `[n, pieces]`."""
        return self.pieces(self.features(ink))
