# SPDX-License-Identifier: Apache-2.0
"""Mean cosines of keys and norms of values, against loops over pairs of keys in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from oracle import scores
from tests.inputs import make_layers, observe_ragged, padded
from vllm_tgvkv.kernels.diversity import mean_cosines, norms
from vllm_tgvkv.kernels.statistics import observe

SIZE, HEAD_SIZE = 53, 16


def ragged(lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return keys [H, S, D] that are NaN behind the lengths, and the keys of each head."""
    heads = [
        (torch.randn(length, HEAD_SIZE) + torch.randn(HEAD_SIZE)) * torch.rand(length, 1) * 9
        for length in lengths
    ]
    heads = [head.to(dtype) for head in heads]
    return padded(heads, SIZE), heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_any_length(dtype: torch.dtype) -> None:
    lengths = [SIZE, 1, 40, 0, 2, random.randint(1, SIZE)]
    keys, heads = ragged(lengths, dtype)
    cosines, lengths_of = (
        measure(keys, torch.tensor(lengths)) for measure in (mean_cosines, norms)
    )
    assert cosines.dtype == lengths_of.dtype == torch.float32
    for head, ours, of_norms in zip(heads, cosines, lengths_of, strict=True):
        number = len(head)
        wanted = torch.tensor(scores.mean_cosines(head), dtype=torch.float64)
        torch.testing.assert_close(ours[:number].double(), wanted, rtol=1e-5, atol=1e-6)
        of_keys = head.double().norm(dim=-1)
        torch.testing.assert_close(of_norms[:number].double(), of_keys, rtol=1e-6, atol=1e-6)
        assert not ours[number:].any()
        assert not of_norms[number:].any()


def test_a_key_of_zeros_is_like_no_other() -> None:
    keys = torch.randn(1, 4, HEAD_SIZE)
    keys[0, 2] = 0
    found = mean_cosines(keys, torch.tensor([4]))[0]
    assert found[2] == 0
    others = torch.nn.functional.cosine_similarity(keys[0, :1], keys[0, [1, 3]])
    torch.testing.assert_close(found[0], others.sum() / 3)


@pytest.mark.parametrize("workspace_bytes", [0, 1 << 20])
def test_statistics_of_paged_heads(workspace_bytes: int) -> None:
    """Each head with its own pages and length, some rows see fewer keys; values on the pages."""
    lengths = [[random.randint(6, 40) for _ in range(3)] for _ in range(2)]
    layers = make_layers(lengths, [5, 2, 0], per_head=True)
    pool, tables = layers.arguments["pool"], layers.arguments["tables"]
    values = torch.full_like(pool, math.nan)
    values[~pool.isnan()] = torch.randn(int((~pool.isnan()).sum()))
    names = frozenset({"mean_cosines", "value_norms"})
    seen = observe_ragged(
        **layers.arguments, statistics=names, workspace_bytes=workspace_bytes, values=values
    )
    for pair, length in enumerate(layers.lengths):
        count = -(-length // pool.shape[1])
        keys, of_values = (
            pages[tables[pair, :count].long()].flatten(0, 1)[:length] for pages in (pool, values)
        )
        wanted = torch.tensor(scores.mean_cosines(keys), dtype=torch.float64)
        cosines, found = seen.mean_cosines[pair], seen.value_norms[pair]
        torch.testing.assert_close(cosines[:length].double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[:length], of_values.norm(dim=-1))
        assert seen.is_seen[pair].tolist() == [j < length for j in range(max(layers.lengths))]
        assert not cosines[length:].any()
        assert not found[length:].any()


def test_what_statistics_of_values_need() -> None:
    with pytest.raises(ValueError, match=r"lengths \[H\]"):
        mean_cosines(torch.zeros(2, 3, 4), torch.tensor([1]))
    layers = make_layers([[9, 3]], [0], per_head=True).arguments
    names = frozenset({"value_norms"})
    with pytest.raises(ValueError, match="value_norms needs the pages of the values"):
        _ = observe_ragged(**layers, statistics=names).value_norms
    with pytest.raises(ValueError, match="value_norms was not computed"):
        _ = observe_ragged(**layers, values=layers["pool"]).value_norms
    with pytest.raises(ValueError, match="values must be"):
        observe_ragged(**layers, values=layers["pool"][1:])
    pages, ids, rows = torch.randn(5, 2, 4, 8), torch.tensor([2, 0]), torch.tensor([6])
    given = (torch.randn(1, 2, 1, 8), pages, ids, rows, 7, 1.0)
    with pytest.raises(ValueError, match="value_pages must have strides"):
        observe(*given, value_pages=torch.randn(5, 2, 4, 9)[..., :8])
    with pytest.raises(ValueError, match="value_pages must be"):
        observe(*given, value_pages=torch.randn(5, 2, 3, 8))
    in_layer = observe(*given, per_head=False, statistics=names, value_pages=pages)
    with pytest.raises(ValueError, match="use granularity head"):
        _ = in_layer.value_norms
