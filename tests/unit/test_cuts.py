# SPDX-License-Identifier: Apache-2.0
"""Planned cuts: properties that hold for any request, and a simulation of the tokens in between."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_tgvkv.shared.cuts import Ceiling, Cut, Cuts, plan_cuts

SIZES = st.sampled_from((1, 4, 16))
STEPS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5)


def all_cuts(cuts: Cuts) -> list[Cut]:
    found = [cuts.first]
    while (cut := cuts.after(found[-1])) is not None:
        assert cut.at > found[-1].at
        found.append(cut)
    return found


@given(num_prompt=st.integers(16, 300), steps=STEPS, size=SIZES, num_answer=st.integers(61, 90))
def test_a_schedule_shrinks_with_every_cut(
    num_prompt: int, steps: list[tuple[int, int]], size: int, num_answer: int
) -> None:
    longest = num_prompt + num_answer
    cuts = plan_cuts(num_prompt, steps, None, size, longest)
    found = all_cuts(cuts)
    assert found == all_cuts(plan_cuts(num_prompt, steps, None, size, longest))
    assert (found[0].at, found[0].num_retained) == (num_prompt + steps[0][0], steps[0][1])
    for before, cut in itertools.pairwise(found):
        assert cut.num_retained < before.num_retained
        assert (cut.at - num_prompt, cut.num_retained) in steps
    assert {cut.num_replaced for cut in found} == {num_prompt // size}
    for after, retained in steps:  # a step is left out only if it would come late or free nothing
        made = [cut for cut in found if cut.at <= num_prompt + after]
        assert (
            not made
            or after + 1 >= num_answer
            or made[-1].num_retained
            <= max(retained, *(k for _, k in steps[: steps.index((after, retained)) + 1]))
        )


@given(
    num_prompt=st.integers(16, 300),
    defer=st.integers(0, 40),
    retained=st.integers(1, 40),
    size=SIZES,
    most=st.integers(1, 120),
    buffer=st.integers(1, 60),
    num_answer=st.integers(42, 400),
)
def test_under_a_ceiling_no_more_is_held(
    num_prompt: int,
    defer: int,
    retained: int,
    size: int,
    most: int,
    buffer: int,
    num_answer: int,
) -> None:
    """Token by token: full blocks that are held after each step, and the peak within one."""
    longest = num_prompt + num_answer
    retained = min(retained, num_prompt // size) or 1
    cuts = plan_cuts(num_prompt, [(defer, retained)], Ceiling(most, buffer), size, longest)
    found = {cut.at: cut for cut in all_cuts(cuts)}
    least = max(most // size, 1)
    bound = max((most + buffer) // size, least + 1)
    assert max(found) < longest - 1
    assert cuts.first.num_retained == min(retained, least)
    num_spared, peaks = 0, []
    for num_tokens in range(cuts.first.at, longest - 1):
        num_full = num_tokens // size
        if cut := found.get(num_tokens):
            peaks.append(-(-num_tokens // size) - num_spared + cut.num_retained)
            if cut != cuts.first:
                assert num_full - num_spared > bound  # it was necessary
                assert (cut.num_retained, cut.num_replaced) == (least, num_full)
            num_spared = cut.num_replaced - cut.num_retained
        waited = cuts.first.at // size - num_spared > bound and len(peaks) == 1
        assert num_full - num_spared <= bound or (waited and num_tokens < cuts.first.at + size)
    assert list(cuts.peaks()) == peaks[:3]
    assert max(peaks) == max(cuts.peaks())


def test_a_cut_that_serves_no_token_is_not_planned() -> None:
    """The request ends with its token 40, which is never computed; 39 is the last that is."""
    for longest, is_planned in ((41, False), (42, False), (43, True)):
        cuts = plan_cuts(33, [(0, 4), (8, 2)], None, 8, longest)
        assert (cuts.after(cuts.first) is not None) == is_planned


def test_a_step_before_the_wait_is_left_out() -> None:
    """A request may wait longer than the server's first steps."""
    cuts = plan_cuts(64, [(10, 6), (8, 4), (10, 3), (12, 2)], None, 8, 200)
    assert all_cuts(cuts) == [Cut(74, 6, 8), Cut(76, 2, 8)]
