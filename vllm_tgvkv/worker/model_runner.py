# SPDX-License-Identifier: Apache-2.0
"""Rows of the batch in vLLM's two model runners: find them, and rewrite those that shrank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tgvkv.shared.plan import Eviction

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1


class RowsV1:
    """Model runner V1: a persistent batch, whose block table is copied to the device each step."""

    @staticmethod
    def find(
        runner: GPUModelRunnerV1, common: CommonAttentionMetadata, request_id: str
    ) -> int | None:
        return runner.input_batch.req_id_to_index.get(request_id)

    @staticmethod
    def request_at(runner: GPUModelRunnerV1, common: CommonAttentionMetadata, row: int) -> str:
        return runner.input_batch.req_ids[row]

    @staticmethod
    def rewrite(runner: GPUModelRunnerV1, eviction: Eviction, group: int) -> None:
        """Replace a prompt's row by its compressed row.

        A request that has ended is gone from the runner. A preempted one has no row in the batch
        until it is scheduled again.

        Args:
            group: index of the evicted layers among vLLM's KV cache groups.
        """
        state = runner.requests.get(eviction.request_id)
        if state is None:
            return
        blocks = eviction.row_blocks
        ids = state.block_ids[group]
        ids[: len(blocks)] = blocks.tolist()
        row = runner.input_batch.req_id_to_index.get(eviction.request_id)
        if row is not None:
            table = runner.input_batch.block_table[group].block_table.np
            table[row, : len(blocks)] = blocks.astype(np.int32)


class RowsV2:
    """Model runner V2: a table of requests on the device, from which each batch is gathered.

    Our runner remembers whose rows these are (`batch`): the attention metadata of hybrids do not
    say it.
    """

    @staticmethod
    def find(
        runner: GPUModelRunnerV2, common: CommonAttentionMetadata, request_id: str
    ) -> int | None:
        index = runner.req_states.req_id_to_index.get(request_id)
        if index is None or runner.batch is None:
            return None
        (rows,) = np.nonzero(runner.batch.idx_mapping_np == index)
        return int(rows[0]) if len(rows) else None

    @staticmethod
    def request_at(runner: GPUModelRunnerV2, common: CommonAttentionMetadata, row: int) -> str:
        assert runner.batch is not None
        return runner.batch.req_ids[row]

    @staticmethod
    def rewrite(runner: GPUModelRunnerV2, eviction: Eviction, group: int) -> None:
        """Stage a compressed row in place of its prompt's; it is written with the step's blocks.

        The row keeps its length.

        Call it after vLLM removed ended and preempted requests, whose places others may take, and
        before it appends the step's new blocks. Never call it for a request that vLLM adds in this
        step: the kernel that writes both rows does so in any order.

        Args:
            group: index of the evicted layers among vLLM's KV cache groups; rows of other groups
                stay.
        """
        index = runner.req_states.req_id_to_index.get(eviction.request_id)
        if index is None:
            return
        table = runner.block_tables.block_tables[group]
        table.stage_write(index, 0, eviction.row_blocks.tolist())
