# SPDX-License-Identifier: Apache-2.0
"""Inputs of tests: seeds, products of parameters, and keys in the pages of a pool."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import pkgutil
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oracle.gates import log_betas, predicted
from oracle.methods import METHODS
from oracle.statistics import SharedSet, paged_sets
from vllm_tgvkv.gates.folder import GateKind, Gates, write
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate, project, store
from vllm_tgvkv.kernels.statistics import (
    ObservedAttention,
    ObservedRows,
    Scratch,
    Statistic,
    observe_layers,
)
from vllm_tgvkv.policies import gates_of, has_summaries
from vllm_tgvkv.policies.head_scores import HeadScores

WITHOUT_GATES = {
    name: mix for name, mix in METHODS.items() if gates_of(name) is None and not has_summaries(name)
}
"""Definitions of the methods that servers without gates and summaries have."""


def seed(test: str) -> None:
    """Seed the random inputs of a test from its name and TGVKV_SEED, which repeats a failure."""
    number = zlib.crc32(f"{os.environ['TGVKV_SEED']} {test}".encode())
    torch.manual_seed(number)
    random.seed(number)


def new_rng() -> np.random.Generator:
    """Return a generator of NumPy that depends on the seed of the test that runs."""
    return np.random.default_rng(random.getrandbits(32))


def product(*factors: Iterable[Any], strength: int = 2) -> list[Any]:
    """Return the product of parameters, most of which is marked `nightly`.

    The usual part has each combination of values of any `strength` factors at least once: with 2,
    each pair of values. A value that is a tuple stands for several parameters.
    """
    values = [list(factor) for factor in factors]
    places = list(itertools.product(*(range(len(of_factor)) for of_factor in values)))
    chosen: set[tuple[int, ...]] = set()
    left = list(places)
    random.Random(0).shuffle(left)

    def combinations(place: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(place), strength))

    uncovered = set().union(*map(combinations, places))
    while uncovered:
        best = max(left, key=lambda place: len(combinations(place) & uncovered))
        uncovered -= combinations(best)
        chosen.add(best)
    found = []
    for place in places:
        case: list[Any] = []
        for of_factor, index in zip(values, place, strict=True):
            value = of_factor[index]
            case.extend(value if isinstance(value, tuple) else [value])
        found.append(pytest.param(*case, marks=[] if place in chosen else pytest.mark.nightly))
    return found


def assert_says(message: str, text: str) -> None:
    """Assert that a message has the parts of a text, which "..." separates, in this order."""
    end = 0
    for part in map(str.strip, text.split("...")):
        found = message.find(part, end)
        assert found >= 0, f"{part!r} is missing, or comes too early, in: {message}"
        end = found + len(part)


class Launches(TorchDispatchMode):
    """Names of PyTorch operations that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class NoKernel:
    """Takes the place of a Triton kernel. Its launches do nothing, and are counted."""

    num_launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **kwargs: object) -> None:
        self.num_launches += 1


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> NoKernel:
    """Run the code of the GPU, on tensors of any device, and return what counts its launches."""
    kernel = NoKernel()
    monkeypatch.setattr(gpu, "on_cpu", True)
    for found in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        module = importlib.import_module(found.name)
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, kernel)

    def copied(values: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Tensor:
        tensor = torch.as_tensor(values, dtype=dtype)
        return tensor.to(device) if out is None else out.copy_(tensor)

    # vLLM's CPU worker replaces this function, when it is imported, by one that ignores the device.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_tgvkv.") and hasattr(module, "async_tensor_h2d"):
            monkeypatch.setattr(module, "async_tensor_h2d", copied)
    return kernel


def head_scores(layers: int, kv_heads: int, group: int = 1) -> HeadScores:
    """Return scores of query heads that differ a lot, with KV heads that have none."""
    scores = torch.rand(layers, kv_heads * group, dtype=torch.float64) ** 6
    scores[-1, :group] = 0
    return HeadScores("file", "a model", kv_heads, tuple(map(tuple, scores.tolist())))


def gates(kind: GateKind, layers: int = 3, kv_heads: int = 2, **options: int) -> Gates:
    """Return gates of a model of this shape that have no folder."""
    form, activation = ("mlp", "gelu") if kind == "kvzap" else ("rg10", "silu")
    sizes = {"hidden_size": 64, "width": 32, "kv_heads": kv_heads}
    numbers = tuple(range(layers))
    return Gates("folder", "file", kind, form, activation, numbers, **sizes, **options)


def gate_tensors(
    form: str, layers: int, hidden_size: int, kv_heads: int, width: int = 24
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return random gates as their authors name them, and their configuration.

    With the bias, TrimKV's beta is mostly between 0.8 and 0.999.
    """
    sizes = {"rg": [hidden_size, width, kv_heads], "rg10": [hidden_size, width, width, kv_heads]}
    sizes["mlp"] = sizes["rg"]
    tensors, config = {}, {"model_type": "kvzap"}
    if form != "mlp":
        config = {"model_type": "llama", "retention_gate": form, "hidden_act": "silu"}
    for layer in range(layers):
        for number, (n_in, n_out) in enumerate(zip(sizes[form], sizes[form][1:], strict=False)):
            is_last = number == len(sizes[form]) - 2
            weight = torch.randn(n_out, n_in) * (4 if is_last else 2) / math.sqrt(n_in)
            bias = torch.randn(n_out)
            if form == "mlp":
                name = f"layers.{layer}.{2 * number}"
                tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
                continue
            name = f"model.layers.{layer}.self_attn.retention_gate"
            tensors[f"{name}.linear{number + 1}.weight"] = weight
            if is_last:
                tensors[f"{name}.bias"] = bias + 4
            else:
                tensors[f"{name}.linear{number + 1}.bias"] = bias
    return tensors, config


def said_by(gate: LayerGate, hidden: Tensor) -> Tensor:
    """Return what a gate stores of hidden states `[T, d]`: float32 `[T, H]`."""
    buffers, pages = GateBuffers.of(gate, len(hidden)), torch.zeros(1, gate.num_heads, len(hidden))
    project(gate, hidden, buffers)
    store(gate, buffers, torch.arange(len(hidden)), pages)
    return pages[0].T


def write_gates(
    folder: Path, form: str, layers: int, hidden_size: int, kv_heads: int
) -> Callable[[int, Tensor], Tensor]:
    """Write random gates of a model; return the oracle's, by layer and hidden states."""
    tensors, config = gate_tensors(form, layers, hidden_size, kv_heads)
    write(folder, tensors, config)
    if form == "mlp":
        return predicted(tensors)
    return log_betas(tensors, "model.layers", 2 if form == "rg10" else 1)


def paged(keys: Tensor, block_size: int, transposed: bool) -> tuple[Tensor, Tensor]:
    """Lay out keys ``[P, H, D]`` in shuffled blocks of a pool that is NaN everywhere else.

    Returns:
        The pool's logical view ``[num_blocks, H, N, D]`` (stored ``[D, N]`` if ``transposed``)
        and the block ids.
    """
    num_tokens, heads, head_size = keys.shape
    num_blocks = math.ceil(num_tokens / block_size)
    shape = (num_blocks + 3, heads, block_size, head_size)
    pool = torch.full(shape, float("nan"), dtype=keys.dtype)
    if transposed:
        pool = pool.transpose(2, 3).contiguous().transpose(2, 3)
    ids = torch.randperm(num_blocks + 3)[:num_blocks]
    for j in range(num_tokens):
        pool[ids[j // block_size], :, j % block_size] = keys[j]
    return pool, ids


def padded(heads: Sequence[Tensor], size: int) -> Tensor:
    """Return keys ``[H, size, D]`` that are NaN behind the keys of each head."""
    keys = torch.full((len(heads), size, heads[0].shape[-1]), math.nan, dtype=heads[0].dtype)
    for row, head in zip(keys, heads, strict=True):
        row[: len(head)] = head
    return keys


@dataclass
class Layers:
    """Rows over the keys of several layers, each head with its own pages and length."""

    arguments: dict[str, Any]
    """Of `observe_ragged`. Pages and slots without a key are NaN, unused table entries garbage."""
    lengths: list[int]
    num_hidden: list[int]
    scales: list[float]
    per_head: bool

    def sets(self) -> list[SharedSet]:
        """Return the exact attention."""
        queries, pool, tables = (
            self.arguments[name].cpu() for name in ("queries", "pool", "tables")
        )
        sinks = self.arguments.get("sinks")
        return paged_sets(
            queries,
            pool,
            tables,
            self.lengths,
            self.num_hidden,
            self.scales,
            self.per_head,
            sinks if sinks is None else sinks.cpu(),
        )


def make_layers(
    lengths: Sequence[Sequence[int]],
    num_hidden: Sequence[int],
    per_head: bool,
    group: int = 2,
    head_size: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
    is_transposed: bool = False,
    extra_width: int = 0,
    device: str = "cpu",
    has_sinks: bool = False,
) -> Layers:
    """Return random rows and keys for heads of these lengths, ``[L][H]``."""
    layers, heads = len(lengths), len(lengths[0])
    flat = [length for layer in lengths for length in layer]
    scales = [head_size**-0.5 * (1 + layer / 4) for layer in range(layers)]
    counts = [math.ceil(length / block_size) for length in flat]
    pages = iter(torch.randperm(sum(counts) + 3).tolist())
    pool = torch.full((sum(counts) + 3, block_size, head_size), math.nan)
    tables = torch.randint(-(2**31), 2**31, (len(flat), max(counts) + extra_width)).int()
    for pair, (length, count) in enumerate(zip(flat, counts, strict=True)):
        tables[pair, :count] = torch.tensor([next(pages) for _ in range(count)])
        for j in range(length):
            pool[tables[pair, j // block_size], j % block_size] = torch.randn(head_size)
    if is_transposed:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    queries = torch.randn(layers, len(num_hidden), heads, group, head_size).mul(2)
    arguments = {
        "queries": queries.to(device, dtype),
        "pool": pool.to(device, key_dtype or dtype),
        "tables": tables.to(device),
        "lengths": torch.tensor(flat, dtype=torch.int32, device=device),
        "num_hidden": torch.tensor(num_hidden, dtype=torch.int32, device=device),
        "num_keys": max(flat),
        "scale": torch.tensor(scales, dtype=torch.float32, device=device),
        "per_head": per_head,
    }
    if has_sinks:
        arguments["sinks"] = random_sinks(layers, heads, group).to(device)
    return Layers(arguments, flat, list(num_hidden), scales, per_head)


def random_sinks(*shape: int) -> Tensor:
    """Return sinks that take from nothing to nearly all of their heads' attention."""
    sinks = torch.randn(shape).mul_(3)
    return sinks.masked_fill_(torch.rand(shape) < 0.1, -math.inf)


def observe_ragged(
    *,
    lengths: Tensor,
    num_hidden: Tensor,
    per_head: bool = True,
    statistics: frozenset[Statistic] = frozenset(),
    workspace_bytes: int = 64 << 20,
    scratch: Scratch | None = None,
    **fields: Any,
) -> ObservedAttention:
    """Observe rows that see all keys of each pair, int32 `[Q or 1]`, but some of the last."""
    rows = ObservedRows(num_visible=lengths[:, None] - num_hidden, **fields)
    return observe_layers(rows, per_head, statistics, workspace_bytes, scratch)
