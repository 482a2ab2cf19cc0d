# SPDX-License-Identifier: Apache-2.0
"""Plans and outcomes on vLLM's outputs, as they cross from process to process."""

from __future__ import annotations

import pickle
from dataclasses import replace

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_tgvkv.shared.plan import (
    Failure,
    StepPlan,
    attach_outcomes,
    attach_plan,
    outcomes_of,
    plan_of,
)


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
