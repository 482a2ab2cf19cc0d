# SPDX-License-Identifier: Apache-2.0
"""Rows of the batch in vLLM's two model runners: find them, and rewrite those that shrank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_tgvkv.shared.plan import Eviction, Restored

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1


class RowsV1:
    """Model runner V1: a persistent batch, whose block table is copied to the device each step."""

    def __init__(self, runner: GPUModelRunnerV1, group: int) -> None:
        """`group` is the index of the evicted layers among vLLM's KV cache groups."""
        self._runner, self._group = runner, group
        self.answers: dict[str, list[int]] = {}
        """The answers so far of new requests, if another server began them."""

    def take_answers(self) -> None:
        """Add `answers` to new requests, which this runner takes for requests without one."""
        batch = self._runner.input_batch
        add_request = batch.add_request

        def add_with_answer(state: CachedRequestState) -> int:
            state.output_token_ids.extend(self.answers.pop(state.req_id, ()))
            return add_request(state)

        batch.add_request = add_with_answer

    def find_row(self, request_id: str) -> int | None:
        return self._runner.input_batch.req_id_to_index.get(request_id)

    def request_at(self, row: int) -> str:
        return self._runner.input_batch.req_ids[row]

    def rewrite(self, change: Eviction | Restored) -> None:
        """Replace a request's row by a compressed one, or by the whole one.

        A request that has ended is gone from the runner. A preempted one has no row in the batch
        until it is scheduled again.
        """
        state = self._runner.requests.get(change.request_id)
        if state is None:
            return
        blocks = change.row_blocks
        ids = state.block_ids[self._group]
        ids[: len(blocks)] = blocks.tolist()
        row = self.find_row(change.request_id)
        if row is not None:
            table = self._runner.input_batch.block_table[self._group].block_table.np
            table[row, : len(blocks)] = blocks.astype(np.int32)


class RowsV2:
    """Model runner V2: a table of requests on the device, from which each batch is gathered.

    Our runner remembers whose rows these are (`batch`): the attention metadata of hybrids do not
    say it.
    """

    def __init__(self, runner: GPUModelRunnerV2, group: int) -> None:
        """`group` is the index of the evicted layers among vLLM's KV cache groups."""
        self._runner, self._group = runner, group
        self.answers: dict[str, list[int]] = {}

    def take_answers(self) -> None:
        """Do nothing: vLLM tells this runner the answers of new requests."""

    def find_row(self, request_id: str) -> int | None:
        index = self._runner.req_states.req_id_to_index.get(request_id)
        if index is None or self._runner.batch is None:
            return None
        (rows,) = np.nonzero(self._runner.batch.idx_mapping_np == index)
        return int(rows[0]) if len(rows) else None

    def request_at(self, row: int) -> str:
        assert self._runner.batch is not None
        return self._runner.batch.req_ids[row]

    def rewrite(self, change: Eviction | Restored) -> None:
        """Stage another row in place of a request's; it is written with the step's blocks.

        The row keeps its length, and rows of other groups stay.

        Call it after vLLM removed ended and preempted requests, whose places others may take, and
        before it appends the step's new blocks. Never call it for a request that vLLM adds in this
        step: the kernel that writes both rows does so in any order.
        """
        index = self._runner.req_states.req_id_to_index.get(change.request_id)
        if index is not None:
            table = self._runner.block_tables.block_tables[self._group]
            table.stage_write(index, 0, change.row_blocks.tolist())
