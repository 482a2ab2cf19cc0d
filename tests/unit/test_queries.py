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

EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=40)


@given(num_rows=st.integers(1, 20), events=EVENTS)
def test_a_row_has_one_owner(num_rows: int, events: list[tuple[int, int, bool]]) -> None:
    rows = QueryRows(num_rows)
    held: dict[str, np.ndarray] = {}
    for number, wanted, gives_back in events:
        name = f"r{number}"
        num_free = num_rows - sum(map(len, held.values()))
        if gives_back:
            rows.give_back([name, "unknown"])
            held.pop(name, None)
        elif name not in held:
            assert rows.take(name, wanted) == (wanted <= num_free)
            assert wanted <= num_free or not rows.take("later", 1)  # nobody overtakes
            rows.end_step({*held, name})
            if wanted <= num_free:
                found = rows.of(name)
                assert found is not None
                assert len(found) == wanted
                held[name] = found
        assert rows.num_free == num_rows - sum(map(len, held.values()))
        taken = np.concatenate([*held.values(), np.empty(0, np.int64)])
        assert len(np.unique(taken)) == len(taken)
        assert ((taken != NO_ROW) & (taken >= 0) & (taken <= num_rows)).all()
        for other in (f"r{i}" for i in range(6)):
            assert (rows.of(other) is None) == (other not in held)
    rows.give_back(list(held))
    assert rows.num_free == num_rows
    assert rows.take("all", num_rows)
    rows.end_step(())  # it was not scheduled
    assert rows.num_free == num_rows


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
