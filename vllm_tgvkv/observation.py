# SPDX-License-Identifier: Apache-2.0
"""All that is observed of one prompt, from its first chunk to the decision on its eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import (
    ObservedAttention,
    Scratch,
    Statistic,
    observe,
    observe_layers,
)
from vllm_tgvkv.pages import CacheShape, PagePool
from vllm_tgvkv.plan import Eviction, Observation, RowSumming
from vllm_tgvkv.policies import NO_ATTENTION, Attention, LayerView, Policy, Prompt
from vllm_tgvkv.prompt import RowSet
from vllm_tgvkv.queries import QueryPool
from vllm_tgvkv.ragged import RaggedAttention, RaggedKeys
from vllm_tgvkv.ranks import Ranks
from vllm_tgvkv.regions import Regions
from vllm_tgvkv.stages import Stages
from vllm_tgvkv.stopwatch import Stopwatch

WORKSPACE_BYTES = 64 << 20
"""Bound of each scratch buffer of the statistics."""

T = TypeVar("T")


@dataclass
class ModelPart:
    """The layers and heads of this worker, and what is shared by all observations of them."""

    shape: CacheShape
    pool: PagePool
    queries: QueryPool
    regions: Regions
    ranks: Ranks
    stages: Stages
    workspace_bytes: int = WORKSPACE_BYTES
    scratch: Scratch = field(default_factory=Scratch)
    """Buffers of the statistics; the layers of a step share them."""

    @property
    def device(self) -> torch.device:
        return self.pool.raw.device

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        return async_tensor_h2d(array, self.device)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a prompt that are observed together."""

    index: slice | torch.Tensor
    """Where their queries are: among the batch's, or among those of all observation rows."""
    positions: torch.Tensor
    """int64 [O], ascending."""
    num_keys: int
    """The last row sees at most this many first keys of the prompt."""
    blocks: torch.Tensor
    """Block ids of these keys, int32."""
    num_common_keys: int = 0
    """Every row sees the first `num_common_keys` keys."""
    per_head: bool
    """Whether statistics are those of each KV head, or of the layer as a whole."""
    statistics: frozenset[Statistic] = frozenset()
    """Statistics computed in addition to column sums."""


@dataclass(frozen=True, kw_only=True)
class SummedRows(Rows):
    """All rows of a chunk, to be added to the prompt's column sums."""

    is_vision: torch.Tensor
    """bool [O]."""
    num_tokens: int
    """Tokens of the prompt and of the answer that the eviction waits for."""


@dataclass(frozen=True)
class DueEviction:
    """An eviction that follows this step's layers, with its data on the device."""

    eviction: Eviction
    policy: Policy
    prompt: Prompt
    voting: Mapping[RowSet, Rows]
    """All row sets of the policy but `all`, whose rows are summed chunk by chunk."""
    blocks: torch.Tensor
    """Block ids of the prompt and the answer so far, int32."""
    stored: torch.Tensor | None
    """Rows of the query pool with the queries of all observation rows, int64 [O]; None if all are
    in this step's chunk."""
    keys: RaggedKeys | None
    """Where the keys are, if the row is compressed already."""

    @property
    def per_head(self) -> bool:
        return self.policy.granularity == "head"


class PromptObservation:
    """One prompt, from its first observed chunk to the decision on its eviction.

    In each step with a chunk that is observed:

        begin_chunk   copy the plan's parts for this chunk to the device
        see_layer     for each layer, after its attention:
                      1. add all of the chunk's rows to the column sums, for the row set `all`
                      2. if the eviction is due, let the policy score the layer
        gather        after the last layer, if the eviction is due

    The first exception is stored as `error`; it ends this prompt's eviction and no other.
    """

    def __init__(
        self,
        request_id: str,
        part: ModelPart,
        config: EvictionConfig,
        policy_of: Callable[[str], Policy],
    ) -> None:
        self.request_id = request_id
        self.stopwatch = Stopwatch(part.device, config.metrics)
        self.due: DueEviction | None = None
        """The eviction that follows the layers of the current step."""
        self.error: Exception | None = None
        """The first exception raised for the prompt, on this rank or another."""
        self.scores: list[torch.Tensor] = []
        """By layer: pooled scores, float32 [S, C]."""
        self.strengths: list[torch.Tensor] = []
        """By layer: what the allocation goes by, float32 [S, F]."""
        self.masses: list[torch.Tensor] = []
        """By layer: observed attention of each token, float32 [S, P]; only with a guard."""
        self._part = part
        self._sinks = config.sinks
        self._policy_of = policy_of
        # The current chunk.
        self._token_index: torch.Tensor | None = None
        """Indices of the observation rows in the batch's queries, int64; None if they are in the
        query pool."""
        self._summed: SummedRows | None = None
        # All chunks so far.
        self._sums: list[RowSums] = []
        """Column sums over all rows, by layer; only if the policy uses the row set `all`."""

    # -- a chunk ------------------------------------------------------------------------

    def begin_chunk(
        self,
        first_token: int,
        observation: Observation | None,
        summing: RowSumming | None,
        eviction: Eviction | None,
    ) -> None:
        """Take the plan's parts for the chunk of this step; a part that it lacks is None.

        `first_token` is the index of the chunk's first token in the batch's queries.
        """
        self._token_index = None
        if observation is not None and observation.stored is None:
            self._token_index = self._part.to_device(observation.token_index(first_token))
        self._summed = self._summed_rows(summing, first_token) if summing else None
        self.due = self._due_eviction(eviction) if eviction else None

    def _summed_rows(self, summing: RowSumming, first_token: int) -> SummedRows:
        start, end = summing.chunk_start, summing.num_keys
        return SummedRows(
            index=slice(first_token, first_token + end - start),
            positions=torch.arange(start, end, device=self._part.device),
            num_keys=end,
            blocks=self._part.to_device(summing.blocks),
            per_head=self._policy_of(summing.method).granularity == "head",
            is_vision=self._part.to_device(summing.prompt.is_vision()[start:end]),
            num_tokens=summing.prompt.num_tokens,
        )

    def _due_eviction(self, eviction: Eviction) -> DueEviction:
        observed, size = eviction.observed, self._part.shape.block_size
        num_replaced = eviction.num_replaced
        if num_replaced is None:
            num_replaced = eviction.prompt.num_tokens // size
        prompt = Prompt(
            num_tokens=observed.num_tokens,
            num_candidates=num_replaced * size,
            is_vision=self._part.to_device(observed.is_vision()),
            sinks=self._sinks,
            images=eviction.prompt.vision,
        )
        policy = self._policy_of(eviction.method)
        blocks = self._part.to_device(eviction.old_blocks)
        computed = eviction.voters.rows[eviction.first_row :]
        voting = {}
        for kind, positions in eviction.voters.sets.items():
            positions = positions[positions >= eviction.num_cached]
            index: slice | torch.Tensor = slice(None)
            if len(positions) < len(computed):
                index = self._part.to_device(np.searchsorted(computed, positions))
            voting[kind] = Rows(
                index=index,
                positions=self._part.to_device(positions),
                num_keys=observed.num_tokens,
                blocks=blocks,
                num_common_keys=int(positions[0]) + 1,
                per_head=policy.granularity == "head",
                statistics=policy.statistics(kind),
            )
        stored = None
        if eviction.stored is not None:
            stored = self._part.to_device(eviction.stored[eviction.first_row :])
        keys = None
        if not eviction.is_first:
            part = self._part
            keys = RaggedKeys.of_row(blocks, observed.num_tokens, part.regions, part.shape)
        return DueEviction(eviction, policy, prompt, voting, blocks, stored, keys)

    # -- a layer ------------------------------------------------------------------------

    def see_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Observe one layer, once its keys are in the cache; see `Evictor.observe_layer`."""
        ranks, rows = self._part.ranks, None
        with self.stopwatch.time("statistics"):
            if self.error is None:
                rows = self.attempt(partial(self._take_chunk, layer, queries, scale))
            if self.due is None:
                return
            ranks.next_section()
            # Other ranks wait for this rank's statistics, or for the message that there are none.
            if self.error is None or ranks.shares_sets(self.due.per_head):
                self.attempt(partial(self._score_layer, self.due, layer, rows, scale))

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return what `step` returns; store what a method or an allocator raises in it."""
        try:
            return step()
        except Exception as error:
            self.error = self.error or error
            return None

    def _take_chunk(self, layer: int, queries: torch.Tensor, scale: float) -> torch.Tensor | None:
        """Add the chunk to the column sums; return the queries of all observation rows.

        They are [O, H * G, D]; None before the evicting chunk, or if there are no such rows.
        """
        if self._summed is not None:
            self._add_sums(self._summed, layer, queries, scale)
        if self.due is not None and self.due.stored is not None:
            return self._part.queries.load(layer, self.due.stored)
        if self._token_index is not None:
            return queries.index_select(0, self._token_index)
        return None

    def _add_sums(
        self, summed: SummedRows, layer: int, queries: torch.Tensor, scale: float
    ) -> None:
        chunk = self._observe(summed, layer, queries, scale)
        if not self._sums:
            self._sums = [
                RowSums(chunk.num_groups, summed.num_tokens, self._part.device)
                for _ in range(self._part.shape.num_layers)
            ]
        self._sums[layer].add(chunk, summed.is_vision)

    def _score_layer(
        self, due: DueEviction, layer: int, queries: torch.Tensor | None, scale: float
    ) -> None:
        """Let the policy score one layer; `queries` are those of all observation rows."""
        policy, prompt = due.policy, due.prompt
        view = self._view(due, policy.score.rows, layer, queries, scale)
        scores = policy.scores(view)
        if due.eviction.guard is not None:
            self.masses.append(view.attention.column_sums)
        if policy.allocation.rows not in ("none", policy.score.rows):
            view = self._view(due, policy.allocation.rows, layer, queries, scale)
        self.strengths.append(policy.allocation.strength(view, scores))
        # Copy the candidates: a view would keep the tail's columns alive as well.
        present = None if due.keys is None else due.keys.present(len(scores))[layer]
        pooled = policy.pooled(scores, prompt, present)[:, : prompt.num_candidates]
        self.scores.append(pooled.contiguous())

    def _view(
        self,
        due: DueEviction,
        kind: RowSet,
        layer: int,
        queries: torch.Tensor | None,
        scale: float,
    ) -> LayerView:
        """Return what a part of the policy sees that uses the row set `kind`."""
        part, voting = self._part, due.voting.get(kind)

        def own() -> Attention:
            """Return the attention of this rank's heads."""
            if self.error is not None:
                raise self.error
            if voting is None:
                return self._sums[layer]
            assert queries is not None
            if due.keys is not None:
                return self._observe_ragged(voting, due.keys, layer, queries, scale)
            return self._observe(voting, layer, queries, scale)

        attention = NO_ATTENTION
        if kind != "none":
            attention = part.ranks.attention(
                own,
                voting.positions if voting else None,
                due.prompt.num_tokens,
                due.policy.statistics(kind),
                due.per_head,
            )
        num_sets = part.shape.num_heads if due.per_head else 1
        first_set = part.ranks.part * num_sets if due.per_head else 0
        return LayerView(
            part.stages.first_layer + layer, num_sets, due.prompt, attention, first_set
        )

    def _observe(
        self, rows: Rows, layer: int, queries: torch.Tensor, scale: float
    ) -> ObservedAttention:
        """Observe rows in one layer; valid until the next call, which reuses the scratch."""
        part = self._part
        return observe(
            queries[rows.index].unflatten(1, (part.shape.num_heads, part.shape.group_size)),
            part.pool.layer_keys(layer),
            rows.blocks,
            rows.positions,
            rows.num_keys,
            scale,
            per_head=rows.per_head,
            statistics=rows.statistics,
            workspace_bytes=part.workspace_bytes,
            num_common_keys=rows.num_common_keys,
            scratch=part.scratch,
        )

    def _observe_ragged(
        self, rows: Rows, keys: RaggedKeys, layer: int, queries: torch.Tensor, scale: float
    ) -> RaggedAttention:
        """Observe rows of a compressed request; valid until the next observation."""
        part, shape = self._part, self._part.shape
        of_layer = keys.of_layer(layer, shape.num_heads)
        own = observe_layers(
            queries[rows.index].unflatten(1, (shape.num_heads, shape.group_size)).unsqueeze(0),
            part.pool.keys,
            keys.tables[of_layer],
            keys.lengths[of_layer],
            (keys.num_tokens - 1 - rows.positions).int(),
            keys.num_tokens,
            scale,
            per_head=rows.per_head,
            statistics=rows.statistics,
            workspace_bytes=part.workspace_bytes,
            scratch=part.scratch,
        )
        return RaggedAttention(own, keys, layer, rows.positions)

    # -- all layers ---------------------------------------------------------------------

    def gather(self, due: DueEviction) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Stack what the layers showed, over the heads of all ranks.

        Returns:
            Scores [L, S, C], strengths [L, S, F] and, with a guard, masses [L, S, P].
        """
        seen = [self.scores, self.strengths]
        if due.eviction.guard is not None:
            seen.append(self.masses)
        scores, strengths, *masses = self._part.ranks.stack(seen, due.per_head)
        return scores, strengths, masses[0] if masses else None
