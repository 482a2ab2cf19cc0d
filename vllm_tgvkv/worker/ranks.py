# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks that hold the heads of every layer together.

Every rank runs the whole eviction for its own heads, on its own pages, by the one scheduler's plan.
Values that must not differ between ranks are computed by each of them from the same numbers:

- where heads of several ranks share a token set, the policy sees the mean of the ranks' attention
  statistics, so its scores and strengths are the same everywhere;
- at granularity `head` the ranks exchange their scores and strengths once, after the last layer,
  and each decides for all heads; at a cut after the first one, which of their tokens are left, too;
- a prompt that fails anywhere on one rank fails on all: each exchange begins with a few numbers
  that say where every rank is.

Ranks only ever gather. Each rank adds in the order of the ranks, so all get the same bits, whereas
a reduction may add in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_tgvkv.kernels.statistics import KEY_STATISTICS, Statistic
from vllm_tgvkv.policies import Attention
from vllm_tgvkv.shared.layer_types import evicted_kv_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_BITS = torch.float32
"""All values are exchanged as bits of this type: vLLM's shared memory moves no integers."""


class RankError(RuntimeError):
    """Another rank could not do its part of an eviction."""


class Ranks:
    """This rank's place among the ranks. By default it is the only one and exchanges nothing.

    All ranks call the same methods in the same order. A rank that left a section early calls fewer
    of them; the others learn of it at their next call and leave the section as well. `exchange`
    gathers float32 `[n]` of each rank to `[size, n]` on each, bit by bit. Heads are spread as vLLM
    does: equally, or `replicas` neighbours hold the same KV head.
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
        self._exchange = exchange
        self._section = 0

    def next_section(self) -> None:
        """Begin a section of a step's work: a layer of a prompt, or its decision.

        All ranks begin the same sections in the same order; one that fails in a section leaves it.
        """
        self._section += 1

    def shares_sets(self, per_head: bool) -> bool:
        """Return whether a token set belongs to heads of several ranks."""
        return self.size > 1 and (not per_head or self.replicas > 1)

    def attention(
        self,
        own: Callable[[], Attention],
        rows: Tensor | None,
        num_keys: int,
        statistics: frozenset[Statistic],
        per_head: bool,
    ) -> Attention:
        """Return the attention that a policy sees of one layer.

        Args:
            own: returns the attention of this rank's heads.
            rows: int64 `[O]`, positions of the rows; None for the row set `all`.
            num_keys: P.
            statistics: what the policy declares.
            per_head: whether each head has its own token set.
        """
        if not self.shares_sets(per_head):
            return own()
        first = self.part * self.replicas
        members = slice(first, first + self.replicas) if per_head else slice(None)

        def mean(part: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
            return self._gather(part, dtype)[members].mean(dim=0)

        return SharedAttention(mean, own, rows, num_keys, statistics)

    def stack(self, numbers: Sequence[Sequence[Tensor]], per_head: bool) -> list[Tensor]:
        """Stack several lists of L tensors `[S, X]` of this rank to `[L, S of all parts, X]` each.

        Token sets that the ranks share are the same on all of them. X values take whole multiples
        of 4 bytes, in boolean tensors as well: blocks have a multiple of 4 tokens.
        """
        own = [torch.stack(tuple(layers)) for layers in numbers]
        if self.size == 1 or not per_head:
            return own
        sizes = [values.nbytes // _BITS.itemsize for values in own]
        bits_of_all = self._gather(lambda: torch.cat([x.flatten().view(_BITS) for x in own]), _BITS)
        stacked = []
        of_parts = bits_of_all[:: self.replicas].split(sizes, dim=1)
        for values, bits in zip(own, of_parts, strict=True):
            by_part = bits.contiguous().view(values.dtype).view(self.num_parts, *values.shape)
            stacked.append(by_part.transpose(0, 1).flatten(1, 2))
        return stacked

    def first(self, find: Callable[[], Tensor]) -> Tensor:
        """Return what `find`, an int64 scalar, is on the first rank."""
        if self.size == 1:
            return find()
        return self._gather(lambda: find().flatten(), torch.int64)[0, 0]

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of an int64 scalar over the ranks."""
        return value if self.size == 1 else self._gather(value.flatten, value.dtype).sum()

    def agree(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return this rank's errors, with a `RankError` where only another rank has one."""
        if self.size == 1:
            return list(errors)
        self.next_section()
        failed = torch.tensor([error is not None for error in errors]).float()
        self._meet()
        ranks_failed = self._exchange(failed).t().tolist()
        return [
            error or _error_elsewhere(ranks)
            for error, ranks in zip(errors, ranks_failed, strict=True)
        ]

    def _gather(self, part: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """Gather `[n]` of each rank to `[ranks, n]`; if `part` raises on one rank, all raise."""
        bits, error = torch.empty(0), None
        try:
            bits = part().to(dtype).contiguous().view(_BITS)
        except Exception as raised:
            error = raised
        self._meet(error)
        return self._exchange(bits).view(dtype)

    def _meet(self, error: Exception | None = None) -> None:
        """Wait until all ranks are here; raise if one of them failed or has left the section.

        A rank that is ahead of others waits until they have left their section and followed.
        """
        while True:
            here = torch.tensor([self._section, error is not None])
            sections, failed = self._exchange(here.view(_BITS)).view(here.dtype).unbind(1)
            if (sections >= self._section).all():
                break
        error = error or _error_elsewhere((failed.bool() | (sections > self._section)).tolist())
        if error is not None:
            raise error


def _error_elsewhere(failed: Sequence[float]) -> RankError | None:
    ranks = ", ".join(str(rank) for rank, has_failed in enumerate(failed) if has_failed)
    return RankError(f"failed on rank {ranks}") if ranks else None


_BY_MODALITY = ("text_column_sums", "vision_column_sums")

_OF_ONE_RANK = (
    "is not defined for a KV head that several ranks hold: choose another method than rkv, or at "
    "most as many tensor-parallel ranks as KV heads"
)


class SharedAttention:
    """The mean of several ranks' statistics of one layer, for a token set that they share.

    All ranks hold the same number of query heads, so this is the mean over all of these. A
    statistic costs one exchange of a few numbers for each key, the first time it is read. See
    `Attention` for the meaning of each.
    """

    row_positions: Tensor
    row_columns: Tensor

    def __init__(
        self,
        mean: Callable[[Callable[[], Tensor], torch.dtype], Tensor],
        own: Callable[[], Attention],
        rows: Tensor | None,
        num_keys: int,
        statistics: frozenset[Statistic],
    ) -> None:
        self._mean = mean
        self._own = cache(own)
        self._num_keys = num_keys
        # Row averages only help a rank to weigh its own rows.
        known_later = {"row_averages", "column_maxima"} | KEY_STATISTICS
        self._first_pass = ["column_sums", *sorted(statistics - known_later)]
        # Not cached properties: their lock would let ranks that are threads wait for each other.
        self._known: dict[str, Tensor] = {}
        if rows is not None:
            self.row_positions = rows
            self.row_columns = rows.unsqueeze(0)

    @property
    def column_sums(self) -> Tensor:
        return self._shared("column_sums", self._first_pass).float().unsqueeze(0)

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

    # Ranks that hold the same KV head have the same keys and values.

    @property
    def is_seen(self) -> Tensor:
        return self._columns(lambda: self._own().is_seen.float()) > 0.5

    @property
    def mean_cosines(self) -> Tensor:
        return self._columns(lambda: self._own().mean_cosines)

    @property
    def value_norms(self) -> Tensor:
        return self._columns(lambda: self._own().value_norms)

    @property
    def share_below(self) -> Tensor:
        return self._declared("share_below")

    @property
    def row_entropies(self) -> Tensor:
        return self._declared("row_entropies").float().unsqueeze(0)

    @property
    def text_column_sums(self) -> Tensor:
        return self._shared("text_column_sums", _BY_MODALITY).unsqueeze(0)

    @property
    def vision_column_sums(self) -> Tensor:
        return self._shared("vision_column_sums", _BY_MODALITY).unsqueeze(0)

    def weighted_column_sums(self, weights: Tensor) -> Tensor:
        return self._columns(lambda: self._own().weighted_column_sums(weights))

    def renormalised_column_sums(
        self, keys: Tensor, weights: Tensor, last_row_only: bool = False
    ) -> Tensor:
        return self._columns(
            lambda: self._own().renormalised_column_sums(keys, weights, last_row_only)
        )

    def _columns(self, part: Callable[[], Tensor]) -> Tensor:
        return self._mean(lambda: part().flatten(), torch.float32).unsqueeze(0)

    def _declared(self, name: Statistic) -> Tensor:
        if name not in self._first_pass:
            raise ValueError(
                f"{name} was not computed: name it in the `statistics` of the score or allocation"
            )
        return self._shared(name, self._first_pass)

    def _shared(self, name: str, together: Sequence[str]) -> Tensor:
        """Return a statistic `[n]`; the first one that is read brings all others of `together`."""

        def part() -> Tensor:
            own = self._own()
            return torch.cat([getattr(own, each).flatten() for each in together])

        if name not in self._known:
            means = self._mean(part, torch.float64 if "share_below" in together else torch.float32)
            sizes = [self._size(each) for each in together]
            self._known.update(zip(together, means.split(sizes), strict=True))
        return self._known[name]

    def _size(self, name: str) -> int:
        if name == "share_below":
            return 1
        return len(self.row_positions) if name == "row_entropies" else self._num_keys


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
