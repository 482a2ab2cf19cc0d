# SPDX-License-Identifier: Apache-2.0
"""The worker's side of an eviction: observe each layer, decide, select, copy.

Within one forward pass, for every prompt whose last chunk is in the batch:

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.decision import Decider, Decision
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.merge import merge_evicted
from vllm_tgvkv.kernels.row_sums import RowSums
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.statistics import Scratch, observe
from vllm_tgvkv.pages import CacheShape, PagePool
from vllm_tgvkv.plan import Eviction, Failure, Observation, Outcome, RowSumming, StepPlan
from vllm_tgvkv.policies import NO_ATTENTION, Attention, Depth, LayerView, Policy, Prompt
from vllm_tgvkv.prompt import PromptMap, RowSet, VisionSpan, voters
from vllm_tgvkv.ranks import Ranks
from vllm_tgvkv.regions import Regions
from vllm_tgvkv.stages import StageOutcome, Stages
from vllm_tgvkv.stopwatch import Stopwatch
from vllm_tgvkv.trace import Trace, Traces

T = TypeVar("T")

logger = init_logger("vllm.tgvkv")

_WORKSPACE_BYTES = 64 << 20
"""Bound of each scratch buffer of the statistics."""


@dataclass
class Judgement:
    """A prompt that is evicted in this forward pass, and what its layers showed so far."""

    eviction: Eviction
    policy: Policy
    prompt: Prompt
    row_sets: list[VotingRows]
    old_blocks: torch.Tensor
    """Block ids of the prompt, int32 [ceil(P / N)]."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """A layer each, float32 [S, C], pooled."""
    strengths: list[torch.Tensor] = field(default_factory=list)
    """A layer each, float32 [S, F]."""
    masses: list[torch.Tensor] = field(default_factory=list)
    """A layer each, float32 [S, P], where a guard needs them."""
    decision: Decision | None = None
    """Once its pages are copied."""
    num_vision: torch.Tensor | None = None
    """Vision tokens in the region, summed over layers and this rank's heads, if asked for."""
    trace: Trace | None = None
    """If the request asked for one."""

    @property
    def per_head(self) -> bool:
        return self.policy.granularity == "head"


@dataclass(frozen=True)
class VotingRows:
    """One row set of a prompt, as far as it was computed."""

    kind: RowSet
    positions: torch.Tensor
    """int64, ascending."""
    index: torch.Tensor | None
    """Their places among the prompt's observation rows, int64; None if they are all of these."""
    num_common_keys: int
    """Keys that all of the rows see."""


@dataclass
class Summing:
    """A chunk whose rows are all added to the prompt's column sums."""

    num_keys: int
    blocks: torch.Tensor
    tokens: slice
    """The chunk's rows of the batch's queries."""
    positions: torch.Tensor
    is_vision: torch.Tensor
    policy: Policy
    num_tokens: int
    """Of the whole prompt."""


@dataclass
class PromptWork:
    """One prompt's part of the current forward pass."""

    request_id: str
    observation: Observation | None = None
    token_index: torch.Tensor | None = None
    """Rows of the batch's queries that are the observation's rows, int64."""
    summing: Summing | None = None
    judgement: Judgement | None = None
    error: Exception | None = None
    """What ended it: the first thing that was raised for it, on this rank or another."""

    def attempt(self, part: Callable[[], T]) -> T | None:
        """Do a part of the work, whatever a method or an allocator raises in it."""
        try:
            return part()
        except Exception as error:
            self.error = self.error or error
            return None

    @property
    def in_one_chunk(self) -> bool:
        """Whether every row that votes is in the chunk that ends the prefill."""
        return (
            self.judgement is not None
            and self.observation is not None
            and self.observation.first == self.judgement.eviction.first_row
        )


@dataclass(frozen=True)
class KeptTokens:
    """What one eviction kept (debug option `record_kept`)."""

    request_id: str
    counts: torch.Tensor
    """Pages of every (layer, head), int64 [L, H]."""
    positions: torch.Tensor
    """Kept positions, int32 [pages, N], pages in (layer, head) order."""


@dataclass(frozen=True)
class PendingOutcome:
    """One eviction's outcome, as long as its numbers are on the device."""

    eviction: Eviction
    num_retained: torch.Tensor
    """int64 scalar."""
    num_vision: torch.Tensor
    """Vision tokens in the region, summed over layers and the heads of all ranks, int64 scalar."""
    num_pairs: int
    """What it is summed over."""
    watch: Stopwatch
    trace: Trace | None
    """Its arrays may still be on their way to the host."""


class Outcomes:
    """Outcomes of a step's evictions, on the way from the device to the host."""

    def __init__(
        self,
        pending: Sequence[PendingOutcome],
        failures: Sequence[Failure],
        shape: CacheShape,
        traces: Traces,
        stages: Stages,
    ) -> None:
        self._pending = pending
        self._failures = failures
        self._shape = shape
        self._traces = traces
        self._stages = stages
        self._numbers = torch.empty(0, 2, dtype=torch.int64)
        self._copied = None
        if pending:
            stacked = torch.stack([torch.stack((p.num_retained, p.num_vision)) for p in pending])
            self._numbers = stacked.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True) if stacked.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def found(self) -> list[StageOutcome | Failure]:
        """Wait for the step that evicted, and return what came of it in this stage's layers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = zip(self._pending, self._numbers.tolist(), strict=True)
        found = [
            StageOutcome(
                request_id=pending.eviction.request_id,
                num_retained=num_retained,
                num_pages=num_retained * pending.num_pairs,
                num_vision=num_vision,
                num_pairs=pending.num_pairs,
                seconds=pending.watch.seconds(),
                trace=pending.trace,
            )
            for pending, (num_retained, num_vision) in numbers
        ]
        return [*found, *self._failures]

    def read(self) -> list[Outcome | Failure]:
        """Wait for the step that evicted, and return what came of it in all layers."""
        evictions = {pending.eviction.request_id: pending.eviction for pending in self._pending}
        return [
            part if isinstance(part, Failure) else self._outcome(evictions[part.request_id], part)
            for part in self._stages.join(self.found())
        ]

    def _outcome(self, eviction: Eviction, found: StageOutcome) -> Outcome:
        size = self._shape.block_size
        is_vision = eviction.prompt.is_vision()
        num_tokens = len(is_vision)
        num_candidates = num_tokens // size * size
        vision = round(found.num_vision / found.num_pairs) + int(is_vision[num_candidates:].sum())
        kept = round(found.num_pages * size / found.num_pairs) + num_tokens - num_candidates
        num_vision = int(is_vision.sum())
        if found.trace is not None:
            self._traces.add(found.trace)
        return Outcome(
            request_id=eviction.request_id,
            first_block=int(eviction.new_blocks[0]),
            num_blocks=found.num_retained if eviction.guard is not None else None,
            method=eviction.method,
            seen={"text": num_tokens - num_vision, "vision": num_vision},
            kept={"text": kept - vision, "vision": vision},
            seconds=found.seconds,
        )


class Evictor:
    """Carries out `StepPlan`s; owned by the attention metadata builder of a worker."""

    def __init__(
        self,
        config: EvictionConfig,
        shape: CacheShape,
        pool: PagePool,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
    ) -> None:
        self.config = config
        self.shape = shape
        self.pool = pool
        self.ranks = ranks or Ranks()
        self.stages = stages or Stages(shape.num_layers)
        self.device = pool.raw.device
        self.regions = Regions(pool.num_blocks, shape.num_pairs, self.device)
        self.kept: deque[KeptTokens] = deque(maxlen=256)
        self.traces = Traces(config.max_traces, config.max_trace_mib << 20)
        self._policies: dict[str, Policy] = {}
        self._queries: dict[str, torch.Tensor] = {}
        """Observation queries of prompts that span several chunks, [L, O, H * G, D]."""
        self._sums: dict[str, list[RowSums]] = {}
        """Column sums over all rows so far, a layer each, of prompts that need them."""
        self._outcomes: list[PendingOutcome] = []
        self._failures: list[Failure] = []
        self._watches: dict[str, Stopwatch] = {}
        self._plan = StepPlan()
        self._work: list[PromptWork] = []
        self._scratch = Scratch()
        self._workspace_bytes = _WORKSPACE_BYTES

    # -- a step -------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Take over what the scheduler decided, before the batch is built."""
        self._plan = plan
        self._work = []
        self._scratch = Scratch()  # the layers of a step share it; then its memory is free
        self.regions.release(plan.released)
        for request_id in plan.forgotten:
            self._forget(request_id)
        if plan.poisoned:
            self.pool.poison(plan.poisoned)

    @property
    def has_work(self) -> bool:
        """Whether prompts have to be observed in this step."""
        plan = self._plan
        return bool(plan.observations or plan.summings or plan.evictions)

    def prepare(self, first_token: Callable[[str], int]) -> bool:
        """Resolve the plan's requests in the batch; whether the layers have to be observed.

        `first_token(request_id)` is the index of the request's first token in the
        batch's queries.
        """
        works: dict[str, PromptWork] = {}
        for observation in self._plan.observations:
            work = works.setdefault(observation.request_id, PromptWork(observation.request_id))
            start = first_token(observation.request_id) - observation.chunk_start
            work.observation = observation
            work.token_index = self._to_device(observation.rows + start)
        for summing in self._plan.summings:
            work = works.setdefault(summing.request_id, PromptWork(summing.request_id))
            work.summing = self._summing(summing, first_token(summing.request_id))
        for eviction in self._plan.evictions:
            work = works.setdefault(eviction.request_id, PromptWork(eviction.request_id))
            work.judgement = Judgement(
                eviction,
                self._policy(eviction.method),
                self._prompt(eviction),
                self._voting_rows(eviction),
                self._to_device(eviction.old_blocks),
            )
        self._work = list(works.values())
        return bool(self._work)

    def observe_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Look at one layer, after its keys were cached and its attention ran.

        `queries` is [tokens, H * G, D], rotated, of the whole batch; `scale` is the factor of
        their products with keys as they are stored.
        """
        for work in self._work:
            with self._watch(work.request_id).time("statistics"):
                self._observe(work, layer, queries, scale)
        if layer == self.shape.num_layers - 1:
            self._end_layers()

    def take_outcomes(self) -> Outcomes | None:
        """What came of this step's evictions, if there is something to tell the scheduler.

        To be called once at the end of every step. A pipeline stage but the last tells the last
        one instead.
        """
        pending, self._outcomes = self._outcomes, []
        failures, self._failures = self._failures, []
        exchanges = self.stages.size > 1 and self.has_work
        if not (pending or failures or exchanges):
            return None
        outcomes = Outcomes(pending, failures, self.shape, self.traces, self.stages)
        if self.stages.is_last:
            return outcomes
        if exchanges:
            self.stages.tell(outcomes.found())
        return None

    def warm_up(self) -> None:
        """Evict a made-up prompt, so that no request waits until kernels are compiled.

        To be called before the cache is used: its first blocks are written, and cleared again.
        A pool too small for that has no use for eviction either.
        """
        size = self.shape.block_size
        prompt = PromptMap(4 * size + 1, (VisionSpan(size, 2 * size, None),))
        old_blocks, new_blocks = np.arange(1, 6, dtype=np.int32), np.array([6], dtype=np.int32)
        if self.pool.num_blocks <= 6:
            return
        policy = self._policy(self.config.policy)
        voting = voters(prompt, policy.row_sets, self.config.observation_window)
        eviction = Eviction(
            request_id="warm-up",
            method=self.config.policy,
            prompt=prompt,
            voters=voting,
            num_cached=0,
            guard=self.config.budget.guard(prompt.num_tokens, 2 * size, size),
            traced_budget=None,
            old_blocks=old_blocks,
            new_blocks=new_blocks,
            row_blocks=new_blocks,
        )
        plan = StepPlan(evictions=[eviction])
        if len(voting.rows):
            rows = Observation("warm-up", 0, 0, voting.rows, len(voting.rows))
            plan.observations.append(rows)
        if voting.every_row:
            chunk = (self.config.policy, 0, prompt.num_tokens, old_blocks, prompt)
            plan.summings.append(RowSumming("warm-up", *chunk))
        heads = self.shape.num_heads * self.shape.group_size
        queries = self.pool.raw.new_zeros(prompt.num_tokens, heads, self.shape.head_size)
        # Long prompts take another path: their statistics do not fit the workspace.
        for self._workspace_bytes in (0, _WORKSPACE_BYTES):
            self.begin_step(plan)
            self.prepare(lambda _: 0)
            for layer in range(self.shape.num_layers):
                self.observe_layer(layer, queries, 1.0)
            self.begin_step(StepPlan(released=[int(new_blocks[0])]))
        self._outcomes.clear()
        self.kept.clear()
        self.pool.raw[: 7 * self.pool.pages_per_block] = 0

    # -- observation --------------------------------------------------------------------

    def _observe(self, work: PromptWork, layer: int, queries: torch.Tensor, scale: float) -> None:
        rows = None
        if work.error is None:
            rows = work.attempt(lambda: self._take_rows(work, layer, queries, scale))
        judgement = work.judgement
        if judgement is None:
            return
        self.ranks.next_section()
        # Other ranks wait for this one's statistics, or to hear that there are none.
        if work.error is None or self.ranks.shares_sets(judgement.per_head):
            work.attempt(lambda: self._judge_layer(work, judgement, layer, rows, scale))

    def _take_rows(
        self, work: PromptWork, layer: int, queries: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """Take what the chunk has of the rows that vote; queries of all of them, once all are in.

        They are [O, H * G, D].
        """
        rows = self._chunk_rows(work, layer, queries)
        if work.summing is not None:
            self._add_rows(work.request_id, work.summing, layer, queries, scale)
        if work.judgement and not work.in_one_chunk and work.request_id in self._queries:
            return self._queries[work.request_id][layer, work.judgement.eviction.first_row :]
        return rows

    def _chunk_rows(
        self, work: PromptWork, layer: int, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Queries of this chunk's observation rows, [n, H * G, D], or None if it has none.

        They are kept until the prefill ends, unless it ends with this chunk and no
        earlier one had rows.
        """
        observation = work.observation
        if observation is None or work.token_index is None:
            return None
        chunk = queries.index_select(0, work.token_index)
        if not work.in_one_chunk:
            if work.request_id not in self._queries:
                shape = (self.shape.num_layers, observation.num_rows, *queries.shape[1:])
                self._queries[work.request_id] = queries.new_empty(shape)
            last = observation.first + len(observation.rows)
            self._queries[work.request_id][layer, observation.first : last] = chunk
        return chunk

    def _add_rows(
        self, request_id: str, summing: Summing, layer: int, queries: torch.Tensor, scale: float
    ) -> None:
        chunk = observe(
            self._by_head(queries[summing.tokens]),
            self.pool.layer_keys(layer),
            summing.blocks,
            summing.positions,
            summing.num_keys,
            scale,
            per_head=summing.policy.granularity == "head",
            workspace_bytes=self._workspace_bytes,
            scratch=self._scratch,
        )
        if request_id not in self._sums:
            self._sums[request_id] = [
                RowSums(chunk.num_groups, summing.num_tokens, self.device)
                for _ in range(self.shape.num_layers)
            ]
        self._sums[request_id][layer].add(chunk, summing.is_vision)

    def _judge_layer(
        self,
        work: PromptWork,
        judgement: Judgement,
        layer: int,
        rows: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Scores and strength of one layer; `rows` are the queries of all observation rows."""
        policy, prompt = judgement.policy, judgement.prompt
        num_sets = self.shape.num_heads if judgement.per_head else 1
        first_set = self.ranks.part * num_sets if judgement.per_head else 0

        def view(kind: RowSet) -> LayerView:
            attention = self._attention(work, judgement, kind, layer, rows, scale)
            return LayerView(
                self.stages.first_layer + layer, num_sets, prompt, attention, first_set
            )

        seen = view(policy.score.rows)
        scores = policy.score(seen)
        if judgement.eviction.guard is not None:
            judgement.masses.append(seen.attention.column_sums)
        if policy.allocation.rows not in ("none", policy.score.rows):
            seen = view(policy.allocation.rows)
        judgement.strengths.append(policy.allocation.strength(seen, scores))
        # A copy of the candidates: a view would keep the tail's columns alive as well.
        pooled = policy.pooled(scores, prompt)[:, : prompt.num_candidates]
        judgement.scores.append(pooled.contiguous())

    def _attention(
        self,
        work: PromptWork,
        judgement: Judgement,
        kind: RowSet,
        layer: int,
        rows: torch.Tensor | None,
        scale: float,
    ) -> Attention:
        """The attention of one row set; its scratch is good until the next call."""
        if kind == "none":
            return NO_ATTENTION
        voting = next((voting for voting in judgement.row_sets if voting.kind == kind), None)

        def own() -> Attention:
            if work.error is not None:
                raise work.error
            return self._own_attention(judgement, voting, layer, rows, scale)

        return self.ranks.attention(
            own,
            voting.positions if voting else None,
            judgement.prompt.num_tokens,
            judgement.policy.statistics(kind),
            judgement.per_head,
        )

    def _own_attention(
        self,
        judgement: Judgement,
        voting: VotingRows | None,
        layer: int,
        rows: torch.Tensor | None,
        scale: float,
    ) -> Attention:
        """The attention of this rank's heads."""
        if voting is None:
            return self._sums[judgement.eviction.request_id][layer]
        assert rows is not None
        return observe(
            self._by_head(rows if voting.index is None else rows.index_select(0, voting.index)),
            self.pool.layer_keys(layer),
            judgement.old_blocks,
            voting.positions,
            judgement.prompt.num_tokens,
            scale,
            per_head=judgement.per_head,
            statistics=judgement.policy.statistics(voting.kind),
            workspace_bytes=self._workspace_bytes,
            num_common_keys=voting.num_common_keys,
            scratch=self._scratch,
        )

    def _by_head(self, queries: torch.Tensor) -> torch.Tensor:
        """[O, H * G, D] -> [O, H, G, D]."""
        return queries.unflatten(1, (self.shape.num_heads, self.shape.group_size))

    # -- decision -----------------------------------------------------------------------

    def _end_layers(self) -> None:
        """Evict the prompts that were judged; give up those that failed on any rank."""
        self._agree()
        judged = [(work, work.judgement) for work in self._work if work.judgement is not None]
        for work, judgement in judged:
            self.ranks.next_section()
            if work.error is None:
                work.attempt(partial(self._finish, judgement))
        if judged:
            self._agree()
        for work in self._work:
            if work.error is not None:
                self._fail(work, work.error)
            elif work.judgement is not None:
                self._record(work.judgement)

    def _agree(self) -> None:
        errors = self.ranks.agree([work.error for work in self._work])
        for work, error in zip(self._work, errors, strict=True):
            work.error = error

    def _finish(self, judgement: Judgement) -> None:
        """Decide, copy what is kept, store the region."""
        eviction, prompt, policy = judgement.eviction, judgement.prompt, judgement.policy
        shape, watch = self.shape, self._watch(judgement.eviction.request_id)
        with watch.time("selection"):
            decider, masses = self._decider(judgement)
            decision = self._decide(judgement, decider, masses)
            offsets = page_offsets(decision.counts)
        num_full = prompt.num_candidates // shape.block_size
        pages = (
            self.pool.keys,
            self.pool.values,
            decision.positions,
            offsets,
            judgement.old_blocks[:num_full],
            self._to_device(eviction.new_blocks),
            shape.num_layers,
            shape.num_heads,
        )
        with watch.time("copy"):
            copy_kept(*pages)
            if policy.merge:
                merge_evicted(*pages)
        self.regions.add(
            eviction.request_id,
            int(eviction.new_blocks[0]),
            eviction.num_retained_blocks,
            num_full,
            offsets,
        )
        judgement.decision = decision
        if self.config.metrics or eviction.guard is not None or eviction.traced_budget:
            judgement.num_vision = _count_vision(prompt, decision.positions, offsets)
        # The first rank answers for all.
        if eviction.traced_budget and self.ranks.rank == 0:
            if self.ranks.num_parts > 1:
                everything = replace(decider, heads=slice(None), agree=lambda find: find())
                decision = self._decide(judgement, everything, masses)
            judgement.trace = self._trace(judgement, decider, decision)

    def _record(self, judgement: Judgement) -> None:
        """Put a prompt that was evicted on record, and forget what was observed of it."""
        eviction, decision = judgement.eviction, judgement.decision
        assert decision is not None
        watch = self._watch(eviction.request_id)
        self._forget(eviction.request_id)
        if judgement.num_vision is not None:
            num_vision = self.ranks.sum(judgement.num_vision)
            num_retained = decision.num_retained
            if num_retained is None:
                num_retained = torch.full_like(num_vision, eviction.num_retained_blocks)
            num_pairs = self.shape.num_pairs * self.ranks.size
            self._outcomes.append(
                PendingOutcome(
                    eviction, num_retained, num_vision, num_pairs, watch, judgement.trace
                )
            )
        if self.config.debug.record_kept:
            self.kept.append(KeptTokens(eviction.request_id, decision.counts, decision.positions))

    def _fail(self, work: PromptWork, error: Exception) -> None:
        """Give one request up, and no other: the scheduler ends it with an error.

        Its row may be compressed already, and a step that is scheduled ahead may still read it:
        the region gets a valid shape, whatever its pages hold. Nobody sees what comes of it.
        """
        logger.error("KV eviction of %s failed", work.request_id, exc_info=error)
        self._forget(work.request_id)
        self._failures.append(Failure(work.request_id, f"{type(error).__name__}: {error}"))
        if work.judgement is None:
            return
        eviction, shape = work.judgement.eviction, self.shape
        size = (shape.num_layers, shape.num_heads)
        pages = torch.full(size, eviction.num_retained_blocks, device=self.device)
        self.regions.add(
            eviction.request_id,
            int(eviction.new_blocks[0]),
            eviction.num_retained_blocks,
            eviction.prompt.num_tokens // shape.block_size,
            page_offsets(pages),
        )

    def _trace(self, judgement: Judgement, decider: Decider, decision: Decision) -> Trace:
        """What the eviction decided for the heads of all ranks, on the way to the host."""
        eviction = judgement.eviction
        assert eviction.traced_budget is not None
        counts, positions, scores = (
            tensor.to("cpu", non_blocking=True)
            for tensor in (decision.counts, decision.positions, decider.scores)
        )
        return Trace(
            id=eviction.request_id,
            policy=eviction.method,
            budget=eviction.traced_budget,
            granularity=judgement.policy.granularity,
            time=time.time(),
            prompt=eviction.prompt,
            block_size=self.shape.block_size,
            counts=counts.numpy(),
            positions=positions.numpy(),
            scores=scores.numpy(),
        )

    def _watch(self, request_id: str) -> Stopwatch:
        """One for each prompt, from its first chunk to its eviction."""
        if request_id not in self._watches:
            self._watches[request_id] = Stopwatch(self.device, self.config.metrics)
        return self._watches[request_id]

    def _decider(self, judgement: Judgement) -> tuple[Decider, torch.Tensor | None]:
        """What decides for this rank's heads, knowing all; and all masses, if there is a guard."""
        shape, ranks = self.shape, self.ranks
        seen = [judgement.scores, judgement.strengths]
        if judgement.eviction.guard is not None:
            seen.append(judgement.masses)
        scores, strengths, *masses = ranks.stack(seen, judgement.per_head)
        own = ranks.part * shape.num_heads
        decider = Decider(
            judgement.policy,
            judgement.prompt,
            scores,
            strengths,
            shape.num_heads * ranks.num_parts,
            shape.block_size,
            self.config.floor_pages,
            ranks.num_parts,
            slice(own, own + shape.num_heads),
            ranks.first,
            Depth(self.stages.first_layer, self.stages.model_layers),
        )
        return decider, masses[0] if masses else None

    def _decide(
        self, judgement: Judgement, decider: Decider, masses: torch.Tensor | None
    ) -> Decision:
        eviction = judgement.eviction
        if eviction.guard is None or masses is None:
            return decider.decide(eviction.num_retained_blocks)
        return decider.decide_guarded(eviction.num_retained_blocks, masses, eviction.guard)

    def _forget(self, request_id: str) -> None:
        self._queries.pop(request_id, None)
        self._sums.pop(request_id, None)
        self._watches.pop(request_id, None)

    # -- the plan on the device ---------------------------------------------------------

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = self.config.build_policy(name)
        return self._policies[name]

    def _prompt(self, eviction: Eviction) -> Prompt:
        prompt = eviction.prompt
        return Prompt(
            num_tokens=prompt.num_tokens,
            num_candidates=prompt.num_tokens // self.shape.block_size * self.shape.block_size,
            is_vision=self._to_device(prompt.is_vision()),
            sinks=self.config.sinks,
            images=tuple(VisionSpan(run.start, run.length, run.grid) for run in prompt.vision),
        )

    def _voting_rows(self, eviction: Eviction) -> list[VotingRows]:
        computed = eviction.voters.rows[eviction.first_row :]
        voting = []
        for kind, positions in eviction.voters.sets.items():
            positions = positions[positions >= eviction.num_cached]
            is_all = len(positions) == len(computed)
            index = None if is_all else self._to_device(np.searchsorted(computed, positions))
            voting.append(
                VotingRows(kind, self._to_device(positions), index, int(positions[0]) + 1)
            )
        return voting

    def _summing(self, summing: RowSumming, first_token: int) -> Summing:
        start, end = summing.chunk_start, summing.num_keys
        return Summing(
            num_keys=end,
            blocks=self._to_device(summing.blocks),
            tokens=slice(first_token, first_token + end - start),
            positions=torch.arange(start, end, device=self.device),
            is_vision=self._to_device(summing.prompt.is_vision()[start:end]),
            policy=self._policy(summing.method),
            num_tokens=summing.prompt.num_tokens,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, self.device)


def _count_vision(prompt: Prompt, positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Vision tokens in all pages that were dealt, int64 scalar; see `select_tokens`."""
    in_page = prompt.is_vision[positions.long()].sum(1)
    is_dealt = torch.arange(len(in_page), device=offsets.device) < offsets[-1]
    return (in_page * is_dealt).sum()
