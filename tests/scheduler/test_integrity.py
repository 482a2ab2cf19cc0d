# SPDX-License-Identifier: Apache-2.0
"""`check_integrity` finds damage: each case breaks the records of a scheduler at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.blocks.integrity import IntegrityError, check_integrity
from vllm_tgvkv.blocks.manager import Compression, EvictingManager
from vllm_tgvkv.scheduler.scheduler import EvictionScheduler


@dataclass
class Work:
    """A scheduler with a request that decodes over a region and one between two chunks."""

    scheduler: EvictionScheduler
    manager: EvictingManager
    pool: Any
    queue: Any
    """The list of free blocks."""
    compression: Compression
    row: list[Any]
    """The blocks of the compressed request: region, null blocks, tail."""


def make_work(checks_each_step: bool = False) -> Work:
    debug = {"check_integrity": checks_each_step}
    double = Double(Setup(chunk=128, eviction={"policy": "tgv", "budget": 0.3, "debug": debug}))
    double.arrive(Job("decodes", tuple(range(3, 303)), 200, ((20, 49),)))
    while not double.scheduler.manager.is_compressed("decodes"):
        double.step()
    double.step()
    double.arrive(Job("prefills", tuple(range(400, 700)), 200, ((20, 49),)))
    double.step()
    assert 0 < double.scheduler.requests["prefills"].num_computed_tokens < 300
    manager = double.scheduler.manager
    compression, row = manager.compressions["decodes"], manager.req_to_blocks["decodes"]
    assert compression.swapped
    assert 2 <= compression.num_retained < compression.num_replaced < len(row)
    pool = manager.block_pool
    return Work(double.scheduler, manager, pool, pool.free_block_queue, compression, row)


def check(work: Work) -> None:
    scheduler = work.scheduler
    check_integrity(scheduler.manager, scheduler.other_managers, scheduler.requests.keys())


def miscount(work: Work, index: int, change: int) -> str:
    block = work.row[index]
    block.ref_cnt += change
    return rf"block {block.block_id} counts {1 + change} owners and has 1"


def give_back_and_keep(work: Work) -> str:
    free = work.queue.get_all_free_blocks()[-1]
    work.row.append(free)
    return rf"block {free.block_id} counts 0 owners and has 1"


def free_a_held_block(work: Work) -> str:
    work.queue.append(work.row[-1])
    return rf"block {work.row[-1].block_id} with 1 owners is in the free list"


def leak(work: Work) -> str:
    """A block is neither free nor held."""
    return rf"block {work.queue.popleft().block_id} with 0 owners is not in the free list"


def leak_a_reservation(work: Work) -> str:
    """Fresh blocks were taken and are not recorded; a reservation would own its blocks."""
    (block,) = work.pool.get_new_blocks(1)
    work.compression.reserved = (block,)
    check(work)
    work.compression.reserved = ()
    return rf"block {block.block_id} counts 1 owners and has 0"


def miscount_the_free_list(work: Work) -> str:
    work.queue.num_free_blocks += 1
    return r"the free list holds \d+ blocks but counts \d+"


def list_a_block_twice(work: Work) -> str:
    """vLLM's list is linked through the blocks and cannot hold one twice; ours to notice."""
    blocks = work.queue.get_all_free_blocks()
    work.queue.get_all_free_blocks = lambda: [*blocks, blocks[0]]
    return "a block is in the free list twice"


def hash_a_block_of_a_region(work: Work) -> str:
    """Another request could take it as its prefix."""
    work.row[1]._block_hash = b"some prefix"
    return rf"block {work.row[1].block_id} in the region of .* is null, hashed or shared"


def share_a_block_of_a_region(work: Work) -> str:
    work.manager.req_to_blocks["prefills"].append(work.row[0])
    work.row[0].ref_cnt += 1
    return rf"block {work.row[0].block_id} in the region of .* is null, hashed or shared"


def lose_a_block_of_a_row(work: Work, index: int) -> str:
    work.pool.free_blocks([work.row[index]])
    work.row[index] = work.manager._null_block
    return "a null block in its tail" if index else "in the region of .* is null"


def keep_a_block_behind_a_region(work: Work) -> str:
    """A prompt block was not given back."""
    (work.row[work.compression.num_retained],) = work.pool.get_new_blocks(1)
    return "holds blocks between its region and its tail"


def retain_an_impossible_number(work: Work, retained: int) -> str:
    work.compression.num_retained = retained
    return rf"request decodes retains {retained} of \d+ blocks"


def invent_a_region(work: Work) -> str:
    work.manager.compressions["ghost"] = work.compression
    return "request ghost has a region but no blocks"


def invent_a_pending_eviction(work: Work) -> str:
    work.manager.compressions["ghost"] = replace(work.compression, num_retained=0)
    return r"evictions are pending for unknown requests \['ghost'\]"


def end_without_giving_back(work: Work) -> str:
    work.manager.req_to_blocks["ghost"] = work.pool.get_new_blocks(1)
    return r"blocks are held for unknown requests \['ghost'\]"


@pytest.mark.parametrize(
    ("damage", "arguments"),
    [
        *((miscount, (index, change)) for index in (0, -1) for change in (1, -1)),
        (give_back_and_keep, ()),
        (free_a_held_block, ()),
        (leak, ()),
        (leak_a_reservation, ()),
        (miscount_the_free_list, ()),
        (list_a_block_twice, ()),
        (hash_a_block_of_a_region, ()),
        (share_a_block_of_a_region, ()),
        (lose_a_block_of_a_row, (0,)),
        (lose_a_block_of_a_row, (-1,)),
        (keep_a_block_behind_a_region, ()),
        (retain_an_impossible_number, (0,)),
        (retain_an_impossible_number, (1000,)),
        (invent_a_region, ()),
        (invent_a_pending_eviction, ()),
        (end_without_giving_back, ()),
    ],
)
def test_damage_is_found(damage: Callable[..., str], arguments: tuple[int, ...]) -> None:
    work = make_work()
    check(work)
    message = damage(work, *arguments)
    with pytest.raises(IntegrityError, match=message):
        check(work)


@pytest.mark.parametrize("checks_each_step", [True, False])
def test_debug_option_checks_each_step(checks_each_step: bool) -> None:
    work = make_work(checks_each_step)
    work.row[0].ref_cnt += 1
    if not checks_each_step:
        work.scheduler.schedule()
        return
    with pytest.raises(IntegrityError, match="counts 2 owners and has 1"):
        work.scheduler.schedule()
