# SPDX-License-Identifier: Apache-2.0
"""Selection of tokens and thresholds, in PyTorch and on Triton: the oracle's, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.select import (
    MAX_TIERS,
    page_offsets,
    ranking_keys,
    select_tokens,
    thresholds,
)

pytest.importorskip("triton", reason="Triton is not installed")
triton_select = pytest.importorskip("vllm_tgvkv.kernels.gpu.select")


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


def select_on(device: str, selection: Selection) -> torch.Tensor:
    scores, tiers, counts, *sizes = selection
    return select_tokens(scores.to(device), tiers.to(device), counts.to(device), *sizes).cpu()


def assert_same(device: str, selection: Selection) -> torch.Tensor:
    """Compare with the oracle; pages that no pair owns are 0."""
    positions = select_on(device, selection)
    assert positions.dtype == torch.int32
    scores, tiers, counts, _, size = selection
    if tiers.dim() == 1:
        wanted = reference.select_tokens(scores, tiers, counts, int(counts.sum()), size)
    else:  # each pair by itself: the oracle has tiers of positions only
        wanted = []
        for pair in itertools.product(*map(range, counts.shape)):
            row = (pair[0], pair[1] if scores.shape[1] > 1 else 0)
            alone = (scores[row][None, None], tiers[row], counts[pair][None, None])
            wanted += reference.select_tokens(*alone, int(counts[pair]), size)
    assert positions[: len(wanted)].tolist() == wanted
    assert not positions[len(wanted) :].any()
    return positions


@settings(max_examples=40)
@given(selections())
def test_equals_the_reference(kernels: str, selection: Selection) -> None:
    assert_same(kernels, selection)


@pytest.mark.parametrize("scores_of", ["equal", "few", "bits"])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_longer_than_a_tile(
    kernels: str, monkeypatch: pytest.MonkeyPatch, shared: bool, scores_of: str
) -> None:
    """Ties across tiles, arbitrary float32 bits, tiers of every row, pages that no pair owns."""
    monkeypatch.setattr(triton_select, "_TILE", 64)
    layers, heads, blocks, block_size = 2, 3, 21, 16
    shape = (layers, 1 if shared else heads, blocks * block_size)
    if scores_of == "equal":
        scores = torch.zeros(shape)
    elif scores_of == "few":
        scores = torch.randint(-2, 3, shape) * 0.5
    else:
        scores = torch.randint(-(2**31), 2**31, shape).to(torch.int32).view(torch.float32)
    tiers = (
        torch.randint(0, MAX_TIERS, shape) if scores_of == "bits" else torch.randint(0, 2, shape)
    )
    counts = torch.randint(0, blocks + 1, (layers, heads))
    counts[0, 1] = 0
    counts[1, 0] = blocks
    selection = (scores, tiers, counts, int(counts.sum()) + 2, block_size)
    positions = assert_same(kernels, selection)
    assert positions[-2:].eq(0).all()


@pytest.mark.parametrize("tier_type", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_strides_and_tier_types(kernels: str, tier_type: torch.dtype) -> None:
    scores = torch.randn(12, 2, 3).permute(1, 2, 0)
    tiers = torch.randint(0, 2, (24,)).to(tier_type)[::2]
    counts = torch.tensor([[2, 0, 1], [3, 1, 3]])
    assert_same(kernels, (scores, tiers, counts, 10, 4))


def test_nothing_and_everything(kernels: str) -> None:
    tiers, counts = torch.zeros(8, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)
    assert select_on(kernels, (torch.zeros(1, 2, 8), tiers, counts, 0, 4)).shape == (0, 4)
    assert select_on(kernels, (torch.zeros(1, 2, 8), tiers, counts, 1, 4)).tolist() == [[0] * 4]
    found = select_on(kernels, (torch.full((1, 2, 8), NAN), tiers, counts + 2, 4, 4))
    assert found.view(2, 8).tolist() == [list(range(8))] * 2


def test_counts_beyond_the_result_write_nothing_after_it(kernels: str) -> None:
    """Counts are not checked on the device; wrong ones must not write to other memory."""
    if kernels == "cpu" and not gpu.on_cpu:
        pytest.skip("PyTorch checks its indices")
    scores, tiers = torch.rand(2, 2, 16), torch.zeros(16, dtype=torch.int32)
    arguments = (scores, tiers, torch.full((2, 2), 9))
    positions = triton_select.select_tokens(*(a.to(kernels) for a in arguments), 5, 4)
    assert positions.shape == (5, 4)
    assert positions[:4].flatten().tolist() == list(range(16))


@settings(max_examples=10)
@given(
    st.lists(SCORE, min_size=1, max_size=20), st.lists(st.integers(0, 20), min_size=1, max_size=3)
)
def test_thresholds_of_ranking_keys(kernels: str, row: list[float], wanted: list[int]) -> None:
    scores = torch.tensor([row] * len(wanted))
    keys = ranking_keys(scores, torch.arange(len(row)) % 3)
    number = torch.tensor(wanted).clamp(max=len(row))
    found = thresholds(keys.to(kernels), number.to(kernels)).cpu()
    ordered = keys.sort(dim=-1, descending=True).values
    expected = ordered.gather(-1, (number - 1).clamp(min=0)[:, None])[:, 0]
    assert found[number > 0].tolist() == expected[number > 0].tolist()


@pytest.mark.parametrize("long_row", [20, 50])
def test_thresholds_of_all_63_bits(
    kernels: str, long_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broadcast rows, equal keys, and rows without a wanted key; by one program or several."""
    monkeypatch.setattr(triton_select, "_TILE", 16)
    monkeypatch.setattr(triton_select, "_LONG_ROW", long_row)
    keys = torch.randint(0, 2**63 - 1, (3, 1, 50))
    keys[1, 0, 7:] = 2**63 - 1
    keys[2] >>= 61
    wanted = torch.tensor([[0, 1, 50, 17]]).expand(3, 4)
    found = thresholds(keys.to(kernels), wanted.to(kernels), 63).cpu()
    ordered = keys.sort(dim=-1, descending=True).values.squeeze(1)
    assert found[:, 1:].tolist() == ordered[:, [0, 49, 16]].tolist()
    assert found[:, 0].tolist() == [2**63 - 1] * 3


def test_page_offsets_are_exclusive_prefix_sums() -> None:
    offsets = page_offsets(torch.tensor([[3, 0], [1, 5]]))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 3, 3, 4, 9]


def test_wrong_arguments_are_named() -> None:
    good: dict[str, object] = {
        "scores": torch.zeros(1, 2, 8),
        "tiers": torch.zeros(8).int(),
        "counts": torch.ones(1, 2).long(),
        "num_pages": 2,
        "block_size": 4,
    }
    for name, value in (
        ("scores", torch.zeros(1, 3, 8)),
        ("scores", torch.zeros(1, 2, 8).double()),
        ("tiers", torch.zeros(7).int()),
        ("tiers", torch.zeros(8)),
        ("counts", torch.ones(1, 2).int()),
        ("num_pages", 5),
        ("block_size", 0),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            select_tokens(**{**good, name: value})
