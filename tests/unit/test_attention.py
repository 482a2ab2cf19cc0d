# SPDX-License-Identifier: Apache-2.0
"""The part of a batch that is left to vLLM's attention."""

from __future__ import annotations

import random

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tgvkv.attention.base import without_rows


def batch(lengths: list[int], device: str = "cpu") -> CommonAttentionMetadata:
    """A batch whose every number tells the row or token that it belongs to."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    num_tokens, num_rows = sum(lengths), len(lengths)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.arange(100, 100 + num_rows).int().to(device),
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        max_query_len=max(lengths),
        max_seq_len=100 + num_rows,
        block_table_tensor=torch.arange(3 * num_rows).int().view(-1, 3).to(device),
        slot_mapping=torch.arange(num_tokens).to(device),
    )


def some_batch(dice: random.Random) -> tuple[list[int], int, list[int]]:
    """Tokens of each row, the number of first rows to take away, and the others."""
    num_first, num_rest = dice.randint(0, 3), dice.randint(1, 4)
    lengths = [1] * num_first + [dice.randint(1, 5) for _ in range(num_rest)]
    rest = range(num_first, len(lengths))
    return lengths, num_first, sorted(dice.sample(rest, dice.randint(0, num_rest)))


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_left_keep_all_that_is_theirs(seed: int) -> None:
    """It never waits for the device: tensors on `meta` have no values to wait for."""
    lengths, num_first, others = some_batch(random.Random(seed))
    whole = batch(lengths)
    rest, tokens = without_rows(whole, num_first, others)
    rows = [row for row in range(num_first, len(lengths)) if row not in others]
    left = [
        token for row in rows for token in range(*whole.query_start_loc_cpu[row : row + 2].tolist())
    ]
    assert whole.slot_mapping[tokens].tolist() == left
    on_meta, _ = without_rows(batch(lengths, "meta"), num_first, others)
    if not rows:
        assert rest is None
        assert on_meta is None
        return
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        found = getattr(on_meta, name)
        assert found.is_meta
        assert found.shape == getattr(rest, name).shape
    assert rest is not None
    expected = batch([lengths[row] for row in rows])
    assert torch.equal(rest.query_start_loc, expected.query_start_loc)
    assert torch.equal(rest.query_start_loc_cpu, expected.query_start_loc)
    assert rest.query_start_loc.dtype == torch.int32
    assert (rest.num_reqs, rest.num_actual_tokens) == (len(rows), len(left))
    assert rest.seq_lens.tolist() == [100 + row for row in rows]
    assert torch.equal(rest.block_table_tensor, whole.block_table_tensor[rows])
    assert rest.slot_mapping.tolist() == left
