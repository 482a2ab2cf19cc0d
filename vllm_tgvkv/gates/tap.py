# SPDX-License-Identifier: Apache-2.0
"""Where the gates read: the hidden state that a layer projects to queries, keys and values.

A hook in front of the projection calls one operation, which begins the gate. Compiled code and
graphs hold the operation and nothing of what it does. It is declared to write the hidden state,
which it only reads: so it comes before the projection, and what it found is there when the layer's
keys are stored. Then their slots are known, and the tap ends the gate and stores its outputs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.utils import extract_layer_index

from vllm_tgvkv.gates.folder import Gates
from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate, project, store
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError


@dataclass(frozen=True)
class Tap:
    """The gate of one layer, and what the layers share while they run theirs."""

    gate: LayerGate
    buffers: GateBuffers
    """For the tokens of the largest step."""

    def read(self, hidden: Tensor) -> None:
        """Begin the gate on the hidden states of a step, `[T, d]`."""
        project(self.gate, hidden.flatten(0, -2), self.buffers)

    def store(self, slots: Tensor, pages: Tensor) -> None:
        """End the gate for tokens that have slots, int64 `[T]`; see `kernels.gates.store`."""
        store(self.gate, self.buffers, slots, pages)

    def warm_up(self, pages: Tensor) -> None:
        """Compile the kernels of steps of any size; all tokens are padding."""
        for num_tokens in (1, len(self.buffers.projected)):
            slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=pages.device)
            self.store(slots, pages)


def attach_taps(
    model: nn.Module,
    layers: Mapping[str, Attention],
    vllm_config: VllmConfig,
    gates: Gates,
    part: int,
) -> None:
    """Let the gates read in front of the projections of some attention layers, once it is loaded.

    Args:
        layers: the layers that are evicted, by the names that vLLM's forward context has for them.
        part: index of this rank's part of the KV heads.

    Raises:
        UnsupportedByEvictionError: if the projection of a layer is not found.
    """
    num_heads = next(iter(layers.values())).num_kv_heads
    device = next(model.parameters()).device
    numbers = {name: extract_layer_index(name) for name in layers}
    heads = slice(part * num_heads, (part + 1) * num_heads)
    loaded = gates.load(numbers.values(), heads, vllm_config.model_config.dtype, device)
    step = vllm_config.scheduler_config.max_num_batched_tokens
    graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    buffers = GateBuffers.of(next(iter(loaded.values())), max(step, graph))
    owners = {child: module for module in model.modules() for child in module.children()}
    for name, layer in layers.items():
        projection = _projection(owners.get(layer), name)
        layer.impl.tap = Tap(loaded[numbers[name]], buffers)
        projection.register_forward_pre_hook(_hook(name))


def _projection(owner: nn.Module | None, name: str) -> nn.Module:
    """Return the module that projects to the queries, keys and values of an attention layer."""
    children = owner.children() if owner is not None else ()
    # A layer with adapters has another one inside.
    inner = {child: getattr(child, "base_layer", child) for child in children}
    found = [child for child in inner if isinstance(inner[child], QKVParallelLinear)]
    if len(found) != 1:
        raise UnsupportedByEvictionError(
            f"kv_eviction.gates does not work with this model: {name} has {len(found)} joint "
            "projections of queries, keys and values beside it, and the gates read in front of "
            "one; serve another model or leave out --kv-eviction-gates"
        )
    return found[0]


def _hook(layer_name: str) -> Any:
    def read(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        torch.ops.vllm_tgvkv.read_hidden_state(inputs[0], layer_name)

    return read


def _read(hidden: Tensor, layer_name: str) -> None:
    get_forward_context().no_compile_layers[layer_name].impl.tap.read(hidden)


_LIBRARY = torch.library.Library("vllm_tgvkv", "FRAGMENT")
_LIBRARY.define("read_hidden_state(Tensor(a!) hidden, str layer_name) -> ()")
_LIBRARY.impl("read_hidden_state", _read, "CompositeExplicitAutograd")
torch.library.register_fake(
    "vllm_tgvkv::read_hidden_state", lambda hidden, layer_name: None, lib=_LIBRARY
)
