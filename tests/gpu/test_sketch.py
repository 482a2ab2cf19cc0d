# SPDX-License-Identifier: Apache-2.0
"""Products of queries and sketched keys, in PyTorch and on Triton."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from vllm_tgvkv.kernels.sketch import BITS, read_sketches, sketch_keys, sketch_logits
from vllm_tgvkv.kernels.statistics import Scratch


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_size", [4, 24, 64, 80, 128])
def test_logits_are_products_with_sketched_keys(
    kernels: str, monkeypatch: pytest.MonkeyPatch, bits: int, head_size: int
) -> None:
    """For any number of pairs, tokens, queries and channels, in parts of any size."""
    monkeypatch.setattr("vllm_tgvkv.kernels.sketch._KEY_BYTES", random.choice((1, 99999)))
    pairs, queries = random.randint(1, 6), random.randint(1, 40)
    tokens = 16 * random.randint(1, 20)
    keys = torch.randn(pairs, tokens, head_size, device=kernels)
    keys = keys * (4 * torch.rand(head_size, device=kernels)) + 3
    sketches = sketch_keys(keys, bits)
    # Further bytes may follow, and any may be NaN.
    more = sketches.new_full((pairs, random.choice((0, 6))), 255)
    asked = torch.randn(pairs, queries, head_size, device=kernels)
    out = torch.full((pairs, queries, tokens + 5), torch.nan, device=kernels)
    sketch_logits(torch.cat((sketches, more), dim=1), bits, asked, tokens, out, Scratch())
    assert out[..., tokens:].isnan().all()
    sketched, asked = read_sketches(sketches, bits, tokens, head_size).double(), asked.double()
    error = (out[..., :tokens] - asked @ sketched.mT).abs()
    # On Triton a query has 16 bits. Means and what is on top of them may cancel.
    assert (error <= 2**-15 * (asked.abs() @ (sketched.abs() + 8).mT)).all()


VARIANTS = """
import torch
from dataclasses import replace
from functools import partial
from vllm_tgvkv.kernels.gpu import sketch
from vllm_tgvkv.kernels.gpu.compile import launches

for bits in (1, 2, 4, 8):
    found = []
    for tokens, queries, more in ((16, 1, 0), (80, 12, 3), (8192, 96, 16)):
        codes = torch.empty(2, 64, tokens * bits // 8, dtype=torch.uint8)
        steps, means = torch.empty(2, tokens).half(), torch.empty(2, 64).half()
        asked, out = torch.empty(2, queries, 64), torch.empty(2, queries, tokens + more)
        run = partial(sketch.sketch_logits, codes, steps, means, means, bits, asked, out)
        (variant,) = launches(sketch.__name__, "", run)
        # A part of a pool's pages, a multiple of 16 bytes.
        found.append(replace(variant, aligned={*variant.aligned, "pair_stride"}))
    assert found[0] == found[1] == found[2], found
"""


def test_a_prompt_of_any_size_takes_one_variant() -> None:
    """None is compiled while requests wait. In an interpreter whose kernels are not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", VARIANTS], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
