# SPDX-License-Identifier: Apache-2.0
"""Gates of every form, in PyTorch and on Triton, against their definition in float64."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.inputs import product
from vllm_tgvkv.kernels.gates import ACTIVATIONS, GateBuffers, LayerGate, project, store

pytest.importorskip("triton", reason="Triton is not installed")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_gate(num_linears: int, activation: str, dtype: torch.dtype, device: str) -> LayerGate:
    """Return a gate whose last bias is large, if it says logarithms."""
    sizes = [random.randint(1, 700), *[random.randint(1, 150)] * (num_linears - 1)]
    sizes.append(random.randint(1, 20))
    is_log = bool(random.getrandbits(1))
    linears = []
    for number, (n_in, n_out) in enumerate(itertools.pairwise(sizes), start=1):
        kept_as = torch.float32 if number == num_linears else dtype
        weight = 2 * torch.randn(n_out, n_in) / math.sqrt(n_in)
        bias = torch.randn(n_out) + 10 * (is_log and number == num_linears)
        linears.append((weight.to(device, kept_as), bias.to(device, kept_as)))
    return LayerGate(is_log, activation, tuple(linears))


def step_of(dtype: torch.dtype) -> float:
    """Return the relative error of a sum in float32 that is rounded to a dtype."""
    return torch.finfo(dtype).eps + 2**-20


def exact(gate: LayerGate, begun: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and their largest error.

    In front of a further projection of the model's dtype, values are rounded to it.

    Args:
        begun: the first projection without its bias.
        size: sums of the absolute products in it, if it is the only one.
    """
    *inner, (last, bias) = [[x.double().cpu() for x in linear] for linear in gate.linears]
    step = step_of(gate.linears[0][0].dtype)
    activate = ACTIVATIONS[gate.activation]
    error = torch.zeros_like(begun)
    for number, (weight, offset) in enumerate(inner):
        if number:
            error = 1.13 * error @ weight.T.abs()  # no activation is steeper
            error += step * (begun.abs() @ weight.T.abs() + offset.abs())
            begun = begun @ weight.T
        begun = begun + offset
        error += 2**-20 * begun.abs()  # GELU is a small difference where it is near 0
        begun = activate(begun)
    if inner:
        error, size = 1.13 * error @ last.T.abs(), begun.abs() @ last.T.abs()
        begun = begun @ last.T
    error += 2**-20 * (size + bias.abs())
    found = begun + bias
    if not gate.is_log:
        return found, error
    # Where the sigmoid is almost 1, its logarithm has the same relative error as its exponential.
    said = -torch.where(found > 0, found.neg().exp().log1p(), found.exp().log1p() - found)
    return said, said.abs() * error.expm1() + 2**-20 * said.abs()


@pytest.mark.parametrize(
    ("num_linears", "activation", "dtype", "num_tokens"),
    product(range(1, 4), ACTIVATIONS, DTYPES, (1, 70, 300)),
)
def test_gates_store_what_they_say_at_the_slots_of_tokens(
    kernels: str, num_linears: int, activation: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """And nothing else, for layers one after the other, where all else is NaN."""
    first = random_gate(num_linears, activation, dtype, kernels)
    buffers = GateBuffers.of(first, 300)
    buffers.projected.fill_(torch.nan)
    buffers.sums.fill_(torch.nan)
    size, num_blocks = random.choice((16, 24, 128)), 30
    shape = (num_blocks, 3, first.num_heads, size)
    pages = torch.full(shape, torch.nan, device=kernels).unbind(1)
    sizes = [weight.shape for weight, _ in first.linears]
    for layer in range(2):
        gate = first
        if layer:
            changed = tuple((x.flip(0), b.flip(0)) for x, b in first.linears)
            gate = LayerGate(first.is_log, activation, changed)
        assert [weight.shape for weight, _ in gate.linears] == sizes
        # In a graph the tokens' hidden states may be followed by rows without a slot.
        hidden = torch.randn(num_tokens, sizes[0][1], device=kernels, dtype=dtype)
        project(gate, hidden, buffers)
        state, weight = hidden.double().cpu(), gate.linears[0][0].double().cpu()
        begun, products = state @ weight.T, state.abs() @ weight.T.abs()
        if gate.width:
            wanted, begun = begun, buffers.projected[:num_tokens].double().cpu()
            assert ((begun - wanted).abs() <= step_of(dtype) * products).all()
        num_slots = random.randint((num_tokens + 1) // 2, num_tokens)
        slots = torch.randperm((num_blocks - 1) * size)[:num_slots] + size
        slots[torch.rand(num_slots) < 0.1] = -1
        store(gate, buffers, slots.to(kernels), pages[layer])
        said, error = exact(gate, begun[:num_slots], products[:num_slots])
        stored, blocks = slots >= 0, slots.clamp(min=0) // size
        found = pages[layer].double().cpu()
        difference = (found[blocks, :, slots % size] - said)[stored].abs()
        assert (difference <= error[stored]).all()
        found[blocks, :, slots % size] = torch.nan
        assert found[1:].isnan().all()
        assert pages[2].isnan().all()
        assert not buffers.arrived.any()


def test_arguments_that_do_not_fit_are_named(kernels: str) -> None:
    gate = random_gate(2, "silu", torch.float32, kernels)
    buffers = GateBuffers.of(gate, 5)
    hidden = torch.zeros(6, gate.linears[0][0].shape[1], device=kernels)
    with pytest.raises(ValueError, match="hidden must be"):
        project(gate, hidden, buffers)
    pages = torch.zeros(2, gate.num_heads, 16, device=kernels)
    slots = torch.zeros(5, dtype=torch.int64, device=kernels)
    with pytest.raises(ValueError, match="slots must be int64"):
        store(gate, buffers, slots.int(), pages)
    with pytest.raises(ValueError, match="pages must be float32"):
        store(gate, buffers, slots, pages[..., ::2])


VARIANTS = """
import torch
from functools import partial
from vllm_tgvkv.kernels.gates import GateBuffers, LayerGate
from vllm_tgvkv.kernels.gpu import gates
from vllm_tgvkv.kernels.gpu.compile import launches

pages = torch.empty(2, 8, 16)
for sizes in ((64, 8), (64, 32, 8), (64, 512, 512, 8)):
    linears = tuple((torch.empty(m, n).half(), torch.empty(m).half())
                    for n, m in zip(sizes, sizes[1:]))
    gate, found = LayerGate(True, "silu", linears), []
    parts, tiles = gates.parts_and_tiles(gate, 9999)
    begun, sums = torch.empty(9999, gate.width).half(), torch.empty(9999, parts, 8)
    buffers = GateBuffers(begun, sums, torch.empty(tiles, dtype=torch.int32))
    for tokens in (1, 16, 17, 256, 257, 320, 8192):
        slots, hidden = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, 64).half()
        found += launches(gates.__name__, "", partial(gates.store, gate, buffers, slots, pages))
        if not gate.width:
            call = partial(gates.project, hidden, linears[0][0], sums)
            found += launches(gates.__name__, "", call)
    different = [x for n, x in enumerate(found) if x not in found[:n]]
    assert len(different) == 1 + (len(sizes) != 3), different
"""


def test_two_variants_take_steps_of_any_size() -> None:
    """None is compiled while requests wait. In an interpreter whose kernels are not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", VARIANTS], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
