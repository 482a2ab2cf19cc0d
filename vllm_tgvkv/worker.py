# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with the evicting attention backend and compressed block-table rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tgvkv.attention_cpu import EvictingCPUImpl, EvictingCPUMetadataBuilder
from vllm_tgvkv.counters import EvictionCounters
from vllm_tgvkv.evictor import Evictor
from vllm_tgvkv.pages import page_pool
from vllm_tgvkv.plan import ATTRIBUTE, RETAINED_ATTRIBUTE, Eviction, StepPlan

BACKEND = "vllm_tgvkv.attention_cpu.EvictingCPUBackend"


@contextmanager
def evicting_backend() -> Iterator[None]:
    """Let vLLM's CPU attention resolve to ours, for the layers built meanwhile.

    The override ends with the block, so that another engine of the same process
    gets stock attention.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()


class EvictionCPUWorker(CPUWorker):
    """The stock worker; hands each step's `StepPlan` to the evictor."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with evicting_backend():
            super().load_model(*args, **kwargs)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        builder = self._builder()
        layers = self.vllm_config.compilation_config.static_forward_context
        names = sorted(builder.layer_names, key=lambda n: layers[n].kv_cache.storage_offset())
        pool = page_pool([layers[name].kv_cache for name in names])
        for index, name in enumerate(names):
            impl = layers[name].impl
            assert isinstance(impl, EvictingCPUImpl), type(impl)
            impl.bind(index, pool)
        builder.bind(pool, self.model_runner.input_batch.req_id_to_index)
        self._rows_to_rewrite: list[Eviction] = []
        self._counters = EvictionCounters().as_dict()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        plan: StepPlan = getattr(scheduler_output, ATTRIBUTE, None) or StepPlan()
        for eviction in self._rows_to_rewrite:
            self._rewrite_row(eviction)
        self._rows_to_rewrite = plan.evictions
        self._counters = plan.counters or self._counters
        self.evictor.begin_step(plan)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if retained := self.evictor.take_retained():
            setattr(output, RETAINED_ATTRIBUTE, retained)
        return output

    def kv_eviction_stats(self) -> dict[str, Any]:
        """Totals of `EvictionCounters` as of the last step, for `collective_rpc`."""
        return self._counters

    def kv_eviction_kept(self) -> list[dict[str, Any]]:
        """Kept tokens of the last evictions, with the debug option `record_kept`.

        Returns:
            For each: `request_id`; `counts`, pages of every (layer, head) as an
            array [L, H]; `positions`, an array [pages, N] in (layer, head) order.
        """
        return [
            {
                "request_id": kept.request_id,
                "counts": kept.counts.numpy(),
                "positions": kept.positions.numpy(),
            }
            for kept in self.evictor.kept
        ]

    @property
    def evictor(self) -> Evictor:
        evictor = self._builder().evictor
        assert evictor is not None, "the KV cache is not initialised"
        return evictor

    def _builder(self) -> EvictingCPUMetadataBuilder:
        ((group,),) = self.model_runner.attn_groups
        builder = group.get_metadata_builder()
        assert isinstance(builder, EvictingCPUMetadataBuilder), type(builder)
        return builder

    def _rewrite_row(self, eviction: Eviction) -> None:
        """Put the compressed row in place of the prompt's, before the next step is built.

        A request that ended meanwhile is gone from the runner; a preempted one gets
        a row of its own when it is scheduled again.
        """
        runner = self.model_runner
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
