# SPDX-License-Identifier: Apache-2.0
"""Selection of tokens: full pages, the right set, ties, NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import kernels as reference
from vllm_tgvkv.kernels.select import MAX_TIERS, page_offsets, select_tokens

NAN, INFINITY = float("nan"), float("inf")
# Few values, so that most candidates are tied.
SCORE = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, -2.5, 1e-42, -1e-42, INFINITY, -INFINITY, NAN])


Selection = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]
"""Arguments of `select_tokens`."""


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    blocks, block_size = draw(st.integers(0, 4)), draw(st.sampled_from([1, 2, 4]))
    rows = draw(st.sampled_from([1, heads]))
    size = blocks * block_size

    def tensor(values: st.SearchStrategy, *shape: int) -> torch.Tensor:
        number = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(values, min_size=number, max_size=number))).view(shape)

    scores = tensor(SCORE, layers, rows, size).float()
    tiers = tensor(st.sampled_from([0, 1, 2, MAX_TIERS - 1]), size).int()
    counts = tensor(st.integers(0, blocks), layers, heads).long()
    return scores, tiers, counts, int(counts.sum()), block_size


@given(selections())
def test_equals_the_reference(selection: Selection) -> None:
    positions = select_tokens(*selection)
    assert positions.dtype == torch.int32
    assert positions.tolist() == reference.select_tokens(*selection)


@pytest.mark.parametrize("shared", [False, True])
def test_random_scores(shared: bool) -> None:
    layers, heads, blocks, block_size = 3, 2, 20, 16
    scores = torch.randn(layers, 1 if shared else heads, blocks * block_size)
    tiers = torch.randint(0, 3, (blocks * block_size,))
    counts = torch.randint(0, blocks + 1, (layers, heads))
    arguments = (scores, tiers, counts, int(counts.sum()), block_size)
    positions = select_tokens(*arguments)
    assert positions.tolist() == reference.select_tokens(*arguments)


def test_all_kept_is_the_identity() -> None:
    scores = torch.full((1, 2, 12), NAN)
    positions = select_tokens(scores, torch.zeros(12).int(), torch.full((1, 2), 3), 6, 4)
    assert positions.view(2, 12).tolist() == [list(range(12))] * 2


def test_page_offsets_are_exclusive_prefix_sums() -> None:
    offsets = page_offsets(torch.tensor([[3, 0], [1, 5]]))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 3, 3, 4, 9]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scores": torch.zeros(1, 3, 8)}, "scores"),
        ({"scores": torch.zeros(1, 2, 8).double()}, "scores"),
        ({"tiers": torch.zeros(7).int()}, "tiers"),
        ({"tiers": torch.zeros(8)}, "tiers"),
        ({"counts": torch.ones(1, 2).int()}, "counts"),
        ({"num_pages": 5}, "num_pages"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], word: str) -> None:
    arguments: dict[str, object] = {
        "scores": torch.zeros(1, 2, 8),
        "tiers": torch.zeros(8).int(),
        "counts": torch.ones(1, 2).long(),
        "num_pages": 2,
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=word):
        select_tokens(**{**arguments, **change})
