# SPDX-License-Identifier: Apache-2.0
"""Gates: small networks that say of each token and KV head what it is worth.

A gate runs in two parts. In front of the projection of queries, keys and values, where its input
is, `project` computes its first projection. When the layer's keys are stored, and their slots are
known, `store` does the rest. On CUDA each part is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import check

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda hidden: functional.gelu(hidden, approximate="tanh"),
}


@dataclass(frozen=True)
class LayerGate:
    """The gate of one layer, for some of its KV heads: one to three projections.

    The output of TrimKV's is a small difference from a large bias. So the last projection is
    computed in float32, whatever the model's dtype is (**a choice**).
    """

    is_log: bool
    """Whether the outputs are the logarithms of sigmoids, as TrimKV's log beta."""
    activation: str
    """Behind all projections but the last one; a key of `ACTIVATIONS`."""
    linears: tuple[tuple[Tensor, Tensor], ...]
    """Weights `[out, in]` and biases `[out]`; the last ones float32, with a row for each KV
    head."""

    @property
    def num_heads(self) -> int:
        return len(self.linears[-1][1])

    @property
    def width(self) -> int:
        """Values between two projections; 0 if there is one only."""
        return len(self.linears[0][1]) if len(self.linears) > 1 else 0


@dataclass(frozen=True)
class GateBuffers:
    """A gate's intermediate results for a step's tokens, at most B.

    Layers share it: each stores its outputs before the next one projects.
    """

    projected: Tensor
    """The first projection without its bias, of the model's dtype `[B, width]`."""
    sums: Tensor
    """Parts of the last projection without its bias, float32 `[B, parts, H]`. Without parts where
    nothing lies between its products and the outputs."""
    arrived: Tensor
    """On CUDA, int32: of some tokens each, the programs that have written their part; else 0."""

    @classmethod
    def of(cls, gate: LayerGate, num_tokens: int) -> GateBuffers:
        """Allocate buffers for B tokens of gates like this one."""
        weight = gate.linears[0][0]
        num_parts, num_tiles = int(not gate.width), 0
        if gpu.runs(weight):
            from vllm_tgvkv.kernels.gpu import gates as triton_gates

            num_parts, num_tiles = triton_gates.parts_and_tiles(gate, num_tokens)
        return cls(
            weight.new_zeros(num_tokens, gate.width),
            weight.new_zeros(num_tokens, num_parts, gate.num_heads, dtype=torch.float32),
            weight.new_zeros(num_tiles, dtype=torch.int32),
        )


def project(gate: LayerGate, hidden: Tensor, buffers: GateBuffers) -> None:
    """Compute the first projection of the hidden states of T tokens, `[T, d]`.

    Nothing is allocated on CUDA.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    weight = gate.linears[0][0]
    has_room = len(hidden) <= len(buffers.projected)
    check("hidden", hidden, ("T <= B", weight.shape[1]), fits=has_room)
    if gate.width:
        torch.mm(hidden, weight.T, out=buffers.projected[: len(hidden)])
    elif gpu.runs(hidden):
        from vllm_tgvkv.kernels.gpu import gates as triton_gates

        triton_gates.project(hidden, weight, buffers.sums)
    else:
        torch.mm(hidden.float(), weight.T, out=buffers.sums[: len(hidden), 0])


def store(gate: LayerGate, buffers: GateBuffers, slots: Tensor, pages: Tensor) -> None:
    """Store the outputs of T tokens, which `project` has begun.

    On CUDA it is one launch, with no scratch memory and no synchronisation.

    Args:
        slots: int64 `[T]`, block * N + slot; -1 for tokens that only fill a graph, whose outputs go
            nowhere, or to the block that nobody reads, 0.
        pages: the layer's outputs, float32 `[num_blocks, H, N]`; any stride of blocks.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    check("slots", slots, ("T <= B",), (torch.int64,), len(slots) <= len(buffers.projected))
    size = pages.shape[-1]
    is_dense = pages[0].is_contiguous()
    check("pages", pages, ("num_blocks", gate.num_heads, "N"), (torch.float32,), is_dense)
    if gpu.runs(pages):
        from vllm_tgvkv.kernels.gpu import gates as triton_gates

        triton_gates.store(gate, buffers, slots, pages)
        return
    slots = slots.clamp(min=0)
    pages[slots // size, :, slots % size] = _outputs(gate, buffers, len(slots))


def _outputs(gate: LayerGate, buffers: GateBuffers, num_tokens: int) -> Tensor:
    """Return what the gate says of a step's tokens, float32 `[T, H]`."""
    *inner, (last, bias) = gate.linears
    if inner:
        activate = ACTIVATIONS[gate.activation]
        hidden = activate(buffers.projected[:num_tokens].float() + inner[0][1])
        for linear in inner[1:]:
            hidden = activate(functional.linear(hidden.to(linear[0].dtype), *linear)).float()
        found = functional.linear(hidden, last, bias)
    else:
        found = buffers.sums[:num_tokens, 0] + bias
    return functional.logsigmoid(found) if gate.is_log else found
