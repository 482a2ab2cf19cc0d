# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of some rows over a paged prompt, one layer at a time.

Probabilities are recomputed from the rows' queries and the cached keys. So keys from earlier chunks
of the prefill and from prefix-cache hits are covered as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NoReturn, Protocol

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu

Statistic = Literal["row_averages", "share_below", "row_entropies", "column_maxima"]
"""Statistics in addition to column sums. ``row_averages`` makes weighted sums cheap."""

THRESHOLD = 0.01
"""Entries below this fraction of their row's maximum are negligible (VL-Cache's p)."""

_FLOAT_BYTES = 4
_EXACT_IN_BFLOAT16 = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# Logits of more rows at a time do not make the matrix product faster, but take up cache.
_LOGITS_BYTES = 8 << 20


class Scratch:
    """Buffers that consecutive observations reuse.

    On CPU the first touch of fresh memory costs as much as the arithmetic on it. An
    :class:`ObservedAttention` is valid until the next one uses its scratch.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return an uninitialised float32 tensor in the buffer ``name``, which grows as needed."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=device)
        return buffer[:size].view(shape)


class Attention(Protocol):
    """Attention statistics of one layer over one prompt, as the parts of a policy see them.

    A is the softmax of the rows' queries over the keys that each row sees. O is the number of rows,
    P of keys, S of token sets. No row set has all statistics: :class:`ObservedAttention` recomputes
    A of a few rows, :class:`~vllm_tgvkv.kernels.row_sums.RowSums` adds up the columns of all rows.
    Statistics that a subclass does not define raise an AttributeError, which names the row sets
    that have them.
    """

    @property
    def row_positions(self) -> Tensor:
        """int64 ``[O]``, ascending positions of the rows."""
        _not_observed("row_positions", _FEW_ROWS)

    @property
    def column_sums(self) -> Tensor:
        """float32 ``[S, P]``, sum of A over the rows."""
        _not_observed("column_sums", f"{_FEW_ROWS} or 'all'")

    @property
    def column_maxima(self) -> Tensor:
        """float32 ``[S, P]``, maximum over the rows of A, averaged over the group's query heads."""
        _not_observed("column_maxima", _FEW_ROWS)

    @property
    def text_column_sums(self) -> Tensor:
        """float32 ``[S, P]``, sum of A over the text rows."""
        _not_observed("text_column_sums", "'all'")

    @property
    def vision_column_sums(self) -> Tensor:
        """float32 ``[S, P]``, sum of A over the vision rows."""
        _not_observed("vision_column_sums", "'all'")

    @property
    def share_below(self) -> Tensor:
        """float64 ``[S]``, share of the visible entries below ``THRESHOLD`` of their row's maximum.

        Counted for each query head, then averaged over the group.
        """
        _not_observed("share_below", _FEW_ROWS)

    @property
    def row_entropies(self) -> Tensor:
        """float32 ``[S, O]``, entropy of each row in nats, mean over the group's query heads."""
        _not_observed("row_entropies", _FEW_ROWS)

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        """Sum over the rows i of ``weights[s, i] * A[s][i, j]``.

        Args:
            weights: float ``[S, O]``, or ``[1, O]`` for the same weights in every set.

        Returns:
            float32 ``[S, P]``.

        Raises:
            ValueError: if ``weights`` has another shape.
        """
        _not_observed("weighted_column_sums", _FEW_ROWS)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        """Weighted column sums of the softmax over a subset of the keys.

        A row's softmax over a subset is its softmax over all keys, divided by the subset's part of
        it; that is done for each query head, before the mean over its group.

        Args:
            keys: bool ``[S or 1, P]``, the subset.
            weights: float ``[S or 1, O]``, of the rows.
            last_row_only: the weights of all other rows are zero; spares computing them.

        Returns:
            float32 ``[S, P]``, zero outside the subset. A row that sees no key of the subset adds
            nothing.
        """
        _not_observed("renormalised_column_sums", _FEW_ROWS)


_FEW_ROWS = "'text', 'after_vision', 'window'"


def _not_observed(name: str, row_sets: str) -> NoReturn:
    raise AttributeError(
        f"{name} is not observed for these rows: set `rows` of the score or allocation to one of "
        f"{row_sets}"
    )


@dataclass(frozen=True)
class ObservedRows:
    """Queries of the rows, and the keys that they see; fields as the arguments of :func:`observe`.

    Raises:
        ValueError: if a shape, dtype or number does not fit; the message names the field.
    """

    queries: Tensor
    key_pages: Tensor
    block_ids: Tensor
    row_positions: Tensor
    num_keys: int
    scale: float
    log_sum_exp: Tensor | None = None
    num_common_keys: int = 0

    def __post_init__(self) -> None:
        queries, pages, ids = self.queries, self.key_pages, self.block_ids
        if queries.dim() != 4 or not queries.is_floating_point():
            raise ValueError(f"queries must be floating [O, H, G, D], got {_describe(queries)}")
        rows, heads, group, head_size = queries.shape
        if pages.dim() != 4 or (pages.shape[1], pages.shape[3]) != (heads, head_size):
            raise ValueError(
                f"key_pages must be [num_blocks, {heads}, N, {head_size}], got {_describe(pages)}"
            )
        if self.num_keys < 1:
            raise ValueError(f"num_keys must be at least 1, got {self.num_keys}")
        num_blocks = -(-self.num_keys // pages.shape[2])
        if ids.shape != (num_blocks,) or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"block_ids must be int32 or int64 [{num_blocks}], got {_describe(ids)}"
            )
        positions, lse = self.row_positions, self.log_sum_exp
        if positions.shape != (rows,) or positions.dtype != torch.int64:
            raise ValueError(f"row_positions must be int64 [{rows}], got {_describe(positions)}")
        if lse is not None and lse.shape != (rows, heads, group):
            raise ValueError(
                f"log_sum_exp must be [{rows}, {heads}, {group}], got {_describe(lse)}"
            )


class ObservedAttention(Attention, ABC):
    """Statistics of some rows of A.

    Row i is the observation token at ``row_positions[i]``; it sees keys ``0..row_positions[i]``.
    S is the number of *groups* of query heads over which statistics are averaged: the G query heads
    of each KV head (S = H), or all query heads of the layer if ``per_head`` is false (S = 1). Built
    by :func:`observe`; ``statistics`` are computed in the same pass over the keys as the column
    sums. All statistics are computed on first access.

    Attributes:
        num_rows, num_keys, num_groups: O, P and S.
        row_positions: int64 ``[O]``, ascending.
    """

    def __init__(
        self,
        rows: ObservedRows,
        per_head: bool,
        statistics: frozenset[Statistic],
        workspace_bytes: int,
        scratch: Scratch,
    ) -> None:
        self.num_rows, self.num_heads, self.group_size, self.head_size = rows.queries.shape
        self.num_keys = rows.num_keys
        self.num_groups = self.num_heads if per_head else 1
        self._row_positions = rows.row_positions
        self._key_pages = rows.key_pages
        self._block_ids = rows.block_ids
        self._scale = rows.scale
        self._statistics = statistics
        self._workspace_bytes = workspace_bytes
        self._scratch = scratch

    @property
    def row_positions(self) -> Tensor:
        return self._row_positions

    @property
    def column_sums(self) -> Tensor:
        return self._first_pass.column_sums

    @property
    def share_below(self) -> Tensor:
        return self._declared("share_below", self._first_pass.share_below)

    @property
    def row_entropies(self) -> Tensor:
        return self._declared("row_entropies", self._first_pass.row_entropies)

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        if weights.shape not in ((self.num_groups, self.num_rows), (1, self.num_rows)):
            raise ValueError(
                f"weights must be [{self.num_groups}, {self.num_rows}] or [1, {self.num_rows}], "
                f"got {list(weights.shape)}"
            )
        return self.mixed_column_sums(weights.unsqueeze(1)).squeeze(1)

    def mixed_column_sums(self, weights: Tensor) -> Tensor:
        """Return K weighted column sums ``[S, K, num_keys]``; weights are ``[S or 1, K, O]``."""
        if "row_averages" in self._statistics:
            averages = self._first_pass.row_averages
            if averages is not None:
                return self._weigh(weights, averages)
        return self._weighted_pass(weights)

    @abstractmethod
    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor: ...

    @cached_property
    @abstractmethod
    def _first_pass(self) -> FirstPass:
        """Column sums and the requested statistics, from one pass over the rows.

        Row averages are kept for weighted sums if they are requested and small enough.
        """

    @abstractmethod
    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        """Return the sums of :meth:`mixed_column_sums` from the kept averages."""

    @abstractmethod
    def _weighted_pass(self, weights: Tensor) -> Tensor:
        """Return the sums of :meth:`mixed_column_sums` from another pass over the rows."""

    def _declared(self, name: Statistic, value: Tensor) -> Tensor:
        if name not in self._statistics:
            raise ValueError(
                f"{name} was not computed: name it in the `statistics` of the score or allocation"
            )
        return value


class TorchAttention(ObservedAttention):
    """Statistics in PyTorch, computed in chunks of rows.

    Scratch memory: the probabilities of one row chunk, the gathered keys and the kept head averages
    take at most ``workspace_bytes`` each, or the size of a single row (4*2*H*G*num_keys bytes) or
    block of keys if that is larger. If the keys do not fit, they are gathered piece by piece, again
    for each chunk of rows.
    """

    def __init__(
        self,
        rows: ObservedRows,
        per_head: bool,
        statistics: frozenset[Statistic],
        workspace_bytes: int,
        scratch: Scratch,
    ) -> None:
        super().__init__(rows, per_head, statistics, workspace_bytes, scratch)
        queries, lse = rows.queries, rows.log_sum_exp
        self._num_common_keys = rows.num_common_keys
        # Float32: a bf16 logit of 20 is off by up to 0.06, its probability by 6 %. The scale is
        # applied to the products, so that bf16 queries stay exact.
        self._queries = queries.permute(1, 2, 0, 3).float()  # [H, G, O, D]
        self._is_bfloat16 = (
            queries.dtype == torch.bfloat16 and rows.key_pages.dtype in _EXACT_IN_BFLOAT16
        )
        self._log_sum_exp = None if lse is None else lse.permute(1, 2, 0).float()
        self._keys: Tensor | None = None
        self._gather_all_if_small()

    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        return torch.bmm(weights.float().expand(self.num_groups, -1, -1), averages)

    def _weighted_pass(self, weights: Tensor) -> Tensor:
        sums = self._queries.new_zeros(self.num_heads, weights.shape[1], self.num_keys)
        weights = weights.float().expand(self.num_heads, -1, -1)
        for rows, probabilities in self.row_chunks():
            # The same weights for each of the group's heads: [H, K, G * R].
            repeated = weights[:, :, rows].repeat(1, 1, self.group_size)
            sums.baddbmm_(repeated, probabilities.flatten(1, 2))
        return self._mean_of_groups(sums / self.group_size)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        subset = keys.float().expand(self.num_heads, -1)
        weights = weights.float().expand(self.num_heads, -1)
        sums = torch.zeros_like(subset[:, None])
        first = self.num_rows - 1 if last_row_only else 0
        for rows, probabilities in self.row_chunks(first):
            flat = probabilities.flatten(1, 2)  # [H, G * R, P]
            mass = torch.bmm(flat, subset.unsqueeze(-1)).squeeze(-1)
            repeated = weights[:, rows].repeat(1, self.group_size)
            # A row that sees no key of the subset adds nothing.
            scaled = torch.where(mass > 0, repeated / mass, 0.0)
            sums.baddbmm_(scaled.unsqueeze(1), flat)
        return self._mean_of_groups(sums.squeeze(1) * subset / self.group_size)

    def row_chunks(self, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield ``(rows, probabilities)`` from row ``first`` on.

        Probabilities are float32 ``[H, G, R, num_keys]``, in a buffer that the next iteration
        overwrites.
        """
        heads, group, keys = self.num_heads, self.group_size, self.num_keys
        row_bytes = heads * group * keys * _FLOAT_BYTES
        # Logits and probabilities share the workspace.
        most = min(_LOGITS_BYTES, self._workspace_bytes // 2) // row_bytes
        step = max(1, min(most, self.num_rows - first))
        for start in range(first, self.num_rows, step):
            rows = slice(start, min(start + step, self.num_rows))
            shape = (heads, group, rows.stop - start, keys)
            logits = self._take("logits", shape)
            self._logits(rows, out=logits)
            yield rows, self._softmax(rows, logits, out=self._take("probabilities", shape))

    @cached_property
    def _first_pass(self) -> FirstPass:
        groups, keys, queried = self.num_groups, self.num_keys, self._statistics
        averages = None
        if (
            "row_averages" in queried
            and groups * self.num_rows * keys * _FLOAT_BYTES <= self._workspace_bytes
        ):
            averages = self._take("averages", (groups, self.num_rows, keys))
        sums = self._queries.new_zeros(self.num_heads, 1, keys)
        # 128 rows of 131k keys exceed the integers that float32 holds.
        below = self._queries.new_zeros(self.num_heads, self.group_size, dtype=torch.float64)
        entropies = self._queries.new_zeros(self.num_heads, self.num_rows)
        for rows, probabilities in self.row_chunks():
            if averages is not None:
                _mean_over_group(probabilities, averages[:, rows])
            else:
                flat = probabilities.flatten(1, 2)
                sums.baddbmm_(torch.ones_like(flat[:, None, :, 0]), flat, alpha=1 / self.group_size)
            # The logits are no longer needed; reuse their buffer.
            spare = self._take("logits", probabilities.shape)
            if "share_below" in queried:
                least = probabilities.amax(dim=-1, keepdim=True).mul_(THRESHOLD)
                torch.lt(probabilities, least, out=spare)
                below += spare.sum(dim=(2, 3))
            if "row_entropies" in queried:
                torch.special.entr(probabilities, out=spare)
                entropies[:, rows] = spare.sum(dim=-1).mean(dim=1)
        if averages is None:
            column_sums = self._mean_of_groups(sums.squeeze(1))
        else:
            column_sums = averages.sum(dim=1)
        return FirstPass(
            column_sums=column_sums,
            row_averages=averages,
            share_below=self._share_of_visible(below),
            row_entropies=self._mean_of_groups(entropies),
        )

    def _share_of_visible(self, below: Tensor) -> Tensor:
        """Return shares of the visible entries ``[S]`` from counts over whole rows ``[H, G]``."""
        num_visible = (self.row_positions + 1).sum()
        # Entries that a row does not see have probability zero and were counted as well.
        num_hidden = self.num_rows * self.num_keys - num_visible
        return self._mean_of_groups((below.mean(dim=1) - num_hidden) / num_visible)

    def _mean_of_groups(self, per_head: Tensor) -> Tensor:
        """Return means ``[S, ...]`` of values ``[H, ...]``."""
        if self.num_groups == self.num_heads:
            return per_head
        return per_head.mean(dim=0, keepdim=True)

    def _logits(self, rows: slice, out: Tensor) -> None:
        """Write scaled, causally masked logits of ``rows`` to ``out`` [H, G, R, num_keys]."""
        flat = out.flatten(1, 2)
        queries = self._queries[:, :, rows].flatten(1, 2)  # [H, G*R, D]
        for start, keys in self._key_chunks():
            part = flat[:, :, start : start + keys.shape[-1]]
            with _bfloat16_products(self._is_bfloat16):
                torch.baddbmm(part, queries, keys, beta=0, alpha=self._scale, out=part)
        # Every row sees the first `num_common_keys` keys. Masking all keys costs as much as the
        # softmax.
        first = self._num_common_keys
        positions = torch.arange(first, self.num_keys, device=out.device)
        future = positions > self.row_positions[rows, None]
        out[..., first:].masked_fill_(future, float("-inf"))

    def _softmax(self, rows: slice, logits: Tensor, out: Tensor) -> Tensor:
        if self._log_sum_exp is None:
            return torch.softmax(logits, dim=-1, out=out)
        return torch.exp(logits.sub_(self._log_sum_exp[:, :, rows, None]), out=out)

    def _gather_all_if_small(self) -> None:
        # Keys are gathered in the cache's dtype, then converted.
        value_bytes = self._key_pages.element_size() + _FLOAT_BYTES
        page_bytes = self.num_heads * self._key_pages.shape[2] * self.head_size * value_bytes
        self._blocks_per_chunk = max(1, self._workspace_bytes // page_bytes)
        if self._block_ids.shape[0] <= self._blocks_per_chunk:
            self._keys = self._gather(0, self._block_ids.shape[0])

    def _key_chunks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first position, keys)`` in order; keys are float32 ``[H, D, n]``."""
        if self._keys is not None:
            yield 0, self._keys
            return
        for start in range(0, self._block_ids.shape[0], self._blocks_per_chunk):
            yield (
                start * self._key_pages.shape[2],
                self._gather(start, start + self._blocks_per_chunk),
            )

    def _take(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._scratch.take(name, shape, self._queries.device)

    def _gather(self, start: int, stop: int) -> Tensor:
        """Return keys of blocks ``start..stop-1`` up to num_keys; later slots may be garbage."""
        block_size = self._key_pages.shape[2]
        ids = self._block_ids[start:stop]
        num_keys = min(self.num_keys - start * block_size, ids.shape[0] * block_size)
        # Copy pages in storage order, [D, N] or [N, D].
        if self._key_pages.stride(-2) == 1:
            pages = self._key_pages.transpose(2, 3).index_select(0, ids).permute(1, 2, 0, 3)
        else:
            pages = self._key_pages.index_select(0, ids).permute(1, 0, 2, 3)
        keys = self._take("keys", pages.shape).copy_(pages)
        if self._key_pages.stride(-2) == 1:
            return keys.flatten(2, 3)[:, :, :num_keys]
        return keys.flatten(1, 2)[:, :num_keys].transpose(1, 2)


def _mean_over_group(probabilities: Tensor, out: Tensor) -> None:
    """Write the mean of ``[H, G, R, P]`` over G, or over H and G, to ``out`` ``[S, R, P]``.

    On CPU adding slices is about three times as fast as reducing a middle dimension.
    """
    by_group = probabilities.view(out.shape[0], -1, *out.shape[1:])
    num_averaged = by_group.shape[1]
    out.copy_(by_group[:, 0])
    for g in range(1, num_averaged):
        out.add_(by_group[:, g])
    out.mul_(1 / num_averaged)


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass over the rows; statistics that were not requested are undefined."""

    column_sums: Tensor
    row_averages: Tensor | None
    """A of every row, float32 ``[S, O, P]``; None if not requested, or too large to keep."""
    share_below: Tensor
    row_entropies: Tensor


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
    log_sum_exp: Tensor | None = None,
    num_common_keys: int = 0,
    scratch: Scratch | None = None,
) -> ObservedAttention:
    """Return the attention of some rows over the prompt's keys, for one layer.

    Args:
        queries: ``[O, H, G, D]``, rotated, any float dtype.
        key_pages: ``[num_blocks, H, N, D]``, the layer's logical view of the pool; any strides.
            Slots from ``num_keys`` on never affect a result. Keys in fp8 are converted as they are
            gathered; ``scale`` has to include their scale.
        block_ids: int32 or int64 ``[ceil(num_keys / N)]``, the prompt's blocks in order.
        row_positions: int64 ``[O]``, ascending positions of the rows, each below ``num_keys``.
        num_keys: P, at least 1.
        scale: factor of the products, as in the model's attention.
        per_head: whether statistics are per KV head, or for the whole layer.
        statistics: the statistics that will be read, besides column sums.
        workspace_bytes: bound of each scratch buffer, see :class:`TorchAttention` and
            :class:`~vllm_tgvkv.kernels.gpu.statistics.TritonAttention`.
        log_sum_exp: float ``[O, H, G]``, natural log of the rows' softmax denominators if the
            attention kernel returned them; saves the reduction over the keys.
        num_common_keys: number of first keys that every row sees, at most ``row_positions[0] + 1``;
            known on the host.
        scratch: buffers of an earlier observation to reuse.

    Raises:
        ValueError: if a shape, dtype or number does not fit; the message names the argument.
    """
    rows = ObservedRows(
        queries,
        key_pages,
        block_ids,
        row_positions,
        num_keys,
        scale,
        log_sum_exp,
        num_common_keys,
    )
    implementation: type[ObservedAttention] = TorchAttention
    if gpu.runs(queries):
        from vllm_tgvkv.kernels.gpu.statistics import TritonAttention as implementation
    return implementation(rows, per_head, statistics, workspace_bytes, scratch or Scratch())


@contextmanager
def _bfloat16_products(enabled: bool) -> Iterator[None]:
    """Let float32 matmuls on CPU multiply in bf16 and add in float32.

    For values that bf16 holds exactly this loses nothing and takes a third of the time. It has no
    effect except on CPUs with bf16 instructions.
    """
    if not enabled:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
