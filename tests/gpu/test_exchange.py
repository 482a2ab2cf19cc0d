# SPDX-License-Identifier: Apache-2.0
"""Tokens that come from the tier, in PyTorch and on Triton: every bit, every page format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import kernels as reference
from tests.gpu.test_copy import FORMATS, pools_of
from tests.unit.test_recall import assert_gives_back, make_pool
from vllm_tgvkv.kernels.copy import as_integers
from vllm_tgvkv.kernels.exchange import Exchange, exchange, fetch_tokens
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.recall import tier as tier_module
from vllm_tgvkv.recall.tier import PinnedTier


def random_exchange(counts: list[int], size: int, num_blocks: int, share: float) -> Exchange:
    """Return an exchange of about a share of the tokens, in a region of as few blocks as fit."""
    pairs = len(counts)
    counts = [*counts[:-1], counts[-1] + -sum(counts) % pairs]
    num_tokens = size * (max(counts) + 3)
    before = [torch.randperm(num_tokens)[: number * size] for number in counts]
    wanted = []
    for tokens in before:
        others = torch.randperm(num_tokens)
        others = others[~torch.isin(others, tokens)]
        goes = torch.rand(len(tokens)) < share
        goes[len(others) :] = False
        wanted.append(torch.where(goes, others[torch.arange(len(tokens)) % len(others)], tokens))
    current, asked = (torch.cat(each).view(-1, size).int() for each in (before, wanted))
    offsets = page_offsets(torch.tensor(counts))
    return Exchange(
        current,
        exchange(current, asked, offsets, num_tokens),
        offsets,
        torch.randperm(num_blocks)[: sum(counts) // pairs],
        torch.randperm(num_tokens // size + 2)[: num_tokens // size],
    )


@settings(max_examples=40)
@given(
    page_format=st.sampled_from(FORMATS),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 16]),
    head_size=st.sampled_from([1, 5, 12, 64, 80, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    share=st.sampled_from([0, 0.05, 1]),
)
def test_every_format(
    kernels: str,
    page_format: str,
    counts: list[int],
    size: int,
    head_size: int,
    dtype: torch.dtype,
    share: float,
) -> None:
    """Slots to which no token comes keep their bits, and their positions."""
    pairs, num_blocks = len(counts), 30
    moves = random_exchange(counts, size, num_blocks, share)
    keys, values = pools_of(page_format, num_blocks * pairs, size, head_size, dtype, kernels)
    shape = (len(moves.tier_blocks) + 2, pairs * size, 2 * head_size)
    tier = torch.randint(256, (*shape[:2], shape[2] * dtype.itemsize), dtype=torch.uint8)
    tier = tier.view(as_integers(keys).dtype)
    stored = torch.randint(-(2**31), 2**31, (num_blocks * pairs, size)).int()
    expected = [each.cpu().clone() for each in (as_integers(keys), as_integers(values), stored)]
    reference.fetch_tokens(tier, *expected, moves)
    stored, tier = stored.to(kernels), tier.to(kernels)
    on_device = Exchange(*(getattr(moves, part.name).to(kernels) for part in fields(moves)))
    fetch_tokens(tier, keys, values, stored, on_device)
    for found, wanted in zip((keys, values, stored), expected, strict=True):
        assert torch.equal(as_integers(found).cpu(), as_integers(wanted))
    assert int(on_device.num_moved) == int((moves.before != moves.after).sum())


class NeverWaits(PinnedTier):
    """Raises where the host would wait for the device."""

    def write(self, pool_blocks: torch.Tensor, blocks: np.ndarray) -> None:
        with no_synchronisation():
            super().write(pool_blocks, blocks)

    def exchange(self, exchange: Exchange, stored: torch.Tensor) -> Callable[[], None]:
        with no_synchronisation():
            return super().exchange(exchange, stored)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tier_in_pinned_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its buffers is filled several times."""
    monkeypatch.setattr(tier_module, "_WORKSPACE_BYTES", 1)
    pool = make_pool(True, dtype, "cuda")
    assert_gives_back(NeverWaits(pool, 12), pool)


def test_wrong_arguments_are_named() -> None:
    moves = random_exchange([1, 2], 4, 6, 0.5)
    keys, values = pools_of("joint", 12, 4, 8, torch.bfloat16)
    tier, stored = torch.zeros(9, 8, 16).short(), torch.zeros(12, 4).int()
    good = {"tier": tier, "key_pages": keys, "value_pages": values, "stored": stored}
    for name, value in (
        ("tier", tier.int()),
        ("tier", tier[:, :4]),
        ("tier", tier.transpose(0, 1)),
        ("value_pages", values[1:]),
        ("stored", stored.long()),
        ("stored", stored[1:]),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            fetch_tokens(**{**good, name: value}, exchange=moves)
    fetch_tokens(**good, exchange=replace(moves, after=moves.before))
