# SPDX-License-Identifier: Apache-2.0
"""Rows of the query pool: handed out once, kept until they are given back, and never lost."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.cache.queries import QueryPool, StoredQueries
from vllm_tgvkv.scheduler.query_rows import QueryRows
from vllm_tgvkv.shared.plan import NO_ROW

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 7), st.integers(1, 4), st.sampled_from(("take", "end", "unscheduled"))
    ),
    max_size=60,
)


@given(
    num_rows=st.integers(9, 24),
    most=st.lists(st.integers(1, 9), min_size=8, max_size=8),
    events=EVENTS,
)
def test_rows_have_one_owner_and_nobody_waits_for_ever(
    num_rows: int, most: list[int], events: list[tuple[int, int, str]]
) -> None:
    """Requests take rows a few at a time, up to `most` at their cuts, and end at any time."""
    rows, held = QueryRows(num_rows), dict[str, np.ndarray]()
    asked: dict[str, int] = {}

    def check() -> None:
        assert rows.num_free == num_rows - sum(map(len, held.values()))
        owed = sum(asked[name] - len(own) for name, own in held.items())
        assert rows.num_spare == max(rows.num_free - owed, 0)
        taken = np.concatenate([*held.values(), np.empty(0, np.int64)])
        assert len(np.unique(taken)) == len(taken)
        assert ((taken != NO_ROW) & (taken >= 0) & (taken <= num_rows)).all()
        for name, own in held.items():
            assert np.array_equal(rows.of(name), own)

    def take(name: str, more: int, scheduled: bool = True) -> bool:
        before = held.get(name, np.empty(0, np.int64))
        wanted = min(len(before) + more, asked[name])
        given = rows.take(name, wanted, asked[name])
        found = rows.of(name)
        assert given or np.array_equal(np.empty(0) if found is None else found, before)
        rows.end_step({*held, name} if scheduled else set(held) - {name})
        if given and scheduled:
            assert found is not None
            assert np.array_equal(found[: len(before)], before)
            held[name] = found
            assert len(found) == wanted
        return given

    for number, more, kind in events:
        name = f"r{number}"
        asked[name] = most[number]
        if kind == "end":
            rows.give_back([name, "unknown"])
            held.pop(name, None)
        else:
            take(name, more, scheduled=kind == "take")
        check()
    while held:  # whoever holds some gets the rest, without others that end
        ready = [name for name in held if take(name, asked[name])]
        assert ready
        rows.give_back(ready)
        for name in ready:
            del held[name]
        check()
    assert rows.num_free == num_rows


def test_more_requests_wait_than_the_pool_holds_at_their_ends() -> None:
    rows, most = QueryRows(100), 33
    for number in range(10):
        assert rows.take(f"r{number}", 1, most)
    assert rows.num_spare == 0
    assert not rows.take_spare("choice", 1)
    assert not rows.take("many", 91, 91)
    assert not rows.take("later", 1, most), "nobody overtakes a request that waits for its first"
    assert rows.take("r3", 2, most), "but those that hold some go on"
    rows.end_step({f"r{number}" for number in range(10)})
    assert rows.num_free == 89


def test_queries_come_back_as_they_were_stored() -> None:
    pool = QueryPool(6, CacheShape(2, 2, 2, 8, 16), torch.float32, torch.device("cpu"))
    pool._queries.fill_(float("nan"))
    first, second = torch.randn(3, 4, 8), torch.randn(2, 4, 8)
    pool.store(0, torch.tensor([5, 1, 3]), first)
    pool.store(1, torch.tensor([1, 6]), second)
    pool.store(0, torch.tensor([NO_ROW, NO_ROW]), second)  # of tokens that do not vote
    assert torch.equal(pool.load(slice(1), torch.tensor([1, 3, 5]))[0], first[[1, 2, 0]])
    assert torch.equal(pool.load(slice(1, 2), torch.tensor([6, 1]))[0], second[[1, 0]])
    assert pool.load(slice(1), torch.tensor([2, 4, 6])).isnan().all()


@given(data=st.data(), num_tokens=st.integers(1, 6))
def test_tokens_of_a_chunk_are_stored_in_their_rows(data: st.DataObject, num_tokens: int) -> None:
    """Whether all tokens of the batch are stored or some, and in whatever order they are named."""
    order = data.draw(st.permutations(range(num_tokens)))
    tokens = np.array(order[: data.draw(st.integers(1, num_tokens))])
    rows = np.array(data.draw(st.permutations(range(1, 7)))[: len(tokens)])
    pool = QueryPool(6, CacheShape(1, 2, 2, 8, 16), torch.float32, torch.device("cpu"))
    pool._queries.fill_(float("nan"))
    queries = torch.randn(num_tokens, 4, 8)
    StoredQueries.of_tokens(pool, tokens, rows).store(0, queries)
    assert torch.equal(pool.load(slice(1), torch.from_numpy(rows))[0], queries[tokens])
    others = np.setdiff1d(np.arange(1, 7), rows)
    assert pool.load(slice(1), torch.from_numpy(others)).isnan().all()
