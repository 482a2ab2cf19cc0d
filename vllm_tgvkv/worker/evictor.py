# SPDX-License-Identifier: Apache-2.0
"""The worker's side of an eviction: observe each layer, decide, copy, store the region.

In one forward pass, for every prompt whose eviction is due:

    after each layer   attention statistics of the observation rows
                       -> the policy's scores and its strength of the layer
    after the last     strengths -> shares -> pages of every (layer, head)
                       scores    -> the kept tokens, every page full
                       one copy into the fresh blocks; the region's offsets are stored

Nothing here waits for the device: every size is known from the plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_tgvkv.cache.pages import CacheShape, PagePool
from vllm_tgvkv.cache.queries import ChunkQueries, DecodeQueries, QueryPool, StoredQueries
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.gates.outputs import GateOutputs
from vllm_tgvkv.kernels.copy import copy_kept, slots_of_positions
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.policies import Depth, Prompt
from vllm_tgvkv.shared.plan import Failure, StepPlan
from vllm_tgvkv.shared.trace import MAX_TRACE_BYTES, Trace, Traces
from vllm_tgvkv.summaries.write import KeysOfRow, write_summaries
from vllm_tgvkv.worker.decision import Decider, Decision
from vllm_tgvkv.worker.observation import DueEviction, Gathered, ModelPart, PromptObservation
from vllm_tgvkv.worker.outcomes import KeptTokens, Outcomes, PendingOutcome
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.stages import Stages

logger = init_logger("vllm.tgvkv")

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Evicted:
    """An eviction that this rank has carried out; it counts once all ranks have."""

    decision: Decision
    num_vision: torch.Tensor | None
    """Vision tokens in the region, summed over this rank's layers and heads; None if nothing is
    told of the eviction."""
    trace: Trace | None
    """If the request asked for one; the first rank's has the heads of all ranks."""


class Evictor:
    """Carries out the `StepPlan`s of a worker.

    In each step the worker calls `begin_step`, `prepare`, `observe_layer` for every layer, and
    `take_outcomes`, in this order.
    """

    def __init__(
        self,
        config: EvictionConfig,
        shape: CacheShape,
        pool: PagePool,
        ranks: Ranks,
        stages: Stages,
        query_dtype: torch.dtype | None = None,
    ) -> None:
        """Make an evictor; `query_dtype` is that of the model, by default that of the cache."""
        self.config = config
        self.summarises = config.summarises
        """Whether rows may have summaries, which attention then looks for in every step."""
        self.shape = shape
        self.pool = pool
        self.ranks = ranks
        self.stages = stages
        queries = QueryPool(
            config.num_query_rows,
            shape.num_layers,
            shape.num_heads * shape.group_size,
            shape.head_size,
            query_dtype or pool.raw.dtype,
            pool.raw.device,
        )
        self.regions = Regions(
            pool.num_blocks,
            shape.num_pairs,
            pool.raw.device,
            shape.block_size if config.decode else 0,
        )
        gate_outputs = None
        if config.gates is not None:
            gate_outputs = GateOutputs(pool.num_blocks, shape, pool.raw.device)
        self.part = ModelPart(shape, pool, queries, self.regions, ranks, stages, gate_outputs)
        self.observations: dict[str, PromptObservation] = {}
        """Prompts that are observed and not evicted yet, by request id."""
        self.plan = StepPlan()
        """The plan of the current step."""
        self.kept: deque[KeptTokens] = deque(maxlen=256)
        self.traces = Traces(config.max_traces, MAX_TRACE_BYTES)
        self._policy_of = cache(config.build_policy)  # a chunk should not build one again
        self._current: list[PromptObservation] = []
        """Prompts observed in the current step."""
        self._stored: ChunkQueries | None = None
        """The store of this step's queries of tokens that vote later."""
        self._decode_queries: DecodeQueries | None = None
        self.ended: list[PendingOutcome | Failure] = []
        """Evictions of the current step, done or failed, until `take_outcomes`."""

    # -- a step -------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Take the plan of a step, before its batch is built."""
        self.plan = plan
        self._current, self._stored = [], None
        self.part.scratch = Scratch()  # frees the last step's buffers
        self.regions.release(plan.released)
        for request_id in plan.forgotten:
            self.observations.pop(request_id, None)
        if plan.poisoned:
            self.pool.fill(plan.poisoned, float("nan"))
            if self.part.gate_outputs is not None:
                self.part.gate_outputs.fill(plan.poisoned, float("nan"))

    def record_decodes(self, max_tokens: int) -> None:
        """Store the queries of steps of single tokens through `stored_queries` from now on.

        `max_tokens` is the most tokens of such a step, padded ones included.
        """
        self._decode_queries = DecodeQueries(self.part.queries, max_tokens)

    def has_work(self, single_tokens: bool) -> bool:
        """Return whether this step's layers are observed.

        `single_tokens` says whether the step has one token of every request.
        """
        if single_tokens and self._decode_queries is not None:
            return self._may_fail
        return bool(self.plan.observations) or self._may_fail

    def stored_queries(
        self, num_tokens: int, first_token: Callable[[str], int]
    ) -> StoredQueries | None:
        """Return the store of a step of single tokens that is not observed, for its attention.

        None if this server records none. `num_tokens` includes padded ones; see `prepare` for
        `first_token`.
        """
        if self._decode_queries is None:
            return None
        self._decode_queries.direct(*self._rows_to_store(first_token))
        return self._decode_queries.of_batch(num_tokens)

    @property
    def decode_kernel(self) -> Literal["stock", "triton"]:
        """Return the kernel that ragged rows are decoded with."""
        return self.config.decode_kernel

    @property
    def records_decodes(self) -> bool:
        """Return whether tokens of answers vote."""
        return self.config.waits

    @property
    def _may_fail(self) -> bool:
        """Whether methods run in this step, which may raise; storing queries does not."""
        return bool(self.plan.summings or self.plan.evictions)

    def prepare(self, first_token: Callable[[str], int]) -> None:
        """Find the plan's prompts in the batch that is being built.

        `first_token(request_id)` is the index of the request's first token in the batch's
        queries.
        """
        observations = {}
        if self._may_fail:
            observations = {part.request_id: part for part in self.plan.observations}
        summings = {part.request_id: part for part in self.plan.summings}
        evictions = {part.request_id: part for part in self.plan.evictions}
        self._current = []
        tokens, rows = self._rows_to_store(first_token)
        if len(tokens):
            self._stored = ChunkQueries(self.part.queries, tokens, rows)
        self.part.num_waiting_rows = sum(
            len(part.rows) for part in self.plan.observations if part.stored is None
        )
        for request_id in dict.fromkeys([*summings, *evictions]):
            if request_id not in self.observations:
                new = PromptObservation(request_id, self.part, self.config, self._policy_of)
                self.observations[request_id] = new
            observation = self.observations[request_id]
            observation.begin_chunk(
                first_token(request_id),
                observations.get(request_id),
                summings.get(request_id),
                evictions.get(request_id),
            )
            self._current.append(observation)

    def _rows_to_store(self, first_token: Callable[[str], int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that vote later and their rows of the query pool, int64 [T] each."""
        found = [(part, part.stored) for part in self.plan.observations if part.stored is not None]
        if not found:
            return _NO_ROWS, _NO_ROWS
        # A decode step has a row of each of many requests: few operations on all of them.
        shifts = [first_token(part.request_id) - part.chunk_start for part, _ in found]
        positions = np.concatenate([part.rows for part, _ in found])
        rows = np.concatenate([stored for _, stored in found])
        if len(rows) == len(found):
            return positions + shifts, rows
        return positions + np.repeat(shifts, [len(stored) for _, stored in found]), rows

    def observe_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Observe one layer, once its keys are in the cache and its attention has run.

        Args:
            layer: index among this worker's layers.
            queries: [tokens, H * G, D], rotated, of the whole batch.
            scale: factor of the products of queries and keys as they are stored.
        """
        if self._stored is not None:
            self._stored.store(layer, queries)
        for observation in self._current:
            observation.see_layer(layer, queries, scale)
        if self._current and layer == self.shape.num_layers - 1:
            self._end_layers()

    def take_outcomes(self) -> Outcomes | None:
        """Return the outcomes of this step's evictions, or None if the scheduler needs none.

        Call it once at the end of every step. All pipeline stages but the last one send theirs to
        the last one and return None.
        """
        ended, self.ended = self.ended, []
        exchanges = self.stages.size > 1 and self._may_fail
        if not (ended or exchanges):
            return None
        outcomes = Outcomes(ended, self.shape, self.traces, self.stages)
        if self.stages.is_last:
            return outcomes
        if exchanges:
            self.stages.tell(outcomes.of_stage())
        return None

    # -- after the last layer -----------------------------------------------------------

    def _end_layers(self) -> None:
        """Evict the prompts that are due; give up those that failed on any rank.

        All ranks go through the same sections in the same order, with failed prompts as well.
        """
        current, self._current = self._current, []
        self._agree(current)
        evicted: dict[str, Evicted | None] = {}
        for seen in current:
            if seen.due is not None:
                self.ranks.next_section()
                evicted[seen.request_id] = None
                if seen.error is None:
                    evict = partial(self._evict, seen, seen.due)
                    evicted[seen.request_id] = seen.attempt(evict)
        if evicted:
            self._agree(current)
        for seen in current:
            if seen.error is not None:
                self._fail(seen, seen.error)
            elif seen.due is not None:
                result = evicted[seen.request_id]
                assert result is not None
                self._record(seen, seen.due, result)

    def _agree(self, current: list[PromptObservation]) -> None:
        errors = self.ranks.agree([seen.error for seen in current])
        for seen, error in zip(current, errors, strict=True):
            seen.error = error

    def _evict(self, seen: PromptObservation, due: DueEviction) -> Evicted:
        """Decide, copy the kept tokens and store the region."""
        eviction, shape = due.eviction, self.shape
        with seen.stopwatch.time("selection"):
            gathered = seen.gather(due)
            decider = self._decider(due, gathered)
            decision = self._decide(due, decider, gathered.masses)
            offsets = page_offsets(decision.counts)
        keys, values, positions = self.pool.keys, self.pool.values, decision.positions
        sizes = (shape.num_layers, shape.num_heads)
        old_blocks = due.blocks[: due.prompt.num_candidates // shape.block_size]
        all_blocks = self.part.to_device(eviction.new_blocks)
        new_blocks = all_blocks[: due.num_token_blocks]
        with seen.stopwatch.time("copy"):
            if due.keys is None:
                sources = slots_of_positions(positions, offsets, old_blocks, shape.num_pairs)
            else:
                if positions.is_cpu and not due.is_ordered:
                    positions = due.keys.settled(positions, offsets)
                sources = due.keys.sources(positions, offsets)
            copy_kept(keys, values, sources, offsets, new_blocks, *sizes)
            if due.policy.merge:
                merge_evicted(keys, values, positions, offsets, old_blocks, new_blocks, *sizes)
            if due.policy.summaries is not None:
                if due.keys is None:
                    of_row = KeysOfRow.of_blocks(old_blocks, shape.num_pairs, shape.block_size)
                else:
                    columns = self.regions.summary_columns(seen.request_id)
                    of_row = KeysOfRow.of_ragged(due.keys, due.blocks, columns)
                write_summaries(
                    due.policy.summaries,
                    due.summary_kinds,
                    due.prompt,
                    gathered.scores[:, decider.own_sets],
                    positions,
                    offsets,
                    of_row,
                    all_blocks[due.num_token_blocks :],
                    self.pool,
                    self.regions,
                )
            if self.config.decode is not None:
                self.regions.store_positions(new_blocks, positions)
                if self.part.gate_outputs is not None:
                    self.part.gate_outputs.move(sources, new_blocks)
        self._add_region(due, offsets, len(due.summary_kinds))
        num_vision = trace = None
        if eviction.is_first or eviction.is_reported or eviction.traced_budget:
            num_vision = _count_vision(due.prompt, decision.positions, offsets)
        if eviction.traced_budget and self.ranks.rank == 0:
            whole = decision
            if self.ranks.num_parts > 1:
                everything = replace(decider, heads=slice(None), agree=lambda find: find())
                whole = self._decide(due, everything, gathered.masses)
            is_guarded = eviction.guard is not None and gathered.masses is not None
            preference = decider.preference(whole.counts, is_guarded)
            trace = self._trace(due, eviction.traced_budget, gathered, whole, preference)
        return Evicted(decision, num_vision, trace)

    def _record(self, seen: PromptObservation, due: DueEviction, evicted: Evicted) -> None:
        """Report an eviction that worked on all ranks, and drop the observation."""
        del self.observations[seen.request_id]
        decision = evicted.decision
        if evicted.num_vision is not None:
            outcome = PendingOutcome(
                due.eviction,
                decision.num_retained,
                self.ranks.sum(evicted.num_vision),
                self.shape.num_pairs * self.ranks.size,
                seen.stopwatch,
                evicted.trace,
            )
            self.ended.append(outcome)
        if self.config.debug.record_kept:
            self.kept.append(KeptTokens(seen.request_id, decision.counts, decision.positions))

    def _fail(self, seen: PromptObservation, error: Exception) -> None:
        """Give up one request, and no other: the scheduler ends it with an error.

        Its row may be compressed already, and a step that is scheduled ahead may still read it.
        So its region gets a valid shape, with pages of any content: nobody sees what is read.
        """
        logger.error("KV eviction of %s failed", seen.request_id, exc_info=error)
        del self.observations[seen.request_id]
        seen.error = None  # its traceback refers to the observation, whose memory is freed now
        self.ended.append(Failure(seen.request_id, f"{type(error).__name__}: {error}"))
        if seen.due is not None:
            num_retained = seen.due.eviction.num_retained
            size = (self.shape.num_layers, self.shape.num_heads)
            pages = torch.full(size, num_retained, device=self.part.device)
            self._add_region(seen.due, page_offsets(pages))

    def _add_region(self, due: DueEviction, offsets: torch.Tensor, num_summaries: int = 0) -> None:
        self.regions.add(
            due.eviction.request_id,
            int(due.eviction.new_blocks[0]),
            due.eviction.num_retained - num_summaries,
            due.prompt.num_candidates // self.shape.block_size,
            offsets,
            num_summaries,
        )

    # -- the decision -------------------------------------------------------------------

    def _decider(self, due: DueEviction, gathered: Gathered) -> Decider:
        """Return what decides for this rank's heads."""
        shape, ranks = self.shape, self.ranks
        first_head = ranks.part * shape.num_heads
        return Decider(
            due.policy,
            due.prompt,
            gathered.scores,
            gathered.strengths,
            num_heads=shape.num_heads * ranks.num_parts,
            block_size=shape.block_size,
            floor_pages=self.config.floor_pages,
            num_parts=ranks.num_parts,
            heads=slice(first_head, first_head + shape.num_heads),
            agree=ranks.first,
            depth=Depth(self.stages.first_layer, self.stages.model_layers),
            present=gathered.present,
        )

    def _decide(self, due: DueEviction, decider: Decider, masses: torch.Tensor | None) -> Decision:
        eviction = due.eviction
        if eviction.guard is None or masses is None:
            return decider.decide(due.num_token_blocks)
        return decider.decide_guarded(eviction.num_retained, masses, eviction.guard)

    def _trace(
        self,
        due: DueEviction,
        budget: str,
        gathered: Gathered,
        decision: Decision,
        preference: torch.Tensor,
    ) -> Trace:
        """Start the copy of a trace to the host; its arrays are valid once the step is done."""

        def on_host(array: torch.Tensor) -> np.ndarray:
            return array.to("cpu", non_blocking=True).numpy()

        scores, unpooled = gathered.scores, gathered.unpooled
        if gathered.present is not None:  # tokens that an earlier cut evicted have no score
            scores = scores.where(gathered.present, torch.nan)
        return Trace(
            id=due.eviction.request_id,
            policy=due.eviction.method,
            budget=budget,
            granularity=due.policy.granularity,
            time=time.time(),
            prompt=due.eviction.prompt,
            num_answer=due.eviction.num_answer,
            num_replaced=due.prompt.num_candidates // self.shape.block_size,
            blocks_before=int(np.count_nonzero(due.eviction.old_blocks)),
            block_size=self.shape.block_size,
            counts=on_host(decision.counts),
            positions=on_host(decision.positions),
            scores=on_host(scores),
            unpooled=None if unpooled is None else on_host(unpooled),
            preference=on_host(preference),
            preferred=due.policy.retention.preferred,
            sinks=due.prompt.sinks,
        )


def _count_vision(prompt: Prompt, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the vision tokens in all pages that hold tokens, int64 scalar; see `select_tokens`."""
    # An index of int64 would take more memory than the positions.
    in_page = prompt.is_vision.index_select(0, positions.flatten()).view_as(positions).sum(1)
    is_used = torch.arange(len(in_page), device=offsets.device) < offsets[-1]
    return (in_page * is_used).sum()
