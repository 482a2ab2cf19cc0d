# SPDX-License-Identifier: Apache-2.0
"""All that is observed of one prompt, from its first chunk to the decision on its eviction."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import ObservedAttention, ObservedRows, observe_layers
from vllm_tgvkv.policies import NO_ATTENTION, Attention, Depth, LayerView, Policy, Prompt
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction, Observation
from vllm_tgvkv.shared.prompt import RowSet
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import ScoredPrompt
from vllm_tgvkv.worker.due import DueEviction, Rows, SummedRows, due_eviction, summed_rows
from vllm_tgvkv.worker.ranks import Exchanges, UnknownAttention
from vllm_tgvkv.worker.stopwatch import Stopwatch

logger = init_logger("vllm.tgvkv")

T = TypeVar("T")


class PromptObservation:
    """One prompt, from its first observed chunk to the decision on its eviction.

    In each step with a chunk that is observed:

        begin_chunk   copy the plan's parts for this chunk to the device
        see_layer     for each layer, after its attention:
                      1. add all of the chunk's rows to the column sums, for the row set `all`
                      2. if the eviction is due, let the policy score the layer
        gather        after the last layer, if the eviction is due

    The first exception is stored as `error`; it ends this prompt's eviction and no other. Among
    several ranks, scores and strengths are then without values, see `ranks.Exchanges`.
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
        self.eviction: Eviction | None = None
        """The eviction that follows the layers of the current step."""
        self.due: DueEviction | None = None
        """The same with its data on the device; None if there was no memory for them."""
        self.error: Exception | None = None
        """The first exception raised for the prompt on this rank."""
        self.exchanges = Exchanges(context.ranks, context.device)
        self.shown: dict[str, torch.Tensor] = {}
        """By the names of `ScoredPrompt`, [L, S, *] each: pooled scores, strengths, masses with a
        guard, and scores before pooling for a trace."""
        self.num_shown = 0
        """Number of layers that have shown theirs."""
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
        self._sums: RowSums | None = None
        """Column sums over all rows, of all layers; only if the policy uses the row set `all`."""

    # -- a chunk ------------------------------------------------------------------------

    def begin_chunk(
        self,
        first_token: int,
        observation: Observation | None,
        summing: ColumnSumChunk | None,
        eviction: Eviction | None,
    ) -> None:
        """Take the plan's parts for the chunk of this step; a part that it lacks is None.

        `first_token` is the index of the chunk's first token in the batch's queries. If there is no
        memory for them, the prompt fails; among several ranks the others would wait for this one,
        so the engine has to end.
        """
        self._token_index = self._summed = self.due = None
        self.eviction = eviction

        def take() -> None:
            if observation is not None and observation.stored is None:
                index = observation.rows + (first_token - observation.chunk_start)
                self._token_index = self._context.to_device(index)
            if summing is not None:
                policy = self._policy_of(summing.method)
                self._summed = summed_rows(summing, first_token, policy, self._context)
            if eviction is not None:
                self.due = self._due_eviction(eviction)

        if self._context.ranks.size > 1:
            take()
        else:
            self.attempt(take)

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
        rows = None
        with self.stopwatch.time("statistics"):
            if self.error is None:
                rows = self.attempt(partial(self._take_chunk, layer, queries, scale))
            if self.due is not None and (self.error is None or self._context.ranks.size > 1):
                self._score_layer(self.due, layer, rows, scale)

    def see_stored(self, scales: Sequence[float]) -> None:
        """Observe all layers after they have run; the query pool has the queries of all rows.

        `scales` are the layers', see `Observer.observe_layer`.
        """
        assert self.due is not None, "nothing else is observed after the layers"
        with self.stopwatch.time("statistics"):
            for layer, scale in enumerate(scales):
                if self.error is None or self._context.ranks.size > 1:
                    self._score_layer(self.due, layer, None, scale)

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return what `step` returns; store what a method or an allocator raises in it."""
        try:
            return step()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # else it keeps tensors of the method
            self.error, self._sums = self.error or error, None
            return None

    def follow(self, step: Callable[[], None]) -> None:
        """Take this rank's part in a section without values, after an error.

        Raises:
            torch.OutOfMemoryError: if there is no memory even for that. The other ranks wait then,
                so the engine has to end.
        """
        self.exchanges.begin_again()
        try:
            step()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.debug("%s fails on every rank", self.request_id, exc_info=True)

    def _take_chunk(self, layer: int, queries: torch.Tensor, scale: float) -> torch.Tensor | None:
        """Add the chunk to the column sums; return the queries of all observation rows.

        They are [O, H * G, D]; None if they are in the query pool, or if there are no such rows.
        """
        if (summed := self._summed) is not None:
            chunk = self._observe(summed, layer, queries.unsqueeze(0), [scale])
            num_sets = chunk.num_groups
            if self._sums is None:
                num_all = self._context.shape.num_layers * num_sets
                self._sums = RowSums(
                    num_all, summed.num_tokens, self._context.device, summed.by_modality
                )
            self._sums.add(chunk, summed.is_vision, layer * num_sets)
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
        first, scales = layer + 1 - len(waiting), [scale for _, scale in waiting]
        self.exchanges.begin_section()
        if self.error is None:
            rows = cache(partial(self._queries_of, due, first, [queries for queries, _ in waiting]))
            self.attempt(partial(self._score_layers, due, first, rows, scales))
        if self.error is not None and self._context.ranks.size > 1:
            self.follow(partial(self._size_layers, due, first, len(scales)))

    def _queries_of(
        self, due: DueEviction, first: int, waiting: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the queries of all observation rows in some layers, [L, O, H * G, D]."""
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
        prompt, num_layers = due.prompt, len(scales)

        def own(kind: RowSet) -> Attention:
            """Return the attention of this rank's heads."""
            voting = due.voting.get(kind)
            if voting is None:
                assert self._sums is not None, "every row was summed"
                num_sets = self._num_sets(due)
                return self._sums.of_sets(slice(first * num_sets, (first + num_layers) * num_sets))
            observed = self._observe(voting, first, queries(), scales)
            return due.keys.attention(observed, first, voting.positions)

        gate_outputs = None
        if due.policy.score.gates is not None:
            outputs = self._context.gate_outputs
            assert outputs is not None, "build_policy refuses the score without gates"
            gate_outputs = due.keys.read(outputs.values, first, num_layers)
        carried = self._context.carried if due.policy.score.accumulates else None
        of_last = None
        if carried is not None and not due.eviction.is_whole:
            of_last = carried.read(due.keys, first, num_layers)
        numbers = gate_outputs, of_last
        view_of = partial(self._view, due, first, num_layers, prompt, own, numbers)
        scores, strengths, masses = self._vote(due, view_of)
        if carried is not None:
            carried.write(due.keys, scores, first)
        present = due.keys.present_in(first, num_layers, self._num_sets(due))
        pooled = due.policy.pooled(scores, prompt, present)[:, : prompt.num_candidates]
        scores = scores[:, : prompt.num_candidates]
        self._keep(due, num_layers, pooled, scores, strengths, masses)

    def _size_layers(self, due: DueEviction, first: int, num_layers: int) -> None:
        """Take this rank's part in the scoring of some layers, without values."""
        prompt = replace(due.prompt, is_vision=due.prompt.is_vision.to("meta"))
        num_sets = num_layers * self._num_sets(due)

        def own(kind: RowSet) -> Attention:
            rows = due.voting[kind].positions if kind in due.voting else None
            return UnknownAttention(num_sets, prompt.num_tokens, rows)

        outputs = torch.empty(num_sets, prompt.num_tokens, device="meta")
        view_of = partial(self._view, due, first, num_layers, prompt, own, (outputs, None))
        scores, strengths, masses = self._vote(due, view_of)
        scores = scores[:, : prompt.num_candidates]
        self._keep(due, num_layers, scores, scores, strengths, masses)

    def _vote(
        self, due: DueEviction, view_of: Callable[[RowSet], LayerView]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return scores before pooling, strengths, and masses for a guard."""
        policy = due.policy
        view = view_of(policy.score.rows)
        scores = policy.scores(view)
        masses = view.attention.column_sums if due.eviction.guard is not None else None
        if policy.allocation.rows not in ("none", policy.score.rows):
            view = view_of(policy.allocation.rows)
        return scores, policy.allocation.strength(view, scores), masses

    def _keep(
        self,
        due: DueEviction,
        num_layers: int,
        pooled: torch.Tensor,
        unpooled: torch.Tensor,
        strengths: torch.Tensor,
        masses: torch.Tensor | None,
    ) -> None:
        """Keep what some layers showed until the decision; tensors are [num_layers * S, *]."""
        # Scores and masses come last, because they may overwrite sums that others are views of.
        kept = unpooled if due.keeps_unpooled else None
        shown = {"unpooled": kept, "strengths": strengths, "scores": pooled, "masses": masses}
        by_layer = {
            name: values.unflatten(0, (num_layers, -1))
            for name, values in shown.items()
            if values is not None
        }
        for name, values in by_layer.items():
            if name in self.shown:
                continue
            size = self._context.shape.num_layers, *values.shape[1:]
            if self._sums is not None and name == ("scores" if masses is None else "masses"):
                # These take the place of the sums of the same layers, which nobody reads again.
                self.shown[name] = self._sums.memory.unflatten(0, size[:2])[..., : size[2]]
            else:
                self.shown[name] = values.new_empty(size)
        # Nothing after this line raises: layers are kept once, whatever fails before.
        layers = slice(self.num_shown, self.num_shown + num_layers)
        self.num_shown += num_layers
        if self.error is None:
            for name, values in by_layer.items():
                self.shown[name][layers].copy_(values)

    def _view(
        self,
        due: DueEviction,
        first: int,
        num_layers: int,
        prompt: Prompt,
        own: Callable[[RowSet], Attention],
        numbers: tuple[torch.Tensor | None, torch.Tensor | None],
        kind: RowSet,
    ) -> LayerView:
        """Return what a part of the policy sees of some layers that uses the row set `kind`.

        `numbers` are outputs of gates and the scores of the cut before.
        """
        attention = NO_ATTENTION
        if kind != "none":
            declared = due.policy.statistics(kind)
            attention = self.exchanges.attention(partial(own, kind), declared, due.per_head)
        num_sets = self._num_sets(due)
        return LayerView(
            self._context.stages.first_layer + first,
            num_layers * num_sets,
            prompt,
            attention,
            self._context.ranks.part * num_sets if due.per_head else 0,
            gate_outputs=numbers[0],
            carried=numbers[1],
        )

    def _num_sets(self, due: DueEviction) -> int:
        """Return S, the token sets of a layer on this rank."""
        return self._context.shape.num_heads if due.per_head else 1

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
        chosen = queries[:, rows.index]
        if chosen.dtype == torch.uint8:  # fp8
            chosen = chosen.view(context.queries.dtype)
        observed = ObservedRows(
            chosen.unflatten(2, (shape.num_heads, shape.group_size)),
            context.pool.keys,
            rows.tables[pairs],
            rows.num_visible if are_alike else rows.num_visible[pairs],
            rows.num_keys,
            scale,
            row_positions=rows.positions if are_alike else None,
            values=context.pool.values,
            sinks=context.sinks and context.sinks(slice(first, first + len(scales))),
        )
        return observe_layers(
            observed, rows.per_head, rows.statistics, context.workspace_bytes, context.scratch
        )

    # -- all layers ---------------------------------------------------------------------

    def gather(self, due: DueEviction) -> ScoredPrompt:
        """Return what the layers showed; over the heads of all ranks, where these compete."""
        context, ranks, stages = self._context, self._context.ranks, self._context.stages
        seen = dict(self.shown)
        if self.error is not None:
            seen = {name: torch.empty_like(each, device="meta") for name, each in seen.items()}
        if not due.eviction.is_whole:
            seen["present"] = self._present(due, seen["scores"])
        gathers = due.gathers_heads and ranks.num_parts > 1
        if gathers:
            seen = dict(zip(seen, self.exchanges.gather_all(list(seen.values())), strict=True))
        num_heads = context.shape.num_heads
        num_parts = ranks.num_parts if gathers or not due.per_head else 1
        part = ranks.part if num_parts > 1 else 0
        return ScoredPrompt(
            due.policy,
            due.prompt,
            num_heads=num_heads * num_parts,
            block_size=context.shape.block_size,
            floor_pages=self._config.floor_pages
            + due.eviction.protected_pages(context.shape.block_size),
            num_parts=num_parts,
            heads=slice(part * num_heads, (part + 1) * num_heads),
            agree=self.exchanges.first if ranks.size > 1 else lambda find: find(),
            depth=Depth(stages.first_layer, stages.model_layers),
            first_head=0 if num_parts > 1 else ranks.part * num_heads,
            **seen,
        )

    def decide_without_values(self, due: DueEviction) -> None:
        """Make the exchanges of a decision."""
        if self.num_shown < self._context.shape.num_layers:
            return  # the method itself does not take this prompt, on any rank
        scored = self.gather(due)
        if due.eviction.guard is not None:
            scored.agree(lambda: torch.empty((), dtype=torch.int64, device="meta"))

    def _present(self, due: DueEviction, scores: torch.Tensor) -> torch.Tensor:
        """Return which candidates earlier cuts left, bool [L, S, C]."""
        if self.error is not None:
            return scores.bool()
        num_layers, num_sets, num_candidates = scores.shape
        present = due.keys.present_in(0, num_layers, num_sets)
        assert present is not None, "the row was cut before"
        return present[:, :num_candidates].unflatten(0, (num_layers, num_sets))
