# SPDX-License-Identifier: Apache-2.0
"""The redundancy kernel against `oracle.decoding`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import decoding
from tests.inputs import padded
from vllm_tgvkv.kernels.redundancy import BYTES_PER_ENTRY, GROUP, last_above, redundancy

SIZE, HEAD_SIZE = 2 * GROUP + 21, 16


def is_clear(keys: Tensor) -> bool:
    """Return whether no cosine is so close to the threshold that rounding might decide."""
    directions = torch.nn.functional.normalize(keys.double(), dim=-1)
    return bool(((directions @ directions.T - decoding.SIMILAR).abs() > 1e-5).all())


def draw(length: int) -> Tensor:
    """Return keys [length, D] in clusters, so that about every third pair is similar."""
    for _ in range(100):
        centres = torch.randn(3, HEAD_SIZE) * 2
        keys = centres[torch.randint(3, (length,))] + torch.randn(length, HEAD_SIZE)
        keys *= torch.rand(length, 1) * 10
        if is_clear(keys):
            return keys
    raise AssertionError("no keys are clear")


def ragged(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Return keys [H, S, D] that are NaN behind the lengths, and the keys of each head."""
    heads = [draw(length).to(dtype) for length in lengths]
    return padded(heads, SIZE), heads


@pytest.mark.parametrize("rows", [1, 7, SIZE, 1000])
def test_heads_of_any_length(rows: int) -> None:
    lengths = [SIZE, 1, 40, 0, 2, GROUP + 1, int(torch.randint(1, SIZE, ()))]
    keys, heads = ragged(lengths)
    workspace = rows * len(lengths) * 3 * GROUP * BYTES_PER_ENTRY
    ours = redundancy(keys, torch.tensor(lengths), workspace_bytes=workspace)
    assert ours.dtype == torch.float32
    for row, head in zip(ours, heads, strict=True):
        wanted = decoding.redundancy(head)
        torch.testing.assert_close(row[: len(head)].double(), wanted, rtol=1e-5, atol=1e-8)
        assert not row[len(head) :].any()


def test_the_rows_differ_from_a_plain_mean_of_cosines() -> None:
    """The inputs of this file reach the rule of the last similar key, in many rows."""
    keys = draw(SIZE)
    directions = torch.nn.functional.normalize(keys.double(), dim=-1)
    plain = (directions @ directions.T).fill_diagonal_(0)
    changed = (decoding.similarity(keys) != plain).any(1)
    assert changed.sum() > SIZE // 2


def test_the_last_value_above_a_threshold() -> None:
    """In any group, at its borders, or nowhere; a value that equals it is not above."""
    values = torch.full((2, 40, 3 * GROUP), -1.0)
    rare = torch.rand(values.shape) > 0.995
    values[rare] = torch.rand(int(rare.sum()))
    for row, slots in enumerate(([0], [GROUP - 1], [GROUP], [3 * GROUP - 1], [], [5, GROUP + 5])):
        values[0, row] = 0.5
        values[0, row, slots] = 0.75
    ours = last_above(values, 0.5)
    for head in range(2):
        for row in range(40):
            above = (values[head, row] > 0.5).nonzero().flatten().tolist()
            assert ours[head, row] == (above[-1] if above else -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_of_low_precision_are_compared_in_float32(dtype: torch.dtype) -> None:
    while True:
        keys, (head,) = ragged([SIZE], dtype)
        if is_clear(head):
            break
    ours = redundancy(keys, torch.tensor([SIZE]))
    torch.testing.assert_close(ours[0].double(), decoding.redundancy(head), rtol=1e-5, atol=1e-8)


def test_memory_is_bounded_and_the_device_is_not_waited_for() -> None:
    """No temporary is larger than the keys or the workspace, whatever the length."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    keys, workspace = torch.randn(2, 1500, 8), 1 << 20
    with Watch():
        ours = redundancy(keys, torch.tensor([1500, 900]), workspace_bytes=workspace)
    assert keys.nbytes <= largest <= workspace < 2 * 1500 * 1500 * 4
    torch.testing.assert_close(ours.sum(1), torch.ones(2))
    keys = torch.empty(2, SIZE, HEAD_SIZE, device="meta")
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    assert redundancy(keys, lengths, workspace_bytes=1 << 12).shape == (2, SIZE)


def test_arguments() -> None:
    keys = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match=r"lengths \[H\], not \[2, 5, 4\], \[3\]"):
        redundancy(keys, torch.tensor([5, 5, 5]))
