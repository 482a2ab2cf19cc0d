# SPDX-License-Identifier: Apache-2.0
"""The KV cache spec and block manager: who holds which block of a compressed request.

A request's row of blocks, before and after its eviction (t0 full prompt blocks,
k of them retained, T tail blocks):

    before   [ p_0 ... p_{k-1} ... p_{t0-1} | tail_0 ... tail_{T-1} ]
    after    [ f_0 ... f_{k-1} | null ... null | tail_0 ... tail_{T-1} ]

    p     prompt blocks: given back to the pool at the end of the step that evicts;
          prefix-cache entries on them stay valid until the pool reuses them
    f     fresh blocks: reserved when the chunk that ends at the cut is scheduled, so
          that running out is vLLM's ordinary back-pressure; never hashed
    tail  the partial last prompt block and decoded tokens: vLLM appends to it

A later cut does the same with region and full tail blocks in place of p. Under pressure a cut's
fresh blocks are reserved when it is decided, some tokens ahead; and as long as the pool has not
reused any p, the row can have them back. If a guard (budget
`auto`) finds that fewer than k blocks are enough, the last of them become null as well, once the
scheduler is told.

vLLM's positions, slot mapping and sequence lengths are not touched. Prompts that prefill together
finish in the order of `admission.py`; decoding requests count by the blocks they hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.request import Request

from vllm_tgvkv.blocks.admission import Prefill, PrefillOrder
from vllm_tgvkv.blocks.other_blocks import OtherBlocks
from vllm_tgvkv.shared.cuts import Cut, Cuts


@dataclass
class Compression:
    """A request that is evicted, once or several times."""

    request: Request
    cut: Cut | None
    """The next cut."""
    num_retained: int = 0
    """k, blocks of its region; 0 if the row is not compressed now."""
    num_replaced: int = 0
    """t, blocks the region replaced."""
    reserved: tuple[KVCacheBlock, ...] = ()
    """Fresh blocks held between the scheduling of the evicting chunk and the swap."""
    deferred: bool = False
    """Whether the evicting chunk had to wait for fresh blocks."""
    num_reusable: int = 0
    """Tokens of its prompt where a hit of the prefix cache ends, if not before."""
    was_cut: bool = False
    """Whether the keys of its answer depend on what a cut kept."""
    may_be_restored: bool = False
    """Whether the blocks that its first cut gives back are remembered."""
    given_back: Sequence[tuple[KVCacheBlock, BlockHashWithGroupId | None]] = ()
    """The prompt's blocks that the first cut gave back, with their hashes; () if one of them is
    known to be lost."""
    num_header: int = 0
    """Blocks that its next cut reserves for a header, if the request goes to another server."""
    header: tuple[KVCacheBlock, ...] = ()
    """Blocks that describe its region to another server, or to this one until it has read them."""
    arriving: Cut | None = None
    """A cut that another server has made, whose blocks are on their way to this one."""

    @property
    def swapped(self) -> bool:
        """Whether the request's row is compressed now."""
        return self.num_retained > 0

    def num_to_reserve(self, num_tokens: int) -> int:
        """Return the fresh blocks that a chunk up to `num_tokens` needs; 0 if it does not evict."""
        if self.reserved or self.cut is None or num_tokens < self.cut.at:
            return 0
        return self.cut.num_retained + self.num_header


class EvictingManager(FullAttentionManager):
    """A `FullAttentionManager` whose requests may trade prompt blocks for fewer fresh ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hashes_whole_blocks = self.block_size == self.block_pool.hash_block_size
        """Whether the prefix cache has no parts of blocks, as in some hybrids."""
        self.compressions: dict[str, Compression] = {}
        self.order = PrefillOrder()
        self._admission: tuple[str, Prefill] | None = None
        """The request that vLLM is about to admit."""
        self.num_kept_free = 0
        """Free blocks that no request is admitted into, for the growth of running requests and the
        fresh blocks of cuts under pressure."""
        self.num_watermark = 0
        """Free blocks that vLLM admits no request into."""
        self.refused: tuple[str, int] | None = None
        """The first request that this step had no blocks for, and how many it needs."""
        self.released: list[int] = []
        """First block ids of regions dropped since the last drain."""
        self.others = OtherBlocks()
        """Blocks that requests hold for layers that are not evicted."""
        self.free_later: Callable[[Sequence[KVCacheBlock]], None] | None = None
        """Frees blocks once the steps that are in flight have ended; None if blocks may go back
        before, because whoever takes them writes to them in a later step."""
        self.record_freed = False
        self.freed: list[int] = []
        """Unhashed blocks given back since the last drain, if `record_freed`."""

    # -- reservation, while the prefill is scheduled ------------------------------------

    def expect(
        self,
        request: Request,
        cut: Cut | None,
        num_reusable: int | None = None,
        num_header: int | None = None,
    ) -> None:
        """Reserve the fresh blocks of a request's next cut with the chunk that ends there.

        Args:
            num_reusable: where a hit of the prefix cache ends, in tokens, if not before.
            num_header: blocks of a header that are reserved as well. None leaves either as it is.
        """
        known = self.compressions.setdefault(request.request_id, Compression(request, cut))
        known.cut = cut
        if num_reusable is not None:
            known.num_reusable = num_reusable
        if num_header is not None:
            known.num_header = num_header

    def forget(self, request_id: str) -> None:
        """Drop the record of a request that holds no blocks: it ended, or is not evicted."""
        compression = self.compressions.pop(request_id, None)
        assert compression is None or not (compression.reserved or compression.swapped)

    def can_ever_fit(self, cuts: Cuts, num_header: int = 0) -> bool:
        """Return whether an empty pool holds a request at each of its cuts, and its header.

        If so, it holds the rest of the request as well, after any number of preemptions: replayed
        tokens take the place of blocks that the prompt gave back.
        """
        usable = self.block_pool.num_gpu_blocks - 1  # the null block is never handed out
        num_others = self.others.most(cuts.longest)
        return max(cuts.peaks(), default=0) + num_header + num_others <= usable

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the blocks for a chunk, or for a whole request with `apply_admission_cap`.

        vLLM compares the number with the free blocks. For a request that is not admitted yet it
        includes the free blocks that earlier prefills need.
        """
        num_tokens = num_tokens_main_model  # without those that only a draft model writes
        compression = self.compressions.get(request_id)
        if compression and compression.arriving and request_id not in self.req_to_blocks:
            num_blocks = self._num_arriving(compression, num_tokens)
            if apply_admission_cap:
                num_blocks = max(num_blocks - self.order.net_change(0), 0)
            else:
                num_blocks += self.order.needed()
            return self._with_kept_free(request_id, num_tokens, num_blocks)
        cut = compression.cut if compression else None
        if cut is None and request_id in self.num_cached_block:
            # It runs, and nothing is reserved: vLLM's number, without the way there, which every
            # request would take in every step.
            num_held = len(self.req_to_blocks[request_id])
            return max(-(-num_tokens // self.block_size) - num_held, 0)
        if apply_admission_cap and cut and request_id not in self.req_to_blocks:
            # A request that waits for its answer has room for it, and for the fresh blocks. One
            # whose region has arrived waits no longer: all might wait for each other's blocks.
            num_tokens = max(num_tokens, cut.at)
        num_blocks = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens,
            apply_admission_cap=apply_admission_cap,
            prefill_end=prefill_end,
        )
        if compression and cut and (num_fresh := compression.num_to_reserve(num_tokens)):
            num_free = self.block_pool.get_num_free_blocks()
            if num_blocks <= num_free < num_blocks + num_fresh:
                compression.deferred = True
            num_blocks += num_fresh
        if request_id in self.req_to_blocks:
            return num_blocks
        if not apply_admission_cap:
            num_blocks += self.order.needed()
            return self._with_kept_free(request_id, num_tokens, num_blocks)
        num_shared = sum(block.ref_cnt > 0 for block in new_computed_blocks)
        num_header = compression.num_header if compression else 0
        prefill = self._prefill(cut, num_tokens, num_shared, num_header)
        self._admission = request_id, prefill
        # The prompt gives blocks back before the tokens that follow it are computed again.
        num_blocks -= min(prefill.num_replayed, prefill.num_returned)
        num_blocks = max(num_blocks - self.order.net_change(num_shared), 0)
        return self._with_kept_free(request_id, num_tokens, num_blocks)

    def _with_kept_free(self, request_id: str, num_tokens: int, num_blocks: int) -> int:
        """Return the free blocks without which a request is not admitted."""
        wanted = num_blocks + self.num_kept_free
        num_others = self.others.most(num_tokens) + self.num_watermark
        if wanted > self.block_pool.get_num_free_blocks() - num_others and self.refused is None:
            self.refused = request_id, num_blocks
        return wanted

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        num_tokens = num_tokens_main_model
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens)
        compression = self.compressions.get(request_id)
        cut = compression.cut if compression else None
        if compression and cut and (num_fresh := compression.num_to_reserve(num_tokens)):
            compression.reserved = tuple(self.block_pool.get_new_blocks(num_fresh))
        if self._admission and self._admission[0] == request_id:
            self.order.admit(*self._admission)
            self._admission = None
        if request_id in self.order.prefills:
            num_held = len(self.req_to_blocks[request_id])
            num_held += len(compression.reserved) if compression else 0
            self.order.advance(request_id, num_held, self._passing(request_id, num_tokens))
        return new_blocks

    # -- prompts that prefill together, see `admission.py` ------------------------------

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.order.begin_step()
        self.refused = None

    def may_take(self, request: Request, num_tokens: int) -> bool:
        """Return whether a request may grow to `num_tokens` now, and earlier prefills finish."""
        request_id = request.request_id
        if request_id not in self.order.prefills:
            return True
        num_blocks = cdiv(num_tokens, self.block_size) - len(self.req_to_blocks[request_id])
        num_blocks += self.others.growth(request, num_tokens)
        if compression := self.compressions.get(request_id):
            num_blocks += compression.num_to_reserve(num_tokens)
        return self.order.may_take(request_id, num_blocks, self.block_pool.get_num_free_blocks())

    def _prefill(
        self, cut: Cut | None, num_tokens: int, num_shared: int, num_header: int
    ) -> Prefill:
        num_blocks = cdiv(num_tokens, self.block_size)
        if cut is None:
            return Prefill(num_blocks, num_shared=num_shared, num_tokens=num_tokens)
        num_first = cdiv(cut.at, self.block_size)
        return Prefill(
            num_first,
            num_replayed=max(num_blocks - num_first, 0),
            num_fresh=cut.num_retained + num_header,
            num_returned=max(cut.num_replaced - num_shared, 0),
            num_shared=num_shared,
            num_tokens=num_tokens,
        )

    def _passing(self, request_id: str, num_tokens: int) -> tuple[int, int]:
        num_last = self.order.prefills[request_id].num_tokens
        return self.others.passing(request_id, num_tokens, num_last)

    def is_compressed(self, request_id: str) -> bool:
        """Return whether the request's row starts with a compressed region."""
        compression = self.compressions.get(request_id)
        return compression is not None and compression.swapped

    # -- from and to other servers ------------------------------------------------------

    def expect_arrival(self, request: Request, cut: Cut, num_header: int) -> None:
        """Take the blocks of a prompt that another server has cut, in place of the whole prompt's.

        They are allocated when vLLM admits the request, as tokens of its connector.
        """
        self.expect(request, None, num_header=num_header)
        self.compressions[request.request_id].arriving = cut

    def arrived(self, request_id: str) -> tuple[KVCacheBlock, ...]:
        """Record that a prompt's blocks have arrived; return those of its header, now unowned.

        The caller frees these once the worker has read them.
        """
        compression = self.compressions[request_id]
        header, compression.header = compression.header, ()
        compression.arriving, compression.num_header = None, 0
        return header

    def blocks_to_send(self, request_id: str, num_tokens: int) -> list[int]:
        """Return the block ids of a request's header, region and tail up to `num_tokens`."""
        row = self.req_to_blocks[request_id][: cdiv(num_tokens, self.block_size)]
        blocks = (*self.compressions[request_id].header, *row)
        return [block.block_id for block in blocks if not block.is_null]

    def _num_arriving(self, compression: Compression, num_tokens: int) -> int:
        cut = compression.arriving
        assert cut is not None
        num_tail = cdiv(max(num_tokens, cut.at), self.block_size) - cut.num_replaced
        return compression.num_header + cut.num_retained + num_tail

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Allocate the blocks of tokens that a connector has; of a cut prompt as its row has them.

        vLLM's connectors fill the blocks that are not null, in order.
        """
        compression = self.compressions.get(request_id)
        cut = compression.arriving if compression else None
        if compression is None or cut is None:
            super().allocate_external_computed_blocks(request_id, *args, **kwargs)
            return
        row, num_header = self.req_to_blocks[request_id], compression.num_header
        assert not row
        blocks = self.block_pool.get_new_blocks(self._num_arriving(compression, cut.at))
        compression.header, blocks = tuple(blocks[:num_header]), blocks[num_header:]
        nulls = [self._null_block] * (cut.num_replaced - cut.num_retained)
        row += [*blocks[: cut.num_retained], *nulls, *blocks[cut.num_retained :]]
        compression.num_retained, compression.num_replaced = cut.num_retained, cut.num_replaced
        compression.was_cut = True

    # -- under pressure -----------------------------------------------------------------

    def plan_cut(self, request: Request, cut: Cut) -> None:
        """Reserve the fresh blocks of a cut that is due some tokens later."""
        self.expect(request, cut)
        fresh = self.block_pool.get_new_blocks(cut.num_retained)
        compression = self.compressions[request.request_id]
        compression.reserved, compression.may_be_restored = tuple(fresh), True

    def num_given_back(self, request_id: str, num_replaced: int) -> float:
        """Return the blocks that the pool gains by a cut, fresh ones not deducted.

        Of blocks that n requests share, each frees a part of 1 / n: once all are cut, they are
        free. Only first blocks are shared.

        Args:
            num_replaced: full blocks of the prompt.
        """
        compression, blocks = self.compressions[request_id], self.req_to_blocks[request_id]
        if compression.swapped:
            return compression.num_retained
        if blocks[0].ref_cnt <= 1:
            return num_replaced
        alone = bisect_left(blocks, True, hi=num_replaced, key=lambda block: block.ref_cnt <= 1)
        return num_replaced - alone + alone / blocks[alone - 1].ref_cnt

    def num_to_restore(self, request_id: str) -> int | None:
        """Return the free blocks that it takes to give a request its whole prompt back, net.

        None if one of the prompt's blocks was reused meanwhile, or never had a hash.
        """
        compression = self.compressions[request_id]
        if not all(hash and block.block_hash == hash for block, hash in compression.given_back):
            compression.given_back = ()
        if not compression.given_back:
            return None
        num_free = sum(block.ref_cnt == 0 for block, _ in compression.given_back)
        return num_free - compression.num_retained

    def restore(self, request_id: str) -> None:
        """Put the prompt's blocks back in their place; `num_to_restore` has found all of them."""
        compression, blocks = self.compressions[request_id], self.req_to_blocks[request_id]
        region = blocks[: compression.num_retained]
        whole = [block for block, _ in compression.given_back]
        self.block_pool.touch(whole)
        blocks[: len(whole)] = whole
        self.released.append(region[0].block_id)
        compression.num_retained = compression.num_replaced = 0
        compression.given_back = ()
        self._give_back(region)

    # -- the swap, right after the evicting chunk was scheduled -------------------------

    def swap(self, request_id: str) -> int:
        """Put the fresh blocks in place of the blocks that the cut replaces, and free these.

        The copy runs at the end of this step's forward pass. The next owner of a freed block
        writes to it in a later step.

        Returns:
            Blocks that the pool gained, the fresh ones deducted. Blocks that other requests share
            stay with them, so it may be negative.
        """
        compression = self.compressions[request_id]
        cut, fresh = compression.cut, compression.reserved
        assert cut is not None
        fresh, compression.header = fresh[: cut.num_retained], fresh[cut.num_retained :]
        assert len(fresh) == cut.num_retained
        assert len(compression.header) == compression.num_header
        blocks = self.req_to_blocks[request_id]
        old = [block for block in blocks[: cut.num_replaced] if not block.is_null]
        if compression.swapped:
            self.released.append(blocks[0].block_id)  # the worker hears of it with the next step
        elif compression.may_be_restored:
            compression.given_back = [(block, block.block_hash) for block in old]
        nulls = [self._null_block] * (cut.num_replaced - len(fresh))
        blocks[: cut.num_replaced] = [*fresh, *nulls]
        compression.reserved, compression.cut, compression.was_cut = (), None, True
        compression.num_retained, compression.num_replaced = cut.num_retained, cut.num_replaced
        num_freed = sum(block.ref_cnt == 1 for block in old)
        self._give_back(old)
        if request_id in self.order.prefills:
            self.order.evict(request_id, len(blocks), self._passing(request_id, cut.at))
        return num_freed - len(fresh)

    def num_held(self) -> int:
        """Return the number of blocks that compressed requests hold."""
        compressed = filter(self.is_compressed, self.compressions)
        return sum(self.num_held_by(request_id) for request_id in compressed)

    def states(self) -> Counter[str]:
        """Return the number of requests in each of `STATES`."""
        return Counter(
            "shrunk" if each.swapped else "restored" if each.was_cut else "whole"
            for each in self.compressions.values()
        )

    def num_held_by(self, request_id: str) -> int:
        """Return the blocks of a request's row, null blocks not counted."""
        num_null = 0
        if self.is_compressed(request_id):
            compression = self.compressions[request_id]
            num_null = compression.num_replaced - compression.num_retained
        return len(self.req_to_blocks[request_id]) - num_null

    def block_ids(self, request_id: str, num_tokens: int | None = None) -> np.ndarray:
        """Return the block ids of a request's first tokens, of all by default, int32."""
        end = None if num_tokens is None else cdiv(num_tokens, self.block_size)
        blocks = self.req_to_blocks[request_id][:end]
        return np.array([block.block_id for block in blocks], dtype=np.int32)

    def trim(self, request_id: str, first_block: int, num_retained: int) -> int | None:
        """Give back the blocks of the region at `first_block` behind its first `num_retained`.

        Its pages are dealt to the first blocks, so no page table points to the others. Returns
        the number of blocks given back, or None if the region does not exist any more.
        """
        if not self.is_compressed(request_id):
            return None
        compression, blocks = self.compressions[request_id], self.req_to_blocks[request_id]
        if blocks[0].block_id != first_block:
            return None
        spare = slice(num_retained, compression.num_retained)
        given_back = blocks[spare]
        blocks[spare] = [self._null_block] * len(given_back)
        compression.num_retained = num_retained
        self._give_back(given_back)
        return len(given_back)

    # -- overridden life cycle of a request ---------------------------------------------

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        request_id, num_full = request.request_id, num_tokens // self.block_size
        if self._hashes_whole_blocks and num_full <= self.num_cached_block.get(request_id, 0):
            return  # no more blocks are full than before, as in most steps
        # Keys decoded after an eviction depend on what was kept, so these blocks must never
        # serve as another request's prefix.
        compression = self.compressions.get(request_id)
        if compression is None or not compression.was_cut:
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks = super().pop_blocks_for_free(request_id)
        self.order.leave(request_id)
        if compression := self.compressions.get(request_id):
            # Ended or preempted; a preempted request prefills and is evicted again.
            if compression.swapped and compression.arriving is None:
                self.released.append(blocks[0].block_id)
            # vLLM frees the last ones first, and those are the first to be taken again. So a server
            # that reads too late finds another header before it finds other keys.
            blocks.extend(compression.reserved)
            blocks.extend(reversed(compression.header))
            compression.reserved, compression.num_retained, compression.header = (), 0, ()
            compression.arriving = None
            compression.was_cut, compression.given_back = False, ()
        self._record_freed(blocks)
        return blocks

    def drain(self) -> tuple[list[int], list[int]]:
        """Return `released` and `freed`, and begin new lists."""
        drained = self.released, self.freed
        self.released, self.freed = [], []
        return drained

    def _give_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._record_freed(blocks)
        if self.free_later is not None:
            self.free_later(blocks)
            return
        # Last blocks first, as vLLM frees: the pool then reuses those least likely to be hit.
        self.block_pool.free_blocks(reversed(blocks))

    def _record_freed(self, blocks: Sequence[KVCacheBlock]) -> None:
        if self.record_freed:
            self.freed.extend(
                block.block_id
                for block in blocks
                if block.ref_cnt == 1 and block.block_hash is None and not block.is_null
            )


class OtherLayersManager:
    """Mixin for managers of layers that are not evicted, in requests that may be compressed."""

    evicting: EvictingManager
    """Of the layers that are evicted."""

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        # What follows an eviction depends on what was kept, in all layers.
        compression = self.evicting.compressions.get(request.request_id)
        if compression and compression.was_cut:
            return
        # Of windows and states vLLM caches only what the same prompt would hit again: its end. Ours
        # ends a hit where rows vote.
        if compression and compression.num_reusable:
            ends = (*kwargs["replay_boundaries"], compression.num_reusable)
            kwargs = {**kwargs, "replay_boundaries": ends}
        super().cache_blocks(request, *args, **kwargs)  # type: ignore[misc]


class WindowManager(OtherLayersManager, SlidingWindowManager):
    """A `SlidingWindowManager` for the windows of requests that may be compressed."""


class StateManager(OtherLayersManager, MambaManager):
    """A `MambaManager` for the states of requests that may be compressed."""


class DraftManager(OtherLayersManager, FullAttentionManager):
    """A `FullAttentionManager` for the layers of a draft model, which keep all tokens."""


def connect_managers(
    managers: Sequence[SingleTypeKVCacheManager],
    num_steps: int,
    num_lookahead: int,
    max_model_len: int,
) -> tuple[int, EvictingManager, list[SingleTypeKVCacheManager]]:
    """Let the managers of all groups of layers know each other.

    Args:
        num_steps: steps that are in flight at the same time.
        num_lookahead: tokens that a draft model writes behind the tokens of a step.
        max_model_len: most tokens of a request, with these.

    Returns:
        The index of the group that is evicted, its manager, and the managers of other layers.
    """
    ((group, manager),) = (
        (group, manager)
        for group, manager in enumerate(managers)
        if isinstance(manager, EvictingManager)
    )
    others = [other for other in managers if other is not manager]
    drafts = [other for other in others if isinstance(other, DraftManager)]
    manager.others = OtherBlocks(others, num_steps, drafts, num_lookahead, max_model_len)
    for other in others:
        if isinstance(other, OtherLayersManager):
            other.evicting = manager
    return group, manager, others


def record_freed_and_new(
    manager: EvictingManager, others: Sequence[SingleTypeKVCacheManager]
) -> None:
    """Let freed blocks be listed, to be filled with NaN, and new ones, which vLLM then clears."""
    manager.record_freed = True
    for each in (manager, *others):
        each._record_new_block_ids = isinstance(each.kv_cache_spec, AttentionSpec)


def uncache_uncomputed(managers: Sequence[SingleTypeKVCacheManager], request: Request) -> None:
    """Remove from the prefix cache the blocks of a chunk that will not run.

    vLLM enters a chunk's blocks when it schedules the chunk. Under the policy `priority` it
    may preempt the request later in the same step and leaves the entries there. Whoever hits
    them, usually the request itself, would read blocks that were never written.
    """
    for manager in managers:
        first = request.num_computed_tokens // manager.block_size
        blocks = manager.req_to_blocks.get(request.request_id, [])[first:]
        manager.block_pool.evict_blocks({block.block_id for block in blocks if not block.is_null})


@register_kv_cache_spec(manager_class=EvictingManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class EvictingSpec(FullAttentionSpec):
    """Full attention whose blocks are managed by `EvictingManager`."""


@register_kv_cache_spec(manager_class=WindowManager, uniform_type_base_spec=SlidingWindowSpec)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """A sliding window whose blocks are managed by `WindowManager`."""


@register_kv_cache_spec(manager_class=StateManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True, kw_only=True)
class StateSpec(MambaSpec):
    """A state whose blocks are managed by `StateManager`."""


@register_kv_cache_spec(manager_class=DraftManager)
@dataclass(frozen=True, kw_only=True)
class DraftSpec(FullAttentionSpec):
    """Full attention of a draft model, whose blocks are managed by `DraftManager`."""

    @classmethod
    def merge(cls, specs: list[DraftSpec]) -> DraftSpec:
        """Merge the specs of one group; vLLM asks whether other layers may join it."""
        assert all(isinstance(spec, DraftSpec) for spec in specs), "not all layers are drafts"
        return super().merge(specs)
