# SPDX-License-Identifier: Apache-2.0
"""Gates by their definition, in float64, from the tensors of a checkpoint by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def log_betas(
    tensors: Mapping[str, Tensor], prefix: str, inner: int
) -> Callable[[int, Tensor], Tensor]:
    """Return TrimKV's gates of all layers, with SiLU: hidden states [n, d] -> log beta [n, H].

    Args:
        tensors: named ``{prefix}.{layer}.self_attn.retention_gate.{part}``.
        inner: number of projections before the last one: 1 in TrimKV, 2 in DBTrimKV.
    """

    def gate(layer: int, hidden: Tensor) -> Tensor:
        def part(name: str) -> Tensor:
            return tensors[f"{prefix}.{layer}.self_attn.retention_gate.{name}"].double()

        x = hidden.double()
        for number in range(1, inner + 1):
            x = x @ part(f"linear{number}.weight").T + part(f"linear{number}.bias")
            x = x / (1 + torch.exp(-x))
        logits = x @ part(f"linear{inner + 1}.weight").T + part("bias")
        return -torch.log(1 + torch.exp(-logits))

    return gate


def predicted(tensors: Mapping[str, Tensor]) -> Callable[[int, Tensor], Tensor]:
    """Return KVzap's networks of all layers: hidden states [n, d] -> scores [n, H].

    `tensors` are named ``layers.{layer}.{0, 2}.{weight, bias}``.
    """

    def gate(layer: int, hidden: Tensor) -> Tensor:
        first, second = (
            (tensors[f"layers.{layer}.{n}.weight"].double(), tensors[f"layers.{layer}.{n}.bias"])
            for n in (0, 2)
        )
        x = hidden.double() @ first[0].T + first[1].double()
        x = x * (1 + torch.erf(x / 2**0.5)) / 2
        return x @ second[0].T + second[1].double()

    return gate
