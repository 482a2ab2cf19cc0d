# SPDX-License-Identifier: Apache-2.0
"""`check_integrity` finds damage: each test breaks the records of a scheduler at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.blocks.integrity import IntegrityError, check_integrity
from vllm_tgvkv.blocks.manager import Compression, EvictingManager
from vllm_tgvkv.scheduler.scheduler import EvictionScheduler


def make_scheduler(checks_each_step: bool = False) -> EvictionScheduler:
    """Return a scheduler with a request that decodes over a region and one between two chunks."""
    debug = {"check_integrity": checks_each_step}
    double = Double(Setup(chunk=128, eviction={"policy": "tgv", "budget": 0.3, "debug": debug}))
    double.arrive(Job("decodes", tuple(range(3, 303)), 200, ((20, 49),)))
    while not double.scheduler.manager.is_compressed("decodes"):
        double.step()
    double.step()
    double.arrive(Job("prefills", tuple(range(400, 700)), 200, ((20, 49),)))
    double.step()
    assert 0 < double.scheduler.requests["prefills"].num_computed_tokens < 300
    return double.scheduler


@pytest.fixture
def scheduler() -> EvictionScheduler:
    return make_scheduler()


@pytest.fixture
def manager(scheduler: EvictionScheduler) -> EvictingManager:
    return scheduler.manager


@pytest.fixture
def compression(manager: EvictingManager) -> Compression:
    return manager.compressions["decodes"]


@pytest.fixture
def row(manager: EvictingManager, compression: Compression) -> list[Any]:
    """The blocks of the compressed request: region, null blocks, tail."""
    blocks = manager.req_to_blocks["decodes"]
    assert compression.swapped
    assert 2 <= compression.num_retained < compression.num_replaced < len(blocks)
    return blocks


def check(scheduler: EvictionScheduler) -> None:
    check_integrity(scheduler.manager, scheduler.other_managers, scheduler.requests.keys())


def expect(scheduler: EvictionScheduler, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        check(scheduler)


def test_undamaged(scheduler: EvictionScheduler) -> None:
    check(scheduler)


@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("change", [1, -1])
def test_wrong_reference_count(
    scheduler: EvictionScheduler, row: list[Any], index: int, change: int
) -> None:
    block = row[index]
    block.ref_cnt += change
    expect(scheduler, rf"block {block.block_id} counts {1 + change} owners and has 1")


def test_owner_of_a_free_block(
    scheduler: EvictionScheduler, manager: EvictingManager, row: list[Any]
) -> None:
    """A block that was given back is still in a row."""
    free = manager.block_pool.free_block_queue.get_all_free_blocks()[-1]
    row.append(free)
    expect(scheduler, rf"block {free.block_id} counts 0 owners and has 1")


def test_held_block_in_the_free_list(
    scheduler: EvictionScheduler, manager: EvictingManager, row: list[Any]
) -> None:
    manager.block_pool.free_block_queue.append(row[-1])
    expect(scheduler, rf"block {row[-1].block_id} with 1 owners is in the free list")


def test_lost_block(scheduler: EvictionScheduler, manager: EvictingManager) -> None:
    """A block is neither free nor held: a leak."""
    block = manager.block_pool.free_block_queue.popleft()
    expect(scheduler, rf"block {block.block_id} with 0 owners is not in the free list")


def test_leaked_reservation(
    scheduler: EvictionScheduler, manager: EvictingManager, compression: Compression
) -> None:
    """Fresh blocks were taken and are not recorded."""
    (block,) = manager.block_pool.get_new_blocks(1)
    expect(scheduler, rf"block {block.block_id} counts 1 owners and has 0")
    compression.reserved = (block,)
    check(scheduler)  # a reservation owns its blocks


def test_count_of_the_free_list(scheduler: EvictionScheduler, manager: EvictingManager) -> None:
    manager.block_pool.free_block_queue.num_free_blocks += 1
    expect(scheduler, r"the free list holds \d+ blocks but counts \d+")


def test_block_twice_in_the_free_list(
    scheduler: EvictionScheduler, manager: EvictingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's list is linked through the blocks and cannot hold one twice; ours to notice."""
    queue = manager.block_pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    monkeypatch.setattr(queue, "get_all_free_blocks", lambda: [*blocks, blocks[0]])
    expect(scheduler, "a block is in the free list twice")


def test_hashed_block_in_a_region(scheduler: EvictionScheduler, row: list[Any]) -> None:
    """Another request could take it as its prefix."""
    row[1]._block_hash = b"some prefix"
    expect(scheduler, rf"block {row[1].block_id} in the region of .* is null, hashed or shared")


def test_shared_block_in_a_region(
    scheduler: EvictionScheduler, manager: EvictingManager, row: list[Any]
) -> None:
    manager.req_to_blocks["prefills"].append(row[0])
    row[0].ref_cnt += 1
    expect(scheduler, rf"block {row[0].block_id} in the region of .* is null, hashed or shared")


@pytest.mark.parametrize(
    ("index", "message"), [(0, "in the region of .* is null"), (-1, "a null block in its tail")]
)
def test_null_block_in_a_region_or_a_tail(
    scheduler: EvictionScheduler,
    manager: EvictingManager,
    row: list[Any],
    index: int,
    message: str,
) -> None:
    manager.block_pool.free_blocks([row[index]])
    row[index] = manager._null_block
    expect(scheduler, message)


def test_block_between_region_and_tail(
    scheduler: EvictionScheduler,
    manager: EvictingManager,
    compression: Compression,
    row: list[Any],
) -> None:
    """A prompt block was not given back."""
    (row[compression.num_retained],) = manager.block_pool.get_new_blocks(1)
    expect(scheduler, "holds blocks between its region and its tail")


@pytest.mark.parametrize("retained", [0, 1000])
def test_impossible_region(
    scheduler: EvictionScheduler, compression: Compression, retained: int
) -> None:
    compression.num_retained = retained
    expect(scheduler, rf"request decodes retains {retained} of \d+ blocks")


def test_region_without_blocks(
    scheduler: EvictionScheduler, manager: EvictingManager, compression: Compression
) -> None:
    manager.compressions["ghost"] = compression
    expect(scheduler, "request ghost has a region but no blocks")
    manager.compressions["ghost"] = replace(compression, num_retained=0)
    expect(scheduler, r"evictions are pending for unknown requests \['ghost'\]")


def test_blocks_of_an_unknown_request(
    scheduler: EvictionScheduler, manager: EvictingManager
) -> None:
    """A request ended without giving its blocks back."""
    manager.req_to_blocks["ghost"] = manager.block_pool.get_new_blocks(1)
    expect(scheduler, r"blocks are held for unknown requests \['ghost'\]")


@pytest.mark.parametrize("checks_each_step", [True, False])
def test_debug_option_checks_each_step(checks_each_step: bool) -> None:
    scheduler = make_scheduler(checks_each_step)
    scheduler.manager.req_to_blocks["decodes"][0].ref_cnt += 1
    if not checks_each_step:
        scheduler.schedule()
        return
    with pytest.raises(IntegrityError, match="counts 2 owners and has 1"):
        scheduler.schedule()
