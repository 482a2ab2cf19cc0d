# SPDX-License-Identifier: Apache-2.0
"""All that is observed of one prompt, from its first chunk to the decision on its eviction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.queries import QueryPool
from vllm_tgvkv.cache.ragged import RaggedAttention, RaggedKeys
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates.outputs import GateOutputs
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.statistics import ObservedAttention, Scratch, Statistic, observe_layers
from vllm_tgvkv.policies import NO_ATTENTION, Attention, LayerView, Policy, Prompt
from vllm_tgvkv.shared.plan import ColumnSumChunk, Eviction, Observation
from vllm_tgvkv.shared.prompt import RowSet
from vllm_tgvkv.summaries.options import Kind
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages
from vllm_tgvkv.worker.stopwatch import Stopwatch

WORKSPACE_BYTES = 64 << 20
"""Bound of each scratch buffer of the statistics, or the size of one layer's if that is more."""

_OF_NEIGHBOURS: frozenset[Statistic] = frozenset({"past_importance", "key_redundancy"})
"""Statistics that depend on the order of the keys in the cache."""

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
    gate_outputs: GateOutputs | None = None
    """None without gates."""
    workspace_bytes: int = WORKSPACE_BYTES
    scratch: Scratch = field(default_factory=Scratch)
    """Buffers of the statistics; the layers of a step share them."""
    num_waiting_rows: int = 0
    """Rows of this step's batch whose queries wait until their layers are scored together."""

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
    num_hidden: torch.Tensor
    """int32 [O], number of last keys that a row does not see."""
    num_keys: int
    """Every pair of a layer and a head has at most this many keys."""
    tables: torch.Tensor
    """Pages of the keys of every pair, int32 [L * H, W]."""
    lengths: torch.Tensor
    """Keys of every pair, int32 [L * H], or [1] if all have the same number."""
    num_common_keys: int = 1
    """Every row sees the first `num_common_keys` keys; at least its own, if no key is evicted."""
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
class Gathered:
    """What the layers of this worker showed, for the heads of all ranks."""

    scores: torch.Tensor
    """Pooled, float32 [L, S, C]."""
    strengths: torch.Tensor
    """float [L, S, F]."""
    masses: torch.Tensor | None = None
    """Observed attention, float32 [L, S, P]; only with a guard."""
    unpooled: torch.Tensor | None = None
    """The scores before pooling, float32 [L, S, C]; only for a trace of pooled scores."""
    present: torch.Tensor | None = None
    """Candidates that earlier cuts left, bool [L, S, C]; None at the first cut."""


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
    layers_at_once: int
    """Number of layers that are scored together."""
    summary_kinds: tuple[Kind, ...]
    """Kinds of the summaries in the last blocks of the region, one for each block."""

    @property
    def per_head(self) -> bool:
        return self.policy.granularity == "head"

    @property
    def num_token_blocks(self) -> int:
        """Blocks of the region that hold tokens."""
        return self.eviction.num_retained - len(self.summary_kinds)

    @property
    def keeps_unpooled(self) -> bool:
        """Whether a trace tells scores from those that pooling raised."""
        return self.eviction.traced_budget is not None and self.policy.pooling.kind != "none"

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the keys in the cache matters at later cuts."""
        return any(_OF_NEIGHBOURS & rows.statistics for rows in self.voting.values())


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
        self.stopwatch = Stopwatch(part.device)
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
        self._part = part
        self._sinks = config.sinks
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
            self._token_index = self._part.to_device(observation.token_index(first_token))
        self._summed = self._summed_rows(summing, first_token) if summing else None
        self.due = self._due_eviction(eviction) if eviction else None

    def _summed_rows(self, summing: ColumnSumChunk, first_token: int) -> SummedRows:
        start, end, device = summing.chunk_start, summing.num_keys, self._part.device
        return SummedRows(
            index=slice(first_token, first_token + end - start),
            positions=torch.arange(start, end, device=device),
            num_hidden=torch.arange(end - start - 1, -1, -1, dtype=torch.int32, device=device),
            num_keys=end,
            tables=self._tables(self._part.to_device(summing.blocks)),
            lengths=self._lengths(end),
            per_head=self._policy_of(summing.method).granularity == "head",
            is_vision=self._part.to_device(summing.prompt.is_vision()[start:end]),
            num_tokens=summing.prompt.num_tokens,
        )

    def _due_eviction(self, eviction: Eviction) -> DueEviction:
        observed, size = eviction.observed, self._part.shape.block_size
        prompt = Prompt(
            num_tokens=observed.num_tokens,
            num_candidates=eviction.num_replaced * size,
            is_vision=self._part.to_device(observed.is_vision()),
            sinks=self._sinks,
            images=eviction.prompt.vision,
        )
        policy = self._policy_of(eviction.method)
        blocks = self._part.to_device(eviction.old_blocks)
        part, keys = self._part, None
        tables, lengths = self._tables(blocks), self._lengths(observed.num_tokens)
        num_keys = observed.num_tokens
        if not eviction.is_first:
            find = partial(RaggedKeys.of_row, blocks, observed.num_tokens, part.regions, part.shape)
            keys = self.attempt(find)  # it takes memory, which may be short
        if keys is not None:
            tables, lengths, num_keys = keys.tables, keys.lengths, keys.num_columns
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
                num_hidden=self._part.to_device(
                    (observed.num_tokens - 1 - positions).astype(np.int32)
                ),
                num_keys=num_keys,
                tables=tables,
                lengths=lengths,
                num_common_keys=int(positions[0]) + 1 if keys is None else 0,
                per_head=policy.granularity == "head",
                statistics=policy.statistics(kind),
            )
        stored = None
        if eviction.stored is not None:
            stored = self._part.to_device(eviction.stored[eviction.first_row :])
        at_once = 1
        if keys is None:
            at_once = self._layers_at_once(policy, observed.num_tokens, len(computed))
        kinds: tuple[Kind, ...] = ()
        if policy.summaries is not None:
            sizes = eviction.num_retained, eviction.num_replaced
            kinds = policy.summaries.kinds(*sizes, bool(prompt.images))
        return DueEviction(eviction, policy, prompt, voting, blocks, stored, keys, at_once, kinds)

    def _tables(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the pages of a prompt's blocks in every layer and head, int32 [L * H, W]."""
        num_pairs = self._part.shape.num_pairs
        pairs = torch.arange(num_pairs, dtype=torch.int32, device=blocks.device)
        return torch.add(pairs[:, None], blocks, alpha=num_pairs)

    def _lengths(self, num_keys: int) -> torch.Tensor:
        return torch.full((1,), num_keys, dtype=torch.int32, device=self._part.device)

    def _layers_at_once(self, policy: Policy, num_tokens: int, num_rows: int) -> int:
        """Return the number of layers to score together, so that their memory is bounded.

        One launch for many layers saves time of the host, which only a GPU waits for. Ranks
        exchange the statistics of a token set that they share layer by layer.
        """
        part, per_head = self._part, policy.granularity == "head"
        if (
            not gpu.runs(part.pool.raw)
            or part.ranks.shares_sets(per_head)
            or not policy.scores_layers_together
        ):
            return 1
        num_sets = part.shape.num_heads if per_head else 1
        columns = num_sets * (num_tokens + 128)
        of_layer = max(
            columns * policy.scoring_bytes(num_rows),
            part.queries.row_bytes * max(num_rows, part.num_waiting_rows),
        )
        return max(1, min(part.shape.num_layers, part.workspace_bytes // of_layer))

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

        They are [O, H * G, D]; None if they are in the query pool, or if there are no such rows.
        """
        if self._summed is not None:
            self._add_sums(self._summed, layer, queries, scale)
        if self._token_index is not None:
            return queries.index_select(0, self._token_index)
        return None

    def _add_sums(
        self, summed: SummedRows, layer: int, queries: torch.Tensor, scale: float
    ) -> None:
        chunk = self._observe(summed, layer, queries.unsqueeze(0), [scale])
        if not self._sums:
            self._sums = [
                RowSums(chunk.num_groups, summed.num_tokens, self._part.device)
                for _ in range(self._part.shape.num_layers)
            ]
        self._sums[layer].add(chunk, summed.is_vision)

    def _score_layer(
        self, due: DueEviction, layer: int, queries: torch.Tensor | None, scale: float
    ) -> None:
        """Score a layer together with those that wait, or let it wait for others."""
        self._waiting.append((queries, scale))
        if layer + 1 < self._part.shape.num_layers and len(self._waiting) < due.layers_at_once:
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
            return self._part.queries.load(slice(first, first + len(waiting)), due.stored)
        found = [queries for queries in waiting if queries is not None]
        return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)

    def _score_layers(
        self,
        due: DueEviction,
        first: int,
        queries: Callable[[], torch.Tensor],
        scales: Sequence[float],
    ) -> None:
        """Let the policy score some layers as if their token sets were those of one layer."""
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
        present = None if due.keys is None else due.keys.present_in(first, len(scores))
        # Copy the candidates: a view would keep the tail's columns alive as well.
        num_kept = due.num_token_blocks * self._part.shape.block_size
        pooled = policy.pooled(scores, prompt, num_kept, present)[:, : prompt.num_candidates]
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
        part, voting = self._part, due.voting.get(kind)

        def own() -> Attention:
            """Return the attention of this rank's heads."""
            if self.error is not None:
                raise self.error
            if voting is None:
                return self._sums[first]
            observed = self._observe(voting, first, queries(), scales)
            if due.keys is None:
                return observed
            return RaggedAttention(observed, due.keys, first, voting.positions)

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
        return LayerView(
            part.stages.first_layer + first,
            len(scales) * num_sets,
            due.prompt,
            attention,
            part.ranks.part * num_sets if due.per_head else 0,
            gate_outputs=self._gate_outputs(due, first, len(scales)),
        )

    def _gate_outputs(self, due: DueEviction, first: int, num_layers: int) -> torch.Tensor | None:
        """Return what the gates of some layers said of each token, if the score reads it."""
        outputs = self._part.gate_outputs
        if due.policy.score.gates is None:
            return None
        assert outputs is not None, "build_policy refuses the score without gates"
        if due.keys is not None:
            return outputs.of_keys(first, due.keys)
        return outputs.of_row(first, num_layers, due.blocks, due.prompt.num_tokens)

    def _observe(
        self, rows: Rows, first: int, queries: torch.Tensor, scales: Sequence[float]
    ) -> ObservedAttention:
        """Observe rows in some layers; valid until the next call, which reuses the scratch."""
        part, shape = self._part, self._part.shape
        pairs = slice(first * shape.num_heads, (first + len(scales)) * shape.num_heads)
        scale: float | torch.Tensor = scales[0]
        if min(scales) < max(scales):  # of a quantised cache
            scale = part.to_device(np.array(scales, np.float32))
        return observe_layers(
            queries[:, rows.index].unflatten(2, (shape.num_heads, shape.group_size)),
            part.pool.keys,
            rows.tables[pairs],
            rows.lengths if len(rows.lengths) == 1 else rows.lengths[pairs],
            rows.num_hidden,
            rows.num_keys,
            scale,
            per_head=rows.per_head,
            statistics=rows.statistics,
            workspace_bytes=part.workspace_bytes,
            num_common_keys=rows.num_common_keys,
            row_positions=rows.positions if len(rows.lengths) == 1 else None,
            scratch=part.scratch,
            values=part.pool.values,
        )

    # -- all layers ---------------------------------------------------------------------

    def gather(self, due: DueEviction) -> Gathered:
        """Stack what the layers showed, over the heads of all ranks."""
        seen: list[Sequence[torch.Tensor]] = [self.scores, self.strengths]
        names = ["scores", "strengths"]
        if due.eviction.guard is not None:
            seen.append(self.masses)
            names.append("masses")
        if due.keeps_unpooled:
            seen.append(self.unpooled)
            names.append("unpooled")
        if due.keys is not None:
            present = due.keys.present(self.scores[0].shape[0])
            seen.append(present[..., : due.prompt.num_candidates].unbind())
            names.append("present")
        stacked = self._part.ranks.stack(seen, due.per_head)
        return Gathered(**dict(zip(names, stacked, strict=True)))
