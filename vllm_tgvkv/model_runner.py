# SPDX-License-Identifier: Apache-2.0
"""How vLLM's two model runners keep the rows of their batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tgvkv.plan import Eviction


class RowsV1:
    """Model runner V1: a persistent batch, whose block table is copied to the device each step."""

    @staticmethod
    def find(runner: Any, common: CommonAttentionMetadata, request_id: str) -> int | None:
        return runner.input_batch.req_id_to_index.get(request_id)

    @staticmethod
    def rewrite(runner: Any, eviction: Eviction) -> None:
        """Put a compressed row in the prompt's place.

        A request that ended meanwhile is gone from the runner; a preempted one gets
        a row of its own when it is scheduled again.
        """
        state = runner.requests.get(eviction.request_id)
        if state is None:
            return
        blocks = eviction.row_blocks
        (ids,) = state.block_ids
        ids[: len(blocks)] = blocks.tolist()
        row = runner.input_batch.req_id_to_index.get(eviction.request_id)
        if row is not None:
            table = runner.input_batch.block_table[0].block_table.np
            table[row, : len(blocks)] = blocks.astype(np.int32)


class RowsV2:
    """Model runner V2: a table of requests on the device, from which each batch is gathered."""

    @staticmethod
    def find(runner: Any, common: CommonAttentionMetadata, request_id: str) -> int | None:
        index = runner.req_states.req_id_to_index.get(request_id)
        if index is None or common.req_idx is None:
            return None
        (rows,) = np.nonzero(common.req_idx == index)
        return int(rows[0]) if len(rows) else None

    @staticmethod
    def rewrite(runner: Any, eviction: Eviction) -> None:
        """Put a compressed row in the prompt's place; it is written with the step's other blocks.

        To be called after vLLM took ended and preempted requests away, whose place another
        request may have, and before it appends the step's new blocks.
        """
        index = runner.req_states.req_id_to_index.get(eviction.request_id)
        if index is not None:
            runner.block_tables.append_block_ids(
                index, (eviction.row_blocks.tolist(),), overwrite=True
            )
