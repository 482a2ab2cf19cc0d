# SPDX-License-Identifier: Apache-2.0
"""Calls to all engines of a server; `server/test_replicas.py` calls those of a real one."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient

from vllm_tgvkv.server.engines import ask_engines


class OneEngine:
    """The interface of `EngineClient`."""

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> list[Any]:
        return [(method, *args)]


class SeveralEngines:
    """The part of an `AsyncLLM` with data parallelism that is called."""

    def __init__(self) -> None:
        self.engine_core = self

    async def call_utility_all_async(self, utility: str, *args: Any) -> list[Any]:
        assert utility == "collective_rpc"
        method, timeout, arguments, keywords = args
        assert (timeout, keywords) == (None, None)
        return [[(engine, method, *arguments)] for engine in "ab"]


def test_answers_are_listed_by_engine_and_worker() -> None:
    assert asyncio.run(ask_engines(SeveralEngines(), "m", 1)) == [[("a", "m", 1)], [("b", "m", 1)]]
    assert asyncio.run(ask_engines(OneEngine(), "m", 1)) == [[("m", 1)]]


def test_vllm_calls_all_engines_by_that_name() -> None:
    """Contract of `ask_engines`, which uses more than the interface of `EngineClient`."""
    parameters = list(inspect.signature(EngineCore.collective_rpc).parameters)
    assert parameters[1:] == ["method", "timeout", "args", "kwargs"]
    # vLLM's own call passes the same arguments, and drops all answers but the first.
    for function, text in (
        (AsyncMPClient.collective_rpc_async, '"collective_rpc", method, timeout, args, kwargs'),
        (DPLBAsyncMPClient.call_utility_async, "call_utility_all_async(method, *args))[0]"),
        (AsyncMPClient.call_utility_all_async, "for engine in self.core_engines"),
        (AsyncLLM, "self.engine_core = EngineCoreClient.make_async_mp_client"),
    ):
        assert text in inspect.getsource(function)
