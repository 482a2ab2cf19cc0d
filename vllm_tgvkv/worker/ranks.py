# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks that hold the heads of every layer together.

Every rank runs the whole eviction for its own heads, on its own pages, by the one scheduler's plan.
Values that must not differ between ranks are computed by each of them from the same numbers:

- where heads of several ranks share a token set, the policy sees the mean of the ranks' attention
  statistics, of as many layers at once as memory allows;
- where heads with token sets of their own compete for pages, the ranks gather their scores and
  strengths once, after the last layer, and each decides for all heads. Methods whose heads do not
  compete exchange nothing;
- after the step, the ranks gather a few numbers of each eviction, and the reasons of those that
  failed on one of them.

Ranks only ever gather, and never wait for the host: what is exchanged, and its size, follow from
the plan. Each rank adds in the order of the ranks, so all get the same bits, whereas a reduction
may add in any order.

A rank whose part of an eviction raises still takes part in what follows. It goes on with tensors on
the device `meta`, which have a shape and no values: so it learns how much the others wait for, and
sends zeros. The others compute with them, and learn of the failure after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import KEY_STATISTICS, Attention, Statistic, not_computed
from vllm_tgvkv.shared.layer_types import evicted_kv_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_BITS = torch.float32
"""All values are exchanged as bits of this type: vLLM's shared memory moves no integers."""


class Ranks:
    """This rank's place among the ranks. By default it is the only one and exchanges nothing.

    All ranks call `gather` as often, in the same order, with as many bytes. `exchange` gathers
    float32 `[n]` of each rank to `[size, n]` on each, bit by bit. Heads are spread as vLLM does:
    equally, or `replicas` neighbours hold the same KV head.
    """

    def __init__(
        self,
        size: int = 1,
        rank: int = 0,
        replicas: int = 1,
        exchange: Callable[[Tensor], Tensor] = lambda values: values.unsqueeze(0),
    ) -> None:
        self.size = size
        self.rank = rank
        self.replicas = replicas
        self.num_parts = size // replicas
        """Ranks that hold different KV heads."""
        self.part = rank // replicas
        """Index of this rank's part."""
        self.num_exchanges = 0
        self._exchange = exchange

    def shares_sets(self, per_head: bool) -> bool:
        """Return whether a token set belongs to heads of several ranks."""
        return self.size > 1 and (not per_head or self.replicas > 1)

    def sharing(self, per_head: bool) -> slice:
        """Return the ranks that share a token set with this one."""
        first = self.part * self.replicas
        return slice(first, first + self.replicas) if per_head else slice(None)

    def gather(self, values: Tensor) -> Tensor:
        """Gather a tensor of each rank, of any shape X, to `[size, *X]`.

        It takes whole multiples of 4 bytes, with booleans as well: blocks have a multiple of 4
        tokens.
        """
        if self.size == 1:
            return values.unsqueeze(0)
        bits = self._exchange(values.contiguous().flatten().view(_BITS))
        self.num_exchanges += 1
        return bits.contiguous().view(values.dtype).view(self.size, *values.shape)


class Exchanges:
    """The exchanges of one prompt, which are the same on all ranks.

    They are made in sections, a part of the eviction that may raise. A rank that fails in one goes
    through it again on the device `meta`, and from then on through all others: `gather` sends zeros
    for tensors without values, except where it has sent them before.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._first = 0
        """Exchanges of this rank before the section."""
        self._num_made = 0
        """Exchanges of the section that were made before it raised, and are not made again."""

    def begin_section(self) -> None:
        """Begin the next section."""
        self._first, self._num_made = self._ranks.num_exchanges, 0

    def begin_again(self) -> None:
        """Begin the section again, after it raised."""
        self._num_made = self._ranks.num_exchanges - self._first

    def gather(self, values: Tensor) -> Tensor:
        """Gather a tensor of each rank, of any shape X, to `[ranks, *X]`."""
        if values.device.type == self._device.type:
            return self._ranks.gather(values)
        if self._num_made:
            self._num_made -= 1
        else:
            self._ranks.gather(torch.zeros(values.shape, dtype=values.dtype, device=self._device))
        return values.new_empty(self._ranks.size, *values.shape)

    def gather_all(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors `[L, S, *]` of each part of the heads to `[L, S of all parts, *]` each."""
        sizes = [values.nbytes // _BITS.itemsize for values in numbers]
        bits = torch.cat([values.contiguous().flatten().view(_BITS) for values in numbers])
        of_parts = self.gather(bits)[:: self._ranks.replicas].split(sizes, dim=1)
        gathered = []
        for values, found in zip(numbers, of_parts, strict=True):
            by_part = found.view(values.dtype).unflatten(1, values.shape)
            gathered.append(by_part.transpose(0, 1).flatten(1, 2))
        return gathered

    def first(self, find: Callable[[], Tensor]) -> Tensor:
        """Return what `find`, an int64 scalar, is on the first rank."""
        return self.gather(find())[0]

    def attention(
        self, own: Callable[[], Attention], statistics: frozenset[Statistic], per_head: bool
    ) -> Attention:
        """Return the attention that a policy sees, given a function for this rank's heads.

        Where token sets belong to heads of several ranks, it is the mean of the ranks' statistics;
        `statistics` are those that the policy declares.
        """
        if not self._ranks.shares_sets(per_head):
            return own()
        members = self._ranks.sharing(per_head)

        def mean(values: Tensor) -> Tensor:
            return self.gather(values)[members].mean(dim=0)

        return SharedAttention(mean, own, statistics)


_BY_MODALITY = ("text_column_sums", "vision_column_sums")

_OF_ONE_RANK = (
    "is not defined for a KV head that several ranks hold: choose another method than rkv, or at "
    "most as many tensor-parallel ranks as KV heads"
)


class SharedAttention:
    """The mean of several ranks' statistics of some layers, for token sets that they share.

    All ranks hold the same number of query heads, so this is the mean over all of these. What one
    pass over the keys brings is exchanged together, the first time that one of it is read. See
    `Attention` for the meaning of each.
    """

    def __init__(
        self,
        mean: Callable[[Tensor], Tensor],
        own: Callable[[], Attention],
        statistics: frozenset[Statistic],
    ) -> None:
        self._mean = mean
        self._own = cache(own)
        # Row averages only help a rank to weigh its own rows.
        known_later = {"row_averages", "column_maxima", "modality_sums"} | KEY_STATISTICS
        self._first_pass = ("column_sums", *sorted(statistics - known_later))
        # Not cached properties: their lock would let ranks that are threads wait for each other.
        self._known: dict[str, Tensor] = {}

    @property
    def row_positions(self) -> Tensor:
        return self._own().row_positions

    @property
    def row_columns(self) -> Tensor:
        return self._own().row_columns

    @property
    def column_sums(self) -> Tensor:
        return self._shared("column_sums", self._first_pass)

    @property
    def share_below(self) -> Tensor:
        return self._declared("share_below")

    @property
    def row_entropies(self) -> Tensor:
        return self._declared("row_entropies")

    @property
    def column_maxima(self) -> Tensor:
        # `compatibility.py` refuses such methods at start.
        raise ValueError("maxima over rows of the mean over several ranks' heads are not known")

    @property
    def past_importance(self) -> Tensor:
        raise ValueError(f"past_importance {_OF_ONE_RANK}")

    @property
    def key_redundancy(self) -> Tensor:
        raise ValueError(f"key_redundancy {_OF_ONE_RANK}")

    # Ranks that hold the same KV head have the same keys and values, and exchange nothing of them.

    @property
    def is_seen(self) -> Tensor:
        return self._own().is_seen

    @property
    def mean_cosines(self) -> Tensor:
        return self._own().mean_cosines

    @property
    def value_norms(self) -> Tensor:
        return self._own().value_norms

    @property
    def text_column_sums(self) -> Tensor:
        return self._shared("text_column_sums", _BY_MODALITY)

    @property
    def vision_column_sums(self) -> Tensor:
        return self._shared("vision_column_sums", _BY_MODALITY)

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        return self._mean(self._own().weighted_column_sums(weights))

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        return self._mean(self._own().renormalised_column_sums(keys, weights, last_row_only))

    def mean_of_query_heads(self, find: Callable[[Attention], Tensor]) -> Tensor:
        return self._mean(self._own().mean_of_query_heads(find))

    def _declared(self, name: Statistic) -> Tensor:
        if name not in self._first_pass:
            raise ValueError(not_computed(name))
        return self._shared(name, self._first_pass)

    def _shared(self, name: str, together: Sequence[str]) -> Tensor:
        """Return a statistic; the first one that is read brings all others of `together`."""
        if name not in self._known:
            parts = [getattr(self._own(), each) for each in together]
            dtype = torch.float64 if "share_below" in together else torch.float32
            means = self._mean(torch.cat([part.flatten().to(dtype) for part in parts]))
            of_parts = means.split([part.numel() for part in parts])
            for each, part, values in zip(together, parts, of_parts, strict=True):
                self._known[each] = values.view(part.shape).to(part.dtype)
        return self._known[name]


class UnknownAttention:
    """Attention without values, on the device `meta`: shapes of the statistics of S token sets.

    See `Attention` for the meaning of each.
    """

    def __init__(self, num_sets: int, num_tokens: int, row_positions: Tensor | None) -> None:
        """Make it; `row_positions`, int64 `[O]`, is None for the row set `all`."""
        self._num_sets = num_sets
        columns = torch.empty(num_sets, num_tokens, device="meta")
        self.column_sums = self.column_maxima = columns
        self.text_column_sums = self.vision_column_sums = columns
        self.past_importance = self.key_redundancy = columns
        self.mean_cosines = self.value_norms = columns
        self.is_seen = columns.bool()
        self.share_below = torch.empty(num_sets, dtype=torch.float64, device="meta")
        if row_positions is not None:
            self.row_positions = row_positions.to("meta")
            self.row_columns = self.row_positions.unsqueeze(0)
            self.row_entropies = columns.new_empty(num_sets, len(row_positions))

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        return torch.empty_like(self.column_sums)

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        return torch.empty_like(self.column_sums)

    def mean_of_query_heads(self, find: Callable[[Attention], Tensor]) -> Tensor:
        return torch.empty_like(self.column_sums)


def tensor_ranks(vllm_config: VllmConfig) -> Ranks:
    """Return this worker's place among the tensor-parallel ranks of its engine."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return Ranks()
    num_kv_heads = evicted_kv_heads(vllm_config.model_config)
    return Ranks(
        group.world_size,
        group.rank_in_group,
        max(1, group.world_size // num_kv_heads),
        lambda values: group.all_gather(values, dim=0).view(group.world_size, -1),
    )
