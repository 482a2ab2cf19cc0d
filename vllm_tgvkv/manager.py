# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec and block manager: who holds which block of a compressed request.

A request's row of blocks, before and after its eviction (t0 full prompt blocks,
k of them retained, T tail blocks):

    before   [ p_0 ... p_{k-1} ... p_{t0-1} | tail_0 ... tail_{T-1} ]
    after    [ f_0 ... f_{k-1} | null ... null | tail_0 ... tail_{T-1} ]

    p     prompt blocks: given back to the pool at the end of the step that evicts;
          prefix-cache entries on them stay valid until the pool reuses them
    f     fresh blocks: reserved when the last prefill chunk is scheduled, so that
          running out is vLLM's ordinary back-pressure; never hashed
    tail  the partial last prompt block and decoded tokens: vLLM appends to it

Where a guard (budget `auto`) finds that fewer than k blocks are enough, the last of them
become null as well, once the scheduler hears of it.

Positions, slot mapping and sequence lengths of vLLM are not touched.

A prompt needs all of its blocks once, and its fresh ones beside them, before it shrinks. So that
prompts which prefill together do not take these from each other, they finish in the order in which
they were admitted (a banker's order, see `Prefill`); decoding requests count by what they hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.request import Request

_OUT_OF_ORDER = sys.maxsize


@dataclass
class Compression:
    """A request that is evicted when its prefill ends, and where it stands."""

    request: Request
    num_retained_blocks: int
    num_full_blocks: int
    reserved: tuple[KVCacheBlock, ...] = ()
    """Fresh blocks held between the scheduling of the last chunk and the swap."""
    swapped: bool = False
    """Whether the request's row is compressed now."""
    deferred: bool = False
    """Whether the last chunk had to wait for the blocks to copy into."""

    def needs_reservation(self, num_tokens: int) -> bool:
        """Whether a chunk that brings the request to `num_tokens` ends its prompt."""
        return not (self.reserved or self.swapped) and num_tokens >= self.request.num_prompt_tokens


@dataclass
class Prefill:
    """What an admitted prompt still takes from the pool, and what it brings back at its end.

    Prefills are kept in the order of admission. They are safe as long as the first can take all it
    still needs from the free blocks, the second once the first has given back, and so on: then
    none has to be preempted for another. What decoding requests take in the meantime is not in
    these sums; vLLM preempts for it as ever.
    """

    number: int
    """Place in the order of admission."""
    num_tokens: int
    """Tokens it computes: the prompt, and after a preemption what it had generated."""
    num_left: int = 0
    """Blocks it still takes."""
    num_returned: int = 0
    """Blocks it gives back when it is evicted; those that others share are not counted."""
    last_step: int = 0


@dataclass
class Queue:
    """Prefills one behind the other, each of which ends before the next one goes on."""

    wanted: int | None = None
    """Free blocks without which one of them would not finish; None if there are none."""
    brought: int = 0
    """Blocks that are free more, or less, once all of them have ended."""

    def add(self, prefill: Prefill) -> None:
        self.brought -= prefill.num_left
        self.wanted = max(self.wanted or 0, -self.brought)
        self.brought += prefill.num_returned

    @classmethod
    def of(cls, prefills: Iterable[Prefill]) -> Queue:
        queue = cls()
        for prefill in prefills:
            queue.add(prefill)
        return queue


@dataclass(frozen=True)
class Admission:
    """A request that vLLM is about to admit, and how many of its blocks others hold as well."""

    request_id: str
    num_tokens: int
    num_shared: int


@dataclass(frozen=True)
class Swap:
    """Block ids around one eviction, as the worker needs them."""

    old_blocks: list[int]
    new_blocks: list[int]
    row_blocks: list[int]
    num_freed: int
    deferred: bool
    """Whether the last chunk had to wait for the blocks to copy into."""


class EvictingManager(FullAttentionManager):
    """A `FullAttentionManager` whose requests may trade prompt blocks for fewer fresh ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compressions: dict[str, Compression] = {}
        self.prefills: dict[str, Prefill] = {}
        """Requests that are admitted and have not got all of their blocks, in that order."""
        self._admission: Admission | None = None
        self._num_admitted = 0
        self._step = 0
        self._advanced, self._last_advanced = Queue(), 0
        """Prefills that have advanced in this step, and the number of the last of them. They do so
        in their order, so that each costs an addition; `_OUT_OF_ORDER` where they did not."""
        self.released: list[int] = []
        """First block ids of regions dropped since the last drain."""
        self.record_freed = False
        self.freed: list[int] = []
        """Unhashed blocks given back since the last drain, if `record_freed`."""

    # -- reservation, while the prefill is scheduled ------------------------------------

    def expect_eviction(self, request: Request, num_retained: int, num_full: int) -> None:
        """Reserve `num_retained` fresh blocks when the request's last chunk is scheduled."""
        self.compressions[request.request_id] = Compression(request, num_retained, num_full)

    def forget(self, request_id: str) -> None:
        """Drop the record of a request that holds no blocks: it ended, or stays as it is."""
        compression = self.compressions.pop(request_id, None)
        assert compression is None or not (compression.reserved or compression.swapped)

    def can_ever_fit(self, request: Request, num_retained: int) -> bool:
        """Whether an empty pool would hold the prompt and the retained blocks together.

        It holds all that follows then, however often the request is preempted: what is replayed
        behind the prompt takes the place of blocks that the prompt gave back.
        """
        usable = self.block_pool.num_gpu_blocks - 1  # the null block is never handed out
        return cdiv(request.num_prompt_tokens, self.block_size) + num_retained <= usable

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Blocks for a chunk, or with `apply_admission_cap` for a whole request.

        vLLM compares the number with the free blocks. A request that is not admitted yet is asked
        for more than it takes, where earlier prefills need the free blocks.
        """
        num_blocks = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        compression = self.compressions.get(request_id)
        if compression and compression.needs_reservation(num_tokens):
            num_free = self.block_pool.get_num_free_blocks()
            if num_blocks <= num_free < num_blocks + compression.num_retained_blocks:
                compression.deferred = True
            num_blocks += compression.num_retained_blocks
        if request_id in self.req_to_blocks:
            return num_blocks
        if not apply_admission_cap:
            return num_blocks + (Queue.of(self.prefills.values()).wanted or 0)
        num_shared = sum(block.ref_cnt > 0 for block in new_computed_blocks)
        self._admission = Admission(request_id, num_tokens, num_shared)
        if compression:
            # At its end the prompt gives blocks back, before what follows is computed again.
            num_behind = self._num_behind(compression, num_tokens)
            num_blocks -= min(num_behind, compression.num_full_blocks - num_shared)
        return max(num_blocks - self._brought_back(num_shared), 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        compression = self.compressions.get(request_id)
        if compression and compression.needs_reservation(num_tokens):
            num_retained = compression.num_retained_blocks
            compression.reserved = tuple(self.block_pool.get_new_blocks(num_retained))
        if (admission := self._admission) and admission.request_id == request_id:
            self._admission = None
            self._admit(admission)
        if request_id in self.prefills:
            self._advance(request_id)
        return new_blocks

    # -- prefills beside each other -----------------------------------------------------

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self._step += 1
        self._advanced, self._last_advanced = Queue(), 0

    def may_take(self, request_id: str, num_tokens: int) -> bool:
        """Whether a prefill may grow to `num_tokens` now, and those before it still finish.

        Only prefills that advance in this step are waited for: one that does not may itself wait
        for something that this one holds, such as a place in the encoder's cache.
        """
        prefill = self.prefills.get(request_id)
        if prefill is None:
            return True
        wanted = self._advanced_before(prefill).wanted
        if wanted is None:
            return True
        num_blocks = cdiv(num_tokens, self.block_size) - len(self.req_to_blocks[request_id])
        compression = self.compressions.get(request_id)
        if compression and compression.needs_reservation(num_tokens):
            num_blocks += compression.num_retained_blocks
        return num_blocks + wanted <= self.block_pool.get_num_free_blocks()

    def _advanced_before(self, prefill: Prefill) -> Queue:
        """The prefills before this one that advance in this step."""
        if prefill.number > self._last_advanced:
            return self._advanced
        return Queue.of(
            other
            for other in self.prefills.values()
            if other.number < prefill.number and other.last_step == self._step
        )

    def _brought_back(self, num_shared: int) -> int:
        """Blocks that are free more, or less, once all prefills have ended.

        What the next request shares with them is not given back; or all keep what they have.
        """
        num_left = sum(prefill.num_left for prefill in self.prefills.values())
        num_returned = sum(prefill.num_returned for prefill in self.prefills.values())
        return max(num_returned - num_shared, 0) - num_left

    def _admit(self, admission: Admission) -> None:
        num_shared = admission.num_shared
        for prefill in self.prefills.values():
            if not num_shared:
                break
            kept = min(prefill.num_returned, num_shared)
            prefill.num_returned -= kept
            num_shared -= kept
            self._last_advanced = _OUT_OF_ORDER
        self._num_admitted += 1
        prefill = Prefill(self._num_admitted, admission.num_tokens)
        self.prefills[admission.request_id] = prefill
        if compression := self.compressions.get(admission.request_id):
            prefill.num_returned = max(compression.num_full_blocks - admission.num_shared, 0)

    def _advance(self, request_id: str) -> None:
        """Bring a prefill's sums up to date; it is none any more once it has all its blocks."""
        prefill = self.prefills[request_id]
        if prefill.last_step == self._step or prefill.number < self._last_advanced:
            self._last_advanced = _OUT_OF_ORDER
        prefill.last_step = self._step
        num_held = len(self.req_to_blocks[request_id])
        compression = self.compressions.get(request_id)
        if compression is None or compression.swapped:
            prefill.num_left = cdiv(prefill.num_tokens, self.block_size) - num_held
            prefill.num_returned = 0
            if prefill.num_left <= 0:
                del self.prefills[request_id]
                return
        else:
            num_prompt_blocks = cdiv(compression.request.num_prompt_tokens, self.block_size)
            num_behind = self._num_behind(compression, prefill.num_tokens)
            prefill.num_left = num_prompt_blocks - num_held
            prefill.num_left += max(num_behind - prefill.num_returned, 0)
            if not compression.reserved:
                prefill.num_left += compression.num_retained_blocks
        if prefill.number > self._last_advanced:
            self._advanced.add(prefill)
            self._last_advanced = prefill.number

    def _num_behind(self, compression: Compression, num_tokens: int) -> int:
        """Blocks of tokens that a preempted request had generated."""
        num_prompt_blocks = cdiv(compression.request.num_prompt_tokens, self.block_size)
        return cdiv(num_tokens, self.block_size) - num_prompt_blocks

    def is_compressed(self, request_id: str) -> bool:
        """Whether the request's row starts with a compressed region."""
        compression = self.compressions.get(request_id)
        return compression is not None and compression.swapped

    # -- the swap, right after the last chunk was scheduled -----------------------------

    def swap(self, request_id: str) -> Swap:
        """Put the fresh blocks in place of the prompt's and give those back to the pool.

        The copy runs at the end of this step's forward pass; whoever gets a freed
        block writes to it in a later step.
        """
        compression = self.compressions[request_id]
        num_full, fresh = compression.num_full_blocks, compression.reserved
        blocks = self.req_to_blocks[request_id]
        old = blocks[:num_full]
        num_prompt_blocks = cdiv(compression.request.num_prompt_tokens, self.block_size)
        old_ids = [block.block_id for block in blocks[:num_prompt_blocks]]
        nulls = [self._null_block] * (num_full - len(fresh))
        blocks[:num_full] = [*fresh, *nulls]
        compression.reserved, compression.swapped = (), True
        free_before = self.block_pool.get_num_free_blocks()
        self._give_back(old)
        if request_id in self.prefills:
            self._advance(request_id)
        return Swap(
            old_blocks=old_ids,
            new_blocks=[block.block_id for block in fresh],
            row_blocks=[block.block_id for block in blocks],
            num_freed=self.block_pool.get_num_free_blocks() - free_before,
            deferred=compression.deferred,
        )

    def num_held(self) -> tuple[int, int]:
        """Requests that are compressed now, and the blocks they hold."""
        compressed = [(r, c) for r, c in self.compressions.items() if c.swapped]
        blocks = sum(
            c.num_retained_blocks + len(self.req_to_blocks[r]) - c.num_full_blocks
            for r, c in compressed
        )
        return len(compressed), blocks

    def block_ids(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Ids of the blocks that hold a request's first tokens, int32 [ceil(num_tokens / N)]."""
        blocks = self.req_to_blocks[request_id][: cdiv(num_tokens, self.block_size)]
        return np.array([block.block_id for block in blocks], dtype=np.int32)

    def trim(self, request_id: str, first_block: int, num_retained: int) -> int | None:
        """Give back what a region that starts with `first_block` holds beyond `num_retained`.

        Its pages are dealt to the first blocks, so no page table points to the others.
        Returns the number of blocks given back, or None if there is no such region any more.
        """
        compression = self.compressions.get(request_id)
        if compression is None or not compression.swapped:
            return None
        blocks = self.req_to_blocks[request_id]
        if blocks[0].block_id != first_block:
            return None
        spare = slice(num_retained, compression.num_retained_blocks)
        given_back = blocks[spare]
        blocks[spare] = [self._null_block] * len(given_back)
        compression.num_retained_blocks = num_retained
        self._give_back(given_back)
        return len(given_back)

    def uncache_uncomputed(self, request: Request) -> None:
        """Take blocks out of the prefix cache that a step fills which will not run.

        vLLM enters a chunk's blocks when it schedules the chunk. Under the policy `priority` it
        may preempt the request later in the same step, and leaves the entries there: whoever hits
        them, the request itself first of all, reads blocks that nobody wrote.
        """
        first = request.num_computed_tokens // self.block_size
        blocks = self.req_to_blocks.get(request.request_id, [])[first:]
        self.block_pool.evict_blocks({block.block_id for block in blocks if not block.is_null})

    # -- vLLM's side of the life of a request -------------------------------------------

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # What a compressed request decodes depends on the keys that were kept, so its
        # blocks must never serve as another request's prefix.
        if not self.is_compressed(request.request_id):
            super().cache_blocks(request, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        prefill = self.prefills.pop(request_id, None)
        if prefill is not None and prefill.last_step == self._step:
            self._last_advanced = _OUT_OF_ORDER
        if compression := self.compressions.get(request_id):
            # Ended or preempted; a preempted request is evicted again after it has
            # prefilled again.
            if compression.swapped:
                self.released.append(blocks[0].block_id)
            blocks.extend(compression.reserved)
            compression.reserved, compression.swapped = (), False
        self._record_freed(blocks)
        return blocks

    def drain_released(self) -> list[int]:
        released, self.released = self.released, []
        return released

    def drain_freed(self) -> list[int]:
        freed, self.freed = self.freed, []
        return freed

    def _give_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._record_freed(blocks)
        # Last blocks first, as vLLM frees: the pool reuses those least likely to be hit.
        self.block_pool.free_blocks(reversed(blocks))

    def _record_freed(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.record_freed:
            self.freed.extend(
                block.block_id
                for block in blocks
                if block.ref_cnt == 1 and block.block_hash is None and not block.is_null
            )


@register_kv_cache_spec(manager_class=EvictingManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Full attention whose blocks are managed by `EvictingManager`."""
