# SPDX-License-Identifier: Apache-2.0
"""The message between servers about a prompt, and the header among its blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.double import Job, Setup, make_scheduler
from vllm_tgvkv.cache.header import Headers
from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.handover import (
    Handover,
    HandoverError,
    Region,
    new_nonce,
    num_header_ints,
)

REGION = Region(500, 3, 2, 15, 1, new_nonce())
MESSAGE = Handover("0a1b", 1, "reach", "f" * 32, (1, 2, 3, 4, 5), 16, REGION)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
PLAIN = MESSAGE.as_dict()


@given(region=st.none() | st.just(REGION))
def test_a_message_survives_json(region: Region | None) -> None:
    message = Handover(**{**vars(MESSAGE), "region": region})
    assert Handover.parse(json.loads(json.dumps(message.as_dict()))) == message


@given(
    whole=st.none() | JSON,
    fields=st.dictionaries(st.sampled_from([*PLAIN, "more"]), JSON, max_size=2),
    of_region=st.dictionaries(st.sampled_from([*vars(REGION), "more"]), JSON, max_size=2),
    lost=st.sets(st.sampled_from(list(PLAIN)), max_size=1),
)
def test_a_forged_message_is_refused_or_of_the_right_types(
    whole: Any, fields: dict[str, Any], of_region: dict[str, Any], lost: set[str]
) -> None:
    value = {**PLAIN, "region": {**vars(REGION), **of_region}, **fields}
    value = {name: each for name, each in value.items() if name not in lost}
    try:
        found = Handover.parse(value if whole is None else whole)
    except HandoverError:
        assert whole is not None or fields or of_region or lost
        return
    assert whole is None
    region = found.region
    assert all(type(text) is str for text in (found.settings, found.method, found.prompt))
    assert all(type(token) is int for token in found.tokens)
    assert found.num_ranks > 0
    assert found.num_cached >= 0
    if region is not None:
        numbers = (*region.nonce, region.at, region.num_planned, region.num_replaced)
        assert all(type(number) is int for number in numbers)
        assert 0 < region.num_retained <= region.num_planned <= region.num_replaced <= region.at


@given(
    num_layers=st.integers(1, 4),
    num_heads=st.integers(1, 3),
    block_size=st.sampled_from([16, 32]),
    head_size=st.sampled_from([8, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    keeps_positions=st.booleans(),
    num_retained=st.integers(1, 6),
    num_spare=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_a_region_goes_through_its_header(
    num_layers: int,
    num_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    keeps_positions: bool,
    num_retained: int,
    num_spare: int,
    seed: int,
) -> None:
    """Whatever the pools hold elsewhere, NaN included; `num_spare` blocks of the header are left,
    because a guard needed fewer than planned."""
    generator = torch.Generator().manual_seed(seed)
    shape = CacheShape(num_layers, num_heads, 1, head_size, block_size)
    num_blocks, page = 40, 2 * block_size * head_size
    pairs, sizes = shape.num_pairs, (num_blocks, shape, torch.device("cpu"), keeps_positions)

    def make() -> tuple[Headers, Regions, torch.Tensor]:
        raw = torch.full((num_blocks * pairs, page), 255, dtype=torch.uint8).to(dtype)
        if dtype.is_floating_point:
            raw.fill_(float("nan"))
        regions = Regions(*sizes)
        return Headers(PagePool(raw, raw, raw, shape), regions), regions, raw.view(num_blocks, -1)

    sender, regions, sent = make()
    num_ints = num_header_ints(pairs, num_retained, block_size, keeps_positions)
    num_header = -(-4 * num_ints // (pairs * page * dtype.itemsize)) + num_spare
    order = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    blocks, others = order[:num_retained], order[num_retained:]
    header = others[: min(num_header, len(others) // 2)]
    if 4 * num_ints > len(header) * pairs * page * dtype.itemsize:
        return  # it would not fit in this pool
    offsets = torch.randint(0, num_retained * pairs + 1, (pairs + 1,), generator=generator).int()
    positions = torch.randint(-5, 9999, (num_retained * pairs, block_size), generator=generator)
    regions.add("a", blocks[0], num_retained, 9, offsets)
    if keeps_positions:
        regions.store_positions(torch.tensor(blocks), positions.int())
    nonce, before = new_nonce(), sent.clone()
    sender.write(header, nonce, blocks, 9)
    untouched = [block for block in range(num_blocks) if block not in header]
    assert sent[untouched].view(torch.uint8).equal(before[untouched].view(torch.uint8))

    receiver, found, received = make()
    own = others[-len(header) :]
    assert not receiver.is_intact(own, nonce, num_retained, 9)
    received[own] = sent[header]
    assert receiver.is_intact(own, nonce, num_retained, 9)
    assert not receiver.is_intact(own, new_nonce(), num_retained, 9)
    assert not receiver.is_intact(own, nonce, num_retained + 1, 9)
    assert not receiver.is_intact(own, nonce, num_retained, 8)
    # Here the region lies in other blocks.
    moved = blocks[::-1]
    receiver.read(own, "b", moved, 9)
    assert found.owns("b")
    assert found.offsets[moved[0]].equal(offsets)
    assert (found.num_token_blocks[moved[0]], found.num_replaced[moved[0]]) == (num_retained, 9)
    if keeps_positions:
        of_blocks = found.positions.view(num_blocks, -1)[moved]
        # Tokens of the nine blocks that it replaces, whatever has arrived.
        positions = positions.int().clamp(0, 9 * block_size - 1)
        assert of_blocks.view(-1, block_size).equal(positions)


@pytest.mark.parametrize("number", [-5, 10**6])
def test_offsets_that_arrive_stay_within_the_region(number: int) -> None:
    shape = CacheShape(2, 2, 1, 16, 16)
    raw = torch.zeros(10 * shape.num_pairs, 2 * 16 * 16)
    regions = Regions(10, shape, raw.device)
    headers = Headers(PagePool(raw, raw, raw, shape), regions)
    offsets = torch.full((shape.num_pairs + 1,), number, dtype=torch.int32)
    regions.add("a", 3, 1, 5, offsets)
    headers.write([7], new_nonce(), [3], 5)
    headers.read([7], "b", [4], 5)
    assert regions.offsets[4].ge(0).all()
    assert regions.offsets[4].le(shape.num_pairs).all()


@given(
    data=st.data(),
    num_header=st.integers(1, 3),
    num_free=st.integers(0, 40),
    has_arrived=st.booleans(),
)
def test_the_blocks_of_a_prompt_that_comes(
    data: Any, num_header: int, num_free: int, has_arrived: bool
) -> None:
    """Header, region and tail are allocated if the pool has room, and all of them go back."""
    size = 16
    num_prompt, num_answer = data.draw(st.integers(size, 600)), data.draw(st.integers(1, 5))
    num_replaced = num_prompt // size
    num_retained = data.draw(st.integers(1, num_replaced))
    at = num_prompt + num_answer - 1
    num_tail = -(-at // size) - num_replaced
    kv_cache = make_scheduler(Setup(num_blocks=num_free)).kv_cache_manager
    (manager,) = kv_cache.coordinator.single_type_managers
    request = Job("a", tuple(range(3, 3 + num_prompt))).request(size)
    manager.expect_arrival(request, Cut(at, num_retained, num_replaced), num_header)
    found = kv_cache.allocate_slots(
        request, 0, num_external_computed_tokens=at, delay_cache_blocks=True
    )
    num_wanted = num_header + num_retained + num_tail
    assert (found is None) == (num_wanted > num_free)
    if found is not None:
        assert manager.block_pool.get_num_free_blocks() == num_free - num_wanted
        row, known = manager.req_to_blocks["a"], manager.compressions["a"]
        is_null = [block.is_null for block in row]
        num_nulls = num_replaced - num_retained
        assert is_null == [False] * num_retained + [True] * num_nulls + [False] * num_tail
        own = {block.block_id for block in (*known.header, *row) if not block.is_null}
        assert (len(known.header), len(own)) == (num_header, num_wanted)
        header = manager.arrived("a") if has_arrived else ()
        kv_cache.free(request)
        kv_cache.block_pool.free_blocks(header)
    manager.forget("a")
    assert manager.block_pool.get_num_free_blocks() == num_free
