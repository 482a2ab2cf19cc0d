# SPDX-License-Identifier: Apache-2.0
"""A check that recounts every block of the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

from vllm_tgvkv.blocks.manager import Compression, EvictingManager


class IntegrityError(RuntimeError):
    """The pool's records disagree; the message names the block or request."""


def check_integrity(
    manager: EvictingManager,
    others: Sequence[SingleTypeKVCacheManager],
    known_ids: Set[str],
    held: Iterable[KVCacheBlock] = (),
) -> None:
    """Recount owners, reservations, free list and regions.

    Every block but the null block is either in the free list with no owner, or out of it with as
    many owners as its reference count. A region's blocks have one owner and no hash, and stand at
    the start of their row, followed by null blocks.

    Args:
        others: managers of the pool's other layers, which evict nothing.
        known_ids: requests that may hold blocks.
        held: blocks that no request holds any more, and that go back to the pool later.

    Raises:
        IntegrityError: at the first disagreement.
    """
    owners: Counter[int] = Counter()
    """How many rows and reservations hold each block."""
    for rows in (manager, *others):
        for blocks in rows.req_to_blocks.values():
            owners.update(block.block_id for block in blocks if not block.is_null)
    for compression in manager.compressions.values():
        owners.update(block.block_id for block in (*compression.reserved, *compression.header))
    owners.update(block.block_id for block in held)
    _check_pool(manager.block_pool, owners)
    for request_id, compression in manager.compressions.items():
        row = manager.req_to_blocks.get(request_id, ())
        if compression.swapped or any(block.is_null for block in row):
            _check_region(request_id, compression, manager, owners)
    if unknown := manager.req_to_blocks.keys() - known_ids:
        raise IntegrityError(f"blocks are held for unknown requests {sorted(unknown)}")
    if unknown := manager.compressions.keys() - known_ids:
        raise IntegrityError(f"evictions are pending for unknown requests {sorted(unknown)}")


def _check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if len(free) != len(set(free)):
        raise IntegrityError("a block is in the free list twice")
    if len(free) != pool.get_num_free_blocks():
        raise IntegrityError(
            f"the free list holds {len(free)} blocks but counts {pool.get_num_free_blocks()}"
        )
    free_ids = set(free)
    for block in pool.blocks:
        if block.is_null:
            continue
        if block.ref_cnt != owners[block.block_id]:
            raise IntegrityError(
                f"block {block.block_id} counts {block.ref_cnt} owners and has "
                f"{owners[block.block_id]}"
            )
        if (block.ref_cnt == 0) != (block.block_id in free_ids):
            raise IntegrityError(
                f"block {block.block_id} with {block.ref_cnt} owners is "
                f"{'' if block.block_id in free_ids else 'not '}in the free list"
            )


def _check_region(
    request_id: str, compression: Compression, manager: EvictingManager, owners: Counter[int]
) -> None:
    blocks = manager.req_to_blocks.get(request_id)
    if blocks is None:
        raise IntegrityError(f"request {request_id} has a region but no blocks")
    retained, num_full = compression.num_retained, compression.num_replaced
    if not 1 <= retained <= num_full:
        raise IntegrityError(f"request {request_id} retains {retained} of {num_full} blocks")
    for block in blocks[:retained]:
        if block.is_null or block.block_hash is not None or owners[block.block_id] != 1:
            raise IntegrityError(
                f"block {block.block_id} in the region of {request_id} is null, hashed or shared"
            )
    if not all(block.is_null for block in blocks[retained:num_full]):
        raise IntegrityError(f"request {request_id} holds blocks between its region and its tail")
    if any(block.is_null for block in blocks[num_full:]):
        raise IntegrityError(f"request {request_id} has a null block in its tail")
