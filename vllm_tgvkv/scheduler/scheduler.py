# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with evictions: choose requests, reserve and swap blocks, plan each step."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_tgvkv.blocks.integrity import check_integrity
from vllm_tgvkv.blocks.manager import (
    EvictingManager,
    OtherLayersManager,
    StateManager,
    num_other_blocks,
    uncache_uncomputed,
)
from vllm_tgvkv.blocks.other_blocks import OtherBlocks
from vllm_tgvkv.config.defaults import Defaults
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import CONFIG_KEY, config_of
from vllm_tgvkv.scheduler.candidate import Candidate, make_candidate
from vllm_tgvkv.scheduler.query_rows import QueryRows
from vllm_tgvkv.shared.counters import EvictionCounters
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError
from vllm_tgvkv.shared.metrics import LAYERS, MetricsBuffer
from vllm_tgvkv.shared.plan import (
    ColumnSumChunk,
    Eviction,
    Failure,
    Observation,
    Outcome,
    StepPlan,
    attach_plan,
    outcomes_of,
)
from vllm_tgvkv.shared.report import CutReport, EvictionReport, MemoryReport
from vllm_tgvkv.shared.vllm_versions import end_with_error

logger = init_logger("vllm.tgvkv")

_GAUGE_SECONDS = 1.0
"""Interval of the gauges, which count all compressed requests."""


class EvictionScheduler(Scheduler):
    """The stock scheduler with evictions; all scheduling decisions stay vLLM's.

    `add_request` decides whether a request will be evicted, after which token, and how many
    blocks it retains. The manager reserves these with the chunk that ends at this token: the last
    chunk of the prefill, or a token of the answer. `schedule` then swaps the blocks and attaches
    a `StepPlan` to the step's output. The number of freed blocks is known here, before the step
    runs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.eviction_config = config_of(self.vllm_config)
        self.eviction_counters = EvictionCounters(
            metrics=MetricsBuffer() if self.log_stats else None
        )
        managers = self.kv_cache_manager.coordinator.single_type_managers
        ((self.group, manager),) = (
            (group, manager)
            for group, manager in enumerate(managers)
            if isinstance(manager, EvictingManager)
        )
        self.manager = manager
        self.other_managers = [other for other in managers if other is not manager]
        """Managers of layers that are not evicted: those with states and with windows."""
        num_steps = self.vllm_config.max_concurrent_batches
        manager.num_other_blocks = num_other_blocks(self.other_managers, num_steps)
        manager.others = OtherBlocks(self.other_managers)
        for other in self.other_managers:
            if isinstance(other, OtherLayersManager):
                other.evicting = manager
        self._caches_states = any(
            isinstance(other, StateManager) and other.caches_states for other in self.other_managers
        )
        self.tokens_per_block = manager.block_size
        """N. vLLM's own `block_size` is a multiple of it if there are groups of other layers."""
        if (least := config.missed_ceiling(self.tokens_per_block)) is not None:
            # vLLM makes the blocks of a hybrid longer once its model is loaded.
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with decode.max_tokens: "
                f"{config.decode and config.decode.max_tokens} and blocks of "
                f"{self.tokens_per_block} tokens, which this model has: give at least {least} "
                "tokens, a smaller --block-size, or leave out --kv-eviction"
            )
        if config.debug.poison:
            manager.record_freed = True
            # vLLM's kernels multiply unwritten slots by zero, which NaN survives: let vLLM
            # clear each block when it is handed out again.
            self.needs_kv_cache_zeroing = True
            for each in managers:
                each._record_new_block_ids = isinstance(each.kv_cache_spec, AttentionSpec)
        self.candidates: dict[str, Candidate] = {}
        self.query_rows = QueryRows(config.num_query_rows)
        self._first_chunks: list[str] = []
        """Requests that took query rows while this step was scheduled."""
        self._most_cut_tokens = self.max_model_len + self.max_num_scheduled_tokens
        """Tokens of all requests together that are evicted in one step, which bounds the memory of
        their scores (`memory.py`). One more waits for the next step."""
        self._num_cut_tokens = 0
        self._queue_waits = False
        """Whether a request that is not admitted yet has to wait in this step."""
        self._rows_are_short = False
        """Whether a request waits for query rows in this step. Those after it take none, or a
        request that needs many could wait forever."""
        self._defaults = Defaults(config)
        self._forgotten: list[str] = []
        self._reports: dict[str, EvictionReport] = {}
        self._last_gauges = 0.0
        self._last_log, self._last_line = time.monotonic(), str(self.eviction_counters)
        logger.info(
            "KV eviction: policy %s, budget %s, after %d tokens of the answer, granularity %s; "
            "pages of %d tokens, pool of %d blocks of %d pages (layers x KV heads)",
            config.policy,
            *config.first_eviction(config.policy),
            config.build_policy(config.policy).granularity,
            self.tokens_per_block,
            self.block_pool_size,
            self.pages_per_block,
        )

    @property
    def block_pool_size(self) -> int:
        return self.manager.block_pool.num_gpu_blocks - 1

    @property
    def pages_per_block(self) -> int:
        """Pages of a block on the first worker, if several share the heads or layers."""
        group = self.kv_cache_config.kv_cache_groups[self.group]
        return len(group.layer_names) * group.kv_cache_spec.num_kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on the first worker, with the padding that some groups may have."""
        return max(each.block_stride for each in self.kv_cache_config.kv_cache_tensors)

    # -- arrival ------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self._consider(request)

    def _consider(self, request: Request) -> None:
        """Make the request a candidate, or count the reason why not."""
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        try:
            defaults = self._defaults.current()
            options = RequestOptions.resolve(defaults, extra_args, self.tokens_per_block)
        except EvictionConfigError as error:
            # vLLM's front ends answer such a request with HTTP 400. A request from elsewhere
            # must not end the engine.
            logger.warning("KV eviction of %s skipped: %s", request.request_id, error)
            self._skip(request, self.eviction_config.policy, "invalid_request")
            return
        if options.report:
            num_blocks = cdiv(request.num_prompt_tokens, self.tokens_per_block)
            self._reports[request.request_id] = EvictionReport(
                options.policy,
                request.num_prompt_tokens,
                num_blocks,
                budget=options.budget.value,
                defer=options.defer,
                decode=options.decode,
            )
        model = self.vllm_config.model_config.hf_config
        candidate = make_candidate(
            request, options, self.eviction_config, self.tokens_per_block, model, self.max_model_len
        )
        if isinstance(candidate, str):
            self._skip(request, options.policy, candidate)
        elif not self.manager.can_ever_fit(candidate.cuts):
            self._skip(request, options.policy, "pool_too_small")
        else:
            self.candidates[request.request_id] = candidate
            self.manager.expect(request, candidate.cut)
            reusable = self._most_cached(request, candidate)
            self.manager.compressions[request.request_id].num_reusable = reusable

    def _skip(self, request: Request, policy: str, reason: str) -> None:
        self.eviction_counters.skip(policy, reason)
        if report := self._reports.get(request.request_id):
            report.skip_reason = reason
        logger.debug("KV eviction of %s skipped: %s", request.request_id, reason)

    # -- admission ----------------------------------------------------------------------

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Shorten a hit that would cover observation rows or the end of the prompt."""
        blocks, num_hit, boundary, diverged = super()._get_local_prefix_cache_hit(
            request, *args, **kwargs
        )
        candidate = self.candidates.get(request.request_id)
        if candidate is None:
            return blocks, num_hit, boundary, diverged
        limit = self._most_cached(request, candidate)
        if num_hit > limit:
            # Not cut off: a window that ends earlier needs blocks which the longer hit left out.
            coordinator = self.kv_cache_manager.coordinator
            found, num_hit, num_more = coordinator.find_longest_cache_hit(
                request.block_hashes, limit
            )
            blocks = self.kv_cache_manager.create_kv_cache_blocks(found)
            boundary = num_hit + num_more if num_more else 0
        candidate.num_cached = num_hit
        return blocks, num_hit, boundary, diverged

    def _most_cached(self, request: Request, candidate: Candidate) -> int:
        """Return the most tokens that a candidate may take from the prefix cache."""
        # The step that evicts must run, even if a preempted request has all of its tokens and
        # more in the cache. With speculative decoding vLLM pads a first step of one token with
        # draft positions, which would lie behind the tokens that the eviction sees.
        limit = candidate.cuts.first.at - 1
        if self.num_spec_tokens:
            limit = min(limit - 1, request.num_tokens - 2)
        last_cached = candidate.voters.last_cached
        return limit if last_cached is None else min(limit, last_cached)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the tokens of a chunk; 0, which vLLM skips, if the request has to wait.

        vLLM asks this for every chunk, and for every step of a decoding request. Requests that
        are not admitted yet wait behind one that has to wait, so that it is not overtaken for
        ever: vLLM 0.32 asks no further, 0.33 does.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        is_admitted = request.status == RequestStatus.RUNNING
        if num_new_tokens == 0 or (self._queue_waits and not is_admitted):
            return 0
        num_new_tokens = self._end_chunk(request, num_computed_tokens, num_new_tokens)
        self._queue_waits |= num_new_tokens == 0 and not is_admitted
        return num_new_tokens

    def _end_chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return the tokens of a chunk, at most `num_new_tokens`; 0 if the request has to wait.

        A candidate's chunk ends where it is evicted, and where a later request with the same prompt
        takes over a cached state: only the state at the end of a chunk can be cached. Only a
        preempted request has tokens behind its cut when it prefills: they follow in the next chunk,
        over the compressed cache, as they were computed the first time. A candidate waits if
        earlier prefills need the blocks, or if it has to store queries and no rows are left for
        them.
        """
        candidate = self.candidates.get(request.request_id)
        if candidate is not None and candidate.cut is not None:
            end = min(num_computed_tokens + num_new_tokens, candidate.cut.at)
            reusable = self._reusable_states(request.request_id)
            if num_computed_tokens < reusable < end:
                end = reusable
            num_known = request.num_tokens + request.num_output_placeholders
            if end > num_known and end == candidate.cut.at:
                # A draft would evict, and it may be rejected: wait until the token is known.
                end -= 1
            if candidate.voters_of_cut.every_row:
                end = min(end, num_known)  # a draft that is rejected must not be summed
            num_new_tokens = end - num_computed_tokens
            if not self._may_observe(candidate, request.request_id, num_computed_tokens, end):
                return 0
        end = num_computed_tokens + num_new_tokens
        if not self.manager.may_take(request, end):
            return 0
        if candidate is not None and candidate.cut is not None and end == candidate.cut.at:
            if self._num_cut_tokens and self._num_cut_tokens + end > self._most_cut_tokens:
                return 0
            self._num_cut_tokens += end
        return num_new_tokens

    def _reusable_states(self, request_id: str) -> int:
        """Return the tokens behind which a candidate's states are cached; 0 for none."""
        if not self._caches_states:
            return 0
        num_reusable = self.manager.compressions[request_id].num_reusable
        return num_reusable // self.block_size * self.block_size

    def _may_observe(self, candidate: Candidate, request_id: str, start: int, end: int) -> bool:
        """Take query rows for the chunk `start` to `end` of a candidate, if it needs any.

        It needs none if all tokens that vote are in the chunk that evicts. Otherwise it takes them
        with the first token that votes, and holds them until the cut. Two requests cannot wait for
        each other for ever: one that waits for rows does not advance and so holds nobody back
        (`admission.py`), and if blocks run out vLLM preempts the last request with its rows.
        """
        assert candidate.cut is not None
        rows = candidate.voters_of_cut.rows
        if not len(rows) or self.query_rows.holds(request_id):
            return True
        if end == candidate.cut.at and start <= max(rows[0], candidate.num_cached):
            return True
        if end <= rows[0]:
            return True
        if self._rows_are_short or not self.query_rows.take(request_id, len(rows)):
            self._rows_are_short = True
            return False
        self._first_chunks.append(request_id)
        return True

    # -- each step ----------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._num_cut_tokens, self._queue_waits = 0, False
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        self.query_rows.give_back(name for name in self._first_chunks if name not in scheduled)
        self._first_chunks, self._rows_are_short = [], False
        plan = StepPlan(
            released=self.manager.drain_released(),
            forgotten=self._forgotten,
            poisoned=self.manager.drain_freed(),
        )
        self._forgotten = []
        for request_id, num_scheduled in scheduled.items():
            candidate = self.candidates.get(request_id)
            if candidate is not None and candidate.cut is not None:
                self._plan_chunk(plan, self.requests[request_id], candidate, num_scheduled)
        if not self.use_v2_model_runner:  # which is sent whole requests when they are resumed
            for request_id in output.scheduled_encoder_inputs:
                request = self.requests[request_id]
                if request.num_preemptions:
                    plan.images[request_id] = request.mm_features
        plan.counters = self.eviction_counters.take_if_changed()
        if self.eviction_config.debug.check_integrity:
            check_integrity(self.manager, self.other_managers, self.requests.keys())
        return attach_plan(output, plan)

    def _plan_chunk(
        self, plan: StepPlan, request: Request, candidate: Candidate, num_scheduled: int
    ) -> None:
        """Add the worker's part in a chunk of a candidate before its next cut."""
        end = request.num_computed_tokens  # vLLM has advanced it by this chunk already
        start = end - num_scheduled
        voting = candidate.voters_of_cut
        rows = voting.rows
        stored = self.query_rows.of(request.request_id)
        first, last = rows.searchsorted((start, end))
        if first < last:
            plan.observations.append(
                Observation(
                    request_id=request.request_id,
                    chunk_start=start,
                    rows=rows[first:last],
                    stored=None if stored is None else stored[first:last],
                )
            )
        if voting.every_row:
            plan.summings.append(
                ColumnSumChunk(
                    request_id=request.request_id,
                    method=candidate.options.policy,
                    chunk_start=start,
                    num_keys=end,
                    blocks=self.manager.block_ids(request.request_id, end),
                    prompt=candidate.prompt.followed_by(candidate.options.defer),
                )
            )
        assert candidate.cut is not None
        if end == candidate.cut.at:
            plan.evictions.append(self._evict(request, candidate, candidate.cut))

    def _evict(self, request: Request, candidate: Candidate, cut: Cut) -> Eviction:
        options, voting = candidate.options, candidate.voters_of_cut
        is_first = cut == candidate.cuts.first
        candidate.was_evicted = True
        candidate.advance()
        stored = self.query_rows.of(request.request_id)
        # Free from now on: the rows are read in this step, and written by later ones.
        self.query_rows.give_back([request.request_id])
        swap = self.manager.swap(request.request_id)
        self.manager.expect(request, candidate.cut)
        num_given_back = swap.num_freed - len(swap.new_blocks)
        candidate.num_given_back += num_given_back
        self.eviction_counters.gave_back(options.policy, num_given_back)
        if swap.deferred:
            self.eviction_counters.deferred(options.policy)
        if candidate.guard is None:
            num_tail = max(request.num_prompt_tokens - cut.num_replaced * self.tokens_per_block, 0)
            num_filled = cut.num_retained - candidate.num_summaries(cut)
            num_kept = num_filled * self.tokens_per_block + num_tail
            self._record(request, candidate, cut, swap.num_held, cut.num_retained, num_kept)
        else:
            candidate.num_pending += 1
        return Eviction(
            request_id=request.request_id,
            method=options.policy,
            prompt=candidate.prompt,
            voters=voting,
            num_cached=candidate.num_cached if is_first else 0,
            guard=candidate.guard,
            traced_budget=str(options) if options.trace else None,
            old_blocks=np.array(swap.old_blocks, dtype=np.int32),
            new_blocks=np.array(swap.new_blocks, dtype=np.int32),
            row_blocks=np.array(swap.row_blocks, dtype=np.int32),
            num_answer=cut.at - request.num_prompt_tokens,
            num_replaced=cut.num_replaced,
            is_first=is_first,
            stored=stored,
            is_reported=options.report,
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # Before vLLM's own update, which may end the request and return its report.
        for outcome in outcomes_of(model_runner_output):
            if isinstance(outcome, Failure):
                self._fail(outcome)
                continue
            if outcome.is_first:
                self.eviction_counters.record_outcome(outcome)
            if outcome.num_blocks is not None:
                self._trim(outcome, outcome.num_blocks)
            if report := self._reports.get(outcome.request_id):
                report.add_outcome(outcome)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _fail(self, failure: Failure) -> None:
        """End a request whose prompt could not be judged: its blocks are swapped already."""
        candidate = self.candidates.get(failure.request_id)
        if candidate is None:
            return  # it ended meanwhile
        candidate.has_failed = True
        self._skip(self.requests[failure.request_id], candidate.options.policy, "policy_failed")
        message = (
            f"KV eviction by the method {candidate.options.policy!r} failed; the server's log has "
            "the reason"
        )
        end_with_error(self, failure.request_id, message)

    def _trim(self, outcome: Outcome, num_retained: int) -> None:
        """Take back the blocks that a guarded eviction did not need."""
        candidate = self.candidates.get(outcome.request_id)
        if candidate is None:
            return  # it ended, and all of its blocks went back
        candidate.num_pending -= 1
        if candidate.num_stale:
            candidate.num_stale -= 1
            return  # it was preempted since
        num_freed = self.manager.trim(outcome.request_id, outcome.first_block, num_retained)
        if num_freed is None:
            return
        candidate.num_given_back += num_freed
        self.eviction_counters.gave_back(candidate.options.policy, num_freed)
        num_kept = sum(outcome.kept.values())
        request = self.requests[outcome.request_id]
        cut = candidate.cuts.first
        num_before = cdiv(cut.at, self.tokens_per_block)
        self._record(request, candidate, cut, num_before, num_retained, num_kept)

    def _record(
        self,
        request: Request,
        candidate: Candidate,
        cut: Cut,
        num_before: int,
        num_retained: int,
        num_kept: int,
    ) -> None:
        """Count and report a cut.

        Args:
            num_before: blocks that the request held.
            num_retained: blocks of the region.
            num_kept: tokens per head in the region, and those of the prompt in the tail.
        """
        num_tokens, options = request.num_prompt_tokens, candidate.options
        num_answer = cut.at - num_tokens
        num_after = cdiv(cut.at, self.tokens_per_block) - cut.num_replaced + num_retained
        if cut == candidate.cuts.first:
            self.eviction_counters.evicted(options.policy, num_tokens, num_kept)
        else:
            self.eviction_counters.cut_again(options.policy)
        if report := self._reports.get(request.request_id):
            if report.cuts and report.cuts[-1].answer_tokens >= num_answer:
                report.cuts.clear()  # they were undone by a preemption
            report.cuts.append(CutReport(num_answer, num_before, num_after, num_kept))
            report.kept_tokens, report.blocks_after = num_kept, num_after
            report.kept_text_tokens = report.kept_vision_tokens = None  # the worker knows them
            report.blocks_before = report.cuts[0].blocks_before
            report.memory = self._memory(request, candidate, cut, report.blocks_before, num_after)
            report.trace = request.request_id if options.trace else None
        logger.debug(
            "KV eviction of %s after %d tokens of the answer: %s, %s; %d of %d prompt tokens kept "
            "a head, blocks %d -> %d",
            request.request_id,
            num_answer,
            options.policy,
            options,
            num_kept,
            num_tokens,
            num_before,
            num_after,
        )

    def _memory(
        self, request: Request, candidate: Candidate, cut: Cut, num_before: int, num_after: int
    ) -> MemoryReport:
        """Return what a request holds in all layers once it is cut.

        Args:
            num_before: blocks of the layers that are evicted, before the first cut.
            num_after: the same, after this one.
        """
        others = self.manager.others
        windows, states = others.windows(cut.at), others.states(request.request_id)
        blocks = (num_before + windows + states, num_after + windows + states, windows, states)
        return MemoryReport(
            *(number * self.block_bytes for number in (*blocks, candidate.num_given_back))
        )

    # -- end of a request ---------------------------------------------------------------

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        uncache_uncomputed((self.manager, *self.other_managers), request)
        super()._preempt_request(request, *args, **kwargs)
        if candidate := self.candidates.get(request.request_id):
            self._forgotten.append(request.request_id)
            self.query_rows.give_back([request.request_id])
            candidate.restart()
            self.manager.expect(request, candidate.cut)
            candidate.num_stale = candidate.num_pending

    def _free_request(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        if candidate := self.candidates.pop(request.request_id, None):
            was_counted = candidate.was_evicted or candidate.has_failed
            if candidate.options.defer and not was_counted:
                self._skip(request, candidate.options.policy, "answer_too_short")
            self._forgotten.append(request.request_id)
            self.query_rows.give_back([request.request_id])
            self.manager.forget(request.request_id)
        if report := self._reports.pop(request.request_id, None):
            kv_params = {**(kv_params or {}), CONFIG_KEY: asdict(report)}
        return kv_params, ec_params

    # -- statistics ---------------------------------------------------------------------

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with the metrics; log the totals at vLLM's interval."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return None
        now = time.monotonic()
        if (metrics := self.eviction_counters.metrics) is not None:
            # An idle server makes no statistics: its last ones must say that nothing is held.
            if now - self._last_gauges >= _GAUGE_SECONDS or not self.running:
                self._last_gauges = now
                num_requests, num_blocks = self.manager.num_held()
                metrics.set("compressed_requests", num_requests)
                names = filter(self.manager.is_compressed, self.manager.compressions)
                held = (num_blocks, *self.manager.others.held(names))
                for layers, num_held in zip(LAYERS, held, strict=True):
                    metrics.set("blocks_held", num_held, layers)
            metrics.move_to(stats.waiting_lora_adapters)
        if now - self._last_log >= envs.VLLM_LOG_STATS_INTERVAL:
            self._last_log = now
            line = str(self.eviction_counters)
            if line != self._last_line:
                self._last_line = line
                logger.info("KV eviction: %s", line)
        return stats


class AsyncEvictionScheduler(EvictionScheduler, AsyncScheduler):
    """The same over vLLM's scheduler that plans a step while the last one runs.

    Blocks may be swapped before the step that copies them has run: every step of the device comes
    after it, and no block is read by position alone.
    """
