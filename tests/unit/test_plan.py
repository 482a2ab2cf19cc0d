# SPDX-License-Identifier: Apache-2.0
"""Plans and outcomes on vLLM's outputs, as they cross from process to process."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from tests.inputs import new_rng
from tests.unit.test_trace import make_trace
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.plan import (
    Arrival,
    Choice,
    ChoiceOutcome,
    ColumnSumChunk,
    Eviction,
    Failure,
    Header,
    Observation,
    Outcome,
    Restored,
    StepPlan,
    attach_outcomes,
    attach_plan,
    outcomes_of,
    plan_of,
)
from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, Voters


def test_plan_survives_pickling_and_replacement() -> None:
    plan = StepPlan(released=[3], forgotten=["a"])
    stock = SchedulerOutput.make_empty()
    stock.finished_req_ids.add("b")
    output = attach_plan(stock, plan)
    # vLLM's model runner replaces the output where it drafts by n-grams on the GPU.
    for copied in (
        output,
        pickle.loads(pickle.dumps(output)),
        replace(output, finished_req_ids=set()),
    ):
        assert isinstance(copied, SchedulerOutput)
        assert plan_of(copied) == plan
    assert output.finished_req_ids == {"b"}


def test_step_without_plan_stays_stock() -> None:
    output = SchedulerOutput.make_empty()
    assert attach_plan(output, StepPlan()) is output
    assert not plan_of(output)


def test_outcomes_survive_pickling_and_leave_the_shared_output_alone() -> None:
    outcomes = [Failure("a", "out of memory")]
    result = attach_outcomes(EMPTY_MODEL_RUNNER_OUTPUT, outcomes)
    assert outcomes_of(pickle.loads(pickle.dumps(result))) == outcomes
    assert isinstance(result, ModelRunnerOutput)
    assert not outcomes_of(EMPTY_MODEL_RUNNER_OUTPUT)
    assert attach_outcomes(EMPTY_MODEL_RUNNER_OUTPUT, []) is EMPTY_MODEL_RUNNER_OUTPUT


def same(one: Any, other: Any) -> bool:
    """Return whether two messages are equal, arrays and their types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    return bool(one == other)


def sent(message: Any) -> Any:
    """Pickle a message as vLLM does for workers on other nodes, arrays apart."""
    beside: list[bytes] = []
    keep = lambda buffer: beside.append(buffer.raw().tobytes())  # noqa: E731
    text = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
    return pickle.loads(text, buffers=beside)


def test_whole_plan_and_all_outcomes_reach_another_node() -> None:
    """All lists of a plan, with images, and outcomes with a trace."""
    rng, few = new_rng(), np.arange(3, dtype=np.int32)
    prompt = PromptMap(64, (VisionSpan(8, 16, (4, 4)),))
    rows = np.array([60, 61], dtype=np.int64)
    pixels = MultiModalFieldElem(torch.rand(3, 4), MultiModalSharedField(batch_size=1))
    image = MultiModalFeatureSpec(
        MultiModalKwargsItem({"pixels": pixels}), "image", "hash", PlaceholderRange(8, 16)
    )
    eviction = Eviction(
        *("r", "tgv", prompt, Voters({"window": rows}, rows, False), 0, Guard(0.9, 1), "10 %"),
        *(few, 2, few, few),
        stored=rows,
        tier_blocks=few,
        header=Header((5,), (1, 2, 3, 4)),
    )
    plan = StepPlan(
        released=[3],
        restored=[Restored("s", few)],
        forgotten=["t"],
        arriving=[Arrival("v", Header((5,), (1, 2, 3, 4)), (6, 7), 9)],
        arrived=["w"],
        answers={"w": [8]},
        poisoned=[4],
        observations=[Observation("r", 0, rows, rows)],
        summings=[ColumnSumChunk("r", "h2o", 0, 64, few, prompt)],
        evictions=[eviction],
        choices=[Choice("r", 70, rows, rows, few)],
        unrecallable=["u"],
        images={"r": [image]},
        counters={"requests_evicted": 1},
    )
    assert all(vars(plan).values()), "each list has something"
    found = plan_of(sent(attach_plan(SchedulerOutput.make_empty(), plan)))
    assert same(found, plan)
    assert not same(found, replace(plan, evictions=[replace(eviction, old_blocks=few + 1)]))

    trace, _ = make_trace(rng, 64)
    outcomes = [
        Outcome("r", 3, 2, "tgv", {"text": 48}, {"text": 8}, {"copy": 0.1}, trace=trace),
        ChoiceOutcome("r", 3, 1.5, 8, trace),
        Failure("a", "out of memory"),
    ]
    assert same(outcomes_of(sent(attach_outcomes(EMPTY_MODEL_RUNNER_OUTPUT, outcomes))), outcomes)
