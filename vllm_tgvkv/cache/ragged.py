# SPDX-License-Identifier: Apache-2.0
"""The keys of a compressed request as the parts of a policy see them: by position.

A head's keys are columns: first its region, whose positions have gaps, then the tail. Statistics
are computed by column, and methods think in positions of the whole request. `RaggedKeys` translates
between the two; evicted positions have no column and get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.kernels.ragged import column_positions, kept_slots, position_columns
from vllm_tgvkv.kernels.statistics import Attention, ObservedAttention


@dataclass(frozen=True)
class RaggedKeys(RowKeys):
    """Where the keys of one compressed row are.

    The host knows that no head has more than C keys. On a CPU C is the most that one has, so that
    the cost of a cut goes by the keys that are left; elsewhere it is n.
    """

    region_positions: Tensor
    """Positions of the tokens in all regions, int32 [num_pool_pages, N]."""
    first_tail: Tensor
    """Position of the first token behind the row's region, int32 [1]."""
    most_keys: int
    """C."""
    columns: Tensor
    """Column of each position, int32 [L * H, n]; n for evicted positions."""

    @classmethod
    def of_row(cls, blocks: Tensor, num_tokens: int, regions: Regions) -> RaggedKeys:
        """Look up the keys of a row of the block table, int32 [W], that has `num_tokens` tokens."""
        shape = regions.shape
        num_pairs, size = shape.num_pairs, shape.block_size
        row, device = blocks.unsqueeze(0), blocks.device
        seq_lens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
        by_pair = (shape.num_layers, 1, shape.num_heads)
        lengths = torch.empty(by_pair, dtype=torch.int32, device=device)
        regions.write_lengths(row, seq_lens, lengths)
        num_columns = int(lengths.max()) if lengths.is_cpu else num_tokens
        width = -(-num_columns // size)
        tables = torch.zeros(*by_pair, width, dtype=torch.int32, device=device)
        regions.write_page_tables(row, seq_lens, 0, tables)
        tables, lengths = tables.view(num_pairs, width), lengths.view(num_pairs)
        # Indexing by a tensor of no dimension would wait for its value.
        first_tail = regions.num_replaced.index_select(0, blocks[:1]) * size
        columns = position_columns(
            tables, lengths, regions.positions, first_tail, num_tokens, num_columns
        )
        where = regions.positions, first_tail, num_columns, columns
        return cls(blocks, tables, lengths, num_tokens, shape, *where)

    @property
    def num_columns(self) -> int:
        return self.most_keys

    def positions(self, pairs: slice = slice(None)) -> Tensor:
        """Return the position of each column of some pairs, int32 [pairs, C]; n without a key."""
        row = self.tables[pairs], self.lengths[pairs], self.region_positions, self.first_tail
        return column_positions(*row, self.num_tokens, self.num_columns)

    def present_in(self, first: int, num_layers: int, num_sets: int) -> Tensor:
        return self.columns[self.of_layers(first, num_layers, num_sets)] < self.num_tokens

    def attention(self, observed: ObservedAttention, layer: int, rows: Tensor) -> Attention:
        return RaggedAttention(observed, self, layer, rows)

    def arranged(self, positions: Tensor, offsets: Tensor, in_order: bool) -> Tensor:
        if positions.is_cpu and not in_order:
            return self.settled(positions, offsets)
        return positions

    def slots(self, positions: Tensor, offsets: Tensor, num_slots: int) -> Tensor:
        return kept_slots(positions, offsets, self.tables, self.columns, num_slots)

    def candidates(self, num_candidates: int) -> tuple[Tensor, Tensor]:
        return self.tables, self.positions()

    def places(self, layer: int, num_layers: int) -> Tensor:
        places, present = self._places(layer, num_layers)
        return places.mul_(present)

    def read(self, numbers: Tensor, layer: int, num_layers: int) -> Tensor:
        places, present = self._places(layer, num_layers)
        found = numbers.flatten().index_select(0, places.flatten()).view_as(places)
        return torch.where(present, found, 0)

    def _places(self, layer: int, num_layers: int) -> tuple[Tensor, Tensor]:
        """Return the keys' places, any of the head's for those that are not there, and who is."""
        size, pairs = self.shape.block_size, self.of_layers(layer, num_layers, self.shape.num_heads)
        columns = self.columns[pairs].long()
        present = columns < self.num_tokens
        columns = torch.where(present, columns, 0)
        pages = self.tables[pairs].gather(1, columns // size).long()
        return pages.mul_(size).add_(columns % size), present

    def settled(self, positions: Tensor, offsets: Tensor) -> Tensor:
        """Return the tokens of a new region in an order that leaves most of them in their slots.

        A pair's kept tokens within the length of its new region stay in their columns, and those
        after it fill the columns of evicted ones. So a cut that evicts few tokens copies whole
        pages. Attention does not depend on the order of keys. How many tokens move is known from
        the data only: this is for CPUs.

        Args:
            positions: int32 [pages, N]; `offsets` belong to the region, see `select_tokens`.

        Returns:
            int32 [pages, N]. Pages of no pair are unchanged.
        """
        size, num_pages = self.shape.block_size, int(offsets[-1])
        offsets = offsets.long()
        ends = offsets.diff()[:, None] * size
        pair = torch.arange(len(ends)).repeat_interleave(offsets.diff())[:, None]
        is_kept = torch.zeros(len(ends), self.num_columns, dtype=torch.bool)
        is_kept[pair, self.columns[pair, positions[:num_pages].long()].long()] = True
        is_inside = torch.arange(self.num_columns) < ends
        page = torch.arange(num_pages)[:, None] - offsets[pair]
        columns = page * size + torch.arange(size)
        # Both lists are ordered by pair, and every pair has as many holes as tokens after its end.
        of_hole, hole = (is_inside & ~is_kept).nonzero(as_tuple=True)
        columns.view(-1)[offsets[of_hole] * size + hole] = (is_kept & ~is_inside).nonzero()[:, 1]
        settled = positions.clone()
        settled[:num_pages] = self.positions()[pair, columns]
        return settled


def _by_position(statistic: str) -> Any:
    """Return a property: a statistic that is computed by column, by position.

    What depends on neighbours does so on those in the cache.
    """
    return property(lambda self: self.scattered(getattr(self._own, statistic)))


class RaggedAttention(Attention):
    """Attention over the keys of some layers of a compressed row, by position."""

    def __init__(self, own: ObservedAttention, keys: RaggedKeys, layer: int, rows: Tensor) -> None:
        self._own = own
        self._num_tokens = keys.num_tokens
        pairs = keys.of_layers(layer, own.num_layers, own.num_groups // own.num_layers)
        self._positions, self._columns = keys.positions(pairs).long(), keys.columns[pairs]
        self._rows = rows

    @property
    def row_positions(self) -> Tensor:
        return self._rows

    @property
    def row_columns(self) -> Tensor:
        return self._rows.unsqueeze(0)

    column_sums = _by_position("column_sums")
    column_maxima = _by_position("column_maxima")
    past_importance = _by_position("past_importance")
    key_redundancy = _by_position("key_redundancy")
    mean_cosines = _by_position("mean_cosines")
    value_norms = _by_position("value_norms")

    @property
    def row_entropies(self) -> Tensor:
        return self._own.row_entropies

    @property
    def is_seen(self) -> Tensor:
        # The last row is the request's last token, which sees all that is left.
        return self._columns < self._num_tokens

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        return self.scattered(self._own.weighted_column_sums(weights))

    def scattered(self, values: Tensor) -> Tensor:
        """Return values of columns, float32 [S, C], by position, [S, n]."""
        found = values.new_zeros(len(values), self._num_tokens + 1)
        found.scatter_(1, self._positions, values)
        return found[:, : self._num_tokens]
