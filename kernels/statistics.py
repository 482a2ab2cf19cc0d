# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of some rows over paged keys, for one layer or for many in one call.

Probabilities are recomputed from the rows' queries and the cached keys. So keys from earlier chunks
of the prefill and from prefix-cache hits are covered as well. Keys are found through a page table
per KV head, so heads may have different lengths, as in a compressed request.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import INTEGERS, QUERIES, check, indexable
from vllm_tgvkv.kernels.diversity import mean_cosines, norms
from vllm_tgvkv.kernels.importance import WINDOW, importance
from vllm_tgvkv.kernels.redundancy import redundancy

Statistic = Literal[
    "row_averages",
    "share_below",
    "row_entropies",
    "column_maxima",
    "past_importance",
    "key_redundancy",
    "mean_cosines",
    "value_norms",
    "modality_sums",
]
"""Statistics in addition to column sums. `row_averages` makes weighted sums cheap; `modality_sums`,
of the row set `all` only, are column sums over text rows and over vision rows."""

KEY_STATISTICS: frozenset[Statistic] = frozenset(
    {"past_importance", "key_redundancy", "mean_cosines", "value_norms"}
)
"""Statistics of a KV head's own keys or values, computed for some heads at a time in PyTorch."""


_REDUNDANCY_WORKSPACES = 3
"""Workspaces that keys and rows of their similarities take together."""

THRESHOLD = 0.01
"""Entries below this fraction of their row's maximum are negligible (VL-Cache's p)."""

T = TypeVar("T")


def not_computed(name: Statistic) -> str:
    """Return the message for a statistic that no part of the policy declares."""
    return f"{name} was not computed: name it in the `statistics` of the score or allocation"


def bytes_of_keys(num_keys: int, head_size: int, element_bytes: int) -> int:
    """Return what `KEY_STATISTICS` take for the keys of a head: their own bytes, and in float32.

    Keys in fp8 become bfloat16 first.
    """
    return (4 + max(2, element_bytes)) * head_size * num_keys


def bytes_of_similarities(of_keys: int, workspace_bytes: int) -> int:
    """Return what rows of similarities may take beside the keys of a head, which take `of_keys`.

    With less, products are smaller and more.
    """
    left = _REDUNDANCY_WORKSPACES * workspace_bytes - max(workspace_bytes, of_keys)
    return max(workspace_bytes, left)


class Scratch:
    """Buffers that consecutive observations reuse.

    On CPU the first touch of fresh memory costs as much as the arithmetic on it. An
    `ObservedAttention` is valid until the next one uses its scratch.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return an uninitialised float32 tensor in the buffer `name`, which grows as needed."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=device)
        return buffer[:size].view(shape)


class Attention(Protocol):
    """Attention statistics over one prompt, as the parts of a policy see them.

    A is the softmax of the rows' queries over the keys that each row sees. O is the number of rows,
    P of keys, S of token sets, of one layer or of several. A learned sink is in a softmax's
    denominator and has no column, so that a row of A sums to less than 1. No row set has all
    statistics:
    `ObservedAttention` recomputes A of a few rows,
    `RowSums` adds up the columns of all rows. Statistics that a
    subclass does not define raise an AttributeError, which names the row sets that have them.
    """

    @property
    def row_positions(self) -> Tensor:
        """int64 `[O]`, ascending positions of the rows."""
        _not_observed("row_positions", _FEW_ROWS)

    @property
    def row_columns(self) -> Tensor:
        """int64 `[S or 1, O]`, the column of each row's own token, the last key that it sees.

        It differs from the row's position where keys before it were evicted.
        """
        _not_observed("row_columns", _FEW_ROWS)

    @property
    def column_sums(self) -> Tensor:
        """float32 `[S, P]`, sum of A over the rows."""
        _not_observed("column_sums", f"{_FEW_ROWS} or 'all'")

    @property
    def column_maxima(self) -> Tensor:
        """float32 `[S, P]`, maximum over the rows of the mean of A over the group."""
        _not_observed("column_maxima", _FEW_ROWS)

    @property
    def text_column_sums(self) -> Tensor:
        """float32 `[S, P]`, sum of A over the text rows; of `modality_sums`."""
        _not_observed("text_column_sums", "'all'")

    @property
    def vision_column_sums(self) -> Tensor:
        """float32 `[S, P]`, sum of A over the vision rows; of `modality_sums`."""
        _not_observed("vision_column_sums", "'all'")

    @property
    def share_below(self) -> Tensor:
        """float64 `[S]`, share of the visible entries below `THRESHOLD` of their row's maximum.

        Counted for each query head, then averaged over the group.
        """
        _not_observed("share_below", _FEW_ROWS)

    @property
    def row_entropies(self) -> Tensor:
        """float32 `[S, O]`, entropy of each row in nats, mean over the group's query heads.

        It is the sum over the keys; a sink adds no term of its own.
        """
        _not_observed("row_entropies", _FEW_ROWS)

    @property
    def past_importance(self) -> Tensor:
        """float32 `[S, P]`, `importance` of each key.

        Rows and pooling are R-KV's: of the last `WINDOW` rows, or of fewer if there are no more,
        pooled over `KERNEL` keys that are neighbours in the cache. S is the number of KV heads.
        """
        _not_observed("past_importance", _FEW_ROWS)

    @property
    def key_redundancy(self) -> Tensor:
        """float32 `[S, P]`, `redundancy` of each key.

        It is that among the keys which the last row sees. S is the number of KV heads.
        """
        _not_observed("key_redundancy", _FEW_ROWS)

    @property
    def is_seen(self) -> Tensor:
        """bool `[S or 1, P]`, the keys that the last row sees."""
        _not_observed("is_seen", _FEW_ROWS)

    @property
    def mean_cosines(self) -> Tensor:
        """float32 `[S, P]`, `mean_cosines` of each key.

        It is that among the keys which the last row sees. S is the number of KV heads.
        """
        _not_observed("mean_cosines", _FEW_ROWS)

    @property
    def value_norms(self) -> Tensor:
        """float32 `[S, P]`, norm of the value of each key that the last row sees.

        In a quantised cache it is divided by the layer's scale. S is the number of KV heads.
        """
        _not_observed("value_norms", _FEW_ROWS)

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        """Sum over the rows i of `weights[s, i] * A[s][i, j]`.

        Args:
            weights: float `[S, O]`, or `[1, O]` for the same weights in every set.

        Returns:
            float32 `[S, P]`.

        Raises:
            ValueError: if `weights` has another shape.
        """
        _not_observed("weighted_column_sums", _FEW_ROWS)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        """Weighted column sums of the softmax over a subset of the keys.

        A row's softmax over a subset is its softmax over all keys, divided by the subset's part of
        it; that is done for each query head, before the mean over its group. So a sink, which is in
        no subset, does not matter.

        Args:
            keys: bool `[S or 1, P]`, the subset.
            weights: float `[S or 1, O]`, of the rows.
            last_row_only: the weights of all other rows are zero; spares computing them.

        Returns:
            float32 `[S, P]`, zero outside the subset. A row that sees no key of the subset adds
            nothing.
        """
        _not_observed("renormalised_column_sums", _FEW_ROWS)

    def mean_of_query_heads(self, find: Callable[[Attention], Tensor]) -> Tensor:
        """Return the mean over each set's query heads of what `find` returns, float32 `[S, P]`.

        `find` gets the attention of query heads, a set each, all of one set side by side, and
        returns one row for each of them, `[sets, P]`.
        """
        _not_observed("mean_of_query_heads", _FEW_ROWS)


_FEW_ROWS = "'text', 'after_vision', 'window'"


def _not_observed(name: str, row_sets: str) -> NoReturn:
    raise AttributeError(
        f"{name} is not observed for these rows: set `rows` of the score or allocation to one of "
        f"{row_sets}"
    )


@dataclass(frozen=True)
class ObservedRows:
    """Queries of the rows and the keys that they see, in L layers of H KV heads.

    A *pair* is one KV head of one layer: pair `l * H + h` is head h of layer l, and Q = L * H.

    Raises:
        ValueError: if a shape, dtype or number does not fit; the message names the field.
    """

    queries: Tensor
    """`[L, O, H, G, D]`, rotated, any float dtype and strides."""
    pool: Tensor
    """`[num_pages, N, D]`, keys of all pages, any strides. Queries and keys in fp8 are converted as
    they are gathered; `scale` has to include their scales."""
    tables: Tensor
    """int32 or int64 `[Q, W]` with W >= ceil(P / N), the pages of each pair's keys in order. What
    comes after a pair's last key may be garbage: entries as well as slots."""
    num_visible: Tensor
    """int32 `[Q, O]`, or `[1, O]` if it is the same for all pairs: number of first keys that each
    row sees; ascends with the rows. A row that sees none adds nothing."""
    num_keys: int
    """P, at least every number in `num_visible`. Columns of keys that no row sees are zero."""
    scale: float | Tensor
    """Factor of the products; float32 `[L]` if it differs between layers."""
    row_positions: Tensor | None = None
    """int64 `[O]`, or None if it differs between pairs which key is a row's own."""
    values: Tensor | None = None
    """`[num_pages, N, D]`, the values of the keys on the same pages; for statistics of values."""
    sinks: Tensor | None = None
    """float32 `[L, H, G]`, the logit of one more key that all rows of a query head see, and that
    has no column; -inf for none. None if no layer has sinks, which costs nothing then."""

    def __post_init__(self) -> None:
        check("queries", self.queries, ("L", "O", "H", "G", "D"), QUERIES)
        layers, rows, heads, _, head_size = self.queries.shape
        check("pool", self.pool, ("num_pages", "N", head_size))
        if self.num_keys < 1:
            raise ValueError(f"num_keys must be at least 1, got {self.num_keys}")
        pairs, num_pages = layers * heads, -(-self.num_keys // self.pool.shape[1])
        check("tables", self.tables, (pairs, "W"), INTEGERS)
        if self.tables.shape[1] < num_pages:
            raise ValueError(
                f"tables must have the {num_pages} pages of num_keys = {self.num_keys} keys, got "
                f"{self.tables.shape[1]} columns"
            )
        pairs = 1 if self.num_visible.shape[0] == 1 else pairs
        check("num_visible", self.num_visible, (pairs, rows), (torch.int32,))
        if isinstance(self.scale, Tensor):
            check("scale", self.scale, (layers,), (torch.float32,))
        if self.row_positions is not None:
            check("row_positions", self.row_positions, (rows,), (torch.int64,))
        if self.values is not None:
            check("values", self.values, (*self.pool.shape[:2], "D"))
        if self.sinks is not None:
            shape = (layers, heads, self.queries.shape[3])
            check("sinks", self.sinks, shape, (torch.float32,), self.sinks.is_contiguous())


class ObservedAttention(Attention, ABC):
    """Statistics of some rows of A in L layers.

    S is the number of *groups* of query heads over which statistics are averaged: the G query heads
    of each KV head (S = L * H), or all query heads of a layer if `per_head` is false (S = L).
    Columns that a row does not see are zero. Built by `observe` and `observe_layers`;
    `statistics` are computed in the same pass over the keys as the column sums. All statistics
    are computed on first access.

    Attributes:
        num_layers, num_rows, num_keys, num_groups: L, O, P and S.
    """

    def __init__(
        self,
        rows: ObservedRows,
        per_head: bool,
        statistics: frozenset[Statistic],
        workspace_bytes: int,
        scratch: Scratch,
    ) -> None:
        shape = rows.queries.shape
        self.num_layers, self.num_rows, self.num_heads, self.group_size, self.head_size = shape
        self.num_keys = rows.num_keys
        self.num_pairs = self.num_layers * self.num_heads
        self.num_groups = self.num_pairs if per_head else self.num_layers
        self._rows = rows
        self._statistics = statistics
        self._workspace_bytes = workspace_bytes
        self._scratch = scratch

    @property
    def row_positions(self) -> Tensor:
        if self._rows.row_positions is None:
            raise ValueError("keys of these rows were evicted: use row_columns, not row_positions")
        return self._rows.row_positions

    @property
    def row_columns(self) -> Tensor:
        columns = self._rows.num_visible.long() - 1
        if columns.shape[0] > 1 and self.num_groups < self.num_pairs:
            return columns[:: self.num_heads]  # the same for all heads of a layer
        return columns

    @property
    def column_sums(self) -> Tensor:
        return self._first_pass.column_sums

    @property
    def share_below(self) -> Tensor:
        return self._declared("share_below", self._first_pass.share_below)

    @property
    def row_entropies(self) -> Tensor:
        return self._declared("row_entropies", self._first_pass.row_entropies)

    @property
    def column_maxima(self) -> Tensor:
        return self._declared("column_maxima", self._first_pass.column_maxima)

    @property
    def past_importance(self) -> Tensor:
        rows = self._rows
        queries = rows.queries[:, -WINDOW:].transpose(1, 2).flatten(0, 1)  # [Q, w, G, D]
        # The window begins with the own key of its first row.
        num_past = rows.num_visible[:, -queries.shape[1]].expand(self.num_pairs) - 1
        if not isinstance(rows.scale, Tensor):
            of_keys = partial(importance, scale=rows.scale)
            return self._of_pages("past_importance", rows.pool, of_keys, queries, num_past)
        scales = rows.scale.repeat_interleave(self.num_heads, output_size=self.num_pairs)
        return self._of_pages("past_importance", rows.pool, importance, queries, num_past, scales)

    @property
    def key_redundancy(self) -> Tensor:
        workspace = bytes_of_similarities(self._bytes_of_keys, self._workspace_bytes)
        of_keys = partial(redundancy, workspace_bytes=workspace)
        return self._of_pages("key_redundancy", self._rows.pool, of_keys, self._lengths)

    @property
    def is_seen(self) -> Tensor:
        # One pair of each group: pairs that share a set have the same lengths.
        lengths = self._rows.num_visible[:, -1:]
        if lengths.shape[0] > 1:
            lengths = lengths[:: self.num_pairs // self.num_groups]
        return torch.arange(self.num_keys, device=lengths.device) < lengths

    @property
    def mean_cosines(self) -> Tensor:
        return self._of_pages("mean_cosines", self._rows.pool, mean_cosines, self._lengths)

    @property
    def value_norms(self) -> Tensor:
        if self._rows.values is None:
            raise ValueError("value_norms needs the pages of the values: give `values`")
        return self._of_pages("value_norms", self._rows.values, norms, self._lengths)

    @property
    def _lengths(self) -> Tensor:
        """Number of keys of each pair, int32 `[Q]`."""
        return self._rows.num_visible[:, -1].expand(self.num_pairs)

    @property
    def _bytes_of_keys(self) -> int:
        """Bytes that the keys of a pair take in `_of_pages`."""
        pool = self._rows.pool
        num_keys = -(-self.num_keys // pool.shape[1]) * pool.shape[1]
        return bytes_of_keys(num_keys, self.head_size, pool.element_size())

    def _of_pages(
        self, name: Statistic, pool: Tensor, function: Callable[..., Tensor], *of_pairs: Tensor
    ) -> Tensor:
        """Return `[Q, P]`, a function of some pairs' keys `[q, P, D]` and what else they have.

        The keys come from `pool`, which may have values in their places. Slots after a pair's
        last key hold anything.
        """
        if self.num_groups < self.num_pairs:
            raise ValueError(f"{name} belongs to one KV head: use granularity head")
        self._declared(name, None)
        lengths, size = self._rows.num_visible[:, -1:], pool.shape[1]
        width = -(-self.num_keys // size)
        starts = torch.arange(width, device=pool.device) * size
        # Entries after the page of a pair's last key may be garbage.
        tables = self._rows.tables[:, :width].masked_fill(starts >= lengths, 0)
        result = torch.empty(self.num_pairs, self.num_keys, device=pool.device)
        step = max(1, self._workspace_bytes // self._bytes_of_keys)
        for start in range(0, self.num_pairs, step):
            pairs = slice(start, start + step)
            pages = indexable(pool).index_select(0, tables[pairs].flatten()).view(pool.dtype)
            if pages.element_size() == 1:  # fp8 has no arithmetic
                pages = pages.to(torch.bfloat16)
            keys = pages.view(-1, width * size, self.head_size)[:, : self.num_keys]
            result[pairs] = function(keys, *(x[pairs] for x in of_pairs))
        return result

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        if weights.shape not in ((self.num_groups, self.num_rows), (1, self.num_rows)):
            raise ValueError(
                f"weights must be [{self.num_groups}, {self.num_rows}] or [1, {self.num_rows}], "
                f"got {list(weights.shape)}"
            )
        return self.mixed_column_sums(weights.unsqueeze(1)).squeeze(1)

    def mixed_column_sums(self, weights: Tensor) -> Tensor:
        """Return K weighted column sums `[S, K, num_keys]`; weights are `[S or 1, K, O]`."""
        if "row_averages" in self._statistics:
            averages = self._first_pass.row_averages
            if averages is not None:
                return self._weigh(weights, averages)
        return self._weighted_pass(weights)

    @abstractmethod
    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor: ...

    def mean_of_query_heads(self, find: Callable[[Attention], Tensor]) -> Tensor:
        rows, group = self._rows, self.group_size
        visible = rows.num_visible
        if visible.shape[0] > 1:
            visible = visible.repeat_interleave(group, dim=0)
        apart = replace(
            rows,
            queries=rows.queries.flatten(2, 3).unsqueeze(3),
            tables=rows.tables.repeat_interleave(group, dim=0),
            num_visible=visible,
            sinks=None if rows.sinks is None else rows.sinks.flatten(1).unsqueeze(2),
        )
        by_head = observe_layers(apart, workspace_bytes=self._workspace_bytes)
        return find(by_head).unflatten(0, (self.num_groups, -1)).mean(dim=1)

    @cached_property
    @abstractmethod
    def _first_pass(self) -> FirstPass:
        """Column sums and the requested statistics, from one pass over the rows.

        Row averages are kept for weighted sums if they are requested and small enough.
        """

    @abstractmethod
    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        """Return the sums of `mixed_column_sums` from the kept averages."""

    @abstractmethod
    def _weighted_pass(self, weights: Tensor) -> Tensor:
        """Return the sums of `mixed_column_sums` from another pass over the rows."""

    def _declared(self, name: Statistic, value: T) -> T:
        if name not in self._statistics:
            raise ValueError(not_computed(name))
        return value


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass over the rows; statistics that were not requested are undefined."""

    column_sums: Tensor
    row_averages: Tensor | None
    """A of every row, float32 `[S, O, P]`; None if not requested, or too large to keep."""
    share_below: Tensor
    row_entropies: Tensor
    column_maxima: Tensor


def observe_layers(
    rows: ObservedRows,
    per_head: bool = True,
    statistics: frozenset[Statistic] = frozenset(),
    workspace_bytes: int = 64 << 20,
    scratch: Scratch | None = None,
) -> ObservedAttention:
    """Return the attention of some rows over a sequence's keys, for L layers in one call.

    Every KV head has its own page table and length, so the sequence may be a compressed one.

    Args:
        per_head: whether statistics are per pair, S = L * H, or per layer, S = L. The second needs
            equal lengths within a layer.
        statistics, workspace_bytes, scratch: as in `observe`.
    """
    if gpu.runs(rows.queries):
        from vllm_tgvkv.kernels.gpu.statistics import TritonAttention

        return TritonAttention(rows, per_head, statistics, workspace_bytes, scratch or Scratch())
    from vllm_tgvkv.kernels.row_chunks import TorchAttention

    return TorchAttention(rows, per_head, statistics, workspace_bytes, scratch or Scratch())


def observe(
    queries: Tensor,
    key_pages: Tensor,
    block_ids: Tensor,
    row_positions: Tensor,
    num_keys: int,
    scale: float,
    per_head: bool = True,
    statistics: frozenset[Statistic] = frozenset(),
    workspace_bytes: int = 64 << 20,
    scratch: Scratch | None = None,
    value_pages: Tensor | None = None,
    sinks: Tensor | None = None,
) -> ObservedAttention:
    """Return the attention of some rows over an uncompressed prompt's keys, for one layer.

    Args:
        queries: `[O, H, G, D]`, rotated, any float dtype.
        key_pages: `[num_blocks, H, N, D]`, the layer's logical view of the pool; any strides.
            Slots from `num_keys` on never affect a result. Keys in fp8 are converted as they are
            gathered; `scale` has to include the scales of keys and queries in fp8.
        block_ids: int32 or int64 `[ceil(num_keys / N)]`, the prompt's blocks in order.
        row_positions: int64 `[O]`, ascending positions of the rows, each below `num_keys`. A
            row sees the keys up to its position.
        num_keys: P, at least 1.
        scale: factor of the products, as in the model's attention.
        per_head: whether statistics are per KV head, or for the whole layer.
        statistics: the statistics that will be read, besides column sums.
        workspace_bytes: bound of each scratch buffer, see
            `TorchAttention` and
            `TritonAttention`.
        scratch: buffers of an earlier observation to reuse.
        value_pages: like `key_pages`, for statistics of values. Blocks and heads have the same
            strides.
        sinks: float32 `[H, G]`, see `ObservedRows`.

    Raises:
        ValueError: if a shape, dtype or number does not fit; the message names the argument.
    """
    check("queries", queries, ("O", "H", "G", "D"), QUERIES)
    num_rows, heads, _, head_size = queries.shape
    check("key_pages", key_pages, ("num_blocks", heads, "N", head_size))
    if num_keys < 1:
        raise ValueError(f"num_keys must be at least 1, got {num_keys}")
    check("block_ids", block_ids, (-(-num_keys // key_pages.shape[2]),), INTEGERS)
    check("row_positions", row_positions, (num_rows,), (torch.int64,))
    pool, tables = _pages_of_heads(key_pages, block_ids)
    values = None
    if value_pages is not None:
        check("value_pages", value_pages, (*key_pages.shape[:3], "D"))
        if value_pages.stride()[:2] != key_pages.stride()[:2]:
            raise ValueError(
                f"value_pages must have strides {key_pages.stride()[:2]} between blocks and heads, "
                f"as key_pages, got {value_pages.stride()[:2]}"
            )
        values = _pages_of_heads(value_pages, block_ids)[0]
    rows = ObservedRows(
        queries[None],
        pool,
        tables,
        (row_positions[None] + 1).int(),
        num_keys,
        scale,
        row_positions,
        values,
        None if sinks is None else sinks[None],
    )
    return observe_layers(rows, per_head, statistics, workspace_bytes, scratch)


def _pages_of_heads(key_pages: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a view `[num_pages, N, D]` of one layer's blocks, and tables `[H, W]` into it.

    Pages start at the multiples of the greatest common divisor of the blocks' and heads' strides.
    """
    num_blocks, heads, block_size, head_size = key_pages.shape
    block_stride, head_stride, slot_stride, dim_stride = key_pages.stride()
    page_stride = math.gcd(block_stride, head_stride) or 1
    of_block, of_head = block_stride // page_stride, head_stride // page_stride
    num_pages = (num_blocks - 1) * of_block + (heads - 1) * of_head + 1
    pool = key_pages.as_strided(
        (num_pages, block_size, head_size), (page_stride, slot_stride, dim_stride)
    )
    dtype = torch.int32 if num_pages < 1 << 31 else torch.int64
    first_pages = torch.arange(heads, dtype=dtype, device=block_ids.device) * of_head
    return pool, torch.add(first_pages[:, None], block_ids.to(dtype), alpha=of_block)
