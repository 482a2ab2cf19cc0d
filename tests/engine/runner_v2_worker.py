# SPDX-License-Identifier: Apache-2.0
"""The GPU's evicting model runner V2 in a CPU worker, for processes that `runner_v2.py` prepared.

The runner is the plugin's GPU runner, over the FlashAttention that `flash_on_cpu.py` pretends.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu import model_runner as cpu

from tests.engine import flash_on_cpu
from vllm_tgvkv.worker.base import EvictingWorker
from vllm_tgvkv.worker.cuda import EvictingModelRunnerV2, EvictionGPUWorker
from vllm_tgvkv.worker.model_runner import RowsV2

flash_on_cpu.pretend_kernels(pytest.MonkeyPatch())


class EvictingV2Runner(EvictingModelRunnerV2, cpu.CPUModelRunner):
    """The evicting runner, which warms up like vLLM's CPU runner."""


class EvictingV2Worker(flash_on_cpu.FlashOnCPUWorker):
    """The CPU worker, with `EvictingV2Runner` and the GPU worker's treatment of it."""

    rewrite_rows = EvictionGPUWorker.rewrite_rows
    rows_class = RowsV2
    # Skips the CPU worker's method, which handles the generators of runner V1.
    sample_tokens = EvictingWorker.sample_tokens

    def init_device(self) -> None:
        def runner(vllm_config: Any, device: Any) -> EvictingV2Runner:
            return EvictingV2Runner(vllm_config, device, self)

        with patch.object(cpu, "CPUModelRunner", runner):
            super().init_device()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        # The debug option `poison` needs blocks cleared. V2 prepares that only for models that
        # need it; V1 on CPU can always do it.
        self.model_runner._init_kv_zero_meta()
