# SPDX-License-Identifier: Apache-2.0
"""Gates that can be trained, and their tensors under the authors' names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

FORMS = {"trimkv": "rg", "dbtrimkv": "rg10", "mlp": "mlp", "linear": "linear"}
"""Forms of gates, as the authors name them, by method or by `--form` of KVzap."""

INNER = {"rg": 1, "rg10": 2, "mlp": 1, "linear": 0}
"""Projections before the last one."""

DEVIATION = 0.02
"""Standard deviation of TrimKV's first weights."""


Tying = Literal["nothing", "layers", "heads"]
"""Sharers of DBTrimKV's last projection: all layers, as in the authors' code, or all layers and
heads, as in the paper."""


class SharedByHeads(nn.Module):
    """A last projection with one row of weights and one bias for all heads.

    The hidden layer has as many equal parts as there are heads, and the row reads a head's part. It
    is written as the whole matrix, `[H, width]`, with zeros at the other heads' parts.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.row = heads, nn.Linear(width // heads, 1)

    @property
    def weight(self) -> Tensor:
        return torch.block_diag(*[self.row.weight] * self.heads)

    @property
    def bias(self) -> Tensor:
        return self.row.bias.expand(self.heads)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


class GateNetworks(nn.Module):
    """The gates of all layers of a model."""

    def __init__(
        self,
        kind: str,
        layers: int,
        sizes: Any,
        width: int,
        bias: float = 0.0,
        tied: Tying = "nothing",
    ) -> None:
        """Make gates with random weights.

        Args:
            kind: `trimkv`, `dbtrimkv`, and of KVzap `mlp` or `linear`.
            sizes: text configuration of the model.
            width: of hidden layers.
            bias: first bias of TrimKV's last projection.
            tied: what shares the last projection and its bias.

        Raises:
            ValueError: if heads are tied and the width is no multiple of their number.
        """
        super().__init__()
        self.form, self.width, self.bias, self.tied = FORMS[kind], width, bias, tied
        self.retains = self.form in ("rg", "rg10")
        self.shares_memory = self.form == "rg10"
        """Whether all heads share a memory, as in DBTrimKV."""
        self.hidden_size, self.kv_heads = sizes.hidden_size, sizes.num_key_value_heads
        self.activation = sizes.hidden_act if self.retains else "gelu"
        self.activate = ACT2FN[self.activation]
        widths = [self.hidden_size, *[width] * INNER[self.form], self.kv_heads]
        self.linears: list[list[nn.Linear | SharedByHeads]] = [
            [nn.Linear(n, m) for n, m in itertools.pairwise(widths)] for _ in range(layers)
        ]
        if tied == "heads":
            if width % self.kv_heads:
                raise ValueError(
                    f"--width is {width}: give a multiple of {self.kv_heads}, the model's KV heads"
                )
            self.linears[0][-1] = SharedByHeads(width, self.kv_heads)
        for layer in self.linears:
            if self.retains:
                *inner, last = layer
                last = last.row if isinstance(last, SharedByHeads) else last
                for linear in (*inner, last):
                    nn.init.normal_(linear.weight, std=DEVIATION)
                    nn.init.zeros_(linear.bias)
                nn.init.constant_(last.bias, bias)
            if tied != "nothing":
                layer[-1] = self.linears[0][-1]
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in self.linears)

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Return log beta or the score, `[S, H]`, of hidden states `[S, d]` of a layer."""
        *inner, last = self.linears[layer]
        hidden = hidden.to(last.weight.dtype)
        for linear in inner:
            hidden = self.activate(linear(hidden))
        found: Tensor = last(hidden)
        return functional.logsigmoid(found) if self.retains else found

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, float32; of tied layers each has its own.

        Args:
            prefix: name of the list of layers in the model, which TrimKV's tensors begin with.
        """
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.linears):
            for number, linear in enumerate(layer):
                if self.retains:
                    start = f"{prefix}.{index}.self_attn.retention_gate."
                    weight, bias = (f"linear{number + 1}.{part}" for part in ("weight", "bias"))
                    bias = "bias" if linear is layer[-1] else bias
                else:
                    start = f"layers.{index}." + (f"{2 * number}." if len(layer) > 1 else "")
                    weight, bias = "weight", "bias"
                found[start + weight] = linear.weight.detach().float()
                found[start + bias] = linear.bias.detach().float()
        return found

    def config(self, base: Mapping[str, Any], memory: int) -> dict[str, Any]:
        """Return the `config.json` of a checkpoint.

        Args:
            base: configuration of the model.
            memory: TrimKV's budget in training, in tokens for each head.
        """
        if not self.retains:
            return {
                "model_type": "kvzap",
                "architectures": ["KVzapModel"],
                "input_dim": self.hidden_size,
                "hidden_dim": self.width if self.form == "mlp" else None,
                "output_dim": self.kv_heads,
                "n_modules": len(self.linears),
            }
        fields: dict[str, Any] = {
            "retention_gate": self.form,
            "retention_gate_bias_init": self.bias,
            "retention_gate_intermediate_size": self.width,
            "tie_retention_gate_layers": self.tied != "nothing",
            "memory_size": memory,
            "global_capacity": self.shares_memory,
            "hidden_act": self.activation,
        }
        if isinstance(text := base.get("text_config"), Mapping):
            fields = {"text_config": {**text, **fields}}
        return {**base, **fields, "trainable_params": "retention_gate"}
