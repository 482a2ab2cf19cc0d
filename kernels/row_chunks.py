# SPDX-License-Identifier: Apache-2.0
"""Attention statistics in PyTorch, from the probabilities of a few rows of one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import (
    THRESHOLD,
    Attention,
    FirstPass,
    ObservedAttention,
    ObservedRows,
    Scratch,
    Statistic,
)

_FLOAT_BYTES = 4
_EXACT_IN_BFLOAT16 = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
# Logits of more rows at a time do not make the matrix product faster, but take up cache.
_LOGITS_BYTES = 8 << 20


class TorchAttention(ObservedAttention):
    """Statistics in PyTorch, layer by layer, in chunks of rows.

    Scratch memory: the probabilities of one row chunk, the gathered keys of one layer and the kept
    head averages take at most `workspace_bytes` each, or the size of a single row
    (4*2*H*G*num_keys bytes) or page of every head if that is larger. If a layer's keys do not fit,
    they are gathered piece by piece, again for each chunk of rows.
    """

    _gathered: tuple[int, Tensor] | None = None
    """A layer and all of its keys, if they fit."""

    def _weigh(self, weights: Tensor, averages: Tensor) -> Tensor:
        return torch.bmm(weights.float().expand(self.num_groups, -1, -1), averages)

    def _weighted_pass(self, weights: Tensor) -> Tensor:
        layers = []
        for layer in range(self.num_layers):
            of_heads = self._of_heads(layer, weights.float())
            sums = self._zeros(self.num_heads, weights.shape[1], self.num_keys)
            for rows, probabilities in self.row_chunks(layer):
                # The same weights for each of the group's heads: [H, K, G * R].
                repeated = of_heads[:, :, rows].repeat(1, 1, self.group_size)
                sums.baddbmm_(repeated, probabilities.flatten(1, 2))
            layers.append(self._mean_of_groups(sums / self.group_size))
        return torch.cat(layers)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        first = self.num_rows - 1 if last_row_only else 0
        layers = []
        for layer in range(self.num_layers):
            subset = self._of_heads(layer, keys.float())
            of_heads = self._of_heads(layer, weights.float())
            sums = torch.zeros_like(subset[:, None])
            for rows, probabilities in self.row_chunks(layer, first):
                flat = probabilities.flatten(1, 2)  # [H, G * R, P]
                mass = torch.bmm(flat, subset.unsqueeze(-1)).squeeze(-1)
                repeated = of_heads[:, rows].repeat(1, self.group_size)
                # A row that sees no key of the subset adds nothing.
                scaled = torch.where(mass > 0, repeated / mass, 0.0)
                sums.baddbmm_(scaled.unsqueeze(1), flat)
            layers.append(self._mean_of_groups(sums.squeeze(1) * subset / self.group_size))
        return torch.cat(layers)

    def row_chunks(self, layer: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield `(rows, probabilities)` of one layer from row `first` on.

        Probabilities are float32 `[H, G, R, num_keys]`, in a buffer that the next iteration
        overwrites.
        """
        heads, group, sinks = self.num_heads, self.group_size, self._rows.sinks
        # A sink is the key in one more column.
        width = self.num_keys + (sinks is not None)
        row_bytes = heads * group * width * _FLOAT_BYTES
        # Logits and probabilities share the workspace.
        most = min(_LOGITS_BYTES, self._workspace_bytes // 2) // row_bytes
        step = max(1, min(most, self.num_rows - first))
        for start in range(first, self.num_rows, step):
            rows = slice(start, min(start + step, self.num_rows))
            shape = (heads, group, rows.stop - start, width)
            logits = self._take("logits", shape)
            self._logits(layer, rows, out=logits[..., : self.num_keys])
            if sinks is not None:
                logits[..., -1] = sinks[layer, :, :, None]
            found = self._softmax(layer, rows, logits, self._take("probabilities", shape))
            yield rows, found[..., : self.num_keys]

    @cached_property
    def _first_pass(self) -> FirstPass:
        groups, rows, keys = self.num_groups, self.num_rows, self.num_keys
        averages = None
        size = groups * rows * keys * _FLOAT_BYTES
        if "row_averages" in self._statistics and size <= self._workspace_bytes:
            averages = self._take("averages", (groups, rows, keys))
        layers = [self._layer_pass(layer, averages) for layer in range(self.num_layers)]
        sums, share_below, entropies, maxima = map(torch.cat, zip(*layers, strict=True))
        return FirstPass(
            column_sums=sums if averages is None else averages.sum(dim=1),
            row_averages=averages,
            share_below=share_below,
            row_entropies=entropies,
            column_maxima=maxima,
        )

    def _layer_pass(self, layer: int, averages: Tensor | None) -> tuple[Tensor, ...]:
        """Return the other fields of `FirstPass` for the sets of one layer.

        Column sums are zero if averages are kept.
        """
        queried, sets = self._statistics, self._sets(layer)
        sums = self._zeros(self.num_heads, 1, self.num_keys)
        # 128 rows of 131k keys exceed the integers that float32 holds.
        below = sums.new_zeros(self.num_heads, self.group_size, dtype=torch.float64)
        entropies = self._zeros(self.num_heads, self.num_rows)
        maxima = self._zeros(sets.stop - sets.start, self.num_keys)
        for rows, probabilities in self.row_chunks(layer):
            if averages is None:
                flat = probabilities.flatten(1, 2)
                sums.baddbmm_(torch.ones_like(flat[:, None, :, 0]), flat, alpha=1 / self.group_size)
            # The logits are no longer needed; reuse their buffer.
            if averages is not None or "column_maxima" in queried:
                if averages is not None:
                    means = averages[sets, rows]
                else:
                    means = self._take("logits", (len(maxima), *probabilities.shape[2:]))
                _mean_over_group(probabilities, means)
                if "column_maxima" in queried:
                    maxima = torch.maximum(maxima, means.amax(dim=1))
            spare = self._take("logits", probabilities.shape)
            if "share_below" in queried:
                least = probabilities.amax(dim=-1, keepdim=True).mul_(THRESHOLD)
                torch.lt(probabilities, least, out=spare)
                below += spare.sum(dim=(2, 3))
            if "row_entropies" in queried:
                torch.special.entr(probabilities, out=spare)
                entropies[:, rows] = spare.sum(dim=-1).mean(dim=1)
        return (
            self._mean_of_groups(sums.squeeze(1)),
            self._share_of_visible(layer, below) if "share_below" in queried else below,
            self._mean_of_groups(entropies),
            maxima,
        )

    def _share_of_visible(self, layer: int, below: Tensor) -> Tensor:
        """Return shares of a layer's visible entries from counts over whole rows `[H, G]`."""
        visible = self._visible(layer).clamp(min=0)
        # Entries that a row does not see have probability zero and were counted as well, unless
        # the row sees none: then no entry is below the maximum.
        hidden = torch.where(visible > 0, self.num_keys - visible, 0).sum(dim=1)
        return self._mean_of_groups((below.mean(dim=1) - hidden) / visible.sum(dim=1))

    def _mean_of_groups(self, per_head: Tensor) -> Tensor:
        """Return means `[H or 1, ...]` of one layer's values `[H, ...]`."""
        if self.num_groups == self.num_pairs:
            return per_head
        return per_head.mean(dim=0, keepdim=True)

    def _of_heads(self, layer: int, values: Tensor) -> Tensor:
        """Return the values `[H, ...]` for one layer's heads, from `[S or 1, ...]`."""
        if values.shape[0] > 1:
            values = values[self._sets(layer)]
        return values.expand(self.num_heads, *values.shape[1:])

    def _sets(self, layer: int) -> slice:
        number = self.num_groups // self.num_layers
        return slice(layer * number, (layer + 1) * number)

    def _pairs(self, layer: int) -> slice:
        return slice(layer * self.num_heads, (layer + 1) * self.num_heads)

    def _visible(self, layer: int) -> Tensor:
        """Return the number of keys that each row sees, int32 `[H or 1, O]`."""
        visible = self._rows.num_visible
        return visible[self._pairs(layer)] if visible.shape[0] > 1 else visible

    def _num_common_keys(self, layer: int, rows: slice) -> int:
        """Return the number of first keys that all of `rows` see in all heads; on a CPU only."""
        visible = self._visible(layer)[:, rows]
        return max(0, int(visible.numpy().min())) if visible.is_cpu else 0

    def _logits(self, layer: int, rows: slice, out: Tensor) -> None:
        """Write scaled, causally masked logits of `rows` to `out` [H, G, R, num_keys]."""
        flat, pool = out.flatten(1, 2), self._rows.pool
        is_exact = {self._rows.queries.dtype, pool.dtype} <= _EXACT_IN_BFLOAT16
        # Float32: a bf16 logit of 20 is off by up to 0.06, its probability by 6 %. The scale is
        # applied to the products, so that bf16 queries stay exact.
        queries = self._rows.queries[layer, rows].permute(1, 2, 0, 3).float().flatten(1, 2)
        scale = self._rows.scale
        scale = float(scale[layer]) if isinstance(scale, Tensor) else scale
        for start, keys in self._key_chunks(layer):
            part = flat[:, :, start : start + keys.shape[-1]]
            with _bfloat16_products(is_exact):
                torch.baddbmm(part, queries, keys, beta=0, alpha=scale, out=part)
        # Masking all keys costs as much as the softmax.
        first = self._num_common_keys(layer, rows)
        columns = torch.arange(first, self.num_keys, device=out.device)
        future = columns >= self._visible(layer)[:, None, rows, None]
        out[..., first:].masked_fill_(future, float("-inf"))

    def _softmax(self, layer: int, rows: slice, logits: Tensor, out: Tensor) -> Tensor:
        torch.softmax(logits, dim=-1, out=out)
        if self._num_common_keys(layer, rows) < 1:
            # The softmax over no key is NaN.
            out.masked_fill_(self._visible(layer)[:, None, rows, None] <= 0, 0.0)
        return out

    def _key_chunks(self, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first column, keys)` in order; keys are float32 `[H, D, n]`."""
        pool, size = self._rows.pool, self._rows.pool.shape[1]
        num_pages = -(-self.num_keys // size)
        # Keys are gathered in the cache's dtype, then converted.
        page_bytes = self.num_heads * size * self.head_size * (pool.element_size() + _FLOAT_BYTES)
        step = max(1, self._workspace_bytes // page_bytes)
        if num_pages <= step:
            if self._gathered is None or self._gathered[0] != layer:
                self._gathered = layer, self._gather(layer, 0, num_pages)
            yield 0, self._gathered[1]
            return
        for start in range(0, num_pages, step):
            yield start * size, self._gather(layer, start, min(start + step, num_pages))

    def _gather(self, layer: int, start: int, stop: int) -> Tensor:
        """Return keys in columns `start..stop-1` of the tables, up to num_keys.

        Slots after a pair's last visible key may hold garbage.
        """
        pool, block_size = self._rows.pool, self._rows.pool.shape[1]
        num_keys = min(self.num_keys, stop * block_size) - start * block_size
        tables = self._rows.tables[self._pairs(layer), start:stop]  # [H, n]
        page_starts = torch.arange(start, stop, device=tables.device) * block_size
        tables = tables.masked_fill(page_starts >= self._visible(layer)[:, -1:], 0)
        # Copy pages in storage order, [D, N] or [N, D].
        is_transposed = pool.stride(1) == 1
        stored = pool.transpose(1, 2) if is_transposed else pool
        pages = stored.index_select(0, tables.flatten()).unflatten(0, tables.shape)
        if is_transposed:
            pages = pages.transpose(1, 2)  # [H, D, n, N]
        keys = self._take("keys", pages.shape).copy_(pages)
        if is_transposed:
            return keys.flatten(2, 3)[:, :, :num_keys]
        return keys.flatten(1, 2)[:, :num_keys].transpose(1, 2)

    def _take(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._scratch.take(name, shape, self._rows.queries.device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._rows.queries.device)


def _mean_over_group(probabilities: Tensor, out: Tensor) -> None:
    """Write the mean of `[H, G, R, P]` over G, or over H and G, to `out` `[S, R, P]`.

    On CPU adding slices is about three times as fast as reducing a middle dimension.
    """
    by_group = probabilities.view(out.shape[0], -1, *out.shape[1:])
    num_averaged = by_group.shape[1]
    out.copy_(by_group[:, 0])
    for g in range(1, num_averaged):
        out.add_(by_group[:, g])
    out.mul_(1 / num_averaged)


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


class _GivenAttention(TorchAttention):
    """Statistics of probabilities that are known, float32 `[H, G, O, P]`."""

    def __init__(self, given: Tensor, rows: ObservedRows, *arguments: Any) -> None:
        super().__init__(rows, True, *arguments)
        self._given = given

    def row_chunks(self, layer: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        yield slice(first, self.num_rows), self._given[:, :, first:]

    def mean_of_query_heads(self, find: Callable[[Attention], Tensor]) -> Tensor:
        raise NotImplementedError("recall refuses the methods that look at query heads one by one")


def observe_logits(
    logits: Tensor,
    row_positions: Tensor,
    statistics: frozenset[Statistic],
    workspace_bytes: int,
    scratch: Scratch,
    sinks: Tensor | None = None,
) -> ObservedAttention:
    """Return the attention of some rows from their logits, which become probabilities in place.

    Heads of several layers may stand side by side. Statistics of keys are not there.

    Args:
        logits: float32 `[H, G, O, P]`, scaled. With sinks, `[H, G, O, P + 1]`: the last column is
            theirs, and is written here.
        row_positions: int64 `[O]`, ascending, each below P. A row sees the keys up to its position.
        sinks: float32 `[H, G]`, see `ObservedRows`.
    """
    whole = logits
    if sinks is not None:
        whole[..., -1] = sinks[:, :, None]
        logits = whole[..., :-1]
    heads, group, num_rows, num_keys = logits.shape
    columns = torch.arange(num_keys - num_rows, num_keys, device=logits.device)
    logits[..., -num_rows:].masked_fill_(columns > row_positions[:, None], float("-inf"))
    torch.softmax(whole, dim=-1, out=whole)
    num_visible = (row_positions[None] + 1).int()
    # In place of queries and keys stand tensors of their shape without channels.
    queries, keys = logits.new_empty(1, num_rows, heads, group, 0), logits.new_empty(1, num_keys, 0)
    tables = num_visible.new_zeros(heads, 1)
    rows = ObservedRows(queries, keys, tables, num_visible, num_keys, 1.0, row_positions)
    return _GivenAttention(logits, rows, statistics, workspace_bytes, scratch)
