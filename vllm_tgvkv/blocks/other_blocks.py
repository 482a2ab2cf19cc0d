# SPDX-License-Identifier: Apache-2.0
"""Blocks that requests hold for layers that are not evicted: windows, states and draft models.

While its prompt is computed, a request holds its windows and the tokens of the steps in flight.
What it does not need for its answer goes back to the pool afterwards, whether it is evicted or not.
States are taken with the first chunk and held to the end. The layers of a draft model hold all
tokens, and those that it drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import (
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

_DECODED_IN_FLIGHT = 2
"""Most tokens of an answer that are scheduled and not computed yet: steps are scheduled ahead."""


class OtherBlocks:
    """Blocks of all groups of layers that are not evicted."""

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager] = (),
        num_steps: int = 1,
        drafts: Sequence[SingleTypeKVCacheManager] = (),
        num_lookahead: int = 0,
        max_model_len: int = 0,
    ) -> None:
        """Make it for a scheduler.

        Args:
            managers: of all these groups.
            num_steps: steps that are in flight at the same time.
            drafts: the managers of draft models.
            num_lookahead: tokens that a draft model writes behind the tokens of a step.
            max_model_len: most tokens of a request, with these.
        """
        self.drafts, self.num_lookahead = drafts, num_lookahead
        self._max_model_len = max_model_len
        self._windows = [each for each in managers if isinstance(each, SlidingWindowManager)]
        self._states = [each for each in managers if isinstance(each, MambaManager)]
        self.caches_states = any(map(_caches_states, self._states))
        """Whether states at the ends of blocks enter the prefix cache."""
        # Of windows, with the tokens of the steps in flight. Of states one that each step
        # overwrites, or with prefix caching one that it starts from, and the last one's result.
        self._most = sum(each.max_admission_blocks_per_request or 0 for each in self._windows)
        """Most blocks of windows and states that a request holds."""
        for each in self._states:
            self._most += 1 + each.num_speculative_blocks + _caches_states(each) * num_steps

    def most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of this length holds."""
        return self._most + self.num_drafting(num_tokens)

    def num_drafting(self, num_tokens: int) -> int:
        """Return the blocks of draft models once a step ends at `num_tokens` of a request."""
        num_tokens = min(num_tokens + self.num_lookahead, self._max_model_len)
        return sum(cdiv(num_tokens, each.block_size) for each in self.drafts)

    def windows(self, num_tokens: int) -> int:
        """Return the blocks of a request's windows once `num_tokens` of it are computed."""
        return sum(
            cdiv(num_tokens, each.block_size)
            - each.get_num_skipped_tokens(num_tokens) // each.block_size
            for each in self._windows
        )

    def states(self, request_id: str) -> int:
        """Return the blocks that a request holds for states between its steps.

        With prefix caching a step has another block for the state that it starts from, until it has
        ended.
        """
        return sum(
            min(
                sum(not block.is_null for block in each.req_to_blocks.get(request_id, ())),
                1 + each.num_speculative_blocks,
            )
            for each in self._states
        )

    def held(self, request_ids: Iterable[str]) -> tuple[int, int, int]:
        """Return the blocks that requests hold for windows, states and draft models now."""
        names = list(request_ids)
        rows = [each.req_to_blocks.get(name, []) for each in self._windows for name in names]
        num_windows = sum(len(_real(blocks, len(blocks))) for blocks in rows)
        drafts = (each.req_to_blocks.get(name, ()) for each in self.drafts for name in names)
        return num_windows, sum(map(self.states, names)), sum(map(len, drafts))

    def passing(self, request_id: str, num_tokens: int, num_last: int) -> tuple[int, int]:
        """Return the blocks that a prefill still takes, and those that it gives back by its end.

        The second number includes the first, less what the answer's windows hold.

        Args:
            num_tokens: tokens of the request behind the chunk that is being scheduled.
            num_last: those at the end of its prefill.
        """
        taken = given_back = 0
        for manager in self._windows:
            blocks = manager.req_to_blocks.get(request_id, [])
            length = max(cdiv(num_tokens, manager.block_size), len(blocks))
            # vLLM's managers allocate one after the other: this one's turn may come yet.
            held = _real(blocks, len(blocks))
            num_held = len(held) + length - len(blocks)
            most = manager.max_admission_blocks_per_request or length
            left = max(min(cdiv(num_last, manager.block_size) - length, most - num_held), 0)
            taken += left
            num_shared = sum(block.ref_cnt > 1 for block in held)
            # The answer's window may begin and end within a block.
            rest = cdiv(manager.sliding_window - 1 + _DECODED_IN_FLIGHT, manager.block_size) + 1
            given_back += max(num_held + left - max(rest, num_shared), 0)
        taken += max(self.num_drafting(num_last) - self.num_drafting(num_tokens), 0)
        return taken, given_back

    def growth(self, request: Request, num_tokens: int) -> int:
        """Return the free blocks that a chunk up to `num_tokens` costs; it may free some."""
        # vLLM frees what is behind the windows first.
        num_processed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
        change = 0
        for manager in self._windows:
            blocks = manager.req_to_blocks.get(request.request_id, [])
            num_skipped = manager.get_num_skipped_tokens(num_processed) // manager.block_size
            freed = _real(blocks, min(num_skipped, len(blocks)))
            change += max(cdiv(num_tokens, manager.block_size) - len(blocks), 0)
            change -= sum(block.ref_cnt == 1 for block in freed)
        num_held = sum(len(each.req_to_blocks.get(request.request_id, ())) for each in self.drafts)
        return change + max(self.num_drafting(num_tokens) - num_held, 0)


def _real(blocks: Sequence[KVCacheBlock], end: int) -> list[KVCacheBlock]:
    """Return the blocks of a row before `end` that are not null, last first; they are adjacent."""
    found = []
    for i in reversed(range(end)):
        if blocks[i].is_null:
            break
        found.append(blocks[i])
    return found


def _caches_states(manager: MambaManager) -> bool:
    return manager.enable_caching and manager.mamba_cache_mode == "align"
