# SPDX-License-Identifier: Apache-2.0
"""Reports of evictions for users: counters, gauges, log lines, and the report in a response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_tgvkv.blocks.manager import EvictingManager
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.scheduler.candidate import Candidate
from vllm_tgvkv.shared.counters import EvictionCounters
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.metrics import LAYERS, STATES, MetricsBuffer
from vllm_tgvkv.shared.plan import ChoiceOutcome, Outcome
from vllm_tgvkv.shared.report import (
    Cause,
    CutCause,
    CutReport,
    EvictionReport,
    MemoryReport,
    RecallReport,
)

logger = init_logger("vllm.tgvkv")

_REPORT = TypeAdapter(EvictionReport)

_GAUGE_SECONDS = 1.0
"""Interval of the gauges, which count all compressed requests."""


class Records:
    """Counts evictions, and reports on requests that ask for it."""

    def __init__(self, manager: EvictingManager, block_bytes: int, with_metrics: bool) -> None:
        """`block_bytes` is the size of a block on the first worker."""
        self.counters = EvictionCounters(metrics=MetricsBuffer() if with_metrics else None)
        self.reports: dict[str, EvictionReport] = {}
        """By request id, of unfinished requests that asked for one."""
        self._manager = manager
        self._block_bytes = block_bytes
        self._last_gauges = 0.0
        self._last_log, self._last_line = time.monotonic(), str(self.counters)

    def open_report(self, request: Request, options: RequestOptions) -> None:
        self.reports[request.request_id] = EvictionReport(
            options.policy,
            request.num_prompt_tokens,
            cdiv(request.num_prompt_tokens, self._manager.block_size),
            budget=options.budget.value,
            defer=options.defer,
            when=options.when,
            decode=options.decode,
            protected_tokens=min(options.protected, request.num_prompt_tokens),
            understood=options.understood,
        )

    def close_report(self, request_id: str) -> dict[str, Any] | None:
        """Return the report of a request that ended as plain data; None if there is none."""
        report = self.reports.pop(request_id, None)
        return None if report is None else asdict(report)

    def skip(self, request: Request, policy: str, reason: str) -> None:
        """Record that a request is not evicted; `reason` is a key of `SKIP_REASONS`."""
        self.counters.skip(policy, reason)
        if report := self.reports.get(request.request_id):
            report.skip_reason = reason
        logger.debug("KV eviction of %s skipped: %s", request.request_id, reason)

    def give_back(self, candidate: Candidate, num_blocks: int) -> None:
        """Record blocks that an eviction returned to the pool, the fresh ones deducted."""
        candidate.num_given_back += num_blocks
        self.counters.gave_back(candidate.options.policy, num_blocks)

    def cut(
        self,
        request: Request,
        candidate: Candidate,
        cut: Cut,
        num_before: int,
        num_retained: int,
        num_kept: int,
        is_first: bool,
    ) -> None:
        """Record a cut.

        Args:
            num_before: blocks that the request held.
            num_retained: blocks of the region.
            num_kept: tokens per head in the region, and the prompt's tokens in the tail.
            is_first: whether it is the request's first one, or the first since a preemption.
        """
        num_tokens, options = request.num_prompt_tokens, candidate.options
        num_answer = cut.at - num_tokens
        num_after = cdiv(cut.at, self._manager.block_size) - cut.num_replaced + num_retained
        cause: CutCause = "first" if is_first else "later"
        if options.when == "pressure":
            cause = "pressure"
        self.counters.cut(options.policy, cause)
        if is_first:
            self.counters.evicted(options.policy, num_tokens, num_kept)
        if report := self.reports.get(request.request_id):
            report.add_cut(CutReport(num_answer, num_before, num_after, num_kept, cause))
            report.memory = self._memory(request, candidate, cut, report.blocks_before, num_after)
            report.trace = request.request_id if options.trace else None
            report.sketch_blocks = candidate.num_sketch
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

    def restored(self, request: Request, candidate: Candidate) -> None:
        """Record that a request has its whole prompt back."""
        self.counters.restored(candidate.options.policy)
        self._came_back(request, "restored")

    def recalled(self, candidate: Candidate, outcome: ChoiceOutcome) -> None:
        """Record the tokens that a choice brings back."""
        assert outcome.num_recalled is not None
        self.counters.recalled(candidate.options.policy, outcome.num_recalled)
        if report := self.reports.get(outcome.request_id):
            report.recalls.append(RecallReport(outcome.num_answer, round(outcome.num_recalled, 2)))

    def recall_lost(self, candidate: Candidate, fault: str) -> None:
        """Record that what a request lacks does not come back any more."""
        self.counters.recall_lost(candidate.options.policy, fault)

    def sent(self, candidate: Candidate, num_blocks: int, num_whole: int) -> None:
        """Record the blocks that another server may read, and those of the whole request."""
        size = self._block_bytes
        self.counters.sent(candidate.options.policy, num_blocks * size, num_whole * size)

    def take_over(self, request: Request, report: Any) -> None:
        """Go on with the report of the server that cut the prompt, if the request asked for one."""
        if request.request_id in self.reports:
            with suppress(ValidationError):  # forged: then the report says what is known here
                self.reports[request.request_id] = _REPORT.validate_python(report)

    def preempted(self, request: Request) -> None:
        """Record that a preemption undoes the cuts of a request that only pressure cuts.

        Its next cut is at a later token, in place of the same ones.
        """
        report = self.reports.get(request.request_id)
        if report and report.cuts and report.cuts[-1].cause != "preempted":
            self._came_back(request, "preempted")

    def _came_back(self, request: Request, cause: Cause) -> None:
        if report := self.reports.get(request.request_id):
            num_tokens, num_computed = request.num_prompt_tokens, request.num_computed_tokens
            num_after = cdiv(num_computed, self._manager.block_size)
            num_before = report.blocks_after or num_after
            answer = num_computed - num_tokens
            report.add_cut(CutReport(answer, num_before, num_after, num_tokens, cause))

    def ended(self, candidate: Candidate) -> None:
        """Record the end of a request that only pressure would cut."""
        if not candidate.was_evicted:
            self.counters.stayed_whole(candidate.options.policy)

    def outcome(self, outcome: Outcome) -> None:
        """Record what only the worker knows of an eviction."""
        if outcome.is_first:
            self.counters.record_outcome(outcome)
        if report := self.reports.get(outcome.request_id):
            report.add_outcome(outcome)

    def update(
        self, stats: SchedulerStats, running: Sequence[Request], num_tier_blocks: int
    ) -> None:
        """Add the metrics to vLLM's statistics; log the totals at vLLM's interval."""
        now = time.monotonic()
        if (metrics := self.counters.metrics) is not None:
            # An idle server makes no statistics: its last ones must say that nothing is held.
            if now - self._last_gauges >= _GAUGE_SECONDS or not running:
                self._last_gauges = now
                manager = self._manager
                held = (manager.num_held_by(request.request_id) for request in running)
                metrics.set("running_blocks", sum(held))
                num_computed = (request.num_computed_tokens for request in running)
                metrics.set("running_tokens", sum(num_computed))
                names = filter(manager.is_compressed, manager.compressions)
                metrics.set("tier_blocks_held", num_tier_blocks)
                states = manager.states()
                for state in STATES:
                    metrics.set("requests_by_state", states[state], state)
                by_layers = (manager.num_held(), *manager.others.held(names))
                for layers, num_held in zip(LAYERS, by_layers, strict=True):
                    metrics.set("blocks_held", num_held, layers)
            metrics.move_to(stats.waiting_lora_adapters)
        if now - self._last_log >= envs.VLLM_LOG_STATS_INTERVAL:
            self._last_log = now
            line = str(self.counters)
            if line != self._last_line:
                self._last_line = line
                logger.info("KV eviction: %s", line)

    def _memory(
        self, request: Request, candidate: Candidate, cut: Cut, num_before: int, num_after: int
    ) -> MemoryReport:
        """Return what a request holds in all layers once it is cut.

        Args:
            num_before: blocks of the layers that are evicted, before the first cut.
            num_after: the same, after this one.
        """
        others, size = self._manager.others, self._block_bytes
        windows, states = others.windows(cut.at), others.states(request.request_id)
        drafts = others.num_drafting(cut.at)
        fixed = windows + states + drafts
        return MemoryReport(
            before=(num_before + fixed) * size,
            after=(num_after + fixed) * size,
            windows=windows * size,
            states=states * size,
            drafts=drafts * size,
            given_back=candidate.num_given_back * size,
        )
