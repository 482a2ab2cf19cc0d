# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with eviction."""

from __future__ import annotations

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tgvkv.model_runner import RowsV1
from vllm_tgvkv.plan import Eviction
from vllm_tgvkv.worker import EvictingWorker


class EvictionCPUWorker(EvictingWorker, CPUWorker):
    """The stock worker with evicting attention; model runner V1."""

    replaced_backend = AttentionBackendEnum.CPU_ATTN
    evicting_backend = "vllm_tgvkv.attention_cpu.EvictingCPUBackend"

    def find_row(self, common: CommonAttentionMetadata, request_id: str) -> int | None:
        return RowsV1.find(self.model_runner, common, request_id)

    def rewrite_rows(self, evictions: list[Eviction]) -> None:
        for eviction in evictions:
            RowsV1.rewrite(self.model_runner, eviction)
