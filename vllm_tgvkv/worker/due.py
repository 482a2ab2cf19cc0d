# SPDX-License-Identifier: Apache-2.0
"""The plan's parts for a prompt, with their data on the device: rows to observe, evictions due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.statistics import Statistic
from vllm_tgvkv.policies import Policy, Prompt
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction
from vllm_tgvkv.shared.prompt import RowSet
from vllm_tgvkv.summaries.options import Kind
from vllm_tgvkv.worker.context import ObserverContext

_OF_NEIGHBOURS: frozenset[Statistic] = frozenset({"past_importance", "key_redundancy"})
"""Statistics that depend on the order of the keys in the cache."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a prompt that are observed together."""

    index: slice | torch.Tensor
    """Where their queries are: in the batch, or among the queries of all observation rows."""
    positions: torch.Tensor
    """int64 [O], ascending."""
    num_visible: torch.Tensor
    """Keys that each row sees in every pair of a layer and a head, int32 [L * H, O], or [1, O] if
    that is the same for all."""
    num_keys: int
    """Every pair has at most this many keys."""
    tables: torch.Tensor
    """Pages of the keys of every pair, int32 [L * H, W]."""
    per_head: bool
    """Whether there are statistics of each KV head, or of the layer as a whole."""
    statistics: frozenset[Statistic] = frozenset()
    """Statistics computed in addition to column sums."""


@dataclass(frozen=True, kw_only=True)
class SummedRows(Rows):
    """All rows of a chunk, to be added to the prompt's column sums."""

    is_vision: torch.Tensor
    """bool [O]."""
    num_tokens: int
    """Tokens of the prompt and of the answer that the eviction waits for."""
    by_modality: bool
    """Whether text and vision rows are summed apart."""


@dataclass(frozen=True)
class DueEviction:
    """An eviction that follows this step's layers, with its data on the device."""

    eviction: Eviction
    policy: Policy
    prompt: Prompt
    voting: Mapping[RowSet, Rows]
    """All row sets of the policy but `all`, whose rows are summed chunk by chunk."""
    keys: RowKeys
    """The keys of the prompt and the answer so far."""
    new_blocks: torch.Tensor
    """The fresh blocks of the region, int32 [k]: first tokens, then summaries."""
    stored: torch.Tensor | None
    """Rows of the query pool with the queries of all observation rows, int64 [O]; None if all are
    in this step's chunk."""
    layers_at_once: int
    """Number of layers that are scored together."""
    summary_kinds: tuple[Kind, ...]
    """Kinds of the summaries in the last blocks of the region, one for each block."""

    @property
    def per_head(self) -> bool:
        return self.policy.granularity == "head"

    @property
    def num_token_blocks(self) -> int:
        """Blocks of the region that hold tokens; the others hold summaries or a sketch."""
        eviction = self.eviction
        return eviction.num_retained - len(self.summary_kinds) - eviction.num_sketch

    @property
    def keeps_unpooled(self) -> bool:
        """Whether a trace tells scores from those that pooling raised."""
        return self.eviction.traced_budget is not None and self.policy.pooling.kind != "none"

    @property
    def gathers_heads(self) -> bool:
        """Whether a decision on one part of the heads needs what the others show."""
        eviction = self.eviction
        return self.per_head and (
            self.policy.allocation.needs_all_heads
            or eviction.guard is not None
            or eviction.traced_budget is not None
        )

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the keys in the cache matters at later cuts."""
        return any(_OF_NEIGHBOURS & rows.statistics for rows in self.voting.values())


def summed_rows(
    chunk: ColumnSumChunk, first_token: int, policy: Policy, context: ObserverContext
) -> SummedRows:
    """Return the rows of a chunk; `first_token` is the index of its first among the queries."""
    start, end, device = chunk.chunk_start, chunk.num_keys, context.device
    return SummedRows(
        index=slice(first_token, first_token + end - start),
        positions=torch.arange(start, end, device=device),
        num_visible=torch.arange(start + 1, end + 1, dtype=torch.int32, device=device)[None],
        num_keys=end,
        tables=RowKeys.of_blocks(context.to_device(chunk.blocks), end, context.shape).tables,
        per_head=policy.granularity == "head",
        is_vision=context.to_device(chunk.prompt.is_vision()[start:end]),
        num_tokens=chunk.prompt.num_tokens,
        by_modality="modality_sums" in policy.statistics("all"),
    )


def due_eviction(
    eviction: Eviction, policy: Policy, sinks: int, keys: RowKeys, context: ObserverContext
) -> DueEviction:
    """Return a planned eviction of a row with these keys; `sinks` tokens are always kept."""
    observed = eviction.observed
    prompt = Prompt(
        num_tokens=observed.num_tokens,
        num_candidates=eviction.num_replaced * context.shape.block_size,
        is_vision=context.to_device(observed.is_vision()),
        sinks=sinks,
        images=eviction.prompt.vision,
        was_cut=not eviction.is_whole,
    )
    stored = None
    if eviction.stored is not None:
        stored = context.to_device(eviction.stored[eviction.first_row :])
    kinds: tuple[Kind, ...] = ()
    if policy.summaries is not None:
        sizes = eviction.num_retained, eviction.num_replaced
        kinds = policy.summaries.kinds(*sizes, bool(prompt.images))
    return DueEviction(
        eviction,
        policy,
        prompt,
        _voting(eviction, policy, keys, context),
        keys,
        context.to_device(eviction.new_blocks),
        stored,
        _layers_at_once(eviction, policy, keys, context),
        kinds,
    )


def _voting(
    eviction: Eviction, policy: Policy, keys: RowKeys, context: ObserverContext
) -> dict[RowSet, Rows]:
    """Return the rows of each row set that were computed, not taken from the prefix cache."""
    computed = eviction.voters.rows[eviction.first_row :]
    voting = {}
    for kind, positions in eviction.voters.sets.items():
        positions = positions[positions >= eviction.num_cached]
        index: slice | torch.Tensor = slice(None)
        if len(positions) < len(computed):
            index = context.to_device(np.searchsorted(computed, positions))
        num_hidden = context.to_device((keys.num_tokens - 1 - positions).astype(np.int32))
        voting[kind] = Rows(
            index=index,
            positions=context.to_device(positions),
            num_visible=keys.lengths[:, None] - num_hidden,
            num_keys=keys.num_columns,
            tables=keys.tables,
            per_head=policy.granularity == "head",
            statistics=policy.statistics(kind),
        )
    return voting


def _layers_at_once(
    eviction: Eviction, policy: Policy, keys: RowKeys, context: ObserverContext
) -> int:
    """Return the number of layers to score together, so that their memory is bounded.

    One launch for many layers saves time of the host, which only a GPU waits for. Ranks exchange
    the statistics of a token set that they share once for all of these layers.
    """
    shares_sets = context.ranks.shares_sets(policy.granularity == "head")
    together = shares_sets or gpu.runs(context.pool.raw)
    if not together or not policy.scores_layers_together:
        return 1
    num_rows = len(eviction.voters.rows[eviction.first_row :])
    shape = context.shape
    num_sets = shape.num_heads if policy.granularity == "head" else 1
    columns = num_sets * (keys.num_tokens + 128)
    query_heads = shape.num_heads * shape.group_size // num_sets
    of_layer = max(
        columns * policy.scoring_bytes(num_rows, query_heads),
        context.queries.row_bytes * max(num_rows, context.num_waiting_rows),
    )
    return max(1, min(shape.num_layers, context.workspace_bytes // of_layer))
