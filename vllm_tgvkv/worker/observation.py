# SPDX-License-Identifier: Apache-2.0
"""All that is observed of one prompt, from its first chunk to the decision on its eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch

from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import ObservedAttention, ObservedRows, observe_layers
from vllm_tgvkv.policies import NO_ATTENTION, Attention, Depth, LayerView, Policy
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction, Observation
from vllm_tgvkv.shared.prompt import RowSet
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import ScoredPrompt
from vllm_tgvkv.worker.due import DueEviction, Rows, SummedRows, due_eviction, summed_rows
from vllm_tgvkv.worker.stopwatch import Stopwatch

T = TypeVar("T")


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
        context: ObserverContext,
        config: EvictionConfig,
        policy_of: Callable[[str], Policy],
    ) -> None:
        self.request_id = request_id
        self.stopwatch = Stopwatch(context.device)
        self.due: DueEviction | None = None
        """The eviction that follows the layers of the current step."""
        self.error: Exception | None = None
        """The first exception raised for the prompt, on this rank or another."""
        self.scores: list[torch.Tensor] = []
        """By layer: pooled scores, float32 [S, C]."""
        self.unpooled: list[torch.Tensor] = []
        """By layer: scores before pooling, float32 [S, C]; only for a trace of pooled scores."""
        self.strengths: list[torch.Tensor] = []
        """By layer: what the allocation goes by, float32 [S, F]."""
        self.masses: list[torch.Tensor] = []
        """By layer: observed attention of each token, float32 [S, P]; only with a guard."""
        self._context = context
        self._config = config
        self._policy_of = policy_of
        # The current chunk.
        self._token_index: torch.Tensor | None = None
        """Indices of the observation rows in the batch's queries, int64; None if they are in the
        query pool."""
        self._summed: SummedRows | None = None
        self._waiting: list[tuple[torch.Tensor | None, float]] = []
        """Queries and scales of the last layers, which are not scored yet; no queries if they are
        in the query pool."""
        # All chunks so far.
        self._sums: list[RowSums] = []
        """Column sums over all rows, by layer; only if the policy uses the row set `all`."""

    # -- a chunk ------------------------------------------------------------------------

    def begin_chunk(
        self,
        first_token: int,
        observation: Observation | None,
        summing: ColumnSumChunk | None,
        eviction: Eviction | None,
    ) -> None:
        """Take the plan's parts for the chunk of this step; a part that it lacks is None.

        `first_token` is the index of the chunk's first token in the batch's queries.
        """
        self._token_index = None
        if observation is not None and observation.stored is None:
            index = observation.rows + (first_token - observation.chunk_start)
            self._token_index = self._context.to_device(index)
        self._summed = None
        if summing is not None:
            per_head = self._policy_of(summing.method).granularity == "head"
            self._summed = summed_rows(summing, first_token, per_head, self._context)
        self.due = self._due_eviction(eviction) if eviction else None

    def _due_eviction(self, eviction: Eviction) -> DueEviction:
        context = self._context
        row = context.to_device(eviction.old_blocks), eviction.observed.num_tokens
        keys: RowKeys | None = None
        if not eviction.is_whole:
            # It takes memory, which may be short.
            keys = self.attempt(partial(RaggedKeys.of_row, *row, context.regions))
        keys = keys or RowKeys.of_blocks(*row, context.shape)
        policy = self._policy_of(eviction.method)
        sinks = max(self._config.sinks, eviction.protected)
        return due_eviction(eviction, policy, sinks, keys, context)

    # -- a layer ------------------------------------------------------------------------

    def see_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Observe one layer, once its keys are in the cache; see `Observer.observe_layer`."""
        ranks, rows = self._context.ranks, None
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

        They are [O, H * G, D]; None if they are in the query pool, or if there are no such rows.
        """
        if (summed := self._summed) is not None:
            chunk = self._observe(summed, layer, queries.unsqueeze(0), [scale])
            if not self._sums:
                self._sums = [
                    RowSums(chunk.num_groups, summed.num_tokens, self._context.device)
                    for _ in range(self._context.shape.num_layers)
                ]
            self._sums[layer].add(chunk, summed.is_vision)
        if self._token_index is not None:
            return queries.index_select(0, self._token_index)
        return None

    def _score_layer(
        self, due: DueEviction, layer: int, queries: torch.Tensor | None, scale: float
    ) -> None:
        """Score a layer together with those that wait, or let it wait for others."""
        self._waiting.append((queries, scale))
        if layer + 1 < self._context.shape.num_layers and len(self._waiting) < due.layers_at_once:
            return
        waiting, self._waiting = self._waiting, []
        first = layer + 1 - len(waiting)
        rows = cache(partial(self._queries_of, due, first, [queries for queries, _ in waiting]))
        self._score_layers(due, first, rows, [scale for _, scale in waiting])

    def _queries_of(
        self, due: DueEviction, first: int, waiting: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the queries of all observation rows in some layers, [L, O, H * G, D]."""
        if self.error is not None:
            raise self.error
        if due.stored is not None:
            return self._context.queries.load(slice(first, first + len(waiting)), due.stored)
        found = [queries for queries in waiting if queries is not None]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def _score_layers(
        self,
        due: DueEviction,
        first: int,
        queries: Callable[[], torch.Tensor],
        scales: Sequence[float],
    ) -> None:
        """Let the policy score some layers as if their token sets belonged to one layer."""
        policy, prompt = due.policy, due.prompt

        def by_layer(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return values.unflatten(0, (len(scales), -1)).unbind()

        view = self._view(due, policy.score.rows, first, queries, scales)
        scores = policy.scores(view)
        if due.eviction.guard is not None:
            self.masses.extend(by_layer(view.attention.column_sums))
        if policy.allocation.rows not in ("none", policy.score.rows):
            view = self._view(due, policy.allocation.rows, first, queries, scales)
        self.strengths.extend(by_layer(policy.allocation.strength(view, scores)))
        present = due.keys.present_in(first, len(scores))
        # Copy the candidates: a view would keep the tail's columns alive as well.
        pooled = policy.pooled(scores, prompt, present)[:, : prompt.num_candidates]
        self.scores.extend(by_layer(pooled.contiguous()))
        if due.keeps_unpooled:
            self.unpooled.extend(by_layer(scores[:, : prompt.num_candidates].contiguous()))

    def _view(
        self,
        due: DueEviction,
        kind: RowSet,
        first: int,
        queries: Callable[[], torch.Tensor],
        scales: Sequence[float],
    ) -> LayerView:
        """Return what a part of the policy sees of some layers that uses the row set `kind`."""
        context, voting = self._context, due.voting.get(kind)

        def own() -> Attention:
            """Return the attention of this rank's heads."""
            if self.error is not None:
                raise self.error
            if voting is None:
                return self._sums[first]
            observed = self._observe(voting, first, queries(), scales)
            return due.keys.attention(observed, first, voting.positions)

        attention = NO_ATTENTION
        if kind != "none":
            attention = context.ranks.attention(
                own,
                voting.positions if voting else None,
                due.prompt.num_tokens,
                due.policy.statistics(kind),
                due.per_head,
            )
        num_sets = context.shape.num_heads if due.per_head else 1
        gate_outputs = None
        if due.policy.score.gates is not None:
            assert context.gate_outputs is not None, "build_policy refuses the score without gates"
            gate_outputs = due.keys.read(context.gate_outputs.values, first, len(scales))
        return LayerView(
            context.stages.first_layer + first,
            len(scales) * num_sets,
            due.prompt,
            attention,
            context.ranks.part * num_sets if due.per_head else 0,
            gate_outputs=gate_outputs,
        )

    def _observe(
        self, rows: Rows, first: int, queries: torch.Tensor, scales: Sequence[float]
    ) -> ObservedAttention:
        """Observe rows in some layers; valid until the next call, which reuses the scratch."""
        context, shape = self._context, self._context.shape
        pairs = slice(first * shape.num_heads, (first + len(scales)) * shape.num_heads)
        scale: float | torch.Tensor = scales[0]
        if min(scales) < max(scales):  # of a quantised cache
            scale = context.to_device(np.array(scales, np.float32))
        are_alike = len(rows.num_visible) == 1
        observed = ObservedRows(
            queries[:, rows.index].unflatten(2, (shape.num_heads, shape.group_size)),
            context.pool.keys,
            rows.tables[pairs],
            rows.num_visible if are_alike else rows.num_visible[pairs],
            rows.num_keys,
            scale,
            row_positions=rows.positions if are_alike else None,
            values=context.pool.values,
        )
        return observe_layers(
            observed, rows.per_head, rows.statistics, context.workspace_bytes, context.scratch
        )

    # -- all layers ---------------------------------------------------------------------

    def gather(self, due: DueEviction) -> ScoredPrompt:
        """Stack what the layers showed, over the heads of all ranks."""
        seen: dict[str, Sequence[torch.Tensor]] = {
            name: by_layer
            for name in ("scores", "strengths", "masses", "unpooled")
            if (by_layer := getattr(self, name))
        }
        present = due.keys.present(self.scores[0].shape[0])
        if present is not None:
            seen["present"] = present[..., : due.prompt.num_candidates].unbind()
        context, ranks, stages = self._context, self._context.ranks, self._context.stages
        stacked = ranks.stack(list(seen.values()), due.per_head)
        num_heads = context.shape.num_heads
        return ScoredPrompt(
            due.policy,
            due.prompt,
            num_heads=num_heads * ranks.num_parts,
            block_size=context.shape.block_size,
            floor_pages=self._config.floor_pages
            + due.eviction.protected_pages(context.shape.block_size),
            num_parts=ranks.num_parts,
            heads=slice(ranks.part * num_heads, (ranks.part + 1) * num_heads),
            agree=ranks.first,
            depth=Depth(stages.first_layer, stages.model_layers),
            **dict(zip(seen, stacked, strict=True)),
        )
