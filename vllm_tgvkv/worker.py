# SPDX-License-Identifier: Apache-2.0
"""What eviction adds to a worker of vLLM, on any platform.

Stock workers become evicting ones by `EvictingWorker` in front of them: `worker_cpu.py`,
`worker_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_tgvkv.attention import EvictingBuilder
from vllm_tgvkv.counters import EvictionCounters
from vllm_tgvkv.evictor import Evictor, Outcomes
from vllm_tgvkv.pages import FP8, page_pool
from vllm_tgvkv.plan import Eviction, attach_outcomes, plan_of


@contextmanager
def evicting_backend(replaced: AttentionBackendEnum, backend: str) -> Iterator[None]:
    """Let one of vLLM's attention backends resolve to ours, for the layers built meanwhile.

    The override ends with the block, so that another engine of the same process
    gets stock attention.
    """
    register_backend(replaced, backend)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        replaced.clear_override()
        selector._cached_get_attn_backend.cache_clear()


class EvictingWorker:
    """Hands each step's `StepPlan` to the evictor, and rows that shrank to the model runner."""

    replaced_backend: AttentionBackendEnum
    evicting_backend: str
    """Qualified name of the attention backend that takes its place."""

    # Of vLLM's worker.
    vllm_config: Any
    model_runner: Any

    _evictor: Evictor | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with evicting_backend(self.replaced_backend, self.evicting_backend):
            super().load_model(*args, **kwargs)  # type: ignore[misc]

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        builder = self._builder()
        layers = self.vllm_config.compilation_config.static_forward_context
        names = sorted(builder.layer_names, key=lambda n: layers[n].kv_cache.storage_offset())
        dtype = FP8.get(self.vllm_config.cache_config.cache_dtype)
        pool = page_pool([layers[name].kv_cache for name in names], builder.slots_first, dtype)
        for index, name in enumerate(names):
            layers[name].impl.bind(index, pool)
        builder.bind(pool, self.find_row)
        self._evictor = builder.evictor
        self._shrunk: list[Eviction] = []
        self._counters = EvictionCounters().as_dict()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        plan = plan_of(scheduler_output)
        self.rewrite_rows(self._shrunk)
        self._shrunk = plan.evictions
        self._counters = plan.counters or self._counters
        self.evictor.begin_step(plan)
        for request_id, images in plan.images.items():
            self.model_runner.requests[request_id].mm_features = images
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        outcomes = self.evictor.take_outcomes()
        if outcomes is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return OutputWithOutcomes(output, outcomes)
        return with_outcomes(output, outcomes)

    def find_row(self, common: CommonAttentionMetadata, request_id: str) -> int | None:
        """Row of a request in the batch that is being built, see `RowFinder`."""
        raise NotImplementedError

    def rewrite_rows(self, evictions: list[Eviction]) -> None:
        """Put compressed rows in place of prompts', before the next step is built."""
        raise NotImplementedError

    def kv_eviction_stats(self) -> dict[str, Any]:
        """Totals of `EvictionCounters` as of the last step, for `collective_rpc`."""
        return self._counters

    def kv_eviction_status(self) -> dict[str, Any]:
        """Totals and pool of this engine, for `GET /kv-eviction/status`."""
        pool = self.evictor.pool
        return {
            "totals": self._counters,
            "pool": {
                "blocks": pool.num_blocks - 1,
                "block_size": pool.block_size,
                "layers": self.evictor.stages.model_layers,
                "kv_heads": pool.num_heads * self.evictor.ranks.num_parts,
            },
        }

    def kv_eviction_traces(self) -> list[dict[str, Any]]:
        """Summaries of the remembered traces, newest first, for `GET /kv-eviction/requests`."""
        return [trace.summary() for trace in self.evictor.traces.newest_first()]

    def kv_eviction_trace(self, name: str, layer: int | None = None) -> dict[str, Any] | None:
        """A trace, or one layer of it; None if it is not known (any more) or has no such layer."""
        trace = self.evictor.traces.find(name)
        if trace is None:
            return None
        return trace.detail() if layer is None else trace.layer(layer)

    def kv_eviction_kept(self) -> list[dict[str, Any]]:
        """Kept tokens of the last evictions, with the debug option `record_kept`.

        Returns:
            For each: `request_id`; `counts`, pages of every (layer, head) as an
            array [L, H]; `positions`, an array [pages, N] in (layer, head) order.
        """
        return [
            {
                "request_id": kept.request_id,
                "counts": kept.counts.numpy(force=True),
                "positions": kept.positions.numpy(force=True),
            }
            for kept in self.evictor.kept
        ]

    @property
    def evictor(self) -> Evictor:
        assert self._evictor is not None, "the KV cache is not initialised"
        return self._evictor

    @property
    def observes(self) -> bool:
        """Whether prompts are observed in this step."""
        return self._evictor is not None and self._evictor.has_work

    def _builder(self) -> EvictingBuilder:
        ((group,),) = self.model_runner.attn_groups
        return group.get_metadata_builder()


class OutputWithOutcomes(AsyncModelRunnerOutput):
    """A step's output that is still on the device, and what came of its evictions."""

    def __init__(self, output: AsyncModelRunnerOutput, outcomes: Outcomes) -> None:
        self._output = output
        self._outcomes = outcomes

    def get_output(self) -> ModelRunnerOutput:
        return with_outcomes(self._output.get_output(), self._outcomes)


def with_outcomes(output: ModelRunnerOutput, outcomes: Outcomes) -> ModelRunnerOutput:
    """Wait for the step's outcomes and attach them."""
    return attach_outcomes(output, outcomes.read())
