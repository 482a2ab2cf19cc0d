# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with eviction, on both of its model runners.

The runners are subclassed for two things: rows that shrank are rewritten where the runner itself
updates its rows, and a step in which prompts are observed runs its attention outside of graphs.
A batch of single tokens would be replayed as one graph, and a prompt may well end with one token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from vllm_tgvkv.model_runner import RowsV1, RowsV2
from vllm_tgvkv.plan import Eviction
from vllm_tgvkv.warm_up import warm_up
from vllm_tgvkv.worker import EvictingWorker


class EvictionGPUWorker(EvictingWorker, Worker):
    """The stock worker with evicting attention and evicting model runners."""

    replaced_backend = AttentionBackendEnum.FLASH_ATTN
    evicting_backend = "vllm_tgvkv.attention_cuda.EvictingFlashBackend"

    def _make_model_runner(self) -> Any:
        runner = EvictingModelRunnerV2 if self.use_v2_model_runner else EvictingModelRunnerV1
        return runner(self.vllm_config, self.device, self)

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> Any:
        warm_up(self.evictor)
        return super().compile_or_warm_up_model()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        if self.evictor.config.debug.poison:
            # Blocks are cleared when they are handed out, which vLLM prepares only for models
            # that need it.
            self.model_runner._init_kv_zero_meta()

    def find_row(self, common: CommonAttentionMetadata, request_id: str) -> int | None:
        return self.model_runner.rows.find(self.model_runner, common, request_id)

    def rewrite_rows(self, evictions: list[Eviction]) -> None:
        self.model_runner.shrunk = evictions


class EvictingModelRunnerV1(GPUModelRunnerV1):
    """Model runner V1 with rows that shrink."""

    rows = RowsV1

    def __init__(self, vllm_config: Any, device: Any, worker: EvictionGPUWorker) -> None:
        super().__init__(vllm_config, device)
        self.worker = worker
        self.shrunk: list[Eviction] = []

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # Here the last step's copy of the block table is known to be over.
        for eviction in self.shrunk:
            self.rows.rewrite(self, eviction)
        self.shrunk = []
        return super()._update_states(scheduler_output)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.worker.observes and kwargs["max_num_scheduled_tokens"] == 1:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class EvictingModelRunnerV2(GPUModelRunnerV2):
    """Model runner V2 with rows that shrink."""

    rows = RowsV2

    def __init__(self, vllm_config: Any, device: Any, worker: EvictionGPUWorker) -> None:
        super().__init__(vllm_config, device)
        self.worker = worker
        self.shrunk: list[Eviction] = []

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        for eviction in self.shrunk:
            self.rows.rewrite(self, eviction)
        self.shrunk = []
        super().update_requests(scheduler_output)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[Any, int | None]:
        state, uniform_token_count = super().gather_batch_req_state(scheduler_output, dummy_run)
        if not dummy_run and self.worker.observes:
            # Not uniform: no graph of the whole step fits it.
            uniform_token_count = None
        return state, uniform_token_count
