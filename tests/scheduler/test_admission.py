# SPDX-License-Identifier: Apache-2.0
"""The order of prefills against a simulation that lets them finish one after the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm_tgvkv.blocks.admission import Prefill, PrefillOrder, Sums

BLOCKS = st.integers(0, 12)
WINDOWS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda n: (min(n), max(n))) | st.just(
    (0, 0)
)
"""Blocks of windows that a prefill still takes, and that it gives back."""


@dataclass
class Row:
    """A prefill in the simulation."""

    name: str
    prompt: int
    replayed: int
    fresh: int
    returned: int
    left: int = 0
    passing: int = 0
    held: int = 0
    advanced: bool = False
    evicted: bool = False


def all_finish(rows: list[Row], num_free: int) -> bool:
    """Return whether each row in turn can take what it needs; then it gives back its blocks."""
    for row in rows:
        if row.left > num_free:
            return False
        num_free += row.returned + row.passing - row.left
    return True


def needed(rows: list[Row]) -> int:
    return next(num_free for num_free in itertools.count() if all_finish(rows, num_free))


class OrderMachine(RuleBasedStateMachine):
    """Admissions, chunks, evictions, preemptions and steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.order = PrefillOrder()
        self.order.begin_step()
        self.rows: list[Row] = []
        self.names = map(str, itertools.count())

    @rule()
    def begin_step(self) -> None:
        self.order.begin_step()
        for row in self.rows:
            row.advanced = False

    @rule(prompt=st.integers(1, 12), replayed=BLOCKS, fresh=BLOCKS, returned=BLOCKS, shared=BLOCKS)
    def admit(self, prompt: int, replayed: int, fresh: int, returned: int, shared: int) -> None:
        if not fresh:
            replayed = returned = 0
        name = next(self.names)
        self.order.admit(name, Prefill(prompt, replayed, fresh, returned, shared))
        for _ in range(shared):  # the first row that still gives blocks back keeps one of them
            for row in self.rows:
                if row.returned:
                    row.returned -= 1
                    break
        self.rows.append(Row(name, prompt, replayed, fresh, returned))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num_blocks=st.integers(0, 5), windows=WINDOWS)
    def advance(self, data: st.DataObject, num_blocks: int, windows: tuple[int, int]) -> None:
        self._advance(data.draw(st.sampled_from(self.rows)), num_blocks, windows)

    @rule(num_blocks=st.integers(0, 2), windows=WINDOWS)
    def advance_all(self, num_blocks: int, windows: tuple[int, int]) -> None:
        """Run a step as vLLM does: every prefill in the order of admission."""
        self.begin_step()
        for row in list(self.rows):
            self.compare(row)
            self._advance(row, num_blocks, windows)

    def _advance(self, row: Row, num_blocks: int, windows: tuple[int, int]) -> None:
        most = row.prompt + (row.replayed if row.evicted else row.fresh)
        row.held = min(row.held + num_blocks, most)
        self.order.advance(row.name, row.held, windows)
        self._moved(row, windows)

    @precondition(lambda self: any(row.fresh and not row.evicted for row in self.rows))
    @rule(data=st.data(), windows=WINDOWS)
    def evict(self, data: st.DataObject, windows: tuple[int, int]) -> None:
        row = data.draw(st.sampled_from([r for r in self.rows if r.fresh and not r.evicted]))
        row.held, row.evicted, row.returned = row.prompt, True, 0
        self.order.evict(row.name, row.held, windows)
        self._moved(row, windows)

    def _moved(self, row: Row, windows: tuple[int, int]) -> None:
        row.advanced = True
        fresh = 0 if row.evicted else row.fresh
        taken, row.passing = windows
        row.left = row.prompt + fresh - row.held + max(row.replayed - row.returned, 0)
        if not fresh and not row.left and not row.passing:
            self.rows.remove(row)
        row.left += taken

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.order.leave(row.name)
        self.order.leave("a request that never prefilled")

    @invariant()
    def compare_all(self) -> None:
        assert list(self.order.prefills) == [row.name for row in self.rows]
        for row in self.rows:
            self.compare(row)
        assert self.order.needed() == needed(self.rows)
        for shared in (0, 3):
            returned = sum(row.returned for row in self.rows)
            change = returned - min(returned, shared) - sum(row.left for row in self.rows)
            change += sum(row.passing for row in self.rows)
            assert self.order.net_change(shared) == change

    def compare(self, row: Row) -> None:
        before = list(itertools.takewhile(lambda other: other is not row, self.rows))
        before = [other for other in before if other.advanced]
        for num_blocks in (0, 2):
            limit = num_blocks + needed(before)
            assert self.order.may_take(row.name, num_blocks, limit)
            assert self.order.may_take(row.name, num_blocks, limit - 1) == (not before)


def test_prefills_finish_in_order() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        OrderMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_prefills_that_advance_in_order_are_not_added_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step with many prefills costs an addition for each, not a sum over those before it."""
    order = PrefillOrder()
    for number in range(50):
        order.admit(str(number), Prefill(9, num_fresh=2, num_returned=8))
    monkeypatch.setattr(Sums, "of", None)
    for num_held in (3, 6):
        order.begin_step()
        for number in range(50):
            assert order.may_take(str(number), 3, num_free=1000)
            order.advance(str(number), num_held)
    order.leave("7")
    with pytest.raises(TypeError):  # out of order: summed from scratch
        order.may_take("20", 3, num_free=1000)
