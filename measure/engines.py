# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in this process, whose parts can be reached, started and ended cleanly."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_tgvkv.scheduler.scheduler import EvictionScheduler
    from vllm_tgvkv.worker.evictor import Evictor

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Front end and engine in one process, on all cores, with nothing from the network."""


def set_environment(variables: Mapping[str, str] = ENVIRONMENT) -> None:
    """Set variables that are not set yet. Call it before torch and vLLM are imported."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


class LocalEngine:
    """An `LLMEngine` and the parts of its core, which runs in this process.

    Needs `VLLM_ENABLE_V1_MULTIPROCESSING=0` when the engine is made.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core

    @property
    def scheduler(self) -> EvictionScheduler:
        """Return the scheduler; without eviction it is vLLM's."""
        scheduler: EvictionScheduler = self.core.scheduler
        return scheduler

    @property
    def worker(self) -> Any:
        """Return the only worker."""
        return self.core.model_executor.driver_worker.worker

    @property
    def evictor(self) -> Evictor:
        """Return the worker's evictor."""
        evictor: Evictor = self.worker.evictor
        return evictor

    @property
    def attention_group(self) -> Any:
        """Return the group of full-attention layers: its backend, builder and layer names."""
        groups = (group for groups in self.worker.model_runner.attn_groups for group in groups)
        # Not imported above: vLLM reads the environment that this module sets.
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        (group,) = (g for g in groups if isinstance(g.kv_cache_spec, FullAttentionSpec))
        return group

    def facts(self) -> dict[str, Any]:
        """Return the settings that vLLM arrived at, for a report."""
        config = self.engine.vllm_config
        return {
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "compilation": str(config.compilation_config.mode),
            "cudagraphs": str(config.compilation_config.cudagraph_mode),
            "attention": self.attention_group.backend.__name__,
            "scheduler": type(self.scheduler).__name__,
            "runner": type(self.worker.model_runner).__name__,
        }

    def close(self) -> None:
        """Shut down the core and free what it held, so that another engine can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        del self.engine, self.core
        gc.collect()
        cleanup_dist_env_and_memory()


class LocalLLM(LocalEngine):
    """An `LLM` in this process, and the parts of its engine's core."""

    def __init__(self, model: Path, eviction: Mapping[str, Any] | None, **options: Any) -> None:
        """Start vLLM, with eviction unless `eviction` is None; `options` are those of `LLM`."""
        from vllm import LLM

        from vllm_tgvkv.config.server import CONFIG_KEY

        additional = {} if eviction is None else {CONFIG_KEY: dict(eviction)}
        options = {"disable_log_stats": True, **options}
        self.llm = LLM(model=str(model), additional_config=additional, **options)
        super().__init__(self.llm.llm_engine)

    def close(self) -> None:
        """Shut down the core and free what it held, so that another engine can start."""
        del self.llm
        super().close()
