# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with evictions: choose requests, reserve and swap blocks, plan each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_tgvkv.blocks.integrity import check_integrity
from vllm_tgvkv.blocks.manager import connect_managers, record_freed_and_new, uncache_uncomputed
from vllm_tgvkv.config.defaults import Defaults
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import CONFIG_KEY, config_of
from vllm_tgvkv.policies.uniform import UniformAllocation
from vllm_tgvkv.scheduler.candidate import Candidate, make_candidate
from vllm_tgvkv.scheduler.chunks import ChunkLimits
from vllm_tgvkv.scheduler.handovers import Handovers
from vllm_tgvkv.scheduler.pressure import Pressure
from vllm_tgvkv.scheduler.query_rows import QueryRows
from vllm_tgvkv.scheduler.recalls import Recalls
from vllm_tgvkv.scheduler.records import Records
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError
from vllm_tgvkv.shared.plan import (
    ChoiceOutcome,
    Eviction,
    Failure,
    Outcome,
    Restored,
    StepPlan,
    attach_plan,
    outcomes_of,
)
from vllm_tgvkv.shared.vllm_versions import end_with_error

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )

logger = init_logger("vllm.tgvkv")

_LOOK_SECONDS = 1e-3
"""Between two looks whether blocks were read, while nothing else is to do. vLLM waits as long while
blocks are on their way here."""

_LONG_BLOCK = 256
"""Tokens. A hybrid model has longer blocks than this unless `--block-size` is given."""


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
        managers = self.kv_cache_manager.coordinator.single_type_managers
        num_steps = self.vllm_config.max_concurrent_batches
        self.group, self.manager, self.other_managers = connect_managers(
            managers, num_steps, self.num_lookahead_tokens, self.max_model_len
        )
        self.tokens_per_block = self.manager.block_size
        """N. vLLM's own `block_size` is a multiple of it if there are groups of other layers."""
        if (least := config.missed_ceiling(self.tokens_per_block)) is not None:
            # vLLM makes a hybrid's blocks longer once it is loaded.
            raise UnsupportedByEvictionError(
                f"--kv-eviction does not work with decode.max_tokens: "
                f"{config.decode and config.decode.max_tokens} and blocks of "
                f"{self.tokens_per_block} tokens, which this model has: give at least {least} "
                "tokens, a smaller --block-size, or leave out --kv-eviction"
            )
        if self.tokens_per_block > _LONG_BLOCK:
            logger.warning(
                "KV eviction: this model's blocks have %d tokens, and every layer and head keeps "
                "%d tokens or more; --block-size 16 lets it keep less",
                self.tokens_per_block,
                config.least_ceiling(self.tokens_per_block),
            )
        if config.debug.poison:
            record_freed_and_new(self.manager, self.other_managers)
            self.needs_kv_cache_zeroing = True  # NaN survives vLLM's products with zero
        self.candidates: dict[str, Candidate] = {}
        """Requests that are evicted, now or later, by id."""
        self.query_rows = QueryRows(config.num_query_rows)
        self._spec = self.kv_cache_config.kv_cache_groups[self.group].kv_cache_spec
        recall = config.recall
        num_tier_blocks = recall.num_tier_blocks(self.vllm_config, self._spec) if recall else 0
        self.recalls = Recalls(num_tier_blocks)
        self.manager.num_watermark = self.kv_cache_manager.watermark_blocks
        self.pressure = Pressure(
            self.manager,
            self.candidates,
            self.query_rows,
            self.max_model_len,
            step_tokens=self.max_num_scheduled_tokens,
            max_running=self.max_num_running_reqs,
            num_drafts=self.num_spec_tokens,
        )
        self._most_cut_tokens = self.max_model_len + self.max_num_scheduled_tokens
        self.sets_memory_aside = not current_platform.is_cpu()
        """Whether the worker has no other memory for evictions than it set aside at start."""
        self._chunk_limits = ChunkLimits(
            self.manager,
            self.query_rows,
            most_cut_tokens=self._most_cut_tokens,
            state_interval=self.block_size if self.manager.others.caches_states else None,
        )
        self._read: list[KVCacheBlock] = []
        """Blocks that this step's worker reads for the last time."""
        # Bytes of a block on the first worker, with the padding that some groups may have.
        block_bytes = max(each.block_stride for each in self.kv_cache_config.kv_cache_tensors)
        self.records = Records(self.manager, block_bytes, self.log_stats)
        self._defaults = Defaults(config)
        self.handovers: Handovers | None = None
        self._cut: set[str] = set()
        """Requests that were cut since the connector was last told."""
        if self.connector is not None:
            self.handovers = Handovers(self, self._candidate)
            self.connector.scheduling = self.handovers
        if self.defer_block_free:
            self.manager.free_later = self._free_later
        self._forgotten: list[str] = []
        """Requests whose observation the worker may drop."""
        budget, defer = config.first_eviction(config.policy)
        policy = config.build_policy(config.policy)
        shortest = budget.shortest_prompt(config.floor_pages + 1, self.tokens_per_block)
        divides = not isinstance(policy.allocation, UniformAllocation)
        evicted = max(config.min_prompt_tokens, budget.tokens or 0)
        if divides and (shortest is None or shortest > evicted):
            logger.warning(
                "KV eviction: %s gives every layer and head the same number of tokens in %s, where "
                "a budget of %s keeps no more blocks of %d tokens than floor_pages (%d); give a "
                "larger budget or a smaller --block-size if they are to differ",
                config.policy,
                f"prompts of fewer than {shortest} tokens" if shortest else "every prompt",
                budget,
                self.tokens_per_block,
                config.floor_pages,
            )
        is_late = config.when == "pressure"
        logger.info(
            "KV eviction: policy %s, budget %s, %s, granularity %s; pages of %d tokens, pool of %d "
            "blocks of %d pages (layers x KV heads)",
            config.policy,
            budget,
            "when memory is short" if is_late else f"after {defer} tokens of the answer",
            policy.granularity,
            self.tokens_per_block,
            self.manager.block_pool.num_gpu_blocks - 1,  # without the null block
            self.pages_per_block,
        )
        if budget.doubt:
            logger.warning("KV eviction: budget %s is %s%s", budget.value, budget, budget.doubt)

    @property
    def pages_per_block(self) -> int:
        """Pages of a block on the first worker, if several share the heads or layers."""
        group = self.kv_cache_config.kv_cache_groups[self.group]
        return len(group.layer_names) * group.kv_cache_spec.num_kv_heads

    # -- arrival ------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        if is_new:
            # Before the connector hears of it: a prompt from another server may not fit.
            self._consider(request)
        super().add_request(request)
        if is_new and request.is_finished():  # its answer is complete, and delivered with the step
            self.waiting.remove_requests([request])

    def _consider(self, request: Request) -> None:
        """Make the request a candidate, or record the reason why not."""
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        try:
            defaults = self._defaults.current()
            options = RequestOptions.resolve(defaults, extra_args, self.tokens_per_block)
        except EvictionConfigError as error:
            # vLLM's front ends answer such a request with HTTP 400. A request from elsewhere
            # must not end the engine.
            logger.warning("KV eviction of %s skipped: %s", request.request_id, error)
            self.records.skip(request, self.eviction_config.policy, "invalid_request")
            return
        if options.report:
            self.records.open_report(request, options)
        handovers = self.handovers
        if handovers is None:
            found, num_header = self._candidate(request, options), 0
        else:
            found, num_header = handovers.consider(request, options)
        if isinstance(found, str):
            self.records.skip(request, options.policy, found)
        else:
            self.candidates[request.request_id] = found
            self.pressure.arrive(request.request_id, found)
            cached = self._most_cached(request, found)
            self.manager.expect(request, found.cut, cached, num_header)
        if handovers is not None:
            handovers.accept(request, options)

    def _candidate(self, request: Request, options: RequestOptions) -> Candidate | str:
        """Return a candidate, or the key of `SKIP_REASONS` why the request is not evicted."""
        found = make_candidate(
            request,
            options,
            self.eviction_config,
            self.tokens_per_block,
            self.vllm_config.model_config,
            self.max_model_len,
            self._num_sketch_blocks,
        )
        if isinstance(found, str):
            return found
        if not self.sets_memory_aside:
            found.weight = 1
        if found.cut is not None and found.weight * found.cut.at > self._most_cut_tokens:
            return "auto_too_long"
        num_header = self.handovers.num_header(request, found) if self.handovers else 0
        fits = self.manager.can_ever_fit(found.cuts, num_header)
        return found if fits else "pool_too_small"

    def _num_sketch_blocks(self, num_tokens: int) -> int:
        recall = self.eviction_config.recall
        return 0 if recall is None else recall.num_sketch_blocks(num_tokens, self._spec)

    # -- admission ----------------------------------------------------------------------

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Shorten a hit that would cover observation rows or the end of the prompt."""
        if self.handovers is not None and self.handovers.is_coming(request.request_id):
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
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
        return candidate.most_cached(request.num_tokens, self.num_spec_tokens)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the tokens of a chunk; 0, which vLLM skips, if the request has to wait.

        vLLM asks this for every chunk, and for every step of a decoding request.
        """
        start, candidate = num_computed_tokens, self.candidates.get(request.request_id)
        num_new = super()._reserve_prefill_lookahead(request, start, num_new_tokens)
        return self._chunk_limits.limit(request, candidate, start, num_new)

    # -- each step ----------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._chunk_limits.begin_step()
        if self._read:
            self.kv_cache_manager.block_pool.free_blocks(self._read)
            self._read = []
        restored = self._relieve() if self.eviction_config.keeps_positions else []
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        self.query_rows.end_step(scheduled)
        self._chunk_limits.end_step(scheduled)
        released, freed = self.manager.drain()
        plan = StepPlan(released, restored, self._forgotten, poisoned=freed)
        self._forgotten = []
        if self.handovers is not None:
            new = (self.requests[each.req_id] for each in output.scheduled_new_reqs)
            self._free_later(self.handovers.plan(plan, new), ahead=not scheduled)
            if not scheduled and not self.has_unfinished_requests():
                # Others read blocks of requests that ended. vLLM would look again at once, and the
                # engine and its workers take the cores that the transfer needs.
                time.sleep(_LOOK_SECONDS)
        for request_id, num_scheduled in scheduled.items():
            candidate = self.candidates.get(request_id)
            if candidate is not None and candidate.next_at is not None:
                self._plan_chunk(plan, self.requests[request_id], candidate, num_scheduled)
        plan.unrecallable = self.recalls.drain()  # also of those that lost them in this step
        if not self.use_v2_model_runner:  # which is sent whole requests when they are resumed
            for request_id in output.scheduled_encoder_inputs:
                request = self.requests[request_id]
                if request.num_preemptions:
                    plan.images[request_id] = request.mm_features
        plan.counters = self.records.counters.take_if_changed()
        if self.eviction_config.debug.check_integrity:
            self.recalls.check(set(filter(self.manager.is_compressed, self.candidates)))
            held = [*self._read, *(block for _, blocks in self.deferred_frees for block in blocks)]
            check_integrity(self.manager, self.other_managers, self.requests.keys(), held)
        return attach_plan(output, plan)

    def _relieve(self) -> list[Restored]:
        """Let requests shrink if memory is short, or give one its prompt back if it is not."""
        request = self.pressure.begin_step(self.running, self.waiting)
        if request is None:
            return []
        self.recalls.end(request.request_id)
        self.query_rows.give_back([request.request_id])  # of a choice that will not be made
        self.candidates[request.request_id].choice = None
        self.records.restored(request, self.candidates[request.request_id])
        return [Restored(request.request_id, self.manager.block_ids(request.request_id))]

    def _plan_chunk(
        self, plan: StepPlan, request: Request, candidate: Candidate, num_scheduled: int
    ) -> None:
        """Add the worker's part in a chunk of a candidate before its next cut."""
        end = request.num_computed_tokens  # vLLM has advanced it by this chunk already
        if candidate.votes_after(end):
            return
        start = end - num_scheduled
        stored = self.query_rows.of(request.request_id)
        if (rows := candidate.observation(request.request_id, start, end, stored)) is not None:
            plan.observations.append(rows)
        if candidate.chooses_next:
            self._plan_choice(plan, request, candidate, stored)
            return
        if candidate.voters_of_cut.every_row:
            blocks = self.manager.block_ids(request.request_id, end)
            plan.summings.append(candidate.column_sums(request.request_id, start, end, blocks))
        assert candidate.cut is not None
        if end == candidate.cut.at:
            plan.evictions.append(self._evict(request, candidate, candidate.cut))

    def _plan_choice(
        self, plan: StepPlan, request: Request, candidate: Candidate, stored: np.ndarray | None
    ) -> None:
        """Let the worker choose a request's tokens again, if this chunk ends where it is due."""
        if request.num_computed_tokens != candidate.choice:
            return
        request_id = request.request_id
        if stored is not None:
            row_blocks = self.manager.block_ids(request_id, candidate.choice)
            num_replaced = self.manager.compressions[request_id].num_replaced
            plan.choices.append(candidate.choice_of(request_id, stored, row_blocks, num_replaced))
            self.query_rows.give_back([request_id])
        candidate.choose_later()

    def _evict(self, request: Request, candidate: Candidate, cut: Cut) -> Eviction:
        """Swap the blocks of the candidate's next cut; return what the worker has to do."""
        request_id, manager = request.request_id, self.manager
        old_blocks = manager.block_ids(request_id, cut.at)
        num_before = manager.num_held_by(request_id)
        is_whole = not manager.is_compressed(request_id)
        is_first = candidate.num_cuts == 0
        if manager.compressions[request_id].deferred:
            self.records.counters.deferred(candidate.options.policy)
        self.records.give_back(candidate, manager.swap(request_id))
        row_blocks, stored = manager.block_ids(request_id), self.query_rows.of(request_id)
        tier_blocks = self._keep_for_recall(request_id, candidate, cut) if is_whole else None
        header = None
        if self.handovers is not None:
            header = self.handovers.header_of(request_id)
            self._cut.add(request_id)
            self.connector.stop_storing(request_id)
        more = stored, is_whole, tier_blocks, header
        eviction = candidate.eviction(request_id, cut, old_blocks, row_blocks, *more)
        # Free from now on: the rows are read in this step, and written by later ones.
        self.query_rows.give_back([request_id])
        candidate.advance()
        if not self.recalls.has(request_id):
            candidate.choice = None
        self.pressure.made(request_id)
        manager.expect(request, candidate.cut)
        if candidate.guard is None:
            num_kept = candidate.num_kept(cut, self.tokens_per_block)
            sizes = num_before, cut.num_retained, num_kept
            self.records.cut(request, candidate, cut, *sizes, is_first=is_first)
        else:
            candidate.num_pending += 1
        return eviction

    def _keep_for_recall(
        self, request_id: str, candidate: Candidate, cut: Cut
    ) -> np.ndarray | None:
        """Return blocks of the tier for a prompt that is cut, if it may be recalled."""
        if not candidate.every:
            return None
        blocks, losing = self.recalls.begin(request_id, cut.num_replaced)
        for name in losing:
            self._lose_recall(name, "full")
        return blocks

    def _lose_recall(self, request_id: str, fault: str) -> None:
        """Let a request go on with the tokens that it has."""
        candidate = self.candidates[request_id]
        self.recalls.end(request_id)
        if candidate.chooses_next:
            self.query_rows.give_back([request_id])
        candidate.choice = None
        self.records.recall_lost(candidate, fault)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # Before vLLM's own update, which may end the request and return its report.
        for outcome in outcomes_of(model_runner_output):
            if isinstance(outcome, Failure):
                self._fail(outcome)
                continue
            if isinstance(outcome, ChoiceOutcome):
                self._recalled(outcome)
                continue
            if outcome.num_retained is not None:
                self._trim(outcome, outcome.num_retained)
            self.records.outcome(outcome)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.handovers is not None:
            self.handovers.deliver(outputs)
        return outputs

    def _recalled(self, outcome: ChoiceOutcome) -> None:
        """Record how many tokens a choice brings back, or that the tier failed."""
        request_id, candidate = outcome.request_id, self.candidates.get(outcome.request_id)
        if candidate is None:
            return  # it ended meanwhile
        if outcome.num_recalled is None:
            if self.recalls.has(request_id):
                self._lose_recall(request_id, "failed")
            return
        if outcome.num_recalled:
            self.recalls.recalled(request_id)
        self.records.recalled(candidate, outcome)

    def _fail(self, failure: Failure) -> None:
        """End a request whose prompt could not be judged: its blocks are swapped already."""
        candidate = self.candidates.get(failure.request_id)
        if candidate is None:
            return  # it ended meanwhile
        candidate.has_failed = True
        policy = candidate.options.policy
        self.records.skip(self.requests[failure.request_id], policy, "policy_failed")
        message = f"KV eviction by the method {policy!r} failed; the server's log has the reason"
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
        self.records.give_back(candidate, num_freed)
        request, cut = self.requests[outcome.request_id], candidate.cuts.first
        assert cut is not None, "only a cut that is known before has a guard"
        num_before, num_kept = cdiv(cut.at, self.tokens_per_block), sum(outcome.kept.values())
        self.records.cut(request, candidate, cut, num_before, num_retained, num_kept, is_first=True)

    # -- end of a request ---------------------------------------------------------------

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        uncache_uncomputed((self.manager, *self.other_managers), request)
        candidate = self.candidates.get(request.request_id)
        if candidate is not None and candidate.stages:
            self.records.preempted(request)  # vLLM forgets next what is computed
        super()._preempt_request(request, *args, **kwargs)
        if candidate is not None:
            self._forgotten.append(request.request_id)
            self._chunk_limits.forget(request.request_id)
            self.query_rows.give_back([request.request_id])
            self.pressure.undo(request.request_id)
            self.recalls.end(request.request_id)
            candidate.restart()
            self.manager.expect(request, candidate.cut)
            candidate.num_stale = candidate.num_pending

    def _free_request(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        if candidate := self.candidates.pop(request.request_id, None):
            was_counted = candidate.was_evicted or candidate.has_failed
            if candidate.stages:
                self.records.ended(candidate)
            elif candidate.options.defer and not was_counted:
                self.records.skip(request, candidate.options.policy, "answer_too_short")
            self.pressure.end(request.request_id)
            self.recalls.end(request.request_id)
            self._forgotten.append(request.request_id)
            self._chunk_limits.forget(request.request_id)
            self.query_rows.give_back([request.request_id])
            if request.request_id not in self.requests:
                self.manager.forget(request.request_id)
        if self.handovers is not None:
            self.handovers.forget(request.request_id)
        if report := self.records.close_report(request.request_id):
            kv_params = {**(kv_params or {}), CONFIG_KEY: report}
        return kv_params, ec_params

    def _free_blocks(self, request: Request) -> None:
        """Free the blocks of a request that ended; later, if a connector reads or writes them."""
        super()._free_blocks(request)
        if request.request_id not in self.candidates:
            self.manager.forget(request.request_id)

    # -- prompts that go from server to server ------------------------------------------

    def _free_later(self, blocks: Sequence[KVCacheBlock], ahead: bool = False) -> None:
        """Free blocks once the steps that may read them have run.

        Args:
            ahead: whether the next step that is not empty reads them, too.
        """
        if not blocks:
            return
        if self.defer_block_free:
            self.deferred_frees.append((self.sched_step_seq + ahead, list(blocks)))
        else:
            self._read += blocks

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Tell the connector of cuts as of preemptions.

        It then ends its copies of the requests' blocks before this step, which is the first to
        write to those that a cut gave back.
        """
        cut, self._cut = self._cut, set()
        if cut:
            ids = cut.union(scheduler_output.preempted_req_ids or ())
            scheduler_output = replace(scheduler_output, preempted_req_ids=ids)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        is_failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        if self.handovers is not None and self.handovers.is_coming(request.request_id):
            self.handovers.end(request, is_failed)

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        assert self.handovers is not None
        others = failed_req_ids - self.handovers.fail(failed_req_ids)
        return super()._handle_failed_recving(others)

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        assert self.handovers is not None
        holders = self.handovers.holders(invalid_block_ids)
        self.handovers.fail(holders)
        others = invalid_block_ids.difference(*holders.values())
        return super()._handle_invalid_blocks(others, num_scheduled_tokens) if others else set()

    # -- statistics ---------------------------------------------------------------------

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Return vLLM's statistics with the metrics."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.records.update(stats, self.running, self.recalls.num_held)
        return stats


class AsyncEvictionScheduler(EvictionScheduler, AsyncScheduler):
    """The same over vLLM's scheduler that plans a step while the last one runs.

    Blocks may be swapped before the step that copies them has run: every step of the device comes
    after it, and no block is read by position alone.
    """
