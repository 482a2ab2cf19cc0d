# SPDX-License-Identifier: Apache-2.0
"""vLLM engines in this process, whose parts can be reached, started and ended cleanly."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from vllm_tgvkv.scheduler.scheduler import EvictionScheduler
    from vllm_tgvkv.worker.evictor import Evictor

MACHINE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Engines on all cores, with nothing from the network."""

ENVIRONMENT = {
    **MACHINE,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""The same, with front end and engine in one process."""


def set_environment(variables: Mapping[str, str] = ENVIRONMENT) -> None:
    """Set variables that are not set yet. Call it before torch and vLLM are imported."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """An input of the engine, and what it is for."""

    name: str
    subject: T
    prompt: Any
    """As vLLM's renderer makes it."""
    sampling: Any


class LocalEngine:
    """A vLLM engine in this process, and the parts of its core.

    Closed at the end of a `with` block. Needs `VLLM_ENABLE_V1_MULTIPROCESSING=0` when it is made.
    """

    def __init__(
        self,
        model: Path | str,
        eviction: Mapping[str, Any] | None = None,
        *,
        as_served: bool = False,
        **options: Any,
    ) -> None:
        """Start vLLM.

        Args:
            eviction: the plugin's settings; None: stock vLLM, unless `options` have them.
            as_served: with the defaults of `vllm serve`, and without `llm`.
            options: engine arguments.
        """
        # Not imported above: vLLM reads the environment that this module sets.
        from vllm import LLM, EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from vllm_tgvkv.config.server import CONFIG_KEY

        if eviction is not None:
            options["additional_config"] = {CONFIG_KEY: dict(eviction)}
        self.llm: Any = None
        if as_served:
            args = EngineArgs(model=str(model), **options)
            context = UsageContext.OPENAI_API_SERVER
            self.engine: Any = LLMEngine.from_engine_args(args, usage_context=context)
        else:
            self.llm = LLM(model=str(model), **{"disable_log_stats": True, **options})
            self.engine = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Return the model's group of full-attention layers: its backend, builder, layer names.

        A draft model has fewer layers.
        """
        groups = (group for groups in self.worker.model_runner.attn_groups for group in groups)
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        full = (group for group in groups if isinstance(group.kv_cache_spec, FullAttentionSpec))
        return max(full, key=lambda group: len(group.layer_names))

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

    def finish(self, requests: Iterable[Request[T]], most: int) -> Iterator[tuple[T, Any, int]]:
        """Yield each request's subject, output and number of steps that gave it a token.

        They come in the order in which they finish.

        Args:
            most: requests that the engine has at a time. Twice its batch keeps the batch full.
        """
        waiting = iter(requests)
        asked: dict[str, T] = {}
        steps: Counter[str] = Counter()
        while True:
            for request in islice(waiting, most - len(asked)):
                self.engine.add_request(request.name, request.prompt, request.sampling)
                asked[request.name] = request.subject
            if not asked:
                return
            for output in self.engine.step():
                name = output.request_id
                steps[name] += 1
                if output.finished:
                    yield asked.pop(name), output, steps.pop(name)

    def close(self) -> None:
        """Shut down the core and free what it held, so that another engine can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        del self.llm, self.engine, self.core
        gc.collect()
        cleanup_dist_env_and_memory()
