# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported minor versions of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.scheduler import Scheduler

CPU_BLOCK_SIZE = 128
"""Tokens of a block on CPU where `--block-size` is not given."""


def block_size_before_loading(cache: CacheConfig, is_cpu: bool) -> int:
    """Return the tokens of a block, as far as they are known before the model is loaded.

    vLLM 0.33 chooses the default on CPU once the model is loaded, and says 16 until then; 0.32
    chooses it at once.
    """
    if is_cpu and not cache.user_specified_block_size:
        return CPU_BLOCK_SIZE
    return int(cache.block_size)


def ray_skips_worker() -> bool:
    """Return whether Ray's workers would call the model runner, and not the worker.

    vLLM 0.32 can be told so; 0.33 has no such executor.
    """
    calls_worker = envs.environment_variables.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    return calls_worker is not None and not calls_worker()


def end_with_error(scheduler: Scheduler, request_id: str, message: str) -> None:
    """Let the scheduler's next `update_from_output` end a request with HTTP 500.

    vLLM 0.32 answers "Internal server error"; 0.33 answers with the message.
    """
    failed = scheduler.grammar_compile_error_reqs
    if isinstance(failed, set):  # vLLM 0.32
        failed.add(request_id)
    else:
        from vllm.outputs import RequestError

        failed[request_id] = RequestError("internal_error", message)
