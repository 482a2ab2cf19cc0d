# SPDX-License-Identifier: Apache-2.0
"""The evicting part of a worker, on any platform.

`EvictingWorker` is a mixin in front of vLLM's workers: `cpu.py`, `cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_tgvkv.attention.base import EvictingBuilder, EvictingImpl
from vllm_tgvkv.attention.sinks import sinks_of
from vllm_tgvkv.blocks.manager import EvictingSpec
from vllm_tgvkv.blocks.states import (
    packed_block_size,
    with_draft_specs,
    with_plain_specs,
    with_state_specs,
)
from vllm_tgvkv.cache.pages import FP8, PagePool, page_pool
from vllm_tgvkv.config.digest import digest, settings_of_worker
from vllm_tgvkv.config.server import EvictionConfig, config_of
from vllm_tgvkv.gates.tap import attach_taps
from vllm_tgvkv.recall.tier import FileTier, MemoryTier, Tier
from vllm_tgvkv.shared.counters import EvictionCounters
from vllm_tgvkv.shared.errors import UnsupportedByEvictionError
from vllm_tgvkv.shared.plan import Eviction, Restored, StepPlan, attach_outcomes, plan_of
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decode_kernel import with_decode_kernel
from vllm_tgvkv.worker.evictor import Evictor
from vllm_tgvkv.worker.model_runner import RowsV1, RowsV2
from vllm_tgvkv.worker.outcomes import Outcomes
from vllm_tgvkv.worker.peers import check_world
from vllm_tgvkv.worker.ranks import tensor_ranks
from vllm_tgvkv.worker.recaller import Recaller
from vllm_tgvkv.worker.stages import pipeline_stages

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1


@contextmanager
def evicting_backend(replaced: AttentionBackendEnum, backend: str) -> Iterator[None]:
    """Replace one of vLLM's attention backends for the layers that are built in the block.

    The override ends with the block, so that another engine in the same process gets stock
    attention.
    """
    register_backend(replaced, backend)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        replaced.clear_override()
        selector._cached_get_attn_backend.cache_clear()


def check_sinks(config: EvictionConfig) -> None:
    """Refuse methods that do not work in layers with learned attention sinks.

    Raises:
        UnsupportedByEvictionError: if a method of the server keeps summaries.
    """
    if config.summarises:
        raise UnsupportedByEvictionError(
            f"--kv-eviction {config.policy} or one of its methods keeps summaries of evicted "
            "tokens, which do not work in layers with learned attention sinks yet: use a method "
            "without summaries and no mix with them, or leave out --kv-eviction"
        )


class EvictingWorker:
    """Owns the evictor: hands it each step's plan, and rows that shrank to the model runner."""

    # Of vLLM's worker.
    vllm_config: VllmConfig
    model_runner: GPUModelRunnerV1 | GPUModelRunnerV2

    replaced_backend: AttentionBackendEnum
    evicting_backend: str
    """Qualified name of the attention backend that replaces it."""

    memory_tier: type[MemoryTier] = MemoryTier

    rows: RowsV1 | RowsV2
    """Rows of the model runner's batch."""

    _evictor: Evictor | None = None
    _least_block_size: int | None = None
    """`--block-size`, if it was given."""

    def init_device(self) -> None:
        """Prepare the device and meet the other workers, which must have the same settings."""
        super().init_device()  # type: ignore[misc]
        check_world(self.kv_eviction_settings)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        cache = self.vllm_config.cache_config
        # vLLM raises it for states once the model is loaded.
        self._least_block_size = cache.block_size if cache.user_specified_block_size else None
        with evicting_backend(self.replaced_backend, self.evicting_backend):
            super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        gates = config_of(self.vllm_config).gates
        if gates is None:
            return
        modules = self.vllm_config.compilation_config.static_forward_context
        layers = {
            name: layer
            for name, layer in modules.items()
            if isinstance(getattr(layer, "impl", None), EvictingImpl)
            and name not in self._draft_layers
        }
        part = tensor_ranks(self.vllm_config).part
        attach_taps(self.model_runner.get_model(), layers, self.vllm_config, gates, part)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return the layers' specs; a given `--block-size` holds for layers beside states, too."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        least, drafts = self._least_block_size, self._draft_layers
        models = {name: spec for name, spec in specs.items() if name not in drafts}
        block_size = None if least is None else packed_block_size(models, least)
        if block_size is not None:
            cache = self.vllm_config.cache_config
            cache.block_size, cache.mamba_page_size_padded = block_size, None
            if cache.enable_prefix_caching:
                # A hit ends with a block of every layer.
                cache.mamba_block_size = block_size
            specs = super().get_kv_cache_spec()  # type: ignore[misc]
        speculative = self.vllm_config.speculative_config
        is_mtp = speculative is not None and speculative.method == "mtp"
        return with_state_specs(with_draft_specs(specs, drafts, last=is_mtp))

    @property
    def _draft_layers(self) -> Set[str]:
        """Names of the attention layers of a draft model."""
        drafter = getattr(self.model_runner, "drafter", None)
        return getattr(drafter, "_draft_attn_layer_names", frozenset())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, make its evictor, and bind layers and metadata builder to them."""
        super().initialize_from_config(with_plain_specs(kv_cache_config))  # type: ignore[misc]
        group, builder = self._evicted_group()
        self.rows = self.rows_class(self.model_runner, group)
        modules = self.vllm_config.compilation_config.static_forward_context
        members = [modules[name] for name in builder.layer_names]
        layers = [layer for layer in members if layer.kv_sharing_target_layer_name is None]
        layers.sort(key=lambda layer: layer.kv_cache.storage_offset())
        impl = layers[0].impl
        pool = page_pool(
            [layer.kv_cache for layer in layers],
            impl.num_queries_per_kv,
            builder.slots_first,
            FP8.get(self.vllm_config.cache_config.cache_dtype),
        )
        self._evictor = Evictor(
            with_decode_kernel(config_of(self.vllm_config), impl, pool.shape.block_size),
            pool,
            tensor_ranks(self.vllm_config),
            pipeline_stages(len(layers), pool.raw.device),
            pool.keys.dtype if impl.has_fp8_queries else self.vllm_config.model_config.dtype,
            self._recaller_of(pool, layers, builder.kv_cache_spec),
            lambda: [layer.impl.product_scale(layer) for layer in layers],
        )
        sinks = sinks_of([layer.impl for layer in layers])
        if sinks is not None:
            check_sinks(config_of(self.vllm_config))
        self._evictor.context.sinks = sinks
        indices = {layer.layer_name: index for index, layer in enumerate(layers)}
        for layer in members:
            owner = layer.kv_sharing_target_layer_name or layer.layer_name
            layer.impl.bind(indices[owner], pool, self._evictor.context.gate_outputs)
        builder.bind(self._evictor, self.rows)
        if has_kv_transfer_group():
            get_kv_transfer_group().receiving = self._evictor.arrivals
            self.rows.take_answers()
        self._shrunk: list[Eviction] = []
        self._counters = EvictionCounters().as_dict()

    def _recaller_of(
        self, pool: PagePool, layers: Sequence[AttentionLayer], spec: EvictingSpec
    ) -> Callable[[ObserverContext], Recaller] | None:
        """Return a function that makes the worker's part of recall; None if there is none."""
        recall = config_of(self.vllm_config).recall
        if recall is None:
            return None
        scales = [layer.impl.product_scale(layer) for layer in layers]
        num_blocks = recall.num_tier_blocks(self.vllm_config, spec)
        tier: Tier
        if recall.folder is None:
            tier = self.memory_tier(pool, num_blocks)
        else:
            tier = FileTier(pool, num_blocks, recall.folder)
        return partial(Recaller, tier=tier, options=recall, scales=scales)

    def _evicted_group(self) -> tuple[int, EvictingBuilder[Any]]:
        """Return the evicted layers' index among vLLM's KV cache groups, and their builder."""
        (found,) = (
            (index, builder)
            for index, groups in enumerate(self.model_runner.attn_groups)
            for group in groups
            if isinstance(builder := group.get_metadata_builder(), EvictingBuilder)
            and builder.evicts
        )
        return found

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        plan = plan_of(scheduler_output)
        # Rows shrink after the step that evicts, and are whole again before the next one.
        self.rewrite_rows([*self._shrunk, *plan.restored])
        self._shrunk = plan.evictions
        self._counters = plan.counters or self._counters
        self.evictor.begin_step(plan)
        self.rows.answers = plan.answers
        for request_id, images in plan.images.items():
            self.model_runner.requests[request_id].mm_features = images
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        self.evictor.evict_stored()
        return output

    def execute_dummy_batch(self) -> None:
        """Run a step without requests, which has no plan either.

        Engines that share a mixture's experts step together, also those without requests.
        """
        self.evictor.begin_step(StepPlan())
        super().execute_dummy_batch()  # type: ignore[misc]

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        outcomes = self.evictor.take_outcomes()
        if outcomes is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return OutputWithOutcomes(output, outcomes)
        return attach_outcomes(output, outcomes.read())

    @property
    def rows_class(self) -> type[RowsV1] | type[RowsV2]:
        """Return how the model runner stores rows of its batch."""
        return RowsV1

    def rewrite_rows(self, changes: list[Eviction | Restored]) -> None:
        """Replace rows that shrank or are whole again, before the next step is built."""
        for change in changes:
            self.rows.rewrite(change)

    def kv_eviction_stats(self) -> dict[str, Any]:
        """Return totals of `EvictionCounters` as of the last step, for `collective_rpc`."""
        return self._counters

    @cached_property
    def _settings(self) -> dict[str, str]:
        return settings_of_worker(self.vllm_config)

    def kv_eviction_settings(self) -> dict[str, str]:
        """Return what has to be the same on all nodes, for `server/engines.py`."""
        return self._settings

    def kv_eviction_status(self) -> dict[str, Any]:
        """Return settings, totals and pool of this engine, for `GET /kv-eviction/status`."""
        pool = self.evictor.pool
        return {
            "settings": digest(self._settings),
            "totals": self._counters,
            "pool": {
                "blocks": pool.num_blocks - 1,
                "block_size": pool.shape.block_size,
                "layers": self.evictor.stages.model_layers,
                "kv_heads": pool.shape.num_heads * self.evictor.ranks.num_parts,
            },
        }

    def kv_eviction_traces(self) -> list[dict[str, Any]]:
        """Return summaries of the stored traces, newest first, for `GET /kv-eviction/requests`."""
        return [trace.summary() for trace in self.evictor.traces.newest_first()]

    def kv_eviction_trace(
        self, name: str, layer: int | None = None, cut: int | None = None
    ) -> dict[str, Any] | None:
        """Return a trace, or one layer of it, at its last cut or at the one with index `cut`.

        None is returned if there is no such trace, layer or cut.
        """
        trace = self.evictor.traces.find(name)
        if trace is None:
            return None
        return trace.detail(cut) if layer is None else trace.layer(layer, cut)

    def kv_eviction_kept(self) -> list[dict[str, Any]]:
        """Return the kept tokens of the last evictions, with the debug option `record_kept`.

        Returns:
            For each: `request_id`; `counts`, pages of every (layer, head) as an array [L, H];
            `positions`, an array [pages, N] in (layer, head) order.
        """
        return [
            {
                "request_id": request_id,
                "counts": kept.counts.numpy(force=True),
                "positions": kept.positions.numpy(force=True),
            }
            for request_id, kept in self.evictor.kept
        ]

    @property
    def evictor(self) -> Evictor:
        assert self._evictor is not None, "the KV cache is not initialised"
        return self._evictor

    @property
    def observes(self) -> bool:
        """Whether layers are observed in this step, which would be a graph otherwise."""
        return self._evictor is not None and self._evictor.has_work(may_be_graph=True)


class OutputWithOutcomes(AsyncModelRunnerOutput):
    """A step's output that is still on the device, with the outcomes of its evictions."""

    def __init__(self, output: AsyncModelRunnerOutput, outcomes: Outcomes) -> None:
        self._output = output
        self._outcomes = outcomes

    def get_output(self) -> ModelRunnerOutput:
        return attach_outcomes(self._output.get_output(), self._outcomes.read())

    def get_kv_connector_output(self) -> Any:
        """Return what is left of the output for vLLM 0.33 if `get_output` failed."""
        return self._output.get_kv_connector_output()
