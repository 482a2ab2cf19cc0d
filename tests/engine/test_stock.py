# SPDX-License-Identifier: Apache-2.0
"""Without `--kv-eviction` vLLM is stock, also after an evicting engine in the same process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from measure.engines import LocalEngine

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

PARTS = (
    "scheduler.scheduler",
    "blocks.manager",
    "worker.base",
    "worker.cpu",
    "worker.evictor",
    "attention.base",
    "attention.cpu",
)
"""Modules of the package that only an engine with eviction uses."""

STOCK = {
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
    "manager": "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager",
    "spec": "vllm.v1.kv_cache_interface.FullAttentionSpec",
    "backend": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    "builder": "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder",
    "impl": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
    "layers outermost": True,
    "invalid request passes": True,
}
EVICTING = {
    "scheduler": "vllm_tgvkv.scheduler.scheduler.EvictionScheduler",
    "worker": "vllm_tgvkv.worker.cpu.EvictionCPUWorker",
    "manager": "vllm_tgvkv.blocks.manager.EvictingManager",
    "spec": "vllm_tgvkv.blocks.manager.EvictingSpec",
    "backend": "vllm_tgvkv.attention.cpu.EvictingCPUBackend",
    "builder": "vllm_tgvkv.attention.cpu.EvictingCPUMetadataBuilder",
    "impl": "vllm_tgvkv.attention.cpu.EvictingCPUImpl",
    "layers outermost": False,
    "invalid request passes": False,
}


def name_of(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def engine_facts(folder: Path, eviction: dict[str, Any] | None) -> dict[str, Any]:
    """Start an engine in this process, send an invalid request, and return its classes."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    running = LocalEngine(
        folder,
        eviction,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        block_size=32,
        num_gpu_blocks_override=32,
    )
    core: Any = running.core
    group = running.attention_group
    layers = running.worker.vllm_config.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in sorted(group.layer_names)]
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    try:
        params = SamplingParams(max_tokens=2, extra_args={"kv_eviction": "nonsense"})
        running.llm.generate("Does this pass?", params, use_tqdm=False)
        passes = True
    except VLLMValidationError:
        passes = False
    facts = {
        "scheduler": name_of(core.scheduler),
        "worker": name_of(running.worker),
        "manager": name_of(manager),
        "spec": name_of(group.kv_cache_spec),
        "backend": name_of(group.backend),
        "builder": name_of(group.get_metadata_builder()),
        "impl": name_of(layers[group.layer_names[0]].impl),
        # Layout LBHNC keeps a layer's cache in one piece, BLHNC interleaves the layers.
        "layers outermost": all(cache.is_contiguous() for cache in caches),
        "invalid request passes": passes,
    }
    del core, group, layers, caches, manager
    running.close()
    return facts


def imported() -> list[str]:
    return [part for part in PARTS if f"vllm_tgvkv.{part}" in sys.modules]


def in_a_fresh_process(folder: Path) -> dict[str, Any]:
    """Start one without a method, one with eviction, and stock; runs in a new process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    found: dict[str, Any] = {"none": engine_facts(folder, {"policy": "none", "budget": 0.5})}

    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.engine.input_processor import InputProcessor

    found["imported"] = imported()
    found["validation"] = InputProcessor.process_inputs.__module__
    found["validation wrapped"] = hasattr(InputProcessor.process_inputs, "__wrapped__")
    found["backend overridden"] = AttentionBackendEnum.CPU_ATTN.is_overridden()

    found["tgv"] = engine_facts(folder, {"policy": "tgv"})
    found["imported with a method"] = imported()
    found["after"] = engine_facts(folder, None)
    found["backend overridden after"] = AttentionBackendEnum.CPU_ATTN.is_overridden()
    return found


@pytest.fixture(scope="module")
def found(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(in_a_fresh_process, tiny_model("llava", image_size=112)).result()


def test_without_a_method_everything_is_vllms(found: dict[str, Any]) -> None:
    assert found["none"] == STOCK
    assert found["imported"] == []
    assert found["validation"] == "vllm.v1.engine.input_processor"
    assert not found["validation wrapped"]
    assert not found["backend overridden"]


def test_with_a_method_every_part_is_the_plugins(found: dict[str, Any]) -> None:
    """Otherwise the checks of stock vLLM above would prove nothing."""
    assert found["tgv"] == EVICTING
    assert found["imported with a method"] == list(PARTS)


def test_stock_engine_after_one_with_eviction(found: dict[str, Any]) -> None:
    assert found["after"] == STOCK
    assert not found["backend overridden after"]
