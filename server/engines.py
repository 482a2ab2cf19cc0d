# SPDX-License-Identifier: Apache-2.0
"""Calls to the workers of every engine, from any API server process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tgvkv.shared.errors import SILENT_NODE, EvictionConfigError, differences

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


async def ask_engines(
    engine_client: EngineClient, method: str, *args: str | int | None
) -> list[list[Any]]:
    """Call a worker method on every engine of a client at the same time.

    With data parallelism `EngineClient.collective_rpc` calls all engines but returns only the first
    one's answer. An engine answers between two steps, so this takes as long as the longest step.

    Args:
        engine_client: The server's client of its engines.
        method: Name of the worker's method.
        args: Positional arguments that msgpack can encode.

    Returns:
        Answers by engine, in the order of their ranks, and by worker.

    Raises:
        Exception: vLLM's own, if the method raises on an engine or an engine has died.
    """
    ask_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:  # a client of one engine, not an `AsyncLLM`
        return [await engine_client.collective_rpc(method, args=args)]
    answers: list[list[Any]] = await ask_all("collective_rpc", method, None, args, None)
    return answers


async def check_engines(engine_client: EngineClient) -> None:
    """Compare the settings of all engines, which nodes read from their own flags.

    Raises:
        EvictionConfigError: naming engine, setting and both values; or vLLM's error of an engine
            that does not evict.
    """
    if engine_client.vllm_config.parallel_config.data_parallel_size == 1:
        return
    try:
        engines = await ask_engines(engine_client, "kv_eviction_settings")
    except Exception as error:
        raise EvictionConfigError(
            f"an engine cannot say how --kv-eviction is set ({error}): its node {SILENT_NODE}"
        ) from error
    # Workers of an engine have compared theirs.
    problem = differences("engine", {rank: workers[0] for rank, workers in enumerate(engines)})
    if problem is not None:
        raise EvictionConfigError(problem)
