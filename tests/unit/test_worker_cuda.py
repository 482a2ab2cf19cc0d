# SPDX-License-Identifier: Apache-2.0
"""The GPU worker's model runners without a GPU: vLLM's own methods on a runner's own state.

The runners are never initialised. Each test gives one the few fields that vLLM's method reads.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.block_table import BlockTables as GPUBlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from vllm_tgvkv.shared.plan import Eviction, StepPlan
from vllm_tgvkv.shared.prompt import PromptMap, Voters
from vllm_tgvkv.worker.cuda import EvictingModelRunnerV1, EvictingModelRunnerV2, EvictionGPUWorker
from vllm_tgvkv.worker.model_runner import RowsV1, RowsV2

PROMPT, COMPRESSED = [1, 2, 3, 4], [7, 0, 0, 4]
GROUP = 1
"""Index of the evicted layers among vLLM's KV cache groups. Group 0 holds windows, say."""


def eviction(request_id: str) -> Eviction:
    """The eviction that turns row `PROMPT` into `COMPRESSED`."""
    return Eviction(
        request_id=request_id,
        method="random",
        prompt=PromptMap(61, ()),
        voters=Voters({}, np.empty(0, dtype=np.int64), every_row=False),
        num_cached=0,
        guard=None,
        traced_budget=None,
        old_blocks=np.array(PROMPT, dtype=np.int32),
        num_replaced=len(PROMPT) - 1,
        new_blocks=np.array(COMPRESSED[:1], dtype=np.int32),
        row_blocks=np.array(COMPRESSED, dtype=np.int32),
    )


def runner(cls: type, observes: bool = False, **fields: Any) -> Any:
    """A model runner with the given fields only."""
    made = cls.__new__(cls)
    rows = RowsV2 if issubclass(cls, EvictingModelRunnerV2) else RowsV1
    worker = SimpleNamespace(observes=observes, rows=rows(made, GROUP))
    made.__dict__.update(worker=worker, changed_rows=[], **fields)
    return made


def in_groups(row: list[int], other: int = 40) -> tuple[list[int], ...]:
    """A request's blocks in both groups: `row` in the evicted one, as many others in group 0."""
    return [block + other for block in row], row


def step(new_blocks: dict[str, list[int] | None], *resumed: str) -> SchedulerOutput:
    """A step of one token for each request, with the blocks that each gets in both groups."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(new_blocks, 1)
    output.total_num_scheduled_tokens = len(new_blocks)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(new_blocks),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[blocks and in_groups(blocks) for blocks in new_blocks.values()],
        num_computed_tokens=[60] * len(new_blocks),
        num_output_tokens=[0] * len(new_blocks),
    )
    return output


# -- steps in which layers are observed ------------------------------------------------------


@pytest.mark.parametrize("observes", [True, False])
@pytest.mark.parametrize("mixed", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])
@pytest.mark.parametrize("row_tokens", [1, 2])
def test_v1_runs_attention_of_single_tokens_outside_of_graphs_if_it_is_observed(
    observes: bool, mixed: CUDAGraphMode, row_tokens: int
) -> None:
    """By vLLM's dispatcher, with graphs for decode steps, and piecewise or none for the others.

    Or the attention of as many tokens of each request, if each has a draft.
    """
    config = VllmConfig()
    dispatcher = CudagraphDispatcher(config)
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    config.compilation_config.max_cudagraph_capture_size = 8
    piecewise = mixed == CUDAGraphMode.PIECEWISE
    both, alone = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
    dispatcher.uniform_decode_query_len = row_tokens
    dispatcher.initialize_cudagraph_keys(both if piecewise else alone, row_tokens)
    ours = runner(
        EvictingModelRunnerV1,
        observes,
        vllm_config=config,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        uniform_decode_query_len=row_tokens,
        input_batch=SimpleNamespace(lora_id_to_lora_request={}),
        cudagraph_dispatcher=dispatcher,
    )

    def mode(*lengths: int) -> CUDAGraphMode:
        found, *_ = ours._determine_batch_execution_and_padding(
            num_tokens=sum(lengths),
            num_reqs=len(lengths),
            num_scheduled_tokens_np=np.array(lengths),
            max_num_scheduled_tokens=max(lengths),
        )
        return found

    assert mode(row_tokens, row_tokens) == (mixed if observes else CUDAGraphMode.FULL)
    assert mode(row_tokens, 8 - row_tokens) == mixed
    if row_tokens > 1:
        assert mode(1, 1) == mixed


@pytest.mark.parametrize("observes", [True, False])
def test_v2_reports_an_observed_step_as_not_uniform(observes: bool) -> None:
    """A prompt of 6 tokens that ends with a chunk of one runs like a decode."""
    ours = runner(
        EvictingModelRunnerV2,
        observes,
        decode_query_len=1,
        use_pp=False,
        pcp_manager=None,
        req_states=SimpleNamespace(
            req_id_to_index={"a": 0, "b": 1},
            prefill_len=SimpleNamespace(np=np.array([6, 3])),
            num_computed_prefill_tokens=np.array([5, 3]),
        ),
    )
    output = step({"a": None, "b": None})
    state, uniform = ours.gather_batch_req_state(output, False)
    assert state.num_scheduled_tokens.tolist() == [1, 1]
    assert uniform == (None if observes else 1)
    rows, names = ours.worker.rows, ["a", "b"]
    assert [rows.find_row(name) for name in names] == [0, 1]
    assert [rows.request_at(row) for row in (0, 1)] == names
    assert ours.gather_batch_req_state(output, True) == (None, 1)
    assert rows.find_row("a") is None


# -- rows that shrink ------------------------------------------------------------------------


def test_v1_rewrites_rows_before_it_updates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. A request that was preempted and is resumed by now keeps the blocks that it gets."""
    sizes = {"max_num_reqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128}
    pages = {"block_sizes": [16, 16], "max_num_blocks_per_req": [8, 8]}
    batch = InputBatch(**sizes, **pages, device=torch.device("cpu"), vocab_size=10)
    state: dict[str, Any] = {"prompt_token_ids": [0] * 61, "mm_features": [], "generator": None}
    requests = {
        name: CachedRequestState(
            req_id=name,
            sampling_params=SamplingParams(),
            block_ids=in_groups(list(PROMPT)),
            num_computed_tokens=61,
            output_token_ids=[],
            **state,
        )
        for name in ("evicted", "other", "waiting", "resumed")
    }
    for name in ("other", "evicted"):
        batch.add_request(requests[name])
    batch.refresh_metadata()
    monkeypatch.setattr(
        gpu_model_runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True)
    )
    ours = runner(
        EvictingModelRunnerV1,
        requests=requests,
        input_batch=batch,
        late_interaction_runner=SimpleNamespace(on_requests_finished=lambda names: None),
        _process_encoder_cache_scheduler_output=lambda output: None,
        speculative_config=None,
        use_async_spec_decode=False,
        use_async_scheduling=False,
        batch_reordering_required=False,
        _may_reorder_batch=lambda output: None,
    )
    others, table = (batch.block_table[group].block_table.np for group in (0, GROUP))
    row = batch.req_id_to_index
    ours.changed_rows = [eviction(name) for name in ("evicted", "waiting", "resumed", "ended")]
    fresh = [10, 11, 12, 13]
    blocks = {"evicted": [5], "other": None, "resumed": fresh}
    ours._update_states(step(blocks, "resumed"))
    wanted = {"evicted": [*COMPRESSED, 5], "other": PROMPT, "resumed": fresh}
    for name, ids in wanted.items():
        assert table[row[name], :6].tolist() == ids + [0] * (6 - len(ids))
    assert others[row["evicted"], :6].tolist() == [*in_groups([*PROMPT, 5])[0], 0]
    wanted["waiting"] = COMPRESSED
    whole = {**wanted, "evicted": [*PROMPT, 5], "waiting": PROMPT}
    for name, request in requests.items():
        assert request.block_ids[GROUP] == wanted[name]
        assert request.block_ids[0] == in_groups(whole[name])[0]

    table[row["evicted"], 0] = 9
    ours._update_states(step(dict.fromkeys(blocks)))
    assert table[row["evicted"], 0] == 9


class StagedRows:
    """The rows of one group; vLLM's own are on the device.

    There, one kernel applies all writes of a step in any order, so no two may overlap.
    """

    def __init__(self, rows: list[list[int]]) -> None:
        self.gpu = np.full((len(rows), 9), -1)
        for index, row in enumerate(rows):
            self.gpu[index, : len(row)] = row
        self.written: set[tuple[int, int]] = set()

    def stage_write(self, index: int, start: int, ids: list[int]) -> None:
        places = {(index, column) for column in range(start, start + len(ids))}
        assert not places & self.written, "the order of two writes is not defined"
        self.written |= places
        self.gpu[index, start : start + len(ids)] = ids


class BlockTables(GPUBlockTables):
    """vLLM's `BlockTables` of both groups, over `StagedRows`."""

    def __init__(self, **rows: list[int]) -> None:
        self.index = {name: index for index, name in enumerate(rows)}
        groups = zip(*(in_groups(row) for row in rows.values()), strict=True)
        self.block_tables = [StagedRows(list(group)) for group in groups]
        self.num_kv_cache_groups = len(self.block_tables)
        lengths = [len(row) for row in rows.values()]
        self.num_blocks = SimpleNamespace(np=np.array([lengths] * self.num_kv_cache_groups))

    def rows(self, group: int = GROUP) -> list[list[int]]:
        """The rows that the next batch reads."""
        lengths, table = self.num_blocks.np[group], self.block_tables[group].gpu
        return [row[:length].tolist() for row, length in zip(table, lengths, strict=True)]

    def apply_staged_writes(self) -> None:
        for table in self.block_tables:
            table.written.clear()


def runner_v2(tables: BlockTables) -> Any:
    """A runner with the rows of `tables` and all that vLLM touches when requests come and go."""
    num_places = len(tables.rows())

    def add_request(req_id: str, **ignored: Any) -> None:
        tables.index[req_id] = min(set(range(num_places)) - set(tables.index.values()))

    nothing = SimpleNamespace(
        remove_request=lambda *args: None,
        add_request=lambda *args: None,
        apply_staged_writes=lambda: None,
    )
    return runner(
        EvictingModelRunnerV2,
        block_tables=tables,
        req_states=SimpleNamespace(
            req_id_to_index=tables.index,
            add_request=add_request,
            remove_request=lambda req_id: tables.index.pop(req_id, None),
            apply_staged_writes=lambda: None,
            num_computed_tokens_np=np.zeros(num_places, dtype=np.int32),
            prefill_len=SimpleNamespace(np=np.full(num_places, 61)),
            num_computed_prefill_tokens=np.zeros(num_places, dtype=np.int32),
        ),
        model_state=nothing,
        lora_state=nothing,
        is_last_pp_rank=False,
        **dict.fromkeys(("pooling_runner", "pp_handler", "encoder_cache", "sampler")),
        **dict.fromkeys(("prompt_logprobs_worker", "adaptive_verification")),
    )


def update_v2(ours: Any, output: SchedulerOutput) -> None:
    """The beginning of V2's `execute_model`."""
    ours.finish_requests(output)
    ours.free_states(output)
    ours.add_requests(output)
    ours.update_requests(output)
    ours.block_tables.apply_staged_writes()


def test_v2_updates_in_the_order_that_these_tests_assume() -> None:
    source = inspect.getsource(GPUModelRunnerV2.execute_model)
    calls = ("finish_requests(", "free_states(", "add_requests(", "update_requests(", "apply_st")
    places = [source.index(call) for call in calls]
    assert places == sorted(places)


def test_v2_rewrites_rows_before_it_appends_blocks() -> None:
    """Once, and only of requests that are in its table."""
    tables = BlockTables(other=PROMPT, evicted=PROMPT)
    ours = runner_v2(tables)
    ours.changed_rows = [eviction(name) for name in ("evicted", "ended")]
    update_v2(ours, step({"evicted": [5], "other": [6]}))
    assert tables.rows() == [[*PROMPT, 6], [*COMPRESSED, 5]]
    assert tables.rows(0) == [in_groups([*PROMPT, last])[0] for last in (6, 5)]
    update_v2(ours, step({"evicted": [8], "other": None}))
    assert tables.rows() == [[*PROMPT, 6], [*COMPRESSED, 5, 8]]
    assert tables.rows(0) == [in_groups([*PROMPT, *last])[0] for last in ([6], [5, 8])]


def test_v2_keeps_the_new_row_of_a_request_that_is_resumed_at_once() -> None:
    """`reset_prefix_cache(reset_running_requests=True)` preempts it after its evicting step.

    To V2 a resumed request is a new one. It may take another's place in the table.
    """
    tables = BlockTables(ended=PROMPT, resumed=PROMPT, evicted=PROMPT, preempted=PROMPT)
    ours = runner_v2(tables)
    ours.changed_rows = [eviction(name) for name in ("resumed", "evicted", "preempted")]
    output = step({"evicted": [5]})
    output.finished_req_ids = {"ended"}
    output.preempted_req_ids = {"resumed", "preempted"}
    resumed = {"prompt_len": 61, "num_computed_tokens": 0, "sampling_params": None}
    output.scheduled_new_reqs = [
        SimpleNamespace(
            req_id="resumed",
            prefill_token_ids=[0] * 61,
            block_ids=in_groups([20, 21, 22, 23]),
            lora_request=None,
            **resumed,
        )
    ]
    update_v2(ours, output)
    rows = {name: tables.rows()[index] for name, index in tables.index.items()}
    assert rows == {"resumed": [20, 21, 22, 23], "evicted": [*COMPRESSED, 5]}
    update_v2(ours, step({"evicted": None, "resumed": [24]}))
    assert tables.rows()[tables.index["resumed"]] == [20, 21, 22, 23, 24]
    assert tables.rows(0)[tables.index["evicted"]] == in_groups([*PROMPT, 5])[0]


def test_an_idle_step_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that share a mixture's experts run such steps, see `engine/test_mixtures.py`."""
    plans: list[Any] = []
    worker: Any = EvictionGPUWorker.__new__(EvictionGPUWorker)
    worker._evictor = SimpleNamespace(begin_step=plans.append)
    monkeypatch.setattr(Worker, "execute_dummy_batch", lambda self: plans.append("vLLM's step"))
    worker.execute_dummy_batch()
    assert plans == [StepPlan(), "vLLM's step"]


def test_overridden_methods_exist_in_vllm() -> None:
    """vLLM never calls the override of a method that it has renamed."""
    for cls, base in (
        (EvictionGPUWorker, Worker),
        (EvictingModelRunnerV1, GPUModelRunnerV1),
        (EvictingModelRunnerV2, GPUModelRunnerV2),
    ):
        functions = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
        overridden = functions - {"rewrite_rows"}
        assert overridden
        assert overridden <= set(dir(base)), overridden
