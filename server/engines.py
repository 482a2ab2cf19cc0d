# SPDX-License-Identifier: Apache-2.0
"""Asking the workers of every engine, whichever API server process is asked."""

from __future__ import annotations

from typing import Any


async def ask_engines(engine_client: Any, method: str, *args: Any) -> list[list[Any]]:
    """Call a worker method on every engine that the client knows, all at the same time.

    With data parallelism `EngineClient.collective_rpc` asks all engines and returns what the first
    one said. An engine answers between two steps, so this takes as long as the longest step.

    Args:
        engine_client: An `EngineClient` of vLLM.
        method: A method of the worker.
        args: Positional; what msgpack can carry.

    Returns:
        Answers by engine, in the order of their ranks, and by worker.

    Raises:
        Exception: vLLM's own, if the method raises on some engine or an engine has died.
    """
    ask_all = getattr(getattr(engine_client, "engine_core", None), "call_utility_all_async", None)
    if ask_all is None:  # not an `AsyncLLM`: a client of one engine
        return [await engine_client.collective_rpc(method, args=args)]
    answers: list[list[Any]] = await ask_all("collective_rpc", method, None, args, None)
    return answers
