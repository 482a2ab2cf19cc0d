# SPDX-License-Identifier: Apache-2.0
"""Tests of what differs between the supported minor versions of vLLM, in the forms of both."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response
from vllm.config import CacheConfig, VllmConfig
from vllm.outputs import RequestError
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.attention.cpu import EvictingCPUBackend
from vllm_tgvkv.server import endpoints, schemas
from vllm_tgvkv.shared.vllm_versions import (
    CPU_BLOCK_SIZE,
    block_size_before_loading,
    end_with_error,
)
from vllm_tgvkv.worker.base import OutputWithOutcomes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"other"}, {"other", "r"}),  # 0.32
        ({}, {"r": RequestError("internal_error", "it failed")}),  # 0.33
    ],
)
def test_a_request_ends_with_an_error(before: Any, after: Any) -> None:
    scheduler = SimpleNamespace(grammar_compile_error_reqs=before)
    end_with_error(scheduler, "r", "it failed")
    assert scheduler.grammar_compile_error_reqs == after


def test_the_error_fits_the_installed_version() -> None:
    double = Double(Setup())
    double.arrive(Job("r", tuple(range(3, 60)), 8))
    double.step()
    end_with_error(double.scheduler, "r", "it failed")
    double.step()
    assert double.errors == {"r"}


def test_the_limit_of_a_prefix_hit_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33 has a second parameter; 0.32 passes none."""
    double = Double(Setup())
    request = double.arrive(Job("r", tuple(range(3, 60)), 8))
    given: list[Any] = []

    def stock(self: Scheduler, request: Any, *args: Any) -> tuple[Any, int, int, bool]:
        given.append(args)
        return double.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False

    monkeypatch.setattr(Scheduler, "_get_local_prefix_cache_hit", stock)
    double.scheduler._get_local_prefix_cache_hit(request)
    double.scheduler._get_local_prefix_cache_hit(request, 7)
    assert given == [(), (7,)]


@pytest.mark.parametrize("given", [None, 16, 64])
def test_block_size_before_loading_is_the_one_after(
    given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 chooses it while it loads, from the backends of the layers."""
    cache = CacheConfig() if given is None else CacheConfig(block_size=given)
    expected = block_size_before_loading(cache, is_cpu=True)
    assert expected == (given or CPU_BLOCK_SIZE)
    config = VllmConfig(cache_config=cache)  # 0.32 chooses it here
    config.model_config = SimpleNamespace(is_hybrid=False)
    monkeypatch.setattr(
        type(current_platform), "_find_non_ssm_backends", lambda config: [EvictingCPUBackend]
    )
    current_platform.update_block_size_for_backend(config)  # 0.33 here
    assert cache.block_size == expected


def test_block_size_elsewhere_is_vllms() -> None:
    cache = SimpleNamespace(block_size=16, user_specified_block_size=False)
    assert block_size_before_loading(cache, is_cpu=False) == 16


def test_an_output_on_the_device_passes_its_parts_on() -> None:
    class Inner(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            raise AssertionError("not asked for")

        def get_kv_connector_output(self) -> str:
            return "salvaged"

    output = OutputWithOutcomes(Inner(), SimpleNamespace())  # type: ignore[arg-type]
    assert output.get_kv_connector_output() == "salvaged"


@pytest.mark.parametrize("left", [None, Response()], ids=["0.32", "0.33"])
def test_an_answer_whose_client_is_gone(left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = schemas.Answers.model_construct()
    for given, status in ((left, 499), (answers, None)):

        async def ask(*_: Any, given: Any = given) -> Any:
            return given

        monkeypatch.setattr(endpoints, "_ask_both", ask)
        response: Any = asyncio.run(endpoints.ask_both(None, None, None))  # type: ignore[arg-type]
        if status is None:
            assert response is answers
        else:
            assert response.status_code == status
