# SPDX-License-Identifier: Apache-2.0
"""What the GPU worker's model runners change, as far as it shows without a GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from vllm_tgvkv.model_runner import RowsV1, RowsV2
from vllm_tgvkv.plan import Eviction
from vllm_tgvkv.worker_cuda import EvictingModelRunnerV1, EvictingModelRunnerV2, EvictionGPUWorker


def shrunk(request_id: str, row_blocks: list[int]) -> Any:
    """An eviction, as far as its row goes."""
    row = np.array(row_blocks, dtype=np.int32)
    return SimpleNamespace(spec=Eviction, request_id=request_id, row_blocks=row)


def runner(cls: type, observes: bool = False, **fields: Any) -> Any:
    """A model runner that was never initialised."""
    made = cls.__new__(cls)
    made.__dict__.update(worker=SimpleNamespace(observes=observes), shrunk=[], **fields)
    return made


@pytest.mark.parametrize("observes", [True, False])
def test_a_v1_step_of_single_tokens_is_eager_where_prompts_are_observed(
    monkeypatch: pytest.MonkeyPatch, observes: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        GPUModelRunnerV1,
        "_determine_batch_execution_and_padding",
        lambda self, force_eager=False, **kwargs: seen.append(force_eager),
    )
    ours = runner(EvictingModelRunnerV1, observes)
    for tokens in (1, 7):
        ours._determine_batch_execution_and_padding(max_num_scheduled_tokens=tokens)
    assert seen == [observes, False]


@pytest.mark.parametrize("observes", [True, False])
def test_a_v2_step_in_which_prompts_are_observed_is_not_uniform(
    monkeypatch: pytest.MonkeyPatch, observes: bool
) -> None:
    monkeypatch.setattr(
        GPUModelRunnerV2, "gather_batch_req_state", lambda self, output, dummy_run: ("state", 1)
    )
    ours = runner(EvictingModelRunnerV2, observes)
    assert ours.gather_batch_req_state(None, False) == ("state", None if observes else 1)
    assert ours.gather_batch_req_state(None, True) == ("state", 1)


def test_rows_are_rewritten_where_the_runners_update_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each before vLLM's own update of the same step, and once."""
    order: list[str] = []
    for cls, base, method, rows in (
        (EvictingModelRunnerV1, GPUModelRunnerV1, "_update_states", RowsV1),
        (EvictingModelRunnerV2, GPUModelRunnerV2, "update_requests", RowsV2),
    ):
        monkeypatch.setattr(base, method, lambda self, output: order.append("vLLM"))
        monkeypatch.setattr(
            rows, "rewrite", staticmethod(lambda runner, e: order.append(e.request_id))
        )
        ours = runner(cls)
        ours.shrunk = [shrunk("a", [4]), shrunk("b", [5])]
        getattr(ours, method)(None)
        getattr(ours, method)(None)
        assert order == ["a", "b", "vLLM", "vLLM"]
        order.clear()


def test_a_row_of_v2_is_staged_whole_and_only_for_requests_that_are_there() -> None:
    staged: list[Any] = []
    ours = runner(
        EvictingModelRunnerV2,
        req_states=SimpleNamespace(req_id_to_index={"a": 3}),
        block_tables=SimpleNamespace(
            append_block_ids=lambda index, ids, overwrite: staged.append((index, ids, overwrite))
        ),
    )
    RowsV2.rewrite(ours, shrunk("a", [7, 0, 0, 9]))
    RowsV2.rewrite(ours, shrunk("gone", [8]))
    assert staged == [(3, ([7, 0, 0, 9],), True)]


def test_rows_of_v2_are_found_by_the_index_of_the_request() -> None:
    ours = runner(
        EvictingModelRunnerV2, req_states=SimpleNamespace(req_id_to_index={"a": 3, "b": 5, "c": 6})
    )
    common = SimpleNamespace(req_idx=np.array([5, 3]))
    assert [RowsV2.find(ours, common, name) for name in ("a", "b", "c", "gone")] == [
        1,
        0,
        None,
        None,
    ]


def test_what_is_overridden_exists_in_vllm() -> None:
    """A method that vLLM renames would be overridden in vain."""
    for cls, base in (
        (EvictionGPUWorker, Worker),
        (EvictingModelRunnerV1, GPUModelRunnerV1),
        (EvictingModelRunnerV2, GPUModelRunnerV2),
    ):
        overridden = {name for name, value in vars(cls).items() if inspect.isfunction(value)} - {
            "__init__",
            "find_row",
            "rewrite_rows",
        }
        assert overridden
        assert overridden <= set(dir(base)), overridden
    parameters = inspect.signature(
        GPUModelRunnerV1._determine_batch_execution_and_padding
    ).parameters
    assert {"max_num_scheduled_tokens", "force_eager"} <= set(parameters)
