# SPDX-License-Identifier: Apache-2.0
"""Pooling over windows, in PyTorch and on Triton."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tgvkv.kernels.pooling import window_pooling


@settings(max_examples=25, deadline=None)
@given(
    num_sets=st.integers(1, 3),
    num_tokens=st.integers(1, 1100),
    reach=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    reduce=st.sampled_from(["max", "mean"]),
    halve=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 2**31),
)
def test_windows_of_any_width(
    kernels: str,
    num_sets: int,
    num_tokens: int,
    reach: tuple[int, int],
    reduce: str,
    halve: int | None,
    seed: int,
) -> None:
    """Runs of random lengths, in which no window leaves its own; infinite scores and NaN."""
    generator = np.random.default_rng(seed)
    positions, runs = np.arange(num_tokens), generator.random(num_tokens).cumsum() // 20
    first = np.maximum(positions - reach[0], np.searchsorted(runs, runs))
    last = np.minimum(positions + reach[1], np.searchsorted(runs, runs, side="right") - 1)
    halve = halve if reduce == "max" else None
    scores = generator.standard_normal((num_sets, num_tokens)).astype(np.float32)
    if reduce == "max":
        scores[generator.random(scores.shape) < 0.1] = -np.inf
    scores[generator.random(scores.shape) < 0.01] = np.nan
    pool = window_pooling(first, last, reduce, halve, torch.device(kernels))
    found = pool(torch.from_numpy(scores).to(kernels))
    values, expected = scores.astype(np.float64), np.empty(scores.shape)
    for j in range(num_tokens):
        window = values[:, first[j] : last[j] + 1]
        if halve is not None:
            distance = np.maximum(j - np.arange(first[j], last[j] + 1), 0)
            window = np.maximum(window, 0) * 2.0 ** (-distance / halve)
        expected[:, j] = window.max(1) if reduce == "max" else window.mean(1)
    wanted = torch.from_numpy(expected).float()
    torch.testing.assert_close(found.cpu(), wanted, equal_nan=True, rtol=2e-6, atol=1e-7)
    if reduce == "max" and halve is None:
        assert torch.equal(found.cpu().nan_to_num(), wanted.nan_to_num())


def test_equal_neighbourhoods_have_equal_means(kernels: str) -> None:
    scores = torch.tensor([0.1, 0.7, 0.2] * 40, device=kernels)[None]
    positions = np.arange(120)
    windows = np.maximum(positions - 3, 0), np.minimum(positions + 2, 119)
    means = window_pooling(*windows, "mean", None, scores.device)(scores)[0, 3:-3].cpu()
    assert len(means.unique()) == 1
