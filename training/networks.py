# SPDX-License-Identifier: Apache-2.0
"""Gates that can be trained, and their tensors under the authors' names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

Method = Literal["trimkv", "dbtrimkv", "kvzap"]
Form = Literal["rg", "rg10", "mlp", "linear"]

INNER: dict[Form, int] = {"rg": 1, "rg10": 2, "mlp": 1, "linear": 0}
"""Projections before the last one."""

DEVIATION = 0.02
"""Standard deviation of TrimKV's first weights."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's gates."""

    form: Form
    layers: int
    hidden_size: int
    kv_heads: int
    width: int = 512
    activation: str = "gelu"
    bias: float = 0.0
    """First bias of the last projection."""
    tied: bool = False
    """Whether the layers share the last projection and its bias."""

    @property
    def shares_memory(self) -> bool:
        """Return whether all heads share a memory, as in DBTrimKV."""
        return self.form == "rg10"


class GateNetworks(nn.Module):
    """The gates of all layers of a model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.activate = ACT2FN[shape.activation]
        sizes = [shape.hidden_size, *[shape.width] * INNER[shape.form], shape.kv_heads]
        self.linears = [
            [nn.Linear(n, m) for n, m in itertools.pairwise(sizes)] for _ in range(shape.layers)
        ]
        for layer in self.linears:
            if shape.form in ("rg", "rg10"):
                for linear in layer:
                    nn.init.normal_(linear.weight, std=DEVIATION)
                    nn.init.zeros_(linear.bias)
                nn.init.constant_(layer[-1].bias, shape.bias)
            if shape.tied:
                layer[-1] = self.linears[0][-1]
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in self.linears)

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Return log beta or the score, `[S, H]`, of hidden states `[S, d]` of a layer."""
        *inner, last = self.linears[layer]
        hidden = hidden.to(last.weight.dtype)
        for linear in inner:
            hidden = self.activate(linear(hidden))
        found: Tensor = last(hidden)
        return functional.logsigmoid(found) if self.shape.form in ("rg", "rg10") else found

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, float32; of tied layers each has its own.

        Args:
            prefix: name of the list of layers in the model, which TrimKV's tensors begin with.
        """
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.linears):
            for number, linear in enumerate(layer):
                is_last = number == len(layer) - 1
                if self.shape.form in ("rg", "rg10"):
                    gate = f"{prefix}.{index}.self_attn.retention_gate."
                    weight, bias = f"linear{number + 1}.weight", f"linear{number + 1}.bias"
                    names = gate + weight, gate + ("bias" if is_last else bias)
                else:
                    part = f"layers.{index}." + (f"{2 * number}." if len(layer) > 1 else "")
                    names = f"{part}weight", f"{part}bias"
                tensors = linear.weight, linear.bias
                found |= {n: x.detach().float() for n, x in zip(names, tensors, strict=True)}
        return found

    def config(self, base: Mapping[str, Any], memory: int) -> dict[str, Any]:
        """Return the `config.json` of a checkpoint.

        Args:
            base: configuration of the model.
            memory: TrimKV's budget in training, in tokens for each head.
        """
        shape = self.shape
        if shape.form in ("mlp", "linear"):
            return {
                "model_type": "kvzap",
                "architectures": ["KVzapModel"],
                "input_dim": shape.hidden_size,
                "hidden_dim": shape.width if shape.form == "mlp" else None,
                "output_dim": shape.kv_heads,
                "n_modules": shape.layers,
            }
        fields: dict[str, Any] = {
            "retention_gate": shape.form,
            "retention_gate_bias_init": shape.bias,
            "retention_gate_intermediate_size": shape.width,
            "tie_retention_gate_layers": shape.tied,
            "memory_size": memory,
            "global_capacity": shape.shares_memory,
            "hidden_act": shape.activation,
        }
        if isinstance(text := base.get("text_config"), Mapping):
            fields = {"text_config": {**text, **fields}}
        return {**base, **fields, "trainable_params": "retention_gate"}


def gate_shape(
    method: Method,
    form: str,
    layers: int,
    config: Any,
    width: int,
    bias: float,
    untied: bool = False,
) -> Shape:
    """Return the shape of a method's gates for a model with this text configuration.

    Args:
        form: of KVzap's, `mlp` or `linear`.
        untied: whether each layer has a last projection of its own in DBTrimKV too.
    """
    forms: dict[str, Form] = {"trimkv": "rg", "dbtrimkv": "rg10", "mlp": "mlp", "linear": "linear"}
    is_kvzap = method == "kvzap"
    return Shape(
        forms[form if is_kvzap else method],
        layers,
        config.hidden_size,
        config.num_key_value_heads,
        width,
        "gelu" if is_kvzap else config.hidden_act,
        0.0 if is_kvzap else bias,
        method == "dbtrimkv" and not untied,
    )


def make(shape: Shape, seed: int, dtype: torch.dtype, device: torch.device) -> GateNetworks:
    """Return untrained gates that follow from the seed."""
    torch.manual_seed(seed)
    return GateNetworks(shape).to(device, dtype)
