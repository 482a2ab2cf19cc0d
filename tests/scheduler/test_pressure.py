# SPDX-License-Identifier: Apache-2.0
"""Who shrinks under pressure, when, and how much; who gets its prompt back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler.double import Double, Job, Setup
from vllm_tgvkv.scheduler import pressure

SIZE = 4


def job(name: str, num_prompt: int, answer: int, arrival: int = 0, **more: Any) -> Job:
    tokens = random.Random(name)
    prompt = tuple(tokens.randrange(3, 1000) for _ in range(num_prompt))
    return Job(name, prompt, answer, ((1, num_prompt // 2),), arrival=arrival, **more)


def setup(num_blocks: int, **more: Any) -> Setup:
    eviction = {
        "policy": "reach",
        "when": "pressure",
        "min_prompt_tokens": 8,
        "budget": 0.1,
        "debug": {"poison": True},
        **more.pop("eviction", {}),
    }
    return Setup(num_blocks, SIZE, max_model_len=512, eviction=eviction, **more)


def totals(double: Double) -> Any:
    return double.scheduler.records.counters


def crowd(name: str = "crowd", num_prompt: int = 240, **more: Any) -> Job:
    """Return a request with a long prompt that is never evicted."""
    return job(name, num_prompt, 20, xargs={"kv_eviction": "none"}, **more)


def retained(double: Double, name: str) -> int:
    """Return the blocks of a running request's region; 0 if it is whole."""
    return double.scheduler.manager.compressions[name].num_retained


def steps(double: Double, number: int) -> None:
    for _ in range(number):
        double.step()


def start(double: Double, *jobs: Job, number: int = 10) -> None:
    """Let requests arrive and decode."""
    for each in jobs:
        double.arrive(each)
    steps(double, number)
    assert {each.name for each in jobs} <= set(double.running)


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    """Return whether a step is scheduled while the last one runs."""
    found: bool = request.param
    return found


@pytest.fixture
def restored_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_RESTORE_EVERY", 1), ("_RESTORE_AFTER", 3), ("_ROOM", 0.0)):
        monkeypatch.setattr(pressure, name, value)


# -- who is cut, when, and to how much --------------------------------------------------


@pytest.mark.parametrize("most", [64, 2])
def test_nothing_is_cut_while_there_is_room(ahead: bool, most: int) -> None:
    """Neither while prompts wait for the end of others only because too many run."""
    jobs = [job(f"r{i}", 80, 40) for i in range(4)]
    double = Double(setup(min(most, 4) * 30, ahead=ahead, max_num_seqs=most))
    double.run(jobs)
    for each in jobs:
        double.assert_answered(each, aborted=False)
    assert not totals(double).cuts
    assert totals(double).requests_whole == 4


def test_a_waiting_request_makes_others_shrink_and_nobody_is_preempted(ahead: bool) -> None:
    """Where vLLM preempts."""
    jobs = [job(f"r{i}", 160, 60, arrival=2 * i) for i in range(8)]
    shape = setup(3 * 55, ahead=ahead)
    stock = Double(replace(shape, eviction=None))
    stock.run(jobs)
    assert stock.num_preemptions
    double = Double(shape)
    double.run(jobs)
    assert totals(double).cuts["pressure"]
    assert not double.num_preemptions
    assert double.num_steps < stock.num_steps


def test_the_least_is_cut_first_and_only_what_is_needed(ahead: bool) -> None:
    """To half of the prompt, and of the request that frees most by it."""
    double = Double(setup(40 + 80 + 15 + 15 + 25, ahead=ahead, chunk=64))
    start(double, job("short", 160, 60), job("long", 320, 60))
    double.arrive(job("new", 200, 20))
    steps(double, 16)
    assert "new" in double.running
    assert (retained(double, "long"), retained(double, "short")) == (40, 0)
    double.run([])
    assert totals(double).cuts == {"pressure": 1}
    assert not double.num_preemptions


@pytest.mark.parametrize(
    ("num_blocks", "num_prompt", "kept"),
    [
        (200, 400, [0, 0, 15]),
        (200, 450, [0, 15, 15]),
        (200, 490, [15, 15, 15]),
        (190, 490, [6, 15, 15]),
    ],
)
def test_all_are_cut_to_a_stage_before_one_is_cut_further(
    ahead: bool, num_blocks: int, num_prompt: int, kept: list[int]
) -> None:
    double = Double(setup(num_blocks, ahead=ahead, chunk=64))
    names = [f"r{i}" for i in range(3)]
    start(double, *(job(name, 120, 60) for name in names), number=12)
    double.arrive(crowd(num_prompt=num_prompt))
    while "crowd" not in double.running:
        double.step()
    assert sorted(retained(double, name) for name in names) == kept
    double.run([])
    assert not double.num_preemptions


def test_nobody_shrinks_below_its_own_budget(ahead: bool) -> None:
    """Who is at it is left alone, and no crowd can change that."""
    own = {"half": 0.5, "tenth": 0.1, "none": 1.0}
    double = Double(setup(3 * 55, ahead=ahead))
    start(double, *(job(n, 160, 60, xargs={"kv_eviction_budget": b}) for n, b in own.items()))
    for number in range(4):
        double.arrive(crowd(f"crowd{number}", 300))
    least = dict.fromkeys(("half", "tenth"), 40)
    while "half" in double.running and "tenth" in double.running:
        for name in least:
            if kept := retained(double, name):
                least[name] = min(least[name], kept)
        double.step()
    assert least == {"half": 20, "tenth": 4}
    assert "none" not in double.scheduler.candidates
    double.run([])
    assert totals(double).cuts["pressure"] <= 1 + 3


@pytest.mark.parametrize("defer", [0, 1, 40])
def test_growing_answers_shrink_before_blocks_run_out(ahead: bool, defer: int) -> None:
    """Nobody waits. The votes of a cut take blocks as well, the more the longer it waits."""
    own = {"kv_eviction_defer": defer} if defer else {}
    jobs = [job(f"r{i}", 160, 120, xargs=own) for i in range(3)]
    double = Double(setup(3 * 60, ahead=ahead))
    double.run(jobs)
    assert totals(double).cuts["pressure"]
    assert not double.num_preemptions


def test_what_the_watermark_keeps_free_is_cut_as_well(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead, chunk=64, watermark=0.2))
    start(double, job("a", 160, 150), job("b", 160, 150))
    double.arrive(job("new", 160, 20))
    steps(double, 20)
    assert "new" in double.running or "new" in double.finished
    double.run([])
    assert not double.num_preemptions


def test_nothing_is_cut_for_who_is_gone(ahead: bool) -> None:
    """The request that blocks were short for is aborted; a smaller one behind it fits."""
    double = Double(setup(165, ahead=ahead, chunk=64))
    start(double, job("a", 160, 150), job("b", 160, 150))
    double.arrive(crowd(num_prompt=400))
    double.arrive(job("small", 20, 40))
    double.schedule()
    assert double.scheduler.manager.refused
    double.abort("crowd")
    while "small" not in double.finished:
        double.step()
    assert not totals(double).cuts
    double.run([])


def test_growth_is_counted_request_by_request() -> None:
    """Against the plain formula, with rows longer and shorter than what is known of a request."""
    double = Double(setup(50))
    counted, rng = double.scheduler.pressure, random.Random(0)
    for _ in range(300):
        near, requests = rng.randint(1, 40), []
        for number in range(4):
            prompt, said, more = rng.randint(1, 400), rng.randint(0, 90), rng.randint(1, 200)
            one = SimpleNamespace(request_id=f"r{number}", num_prompt_tokens=prompt)
            one.num_tokens, one.max_tokens = prompt + said, said + more
            one.num_computed_tokens = one.num_tokens + rng.randint(-3, 2)
            requests.append(one)
        rows = {each.request_id: [0] * rng.randint(1, 130) for each in requests}

        def growth(num_tokens: int, requests: Any = requests, rows: Any = rows) -> int:
            total = 0
            for each in requests:
                longest = min(each.num_prompt_tokens + each.max_tokens, 512)
                known = max(each.num_computed_tokens, each.num_tokens)
                num_blocks = -(-min(known + num_tokens, longest) // SIZE)
                total += max(num_blocks - len(rows[each.request_id]), 0)
            return total

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(double.scheduler.manager, "req_to_blocks", rows)
            found = counted._growth(requests, near)
        assert (found.near, found.far, found.end) == (growth(near), growth(2 * near), growth(9999))


# -- requests with one prompt -----------------------------------------------------------


def test_requests_with_one_prompt_are_cut_together(ahead: bool) -> None:
    """One of them frees nothing."""
    prompt = job("p", 200, 1).prompt
    twins = [Job(f"r{i}", prompt, 120, ((1, 100),), arrival=i) for i in range(2)]
    double = Double(setup(50 + 2 * 16 + 30, ahead=ahead, chunk=256))
    start(double, twins[0], number=6)
    start(double, twins[1])
    double.arrive(crowd(num_prompt=200))
    cut_at: dict[str, int] = {}
    for step in range(40):
        double.step()
        for each in twins:
            if retained(double, each.name):
                cut_at.setdefault(each.name, step)
    assert set(cut_at) == {"r0", "r1"}
    assert abs(cut_at["r0"] - cut_at["r1"]) <= 1
    assert "crowd" in double.admitted
    double.run([])
    assert not double.num_preemptions


# -- planned cuts -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "preempt", "end"])
def test_a_planned_cut_that_is_not_made_leaves_nothing_behind(ahead: bool, how: str) -> None:
    double = Double(setup(2 * 50, ahead=ahead, chunk=64))
    start(double, job("a", 160, 200), job("b", 120, 30))
    double.arrive(crowd())
    manager = double.scheduler.manager
    while not (planned := [n for n, each in manager.compressions.items() if each.reserved]):
        double.step()
    num_cuts = double.worker.num_evictions
    if how == "abort":
        double.abort(planned[0])
    elif how == "preempt":
        double.preempt(planned[0])
    else:
        double.scheduler.finish_requests(planned[0], RequestStatus.FINISHED_STOPPED)
        double.checked()
    assert not any(each.reserved for n, each in manager.compressions.items() if n == planned[0])
    assert planned[0] not in double.scheduler.pressure._due
    assert double.worker.num_evictions == num_cuts
    double.run([])


def test_a_failure_under_pressure_ends_one_request(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead))
    jobs = [job("a", 160, 60, fails="evict"), job("b", 160, 60), job("c", 160, 60, arrival=12)]
    double.run([*jobs, job("d", 160, 60, arrival=14)])
    assert double.errors == {"a"}
    assert not double.num_preemptions


# -- restoring --------------------------------------------------------------------------


def cut_and_leave(double: Double, names: Sequence[str]) -> None:
    """Let a crowd arrive that makes others shrink, and go before it has taken their blocks."""
    double.arrive(crowd(num_prompt=440))
    while not any(retained(double, name) for name in names):
        double.step()
    double.abort("crowd")


def test_a_prompt_comes_back_once_and_stays(ahead: bool) -> None:
    """Some time after its cut; without new requests nobody is cut again."""
    names = ["a", "b"]
    double = Double(setup(190, ahead=ahead, chunk=64))
    start(double, *(job(name, 160, 100) for name in names))
    cut_and_leave(double, names)
    double.run([])
    assert double.worker.num_restored == double.worker.num_evictions >= 1
    for name in names:
        changes = sorted(double.worker.changed[name].items())
        assert [kind for _, kind in changes] in ([], ["cut", "restored"])
        if changes:
            (cut, _), (restored, _) = changes
            assert restored - cut >= pressure._RESTORE_AFTER - 1


@pytest.mark.usefixtures("restored_soon")
def test_a_restored_request_is_cut_again_from_the_whole(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead, chunk=64))
    start(double, job("a", 160, 150))
    for _ in range(3):
        double.arrive(crowd(num_prompt=440))
        while not retained(double, "a"):
            double.step()
        double.abort("crowd")
        while retained(double, "a"):
            double.step()
    assert double.worker.num_restored == 3
    changes = [kind for _, kind in sorted(double.worker.changed["a"].items())]
    assert changes == ["cut", "restored"] * 3
    double.run([])


@pytest.mark.usefixtures("restored_soon")
def test_the_answer_of_a_restored_request_is_nobodys_prefix(ahead: bool) -> None:
    """Blocks that were filled before its first cut still serve others."""
    double = Double(setup(3 * 50, ahead=ahead, chunk=64))
    first = job("a", 160, 100)
    start(double, first)
    cut_and_leave(double, ["a"])
    double.run([])
    assert double.worker.num_restored == 1
    said = double.answers["a"][:-1]
    double.run([Job("more", (*first.prompt, *said, 7, 8, 9), 4, first.images)])
    first_cut = min(double.worker.changed["a"])
    assert 160 <= double.worker.num_cached["more"] <= first_cut < 200


@pytest.mark.usefixtures("restored_soon")
def test_without_a_prefix_cache_nothing_comes_back(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead, chunk=64, prefix_caching=False))
    start(double, job("a", 160, 150), job("b", 160, 150))
    cut_and_leave(double, ["a", "b"])
    double.run([])
    assert double.worker.num_evictions
    assert not double.worker.num_restored


@pytest.mark.usefixtures("restored_soon")
def test_a_prompt_that_others_wrote_over_does_not_come_back(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead, chunk=64))
    start(double, job("a", 160, 200), job("b", 160, 200))
    double.run([crowd()])  # which takes all blocks that were freed
    assert double.worker.num_evictions >= 2
    assert double.worker.num_restored < double.worker.num_evictions


@pytest.mark.usefixtures("restored_soon")
def test_a_restored_request_may_be_preempted_in_the_same_step(ahead: bool) -> None:
    double = Double(setup(3 * 50, ahead=ahead, chunk=64))
    start(double, job("a", 160, 150), job("b", 160, 150))
    cut_and_leave(double, ["a", "b"])
    scheduler = double.scheduler
    begin_step = scheduler.pressure.begin_step

    def restore_and_preempt(*args: Any) -> Any:
        restored = begin_step(*args)
        if restored is not None:
            scheduler.running.remove(restored)
            scheduler._preempt_request(restored, 0.0)
            scheduler.prev_step_scheduled_req_ids.discard(restored.request_id)
        return None

    scheduler.pressure.begin_step = restore_and_preempt
    double.run([])
