# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with eviction, on model runner V1."""

from __future__ import annotations

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tgvkv.worker.base import EvictingWorker
from vllm_tgvkv.worker.cpu_states import AcceptedTokens, repair_states


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return a number of every request for each of its drafts, [num_tokens] in the dtype of `x`.

    vLLM's own function does so on GPUs only, see `engine/patches.py`.

    Args:
        x: a number of every request, such as its temperature, [batch].
        cu_num_tokens: drafts up to and including each request's, [batch].
        replace_from: the number that becomes `replace_to`.
    """
    lengths = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(
        lengths, output_size=num_tokens
    )


class EvictionCPUWorker(EvictingWorker, CPUWorker):
    """The stock worker with evicting attention."""

    replaced_backend = AttentionBackendEnum.CPU_ATTN
    evicting_backend = "vllm_tgvkv.attention.cpu.EvictingCPUBackend"

    _accepted: AcceptedTokens | None = None

    def init_device(self) -> None:
        """Prepare the device, and repair what vLLM does with drafts in this process, for good."""
        super().init_device()
        if self.vllm_config.speculative_config is not None:
            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
            if self.vllm_config.model_config.is_hybrid:
                repair_states()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache; with drafts, states need the number of accepted tokens."""
        super().initialize_from_config(kv_cache_config)
        if self.vllm_config.speculative_config is not None and kv_cache_config.has_mamba_layers:
            self._accepted = AcceptedTokens(self.model_runner.input_batch)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._accepted is not None:
            self._accepted.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, and allocate room for hidden states from another pipeline stage.

        vLLM allocates it in a warm-up that `--enforce-eager` leaves out; then the first request
        would end the engine.
        """
        super().load_model(load_dummy_weights=load_dummy_weights)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample, with the random generators of unfinished prompts set aside.

        vLLM draws for such rows as well and then resets the generator's offset, which ends the
        engine: a CPU's generators have no offset.
        """
        runner = self.model_runner
        generators, num_rows = runner.input_batch.generators, runner.input_batch.num_reqs
        (unfinished,) = np.nonzero(runner.discard_request_mask.np[:num_rows])
        set_aside = {i: generators.pop(i) for i in unfinished.tolist() if i in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(set_aside)
