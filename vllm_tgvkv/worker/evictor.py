# SPDX-License-Identifier: Apache-2.0
"""The worker's side of an eviction: observe each layer, decide, copy, store the region.

In one forward pass, for every prompt whose eviction is due:

    after each layer   attention statistics of the observation rows
                       -> the policy's scores and its strength of the layer
    after the last     strengths -> shares -> pages of every (layer, head)
                       scores    -> the kept tokens, every page full
                       one copy into the fresh blocks; the region's offsets are stored

Where the query pool has the queries of all observation rows, as it has after a wait and at later
cuts, all of this follows the forward pass, which may be a graph then.

Nothing here waits for the device: every size is known from the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_tgvkv.cache.header import Headers
from vllm_tgvkv.cache.key_numbers import CarriedScores, KeyNumbers
from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.cache.queries import DecodeQueries, QueryPool, StoredQueries
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.shared.plan import ChoiceOutcome, Eviction, Failure, StepPlan
from vllm_tgvkv.shared.trace import MAX_TRACE_BYTES, Traces
from vllm_tgvkv.summaries.blocks import SummaryBlocks
from vllm_tgvkv.worker.arrivals import Arrivals
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import Decision
from vllm_tgvkv.worker.due import DueEviction
from vllm_tgvkv.worker.observation import PromptObservation
from vllm_tgvkv.worker.outcomes import Outcomes, PendingChoice, PendingOutcome, start_trace
from vllm_tgvkv.worker.ranks import Ranks
from vllm_tgvkv.worker.recaller import Recaller
from vllm_tgvkv.worker.region_writer import RegionWriter
from vllm_tgvkv.worker.stages import Stages

logger = init_logger("vllm.tgvkv")

_NO_ROWS = np.empty(0, np.int64)


class Evictor:
    """Carries out the `StepPlan`s of a worker.

    The worker calls `begin_step` and `take_outcomes` around each step. In between, attention calls
    the methods of `attention.observer.Observer`.
    """

    def __init__(
        self,
        config: EvictionConfig,
        pool: PagePool,
        ranks: Ranks,
        stages: Stages,
        query_dtype: torch.dtype | None = None,
        recaller: Callable[[ObserverContext], Recaller] | None = None,
        scales: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        """Make an evictor.

        Args:
            query_dtype: dtype of the queries that attention gets, by default of the cache.
            recaller: makes the part that brings evicted tokens back; None if none comes back.
            scales: returns the factor of products of queries and stored keys by layer; 1 by
                default.
        """
        self.config = config
        self.decode_kernel = config.decode_kernel
        self.pool = pool
        self.shape = shape = pool.shape
        self.ranks = ranks
        self.stages = stages
        device, num_blocks = pool.raw.device, pool.num_blocks
        self.query_dtype = query_dtype or pool.raw.dtype
        queries = QueryPool(config.num_query_rows, shape, self.query_dtype, device)
        self.regions = Regions(num_blocks, shape, device, config.keeps_positions)
        self.summaries = SummaryBlocks(pool, self.regions, config.summarises)
        gate_outputs = None
        if config.gates is not None:
            gate_outputs = KeyNumbers(num_blocks, shape, device)
        carried = CarriedScores(num_blocks, shape, device) if config.carries_scores else None
        numbers = gate_outputs, carried
        self.context = ObserverContext(pool, queries, self.regions, ranks, stages, *numbers)
        headers = Headers(pool, self.regions)
        self._writer = RegionWriter(self.context, self.summaries, headers)
        self.arrivals = Arrivals(headers)
        self.recaller = recaller(self.context) if recaller is not None else None
        self.observations: dict[str, PromptObservation] = {}
        """Prompts that are observed and not evicted yet, by request id."""
        self.plan = StepPlan()
        """The plan of the current step."""
        self.kept: deque[tuple[str, Decision]] = deque(maxlen=256)
        """The last decisions by request id (debug option `record_kept`)."""
        self.traces = Traces(config.max_traces, MAX_TRACE_BYTES)
        self._policy_of = cache(config.build_policy)  # a chunk should not build one again
        self._scales = scales or (lambda: [1.0] * shape.num_layers)
        self._current: list[PromptObservation] = []
        """Prompts observed in the current step, layer by layer."""
        self._in_layers: list[Eviction] = []
        """Evictions of the current step that need queries of its batch."""
        self._after_layers: list[Eviction] = []
        """Evictions of the current step that need nothing of its batch."""
        self._stored: StoredQueries | None = None
        """The store of this step's queries of tokens that vote later."""
        self._decode_queries: DecodeQueries | None = None
        self.ended: list[PendingOutcome | Failure] = []
        """Evictions of the current step, done or failed, until `take_outcomes`."""

    # -- a step -------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Take the plan of a step and its requests, before its batch is built."""
        self.plan = plan
        self._current, self._stored = [], None
        observed = {part.request_id for part in plan.observations if part.stored is None}
        observed |= {part.request_id for part in plan.summings}
        self._in_layers = [e for e in plan.evictions if e.request_id in observed]
        self._after_layers = [e for e in plan.evictions if e.request_id not in observed]
        self.context.scratch = Scratch()  # frees the last step's buffers
        # A region that has just arrived may be released at once.
        self.arrivals.begin_step(plan.arriving, plan.arrived, plan.forgotten)
        self.regions.release(plan.released)
        self.summaries.release(plan.released)
        if self.recaller is not None:
            self.recaller.begin_step(plan.unrecallable)
        for request_id in plan.forgotten:
            self.observations.pop(request_id, None)
        if plan.poisoned:
            self.pool.fill(plan.poisoned, float("nan"))
            for numbers in (self.context.gate_outputs, self.context.carried):
                if numbers is not None:
                    numbers.fill(plan.poisoned, float("nan"))

    def record_decodes(self, max_tokens: int) -> None:
        if self.config.waits:
            self._decode_queries = DecodeQueries(self.context.queries, max_tokens)

    def has_work(self, may_be_graph: bool) -> bool:
        if may_be_graph and self._decode_queries is not None:
            return self._may_fail
        return bool(self.plan.observations) or self._may_fail

    def stored_queries(
        self, num_tokens: int, first_token: Callable[[str], int]
    ) -> StoredQueries | None:
        if self._decode_queries is None:
            return None
        self._decode_queries.direct(*self._rows_to_store(first_token))
        return self._decode_queries.of_batch(num_tokens)

    @property
    def _may_fail(self) -> bool:
        """Whether methods run layer by layer, which may raise; storing queries does not."""
        return bool(self.plan.summings or self._in_layers)

    def prepare(self, first_token: Callable[[str], int]) -> None:
        self._current = []
        tokens, rows = self._rows_to_store(first_token)
        if len(tokens):
            self._stored = StoredQueries.of_tokens(self.context.queries, tokens, rows)
        if not self._may_fail:
            return
        observations = {part.request_id: part for part in self.plan.observations}
        summings = {part.request_id: part for part in self.plan.summings}
        evictions = {part.request_id: part for part in self._in_layers}
        self.context.num_waiting_rows = sum(
            len(part.rows) for part in self.plan.observations if part.stored is None
        )
        for request_id in dict.fromkeys([*summings, *evictions]):
            observation = self._observation_of(request_id)
            observation.begin_chunk(
                first_token(request_id),
                observations.get(request_id),
                summings.get(request_id),
                evictions.get(request_id),
            )
            self._current.append(observation)

    def _observation_of(self, request_id: str) -> PromptObservation:
        if request_id not in self.observations:
            new = PromptObservation(request_id, self.context, self.config, self._policy_of)
            self.observations[request_id] = new
        return self.observations[request_id]

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
        if self._stored is not None:
            self._stored.store(layer, queries)
        for observation in self._current:
            observation.see_layer(layer, queries, scale)
        if self._current and layer == self.shape.num_layers - 1:
            current, self._current = self._current, []
            self._end_layers(current)

    def evict_stored(self) -> None:
        """Evict what needs nothing of the batch, once the step's layers have run.

        Call it in every step, before its tokens are sampled: who sees them may read the regions.
        """
        evictions, self._after_layers = self._after_layers, []
        if not evictions:
            return
        scales, self.context.num_waiting_rows = self._scales(), 0
        with torch.inference_mode():  # as the layers run, with which it shares buffers
            for eviction in evictions:
                seen = self._observation_of(eviction.request_id)
                seen.begin_chunk(0, None, None, eviction)
                if seen.due is not None:
                    seen.see_stored(scales)
                self._end_layers([seen])

    def take_outcomes(self) -> Outcomes | None:
        """Return the outcomes of this step's evictions, or None if the scheduler needs none.

        Call it once at the end of every step. All pipeline stages but the last one send theirs to
        the last one and return None.
        """
        ended: list[PendingOutcome | PendingChoice | ChoiceOutcome | Failure]
        ended, self.ended = [*self.ended, *self._choose()], []
        plan = self.plan
        exchanges = self.stages.size > 1 and bool(plan.summings or plan.evictions or plan.choices)
        if self.recaller is not None and (exchanges or self.stages.size == 1):
            # Other stages do not know of a failed tier, and wait for no message in other steps.
            lost = self.recaller.take_failed()
            ended += [ChoiceOutcome(request_id, 0, None) for request_id in lost]
        if not (ended or exchanges):
            return None
        outcomes = Outcomes(ended, self.context, self.traces)
        if self.stages.is_last:
            return outcomes
        if exchanges:
            self.stages.tell(outcomes.of_stage)
        return None

    def _choose(self) -> list[PendingChoice]:
        """Choose the tokens of rows again whose evicted tokens may come back."""
        recaller, found = self.recaller, list[PendingChoice]()
        if recaller is None:
            return found
        for choice in self.plan.choices:
            chosen = recaller.choose(choice)
            if chosen is None:
                continue
            outcome, decision = chosen
            found.append(outcome)
            if self.config.debug.record_kept:
                self.kept.append((choice.request_id, decision))
        return found

    # -- after the last layer -----------------------------------------------------------

    def _end_layers(self, current: Sequence[PromptObservation]) -> None:
        """Evict the prompts that are due, and give up those that failed.

        Among several ranks an error waits until its prompt is due, when all of them learn of it.
        """
        for seen in current:
            pending = None
            if seen.due is not None:
                seen.exchanges.begin_section()
                if seen.error is None:
                    pending = seen.attempt(partial(self._evict, seen, seen.due))
                if seen.error is not None and self.ranks.size > 1:
                    seen.follow(partial(seen.decide_without_values, seen.due))
            elif self.ranks.size > 1:
                continue
            if seen.error is not None:
                self._fail(seen, seen.error)
            elif pending is not None:
                self._record(pending)

    def _evict(self, seen: PromptObservation, due: DueEviction) -> PendingOutcome:
        """Decide, copy, summarise and store the region, each for all layers and heads at once."""
        with seen.stopwatch.time("selection"):
            scored = seen.gather(due)
            decision = scored.decide(due.num_token_blocks, due.eviction.guard)
            offsets = decision.offsets
        with seen.stopwatch.time("copy"):
            positions = self._writer.copy(due, decision)
            self._writer.summarise(due, scored, positions, offsets)
            if self.recaller is not None:
                self.recaller.cut(due, positions, offsets)
        self._writer.store(due, offsets)
        return PendingOutcome(
            due.eviction,
            decision.num_token_blocks,
            decision.count_vision(due.prompt.is_vision) if due.eviction.has_outcome else None,
            self.shape.num_pairs * self.ranks.size,
            seen.stopwatch,
            start_trace(due.eviction, scored, decision, due.num_token_blocks)
            if self.ranks.rank == 0
            else None,
            decision if self.config.debug.record_kept else None,
        )

    def _record(self, pending: PendingOutcome) -> None:
        """Report an eviction that worked, and drop its observation."""
        request_id = pending.eviction.request_id
        del self.observations[request_id]
        if pending.decision is not None:
            self.kept.append((request_id, pending.decision))
        if pending.num_vision is not None or self.ranks.size > 1:  # it may have failed on another
            self.ended.append(replace(pending, decision=None))

    def _fail(self, seen: PromptObservation, error: Exception) -> None:
        """Give up one request, and no other: the scheduler ends it with an error."""
        logger.error("KV eviction of %s failed", seen.request_id, exc_info=error)
        del self.observations[seen.request_id]
        seen.error = None  # its traceback refers to the observation, whose memory is freed now
        self.ended.append(Failure(seen.request_id, f"{type(error).__name__}: {error}"))
        if seen.eviction is not None:
            self._writer.store_failed(seen.eviction)
