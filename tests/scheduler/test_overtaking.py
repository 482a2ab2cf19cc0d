# SPDX-License-Identifier: Apache-2.0
"""Requests behind one that has to wait: vLLM 0.32 schedules none of them, 0.33 would."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.double import Double, Job, Setup
from tests.scheduler.test_simulation import prompt, settings
from vllm_tgvkv.blocks.admission import Prefill
from vllm_tgvkv.scheduler.scheduler import EvictionScheduler


@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_the_first_that_waits_is_admitted_first(ahead: bool) -> None:
    """Evictions of three prompts fit a step. The fourth waits, and the short one behind it."""
    setup = Setup(
        128, eviction=settings("streaming", 0.5), chunk=200, max_model_len=160, ahead=ahead
    )
    double = Double(setup)
    images = ((4, 40),)
    double.arrive(Job("first", prompt(1, 92), 20, images))
    for _ in range(3):
        double.step()  # later prompts are in the prefix cache but for their last tokens
    names = ["a", "b", "c", "waits"]
    for name in names:
        double.arrive(Job(name, prompt(1, 92), 20, images))
    double.arrive(Job("short", prompt(2, 20), 20))
    double.step()
    assert double.admitted == ["first", "a", "b", "c"]
    double.run([])
    assert double.admitted == ["first", *names, "short"]
    assert double.worker.num_cut_together == 3


def test_only_requests_that_are_not_admitted_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Double(Setup(prefix_caching=False))
    scheduler: EvictionScheduler = double.scheduler
    requests = {
        name: double.arrive(Job(name, prompt(number, 40), 8))
        for number, name in enumerate(("running", "first", "second"))
    }
    requests["running"].status = RequestStatus.RUNNING
    scheduler.manager.order.admit("running", Prefill(3))
    waiting: set[str] = set()
    monkeypatch.setattr(
        scheduler._chunk_limits,
        "_limit",
        lambda request, candidate, start, num: 0 if request.request_id in waiting else num,
    )

    def chunk(name: str, num_tokens: int = 16) -> int:
        return scheduler._reserve_prefill_lookahead(requests[name], 0, num_tokens)

    waiting.add("running")
    assert [chunk("running"), chunk("first"), chunk("second")] == [0, 16, 16]
    assert chunk("first", 0) == 0  # vLLM lets it wait, for instance for the encoder
    assert chunk("second") == 16
    waiting.add("first")
    waiting.remove("running")
    assert [chunk("first"), chunk("second"), chunk("running")] == [0, 0, 16]
    waiting.clear()
    assert chunk("first") == 0, "a line that has stopped does not move in the same step"
