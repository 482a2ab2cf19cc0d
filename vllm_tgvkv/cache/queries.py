# SPDX-License-Identifier: Apache-2.0
"""Queries of tokens that vote later: the scheduler's list of free rows, and the worker's memory.

A token votes at the eviction of its prompt. If that is not the step that computes it, because
the prompt comes in chunks or the eviction waits for the answer, its queries of all layers are kept
in a row of a pool of fixed size. The scheduler hands out the rows, so the memory is bounded, and a
prompt waits where no rows are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.kernels.checks import indexable
from vllm_tgvkv.shared.plan import NO_ROW


class QueryPool:
    """The worker's side: the queries themselves, [L, num_rows + 1, H * G, D].

    Those in fp8 are given and returned as bytes (`indexable`); `dtype` says what they are.
    """

    def __init__(
        self, num_rows: int, shape: CacheShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_heads = shape.num_heads * shape.group_size
        size = (shape.num_layers, num_rows + 1, num_heads, shape.head_size)
        self.dtype = dtype
        self._queries = indexable(torch.empty(size, dtype=dtype, device=device))
        self._layers = self._queries.unbind()

    def store(self, layer: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
        """Store queries [T, H * G, D] of one layer in `rows`, int64 [T]."""
        self._layers[layer].index_copy_(0, rows, queries)

    def load(self, layers: slice, rows: torch.Tensor) -> torch.Tensor:
        """Return the queries of `rows`, int64 [O], in some layers: [layers, O, H * G, D]."""
        return self._queries[layers].index_select(1, rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in one layer."""
        return self._queries[0, NO_ROW].nbytes

    @property
    def device(self) -> torch.device:
        return self._queries.device


class DecodeQueries:
    """The store of a decode step's queries, as part of the step's graph.

    Every token has a destination in the pool: `NO_ROW`, unless its request waits for its vote. They
    are in memory that graphs refer to. So one graph serves steps with and without such requests.
    """

    def __init__(self, pool: QueryPool, max_tokens: int) -> None:
        self._pool = pool
        self._rows = torch.full((max_tokens,), NO_ROW, dtype=torch.int64, device=pool.device)
        self._is_clear = True

    def direct(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Set the destinations of a step, before it runs.

        The copy to the device is not waited for. It comes from PyTorch's cache of pinned memory,
        which is not written again before the copy has ended.

        Args:
            tokens: indices in the batch of the tokens that vote later, int64 [T].
            rows: their rows of the pool, int64 [T].
        """
        if not len(tokens):
            if not self._is_clear:
                self._rows.fill_(NO_ROW)
                self._is_clear = True
            return
        all_rows = np.full(len(self._rows), NO_ROW)
        all_rows[tokens] = rows
        async_tensor_h2d(all_rows, out=self._rows)
        self._is_clear = False

    def of_batch(self, num_tokens: int) -> StoredQueries:
        """Return the store of a batch of `num_tokens`, padded ones included, for all its steps."""
        return StoredQueries(self._pool, self._rows[:num_tokens])


@dataclass(frozen=True)
class StoredQueries:
    """The store of the queries of T tokens of a batch; graphs of T tokens refer to it."""

    pool: QueryPool
    rows: torch.Tensor
    """int64 [T]."""
    tokens: torch.Tensor | None = None
    """Their indices in the batch, int64 [T]; None if they are its first ones."""

    @classmethod
    def of_tokens(cls, pool: QueryPool, tokens: np.ndarray, rows: np.ndarray) -> StoredQueries:
        """Return the store of some tokens, outside of graphs; see `DecodeQueries.direct`."""
        order = tokens.argsort()
        tokens, rows = tokens[order], rows[order]
        are_first = tokens[-1] == len(tokens) - 1
        index = None if are_first else async_tensor_h2d(tokens, pool.device)
        return cls(pool, async_tensor_h2d(rows, pool.device), index)

    def store(self, layer: int, queries: torch.Tensor) -> None:
        """Store one layer's queries, [tokens of the batch, H * G, D]."""
        if self.tokens is not None:
            queries = queries.index_select(0, self.tokens)
        # Where a whole batch waits, each operation less is a tenth of a per cent of a CPU's step.
        elif len(queries) > len(self.rows):
            queries = queries[: len(self.rows)]
        self.pool.store(layer, self.rows, queries)
