# SPDX-License-Identifier: Apache-2.0
"""`check_integrity` finds damage: each test breaks the books of a real engine and mends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.running import Ask, Engine, engine
from tests.models import LLAVA_IMAGE, random_image, random_text
from vllm_tgvkv.integrity import IntegrityError, check_integrity
from vllm_tgvkv.manager import Compression, EvictingManager
from vllm_tgvkv.scheduler import EvictionScheduler

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def ask(seed: int, max_tokens: int = 200) -> Ask:
    text = f"{random_text(seed, 20)}{LLAVA_IMAGE}{random_text(seed + 1, 250)}"
    return Ask(text, (random_image(seed, 112, 112),), max_tokens)


@pytest.fixture(scope="module")
def running(tiny_model: Callable[..., Path]) -> Iterator[Engine]:
    """One request that decodes over a compressed region, one between two chunks."""
    folder = tiny_model("llava", image_size=112)
    settings = {"policy": "tgv", "budget": 0.3}
    with engine(folder, settings, max_num_batched_tokens=128) as running:
        running.add(ask(1))
        while not running.scheduler._manager.compressions:
            running.step()
        while not the_compressed(running.scheduler)[1].swapped:
            running.step()
        running.step()
        running.add(ask(5))
        running.step()
        yield running


def the_compressed(scheduler: EvictionScheduler) -> tuple[str, Compression]:
    """The request whose row is compressed."""
    return next(iter(scheduler._manager.compressions.items()))


@pytest.fixture
def scheduler(running: Engine) -> Iterator[EvictionScheduler]:
    """Sound before a test, and sound again once the test has taken its damage back."""
    check_integrity(running.scheduler)
    yield running.scheduler
    check_integrity(running.scheduler)


@pytest.fixture
def manager(scheduler: EvictionScheduler) -> EvictingManager:
    return scheduler._manager


@pytest.fixture
def row(scheduler: EvictionScheduler) -> list[Any]:
    """The blocks of the compressed request: region, null blocks, tail."""
    request_id, compression = the_compressed(scheduler)
    blocks = scheduler._manager.req_to_blocks[request_id]
    assert compression.swapped
    assert 2 <= compression.num_retained_blocks < compression.num_full_blocks < len(blocks)
    return blocks


def expect(scheduler: EvictionScheduler, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        check_integrity(scheduler)


@pytest.mark.parametrize("change", [1, -1])
def test_wrong_reference_count(scheduler: EvictionScheduler, row: list[Any], change: int) -> None:
    for block in (row[0], row[-1]):
        block.ref_cnt += change
        expect(scheduler, rf"block {block.block_id} counts {1 + change} owners and has 1")
        block.ref_cnt -= change


def test_owner_of_a_free_block(scheduler: EvictionScheduler, row: list[Any]) -> None:
    """A block that was given back is still in a row."""
    free = scheduler._manager.block_pool.free_block_queue.get_all_free_blocks()[-1]
    row.append(free)
    expect(scheduler, rf"block {free.block_id} counts 0 owners and has 1")
    row.pop()


def test_held_block_in_the_free_list(scheduler: EvictionScheduler, row: list[Any]) -> None:
    queue = scheduler._manager.block_pool.free_block_queue
    queue.append(row[-1])
    expect(scheduler, rf"block {row[-1].block_id} with 1 owners is in the free list")
    queue.remove(row[-1])


def test_lost_block(scheduler: EvictionScheduler) -> None:
    """Neither free nor held: a leak."""
    queue = scheduler._manager.block_pool.free_block_queue
    block = queue.popleft()
    expect(scheduler, rf"block {block.block_id} with 0 owners is not in the free list")
    queue.append(block)


def test_leaked_reservation(scheduler: EvictionScheduler, manager: EvictingManager) -> None:
    """Fresh blocks that were taken and then forgotten."""
    (block,) = manager.block_pool.get_new_blocks(1)
    expect(scheduler, rf"block {block.block_id} counts 1 owners and has 0")
    _, compression = the_compressed(scheduler)
    compression.reserved = (block,)
    check_integrity(scheduler)  # a reservation owns its blocks
    compression.reserved = ()
    manager.block_pool.free_blocks([block])


def test_count_of_the_free_list(scheduler: EvictionScheduler) -> None:
    queue = scheduler._manager.block_pool.free_block_queue
    queue.num_free_blocks += 1
    expect(scheduler, r"the free list holds \d+ blocks but counts \d+")
    queue.num_free_blocks -= 1


def test_block_twice_in_the_free_list(
    scheduler: EvictionScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's list is linked through the blocks and cannot hold one twice; ours to notice."""
    queue = scheduler._manager.block_pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(queue, "get_all_free_blocks", lambda: [*blocks, blocks[0]])
        expect(scheduler, "a block is in the free list twice")


def test_hashed_block_in_a_region(scheduler: EvictionScheduler, row: list[Any]) -> None:
    """Another request could take it as its prefix."""
    row[1]._block_hash = b"some prefix"
    expect(scheduler, rf"block {row[1].block_id} in the region of .* is null, hashed or shared")
    row[1]._block_hash = None


def test_shared_block_in_a_region(scheduler: EvictionScheduler, row: list[Any]) -> None:
    others = next(r for r in scheduler._manager.req_to_blocks.values() if r is not row)
    others.append(row[0])
    row[0].ref_cnt += 1
    expect(scheduler, rf"block {row[0].block_id} in the region of .* is null, hashed or shared")
    row[0].ref_cnt -= 1
    others.pop()


def test_null_block_in_a_region_or_a_tail(scheduler: EvictionScheduler, row: list[Any]) -> None:
    null = scheduler._manager._null_block
    for index, message in ((0, "in the region of .* is null"), (-1, "a null block in its tail")):
        block, row[index] = row[index], null
        block.ref_cnt -= 1
        scheduler._manager.block_pool.free_block_queue.append(block)
        expect(scheduler, message)
        scheduler._manager.block_pool.free_block_queue.remove(block)
        block.ref_cnt += 1
        row[index] = block


def test_block_between_region_and_tail(scheduler: EvictionScheduler, row: list[Any]) -> None:
    """A prompt block that was not given back."""
    _, compression = the_compressed(scheduler)
    (block,) = scheduler._manager.block_pool.get_new_blocks(1)
    index = compression.num_retained_blocks
    null, row[index] = row[index], block
    expect(scheduler, "holds blocks between its region and its tail")
    row[index] = null
    scheduler._manager.block_pool.free_blocks([block])


@pytest.mark.parametrize("retained", [0, 1000])
def test_impossible_region(
    scheduler: EvictionScheduler, manager: EvictingManager, retained: int
) -> None:
    request_id, compression = the_compressed(scheduler)
    manager.compressions[request_id] = replace(compression, num_retained_blocks=retained)
    expect(scheduler, rf"request {request_id} retains {retained} of \d+ blocks")
    manager.compressions[request_id] = compression


def test_region_without_blocks(scheduler: EvictionScheduler, manager: EvictingManager) -> None:
    _, compression = the_compressed(scheduler)
    manager.compressions["ghost"] = compression
    expect(scheduler, "request ghost has a region but no blocks")
    manager.compressions["ghost"] = replace(compression, swapped=False)
    expect(scheduler, r"evictions are pending for unknown requests \['ghost'\]")
    del manager.compressions["ghost"]


def test_blocks_of_an_unknown_request(
    scheduler: EvictionScheduler, manager: EvictingManager
) -> None:
    """A request that ended without giving its blocks back."""
    (block,) = manager.block_pool.get_new_blocks(1)
    manager.req_to_blocks["ghost"] = [block]
    expect(scheduler, r"blocks are held for unknown requests \['ghost'\]")
    del manager.req_to_blocks["ghost"]
    manager.block_pool.free_blocks([block])


def test_debug_option_checks_each_step(
    running: Engine, scheduler: EvictionScheduler, row: list[Any]
) -> None:
    """With `check_integrity` damage ends the next step, without it nothing is recounted."""
    config = scheduler.eviction_config
    scheduler.eviction_config = replace(config, debug=replace(config.debug, check_integrity=True))
    row[0].ref_cnt += 1
    with pytest.raises(IntegrityError, match="counts 2 owners and has 1"):
        scheduler.schedule()
    row[0].ref_cnt -= 1
    scheduler.eviction_config = config
