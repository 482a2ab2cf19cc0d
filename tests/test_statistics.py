# SPDX-License-Identifier: Apache-2.0
"""Attention statistics against loops in float64."""

from __future__ import annotations

import pytest
import torch

from tests.reference import fresh_seed, paged
from vllm_tgvkv.kernels import reference
from vllm_tgvkv.kernels.statistics import ObservedAttention, observe

HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 8, 4
SCALE = HEAD_SIZE**-0.5


def make(
    num_keys: int, num_rows: int, dtype: torch.dtype = torch.float32, transposed: bool = True
) -> dict[str, object]:
    keys = torch.randn(num_keys, HEADS, HEAD_SIZE).to(dtype)
    key_pages, block_ids = paged(keys, BLOCK_SIZE, transposed)
    return {
        "queries": torch.randn(num_rows, HEADS, GROUP, HEAD_SIZE).mul(2).to(dtype),
        "key_pages": key_pages,
        "block_ids": block_ids,
        "row_positions": torch.randperm(num_keys)[:num_rows].sort().values,
        "num_keys": num_keys,
        "scale": SCALE,
    }


def check(attention: ObservedAttention, exact: torch.Tensor) -> None:
    """``exact`` is A of every query head, ``[H, G, O, P]``."""
    per_head = exact.mean(dim=1)
    torch.testing.assert_close(
        attention.column_sums.double(), per_head.sum(1), rtol=1e-5, atol=1e-6
    )
    for rows in (1, HEADS):
        weights = torch.rand(rows, per_head.shape[1])
        expected = (weights.double()[:, :, None] * per_head).sum(dim=1)
        got = attention.weighted_column_sums(weights)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    mean = attention.mean_over_heads()
    torch.testing.assert_close(
        mean.column_sums.double(), exact.mean(dim=(0, 1)).sum(0)[None], rtol=1e-5, atol=1e-6
    )
    weights = torch.rand(1, per_head.shape[1])
    expected = (weights.double()[0, :, None] * exact.mean(dim=(0, 1))).sum(dim=0)
    got = mean.weighted_column_sums(weights)
    torch.testing.assert_close(got.double(), expected[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_keys", [1, 3, 4, 5, 21, 22, 23, 24])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_tail_length_and_layout(num_keys: int, transposed: bool) -> None:
    fresh_seed()
    arguments = make(num_keys, min(num_keys, 7), transposed=transposed)
    check(observe(**arguments), reference.attention_probabilities(**arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_again(dtype: torch.dtype) -> None:
    fresh_seed()
    arguments = make(23, 9, dtype)
    check(observe(**arguments), reference.attention_probabilities(**arguments))


# Bytes of one row (2 * 4 * H * G * P) and of one block of keys (8 * H * N * D) at P = 37.
ROW, BLOCK = 8 * HEADS * GROUP * 37, 8 * HEADS * BLOCK_SIZE * HEAD_SIZE


@pytest.mark.parametrize("workspace_bytes", [0, BLOCK, ROW, 3 * ROW, 2 * ROW + BLOCK, 1 << 20])
@pytest.mark.parametrize("transposed", [True, False])
def test_any_workspace_gives_the_same(workspace_bytes: int, transposed: bool) -> None:
    fresh_seed()
    arguments = make(37, 20, transposed=transposed)
    attention = observe(**arguments, workspace_bytes=workspace_bytes)
    check(attention, reference.attention_probabilities(**arguments))
    for rows, probabilities in attention.row_chunks():
        size = rows.stop - rows.start
        assert probabilities.shape == (HEADS, GROUP, size, 37)
        assert size == 1 or size * ROW <= workspace_bytes


def test_row_chunks_give_the_probabilities() -> None:
    fresh_seed()
    arguments = make(37, 20)
    exact = reference.attention_probabilities(**arguments)
    for rows, probabilities in observe(**arguments).row_chunks():
        torch.testing.assert_close(probabilities.double(), exact[:, :, rows], rtol=1e-5, atol=1e-6)


def test_log_sum_exp_of_the_attention_kernel_can_be_used() -> None:
    fresh_seed()
    arguments = make(19, 6)
    exact = reference.attention_probabilities(**arguments)
    keys = arguments["key_pages"][arguments["block_ids"]].transpose(1, 2).flatten(0, 1)[:19]
    logits = torch.einsum("ohgd,khd->ohgk", arguments["queries"], keys) * SCALE
    future = torch.arange(19) > arguments["row_positions"][:, None]
    logits = logits.masked_fill(future[:, None, None], float("-inf"))
    check(observe(**arguments, log_sum_exp=logits.logsumexp(dim=-1)), exact)


def test_no_rows_give_zeros() -> None:
    attention = observe(**make(9, 0))
    assert attention.column_sums.tolist() == [[0.0] * 9] * HEADS
    assert attention.weighted_column_sums(torch.ones(1, 0)).tolist() == [[0.0] * 9] * HEADS


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"queries": torch.zeros(4, HEADS, GROUP)}, "queries"),
        ({"queries": torch.zeros(4, HEADS + 1, GROUP, HEAD_SIZE)}, "key_pages"),
        ({"num_keys": 0}, "num_keys"),
        ({"num_keys": 40}, "block_ids"),
        ({"row_positions": torch.zeros(3).long()}, "row_positions"),
        ({"log_sum_exp": torch.zeros(4, GROUP, HEADS)}, "log_sum_exp"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        observe(**{**make(20, 4), **change})


def test_wrong_weights_are_named() -> None:
    attention = observe(**make(20, 4))
    for observed in (attention, attention.mean_over_heads()):
        with pytest.raises(ValueError, match="weights"):
            observed.weighted_column_sums(torch.zeros(HEADS, 5))
