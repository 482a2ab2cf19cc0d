# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with eviction, on both of its model runners.

The runners are subclassed for three things: rows that shrank are rewritten where the runner itself
updates its rows, a step in which layers are observed runs its attention outside of graphs, and all
caches have plain specs. A batch of single tokens, or of 1 + K with K drafts, would be replayed as
one graph, and a prompt may end with a chunk of as many. Steps that only store queries stay graphs,
see `queries.DecodeQueries`, and so do those that an eviction follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import with_gpu_sync_check
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_tgvkv.attention.base import EvictingImpl
from vllm_tgvkv.attention.cuda import most_split_sequences
from vllm_tgvkv.blocks.states import evicted_specs, with_plain_specs
from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.config.server import config_of
from vllm_tgvkv.recall.tier import PinnedTier
from vllm_tgvkv.shared.plan import Eviction, Restored
from vllm_tgvkv.worker.base import EvictingWorker
from vllm_tgvkv.worker.context import WORKSPACE_BYTES
from vllm_tgvkv.worker.decode_kernel import with_decode_kernel
from vllm_tgvkv.worker.memory import Memory, Sizes, memory_outside_pool
from vllm_tgvkv.worker.model_runner import RowsV1, RowsV2
from vllm_tgvkv.worker.ranks import tensor_ranks
from vllm_tgvkv.worker.warm_up import warm_up

logger = init_logger("vllm.tgvkv")


class EvictionGPUWorker(EvictingWorker, Worker):
    """The stock worker with evicting attention and evicting model runners."""

    replaced_backend = AttentionBackendEnum.FLASH_ATTN
    evicting_backend = "vllm_tgvkv.attention.cuda.EvictingFlashBackend"
    memory_tier = PinnedTier

    # vLLM's check for waits covers its own methods. Evictions and outcomes follow them.
    execute_model = with_gpu_sync_check(EvictingWorker.execute_model)
    sample_tokens = with_gpu_sync_check(EvictingWorker.sample_tokens)

    def _make_model_runner(self) -> EvictingModelRunnerV1 | EvictingModelRunnerV2:
        runner = EvictingModelRunnerV2 if self.use_v2_model_runner else EvictingModelRunnerV1
        return runner(self.vllm_config, self.device, self)

    def determine_available_memory(self) -> int:
        """Return the bytes of the pool: what vLLM would take, less what eviction takes itself."""
        available = super().determine_available_memory()
        evicted = evicted_specs(self.get_kv_cache_spec())
        # Blocks of windows and of states are as large, see `page_pool`.
        block_bytes = sum(spec.page_size_bytes for spec in evicted.values())
        memory = memory_of(self.vllm_config, evicted, available // block_bytes)
        logger.info("KV eviction takes %s", memory)
        if self.cache_config.kv_cache_memory_bytes:
            return available  # the user's number, or one found so at an earlier start
        left = memory.left_for_pool(available, block_bytes)
        # vLLM adds it up to a --kv-cache-memory that it recommends.
        self.peak_activation_memory += available - left
        self.available_kv_cache_memory_bytes = left
        return left

    @torch.inference_mode()
    def compile_or_warm_up_model(self) -> CompilationTimes:
        warm_up(self.evictor)
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in layers.values():
            if isinstance(impl := getattr(layer, "impl", None), EvictingImpl):
                impl.warm_up_gate()
        _, builder = self._evicted_group()
        builder.warm_up(next(layers[x] for x in builder.layer_names if layers[x].impl.layer == 0))
        return super().compile_or_warm_up_model()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.evictor.config.debug.poison:
            # Blocks are cleared when they are allocated, which vLLM prepares only for models that
            # need it.
            self.model_runner._init_kv_zero_meta()

    @property
    def rows_class(self) -> type[RowsV1] | type[RowsV2]:
        return RowsV2 if self.use_v2_model_runner else RowsV1

    def rewrite_rows(self, changes: list[Eviction | Restored]) -> None:
        """Leave the rows to the model runner, which rewrites them when it updates its own."""
        self.model_runner.changed_rows = changes


def memory_of(
    vllm_config: VllmConfig, specs: Mapping[str, FullAttentionSpec], most_blocks: int
) -> Memory:
    """Return what eviction takes outside the pool, for the specs of the evicted layers by name.

    The pool has at most `most_blocks` blocks.
    """
    name, spec = next(iter(specs.items()))
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    impl = compilation.static_forward_context[name].impl
    group_size = impl.num_queries_per_kv
    model = vllm_config.model_config
    max_rows = max(scheduler.max_num_seqs, compilation.max_cudagraph_capture_size or 0)
    sizes = Sizes(
        CacheShape(len(specs), spec.num_kv_heads, group_size, spec.head_size, spec.block_size),
        element_bytes=1 if impl.has_fp8_queries else model.dtype.itemsize,
        max_tokens=model.max_model_len,
        step_tokens=scheduler.max_num_batched_tokens,
        max_rows=max_rows,
        table_width=cdiv(model.max_model_len, spec.block_size),
        workspace_bytes=WORKSPACE_BYTES,
        pool_tokens=most_blocks * spec.block_size,
        ranks=tensor_ranks(vllm_config),
        split_sequences=most_split_sequences(
            max_rows,
            spec.num_kv_heads,
            vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph,
        ),
        row_tokens=max_decode_query_len(vllm_config),
    )
    config = with_decode_kernel(config_of(vllm_config), impl, spec.block_size)
    return memory_outside_pool(config, sizes)


class ChangingRows:
    """The common part of both model runners: rows that change."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, worker: EvictionGPUWorker
    ) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self.worker = worker
        self.changed_rows: list[Eviction | Restored] = []

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> Any:
        config = with_plain_specs(kv_cache_config)  # for a trial run as well
        return super().initialize_kv_cache(config, *args, **kwargs)  # type: ignore[misc]

    def rewrite_changed_rows(self) -> None:
        for change in self.changed_rows:
            self.worker.rows.rewrite(change)
        self.changed_rows = []


class EvictingModelRunnerV1(ChangingRows, GPUModelRunnerV1):
    """Model runner V1 with rows that change."""

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        # Here the copy of the last step's block table has certainly ended.
        self.rewrite_changed_rows()
        return super()._update_states(scheduler_output)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        if self.worker.observes:
            # As a prompt's chunk: piecewise graphs leave attention out.
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class EvictingModelRunnerV2(ChangingRows, GPUModelRunnerV2):
    """Model runner V2 with rows that change."""

    batch: BatchReqState | None = None
    """The requests of the step, row by row; None in a trial run."""

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        # A request that was preempted and is resumed in this step has its new row already.
        added = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        self.changed_rows = [row for row in self.changed_rows if row.request_id not in added]
        self.rewrite_changed_rows()
        super().update_requests(scheduler_output)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, dummy_run: bool
    ) -> tuple[BatchReqState | None, int | None]:
        state, uniform_token_count = super().gather_batch_req_state(scheduler_output, dummy_run)
        self.batch = state
        if not dummy_run and self.worker.observes:
            # Not uniform, so that no graph of the whole step fits.
            uniform_token_count = None
        return state, uniform_token_count
