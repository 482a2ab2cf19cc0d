# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, plus: decide who is evicted, reserve, swap, tell the worker."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_tgvkv.budget import Guard
from vllm_tgvkv.config import CONFIG_KEY, NONE, RequestOptions, config_of
from vllm_tgvkv.counters import EvictionCounters
from vllm_tgvkv.defaults import Defaults
from vllm_tgvkv.errors import EvictionConfigError
from vllm_tgvkv.integrity import check_integrity
from vllm_tgvkv.manager import EvictingManager
from vllm_tgvkv.metrics import Observations
from vllm_tgvkv.plan import (
    Eviction,
    Failure,
    Observation,
    Outcome,
    RowSumming,
    StepPlan,
    attach_plan,
    outcomes_of,
)
from vllm_tgvkv.prompt import PromptMap, Voters, map_prompt, voters

logger = init_logger("vllm.tgvkv")

_GAUGE_SECONDS = 1.0
"""Gauges are looked at this often; they take a look at every compressed request."""


@dataclass
class Candidate:
    """A request that is to be evicted at the end of its prefill."""

    wish: RequestOptions
    prompt: PromptMap
    voters: Voters
    num_retained_blocks: int
    """With a guard, at most."""
    guard: Guard | None
    num_cached: int = 0
    """Tokens of the prompt that were taken from the prefix cache, not computed."""
    num_pending: int = 0
    """Guarded evictions whose outcome has not come back."""
    num_stale: int = 0
    """Those of them that a preemption undid. Steps are scheduled ahead, so the request may be
    evicted again before it comes, even into a region that starts with the same block."""


@dataclass
class EvictionReport:
    """What a response says about its request's cache, where it was asked to."""

    policy: str
    prompt_tokens: int
    blocks_before: int
    kept_tokens: int | None = None
    """Prompt tokens kept, mean over layers and heads; None if nothing was evicted."""
    blocks_after: int | None = None
    skip_reason: str | None = None
    trace: str | None = None
    """Name of the trace below `/kv-eviction/requests`, where the request asked for one."""


class EvictionScheduler(Scheduler):
    """The stock scheduler with evictions; all scheduling decisions stay vLLM's.

    For each request: `add_request` decides whether it will be evicted and how many
    blocks it retains; the manager reserves them when the last prefill chunk is
    scheduled; `schedule` then swaps the blocks and attaches a `StepPlan` to the
    step's output. The freed count is known here, before the step runs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eviction_config = config_of(self.vllm_config)
        self._defaults = Defaults(self.eviction_config)
        measures = self.log_stats and self.eviction_config.metrics
        self._observations = Observations() if measures else None
        self.eviction_counters = EvictionCounters(observations=self._observations)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, EvictingManager), type(manager)
        self._manager = manager
        if self.eviction_config.debug.poison:
            self._manager.record_freed = True
            # vLLM's kernels multiply unwritten slots by zero, which NaN survives: let vLLM
            # clear each block when it is handed out again.
            self.needs_kv_cache_zeroing = self._manager._record_new_block_ids = True
        self._candidates: dict[str, Candidate] = {}
        self._forgotten: list[str] = []
        self._reports: dict[str, EvictionReport] = {}
        self._last_gauges = 0.0
        self._last_log, self._last_line = time.monotonic(), str(self.eviction_counters)
        config = self.eviction_config
        logger.info(
            "KV eviction: policy %s, budget %s, granularity %s; pages of %d tokens, "
            "pool of %d blocks of %d pages (layers x KV heads)",
            config.policy,
            config.budget,
            config.build_policy(config.policy).granularity,
            self.block_size,
            self.block_pool_size,
            self.pages_per_block,
        )

    @property
    def block_pool_size(self) -> int:
        return self._manager.block_pool.num_gpu_blocks - 1

    @property
    def pages_per_block(self) -> int:
        """Of the first worker, where several hold the heads or layers together."""
        (group,) = self.kv_cache_config.kv_cache_groups
        return len(group.layer_names) * group.kv_cache_spec.num_kv_heads

    # -- arrival ------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            self._consider(request)

    def _consider(self, request: Request) -> None:
        """Make the request a candidate, or count why it is none."""
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        try:
            wish = RequestOptions.resolve(self._defaults.current(), extra_args)
        except EvictionConfigError as error:
            # vLLM's front ends answer such a request with HTTP 400; one that does not must
            # not be able to end the engine.
            logger.warning("KV eviction of %s skipped: %s", request.request_id, error)
            self._skip(request, self.eviction_config.policy, "invalid_request")
            return
        if wish.report:
            num_blocks = cdiv(request.num_prompt_tokens, self.block_size)
            self._reports[request.request_id] = EvictionReport(
                wish.policy, request.num_prompt_tokens, num_blocks
            )
        candidate = self._make_candidate(request, wish)
        if isinstance(candidate, str):
            self._skip(request, wish.policy, candidate)
            return
        self._candidates[request.request_id] = candidate
        self._manager.expect_eviction(
            request,
            candidate.num_retained_blocks,
            request.num_prompt_tokens // self.block_size,
        )

    def _make_candidate(self, request: Request, wish: RequestOptions) -> Candidate | str:
        """A candidate, or the reason (a key of `SKIP_REASONS`) why the request is none."""
        config, num_tokens = self.eviction_config, request.num_prompt_tokens
        if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
            return "unsupported_request"
        if wish.policy == NONE:
            return "policy_none"
        if request.max_tokens <= 1:
            return "single_token"
        if num_tokens < max(config.min_prompt_tokens, self.block_size):
            return "prompt_too_short"
        policy = config.build_policy(wish.policy)
        model = self.vllm_config.model_config.hf_config
        prompt = map_prompt(num_tokens, request.mm_features, model)
        if not prompt.is_well_formed:
            return "unsupported_request"
        if not prompt.has_vision:
            if config.text_only == "keep":
                return "text_only"
            if policy.allocation.needs_vision:
                return "method_needs_vision"
        if policy.pooling.kind == "grid" and any(run.grid is None for run in prompt.vision):
            return "unknown_patch_grid"
        num_retained = wish.budget.retained_blocks(num_tokens, self.block_size)
        num_full = num_tokens // self.block_size
        is_certain = ~prompt.is_vision()[: num_full * self.block_size]
        is_certain[: config.sinks] = True
        guard = wish.budget.guard(num_tokens, int(is_certain.sum()), self.block_size)
        covers = num_retained >= num_full and guard is None
        if covers and not config.debug.evict_at_full_budget:
            return "budget_covers_prompt"
        if not self._manager.can_ever_fit(request, num_retained):
            return "pool_too_small"
        rows = voters(prompt, policy.row_sets, config.observation_window)
        return Candidate(wish, prompt, rows, num_retained, guard)

    def _skip(self, request: Request, policy: str, reason: str) -> None:
        self.eviction_counters.skip(policy, reason)
        if report := self._reports.get(request.request_id):
            report.skip_reason = reason
        logger.debug("KV eviction of %s skipped: %s", request.request_id, reason)

    # -- admission ----------------------------------------------------------------------

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[Any, int, int, bool]:
        blocks, num_hit, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        candidate = self._candidates.get(request.request_id)
        if candidate is None:
            return blocks, num_hit, boundary, diverged
        # What evicts is the step that ends the prompt, also of a preempted request whose whole
        # prompt, and more, may be cached by now. Where drafts are verified, vLLM fills a first
        # step of one token up with places for drafts, which would lie behind the prompt's end.
        limit = request.num_prompt_tokens - (2 if self.num_spec_tokens else 1)
        last_cached = candidate.voters.last_cached(self.eviction_config.prefix_reuse == "exact")
        if last_cached is not None:
            limit = min(limit, last_cached)
        if num_hit > limit:
            num_hit = limit // self.block_size * self.block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, num_hit)
        candidate.num_cached = num_hit
        return blocks, num_hit, boundary, diverged

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk with the prompt, where it would run on into generated tokens.

        vLLM asks this of every chunk. Only a preempted request has tokens behind its
        prompt when it prefills: they follow in the next chunk, over the compressed cache,
        as they were computed the first time.

        0, which vLLM skips, where a prefill that was admitted earlier needs the blocks.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        if request.request_id in self._candidates:
            left_of_prompt = request.num_prompt_tokens - num_computed_tokens
            if left_of_prompt > 0:
                num_new_tokens = min(num_new_tokens, left_of_prompt)
        may_take = self._manager.may_take(request.request_id, num_computed_tokens + num_new_tokens)
        return num_new_tokens if may_take else 0

    # -- statistics ---------------------------------------------------------------------

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics; at vLLM's interval the totals are logged, if they changed."""
        stats = super().make_stats(*args, **kwargs)
        now = time.monotonic()
        if stats is not None and self._observations is not None:
            # An idle server makes no statistics: its last ones must say that nothing is held.
            if now - self._last_gauges >= _GAUGE_SECONDS or not self.running:
                self._last_gauges = now
                num_requests, num_blocks = self._manager.num_held()
                self._observations.set("compressed_requests", num_requests)
                self._observations.set("blocks_held", num_blocks)
            self._observations.move_to(stats.waiting_lora_adapters)
        if stats is not None and now - self._last_log >= envs.VLLM_LOG_STATS_INTERVAL:
            self._last_log = now
            line = str(self.eviction_counters)
            if line != self._last_line:
                self._last_line = line
                logger.info("KV eviction: %s", line)
        return stats

    # -- each step ----------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        plan = StepPlan(
            released=self._manager.drain_released(),
            forgotten=self._forgotten,
            poisoned=self._manager.drain_freed(),
        )
        self._forgotten = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if request_id in self._candidates and not self._manager.is_compressed(request_id):
                self._plan_chunk(plan, self.requests[request_id], num_scheduled)
        if not self.use_v2_model_runner:  # which is sent whole requests when they are resumed
            for request_id in output.scheduled_encoder_inputs:
                request = self.requests[request_id]
                if request.num_preemptions:
                    plan.images[request_id] = request.mm_features
        plan.counters = self.eviction_counters.take_if_changed()
        if self.eviction_config.debug.check_integrity:
            check_integrity(self)
        return attach_plan(output, plan)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._manager.uncache_uncomputed(request)
        super()._preempt_request(request, *args, **kwargs)
        if candidate := self._candidates.get(request.request_id):
            self._forgotten.append(request.request_id)
            candidate.num_stale = candidate.num_pending

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        self._forget(request.request_id)
        if report := self._reports.pop(request.request_id, None):
            kv_params = {**(kv_params or {}), CONFIG_KEY: asdict(report)}
        return kv_params, ec_params

    def _forget(self, request_id: str) -> None:
        """The request ended or will not be evicted."""
        if self._candidates.pop(request_id, None) is not None:
            self._forgotten.append(request_id)
            self._manager.forget(request_id)

    def _plan_chunk(self, plan: StepPlan, request: Request, num_scheduled: int) -> None:
        """Add what a chunk of a candidate's prefill asks of the worker."""
        candidate = self._candidates[request.request_id]
        end = request.num_computed_tokens  # vLLM has advanced it by this chunk already
        start = end - num_scheduled
        rows = candidate.voters.rows
        first, last = np.searchsorted(rows, (start, end))
        if first < last:
            plan.observations.append(
                Observation(
                    request_id=request.request_id,
                    chunk_start=start,
                    first=int(first),
                    rows=rows[first:last],
                    num_rows=len(rows),
                )
            )
        if candidate.voters.every_row:
            plan.summings.append(
                RowSumming(
                    request_id=request.request_id,
                    method=candidate.wish.policy,
                    chunk_start=start,
                    num_keys=end,
                    blocks=self._manager.block_ids(request.request_id, end),
                    prompt=candidate.prompt,
                )
            )
        if end == request.num_prompt_tokens:
            plan.evictions.append(self._evict(request, candidate))

    def _evict(self, request: Request, candidate: Candidate) -> Eviction:
        swap = self._manager.swap(request.request_id)
        self.eviction_counters.gave_back(
            candidate.wish.policy, swap.num_freed - len(swap.new_blocks)
        )
        if swap.deferred:
            self.eviction_counters.deferred(candidate.wish.policy)
        if candidate.guard is None:
            num_retained = candidate.num_retained_blocks
            num_tail = request.num_prompt_tokens % self.block_size
            num_kept = num_retained * self.block_size + num_tail
            self._count(request, candidate, num_retained, num_kept)
        else:
            candidate.num_pending += 1
        return Eviction(
            request_id=request.request_id,
            method=candidate.wish.policy,
            prompt=candidate.prompt,
            voters=candidate.voters,
            num_cached=candidate.num_cached,
            guard=candidate.guard,
            traced_budget=str(candidate.wish.budget) if candidate.wish.trace else None,
            old_blocks=np.array(swap.old_blocks, dtype=np.int32),
            new_blocks=np.array(swap.new_blocks, dtype=np.int32),
            row_blocks=np.array(swap.row_blocks, dtype=np.int32),
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Before vLLM's own update, which may end the request and make its report.
        for outcome in outcomes_of(model_runner_output):
            if isinstance(outcome, Failure):
                self._fail(outcome)
                continue
            self.eviction_counters.record_outcome(outcome)
            if outcome.num_blocks is not None:
                self._trim(outcome, outcome.num_blocks)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _fail(self, failure: Failure) -> None:
        """End a request whose prompt could not be judged: its blocks are swapped already."""
        candidate = self._candidates.get(failure.request_id)
        if candidate is None:
            return  # it ended meanwhile
        self._skip(self.requests[failure.request_id], candidate.wish.policy, "policy_failed")
        # vLLM ends with an error what it finds here when it updates.
        self.grammar_compile_error_reqs.add(failure.request_id)

    def _trim(self, outcome: Outcome, num_retained: int) -> None:
        """Take back the blocks that a guarded eviction was given and did not need."""
        candidate = self._candidates.get(outcome.request_id)
        if candidate is None:
            return  # it ended, and all of its blocks went back
        candidate.num_pending -= 1
        if candidate.num_stale:
            candidate.num_stale -= 1
            return  # it was preempted since
        num_freed = self._manager.trim(outcome.request_id, outcome.first_block, num_retained)
        if num_freed is None:
            return
        self.eviction_counters.gave_back(candidate.wish.policy, num_freed)
        num_kept = sum(outcome.kept.values())
        self._count(self.requests[outcome.request_id], candidate, num_retained, num_kept)

    def _count(self, request: Request, candidate: Candidate, retained: int, num_kept: int) -> None:
        """Put an eviction that retained so many blocks, and tokens a head, on record."""
        num_tokens = request.num_prompt_tokens
        num_full = num_tokens // self.block_size
        num_blocks_before = cdiv(num_tokens, self.block_size)
        num_blocks = num_blocks_before - num_full + retained
        self.eviction_counters.evicted(candidate.wish.policy, num_tokens, num_kept)
        if report := self._reports.get(request.request_id):
            report.kept_tokens, report.blocks_after = num_kept, num_blocks
            report.trace = request.request_id if candidate.wish.trace else None
        logger.debug(
            "KV eviction of %s: %s, %s; %d of %d prompt tokens kept a head, blocks %d -> %d",
            request.request_id,
            candidate.wish.policy,
            candidate.wish.budget,
            num_kept,
            num_tokens,
            num_blocks_before,
            num_blocks,
        )


class AsyncEvictionScheduler(EvictionScheduler, AsyncScheduler):
    """The same over vLLM's scheduler that plans a step while the last one runs.

    A swap is right before the step that copies has run: every step of the device comes after it,
    and no block is read by position alone.
    """
