# SPDX-License-Identifier: Apache-2.0
"""Selection and thresholds on Triton equal the oracle and the PyTorch code exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from tests.gpu import pytorch_on_cpu
from tests.unit.test_select import SCORE, Selection, selections
from vllm_tgvkv.kernels.select import MAX_TIERS, ranking_keys, select_tokens, thresholds

pytest.importorskip("triton", reason="Triton is not installed")
triton_select = pytest.importorskip("vllm_tgvkv.kernels.gpu.select")


def select_on(device: str, selection: Selection) -> torch.Tensor:
    scores, tiers, counts, *sizes = selection
    return select_tokens(scores.to(device), tiers.to(device), counts.to(device), *sizes).cpu()


def assert_same(device: str, selection: Selection) -> torch.Tensor:
    """Compare with the PyTorch code, including pages that no pair owns."""
    positions = select_on(device, selection)
    with pytorch_on_cpu():
        expected = select_tokens(*selection)
    assert positions.dtype == torch.int32
    assert positions.tolist() == expected.tolist()
    return positions


@settings(max_examples=25)
@given(selections())
def test_equals_the_reference(device: str, selection: Selection) -> None:
    assert select_on(device, selection).tolist() == reference.select_tokens(*selection)


@pytest.mark.parametrize("scores_of", ["equal", "few", "bits"])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_longer_than_a_tile(
    device: str, monkeypatch: pytest.MonkeyPatch, shared: bool, scores_of: str
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
    positions = assert_same(device, selection)
    assert positions[-2:].eq(0).all()


@pytest.mark.parametrize("tier_type", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_strides_and_tier_types(device: str, tier_type: torch.dtype) -> None:
    scores = torch.randn(12, 2, 3).permute(1, 2, 0)
    tiers = torch.randint(0, 2, (24,)).to(tier_type)[::2]
    counts = torch.tensor([[2, 0, 1], [3, 1, 3]])
    assert_same(device, (scores, tiers, counts, 10, 4))


def test_nothing_to_select(device: str) -> None:
    tiers, counts = torch.zeros(8, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)
    assert select_on(device, (torch.zeros(1, 2, 8), tiers, counts, 0, 4)).shape == (0, 4)
    assert select_on(device, (torch.zeros(1, 2, 8), tiers, counts, 1, 4)).tolist() == [[0] * 4]


def test_counts_beyond_the_result_write_nothing_after_it(device: str) -> None:
    """Counts are not checked on the device; wrong ones must not write to other memory."""
    scores, tiers = torch.rand(2, 2, 16), torch.zeros(16, dtype=torch.int32)
    arguments = (scores, tiers, torch.full((2, 2), 9))
    positions = triton_select.select_tokens(*(a.to(device) for a in arguments), 5, 4)
    assert positions.shape == (5, 4)
    assert positions[:4].flatten().tolist() == list(range(16))


@settings(max_examples=10)
@given(
    st.lists(SCORE, min_size=1, max_size=20), st.lists(st.integers(0, 20), min_size=1, max_size=3)
)
def test_thresholds_of_ranking_keys(device: str, row: list[float], wanted: list[int]) -> None:
    scores = torch.tensor([row] * len(wanted))
    keys = ranking_keys(scores, torch.arange(len(row)) % 3)
    number = torch.tensor(wanted).clamp(max=len(row))
    with pytorch_on_cpu():
        expected = thresholds(keys, number)
    assert thresholds(keys.to(device), number.to(device)).tolist() == expected.tolist()


def test_thresholds_of_all_63_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcast rows, equal keys, and a row of which no key is wanted."""
    monkeypatch.setattr(triton_select, "_TILE", 16)
    keys = torch.randint(0, 2**63 - 1, (3, 1, 50))
    keys[1, 0, 7:] = 2**63 - 1
    keys[2] >>= 61
    wanted = torch.tensor([[0, 1, 50, 17]]).expand(3, 4)
    with pytorch_on_cpu():
        expected = thresholds(keys, wanted, num_bits=63)
    assert thresholds(keys.to(device), wanted.to(device), 63).tolist() == expected.tolist()
    ordered = keys.sort(dim=-1, descending=True).values.squeeze(1)
    assert expected[:, 1:].tolist() == ordered[:, [0, 49, 16]].tolist()
