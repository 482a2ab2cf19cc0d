# SPDX-License-Identifier: Apache-2.0
"""Attention statistics against their definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracle.attention import attention_probabilities
from tests.inputs import fresh_seed, paged
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import ObservedAttention, Statistic, observe

HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 8, 4
SCALE = HEAD_SIZE**-0.5


def make(
    num_keys: int, num_rows: int, dtype: torch.dtype = torch.float32, transposed: bool = True
) -> dict[str, Any]:
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


ALL: frozenset[Statistic] = frozenset({"row_averages", "share_below", "row_entropies"})


def check(arguments: dict[str, Any], exact: torch.Tensor, **options: Any) -> None:
    """Compare every statistic, for heads and for the layer, from one pass or from several.

    ``exact`` is A of every query head, float64 ``[H, G, O, P]``.
    """
    for per_head in (True, False):
        for statistics in (ALL, ALL - {"row_averages"}):
            check_one(
                observe(**arguments, per_head=per_head, statistics=statistics, **options), exact
            )


def check_one(
    attention: ObservedAttention, exact: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Compare every statistic of one observation, weighted sums first."""
    rows, num_keys = attention.row_positions.cpu(), exact.shape[-1]
    num_sets, device = attention.num_groups, attention.row_positions.device
    by_set = exact.reshape(num_sets, -1, *exact.shape[2:])  # [S, query heads, O, P]

    def agree(
        got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), expected, rtol=rtol, atol=atol)

    # Weighted sums do not depend on an earlier pass.
    for size in {1, num_sets}:
        weights = torch.rand(size, len(rows))
        expected = (weights.double()[:, :, None] * by_set.mean(1)).sum(dim=1)
        agree(attention.weighted_column_sums(weights.to(device)), expected)
    agree(attention.column_sums, by_set.mean(1).sum(1))
    weights = torch.rand(1, 2, len(rows))
    agree(attention.mixed_column_sums(weights.to(device)), weights.double() @ by_set.mean(1))

    visible = torch.arange(num_keys) <= rows[:, None]
    below = (by_set < 0.01 * by_set.amax(-1, keepdim=True)) & visible
    share = below.sum((2, 3)).double().mean(1) / visible.sum()
    agree(attention.share_below, share, torch.float64)
    entropies = torch.special.entr(by_set).sum(-1).mean(1)
    agree(attention.row_entropies, entropies)

    # A subset may be shared by all groups; early rows may see none of it.
    for size in {1, num_sets}:
        keys = torch.rand(size, num_keys) < 0.5
        weights = torch.rand(size, len(rows))
        subset = by_set * keys[:, None, None]
        subset = (subset / subset.sum(-1, keepdim=True)).nan_to_num(0).mean(1)
        expected = (weights.double()[:, :, None] * subset).sum(1)
        chosen = keys.to(device)
        agree(attention.renormalised_column_sums(chosen, weights.to(device)), expected)
        weights[:, :-1] = 0
        expected = (weights.double()[:, :, None] * subset).sum(1)
        got = attention.renormalised_column_sums(chosen, weights.to(device), last_row_only=True)
        agree(got, expected)


@pytest.mark.parametrize("num_keys", [1, 3, 4, 5, 21, 22, 23, 24])
@pytest.mark.parametrize("transposed", [True, False])
def test_every_tail_length_and_layout(num_keys: int, transposed: bool) -> None:
    fresh_seed()
    arguments = make(num_keys, min(num_keys, 7), transposed=transposed)
    check(arguments, attention_probabilities(**arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_not_rounded_again(dtype: torch.dtype) -> None:
    fresh_seed()
    arguments = make(23, 9, dtype)
    check(arguments, attention_probabilities(**arguments))


@pytest.mark.parametrize("queries", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("workspace_bytes", [0, 1 << 20])
def test_quantised_keys_are_read_without_rounding(
    dtype: torch.dtype, queries: torch.dtype, workspace_bytes: int
) -> None:
    """Their scale, an arbitrary number, is part of the scale of the logits."""
    fresh_seed()
    key_scale = 0.37
    arguments = make(23, 9)
    arguments["queries"] = arguments["queries"].to(queries)
    arguments["key_pages"] = (arguments["key_pages"] / key_scale).to(dtype)
    cached = {**arguments, "key_pages": arguments["key_pages"].double() * key_scale}
    exact = attention_probabilities(**cached)
    arguments["scale"] *= key_scale
    check(arguments, exact, workspace_bytes=workspace_bytes)


# Bytes of one row (2 * 4 * H * G * P) and of one block of keys (8 * H * N * D) at P = 37.
ROW, BLOCK = 8 * HEADS * GROUP * 37, 8 * HEADS * BLOCK_SIZE * HEAD_SIZE


@pytest.mark.parametrize("workspace_bytes", [0, BLOCK, ROW, 3 * ROW, 2 * ROW + BLOCK, 1 << 20])
@pytest.mark.parametrize("transposed", [True, False])
def test_any_workspace_gives_the_same(workspace_bytes: int, transposed: bool) -> None:
    fresh_seed()
    arguments = make(37, 20, transposed=transposed)
    exact = attention_probabilities(**arguments)
    check(arguments, exact, workspace_bytes=workspace_bytes)
    attention = observe(**arguments, workspace_bytes=workspace_bytes)
    for rows, probabilities in attention.row_chunks():
        size = rows.stop - rows.start
        assert probabilities.shape == (HEADS, GROUP, size, 37)
        assert size == 1 or size * ROW <= workspace_bytes


def test_row_chunks_give_the_probabilities() -> None:
    fresh_seed()
    arguments = make(37, 20)
    exact = attention_probabilities(**arguments)
    for rows, probabilities in observe(**arguments).row_chunks():
        torch.testing.assert_close(probabilities.double(), exact[:, :, rows], rtol=1e-5, atol=1e-6)


def test_log_sum_exp_of_the_attention_kernel_can_be_used() -> None:
    fresh_seed()
    arguments = make(19, 6)
    exact = attention_probabilities(**arguments)
    keys = arguments["key_pages"][arguments["block_ids"]].transpose(1, 2).flatten(0, 1)[:19]
    logits = torch.einsum("ohgd,khd->ohgk", arguments["queries"], keys) * SCALE
    future = torch.arange(19) > arguments["row_positions"][:, None]
    logits = logits.masked_fill(future[:, None, None], float("-inf"))
    check(arguments, exact, log_sum_exp=logits.logsumexp(dim=-1))


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


@pytest.mark.parametrize("per_head", [True, False])
def test_wrong_weights_are_named(per_head: bool) -> None:
    attention = observe(**make(20, 4), per_head=per_head)
    with pytest.raises(ValueError, match="weights"):
        attention.weighted_column_sums(torch.zeros(HEADS, 5))


def test_a_statistic_that_was_not_requested_is_named() -> None:
    attention = observe(**make(20, 4))
    with pytest.raises(ValueError, match="share_below was not computed"):
        _ = attention.share_below
    with pytest.raises(ValueError, match="row_entropies was not computed"):
        _ = attention.row_entropies


@pytest.mark.parametrize("per_head", [True, False])
def test_sums_over_all_rows_of_several_chunks(per_head: bool) -> None:
    """Each chunk sees only the keys so far; NaN after them has no effect."""
    fresh_seed()
    arguments = make(37, 37)
    exact = attention_probabilities(**arguments)
    by_set = exact.reshape(HEADS if per_head else 1, -1, 37, 37).mean(1)
    is_vision = torch.rand(37) < 0.5
    sums = RowSums(len(by_set), 37, torch.device("cpu"))
    for start, end in ((0, 1), (1, 20), (20, 37)):
        rows = slice(start, end)
        chunk = observe(
            queries=arguments["queries"][rows],
            key_pages=arguments["key_pages"],
            block_ids=arguments["block_ids"][: -(-end // BLOCK_SIZE)],
            row_positions=arguments["row_positions"][rows],
            num_keys=end,
            scale=SCALE,
            per_head=per_head,
        )
        sums.add(chunk, is_vision[rows])
    for got, rows_of in (
        (sums.text_column_sums, ~is_vision),
        (sums.vision_column_sums, is_vision),
        (sums.column_sums, torch.ones_like(is_vision)),
    ):
        torch.testing.assert_close(got.double(), by_set[:, rows_of].sum(1), rtol=1e-5, atol=1e-6)
