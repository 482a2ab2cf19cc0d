# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed import get_pp_group
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

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load; a pipeline stage that gets hidden states from another one can take them then.

        vLLM makes the room for them in a warm-up which it leaves out with `--enforce-eager`, and
        the first request ends the engine.
        """
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample; a row that does not end its request's known tokens leaves its generator alone.

        vLLM draws for such a row as well, and then turns back the offset of its generator, which
        ends the engine: a CPU's generators have none.
        """
        runner = self.model_runner
        generators, num_rows = runner.input_batch.generators, runner.input_batch.num_reqs
        (unfinished,) = np.nonzero(runner.discard_request_mask.np[:num_rows])
        set_aside = {i: generators.pop(i) for i in unfinished.tolist() if i in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(set_aside)

    def find_row(self, common: CommonAttentionMetadata, request_id: str) -> int | None:
        return RowsV1.find(self.model_runner, common, request_id)

    def rewrite_rows(self, evictions: list[Eviction]) -> None:
        for eviction in evictions:
            RowsV1.rewrite(self.model_runner, eviction)
