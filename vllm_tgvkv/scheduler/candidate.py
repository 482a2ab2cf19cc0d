# SPDX-License-Identifier: Apache-2.0
"""Which requests are evicted, and how many blocks each of them retains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from vllm.config import ModelConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import NONE, EvictionConfig
from vllm_tgvkv.policies import Policy, Summaries
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.cuts import STAGES, Cut, Cuts, plan_cuts
from vllm_tgvkv.shared.plan import Choice, ColumnSumChunk, Eviction, Header, Observation
from vllm_tgvkv.shared.prompt import (
    CHOICE_ROWS,
    PRESSURE_ROWS,
    PromptMap,
    RowSet,
    Voters,
    map_prompt,
    prunes_videos,
    voters,
)


@dataclass
class Candidate:
    """A request that is evicted: at tokens that are known before, or when memory is short."""

    options: RequestOptions
    prompt: PromptMap
    kinds: tuple[RowSet, ...]
    """Row sets that its method reads."""
    voters: Voters
    """Rows that vote at a first cut that is known before."""
    cuts: Cuts
    guard: Guard | None
    cut: Cut | None
    """The next cut; under pressure, None until one is due."""
    num_answer_rows: int
    """Last rows of the answer that vote at all other cuts."""
    stages: tuple[int, ...] = ()
    """Blocks k to which pressure may cut the prompt, descending; () for other requests."""
    summaries: Summaries | None = None
    """How evicted tokens are summarised; None if they are dropped."""
    every: int = 0
    """Tokens between two choices of its tokens; 0 if what is evicted never comes back."""
    num_sketch: int = 0
    """Blocks of its region that hold a sketch of the prompt, so that it may."""
    weight: int = 1
    """How often its tokens count for the memory of a step's evictions."""
    choice: int | None = None
    """Tokens of the request that are computed at the next choice; None if there is none."""
    cut_in_step: int = 0
    """Step in which it was cut last."""
    num_cuts: int = 0
    """Cuts so far; a preemption undoes them."""
    num_cut: int = 0
    """Tokens at the last cut. Queries before it are not stored for the next one."""
    has_failed: bool = False
    """Whether its eviction failed, which ends it."""
    was_evicted: bool = False
    """Whether it was evicted at least once; a preemption undoes the eviction, not this."""
    num_cached: int = 0
    """Prompt tokens taken from the prefix cache instead of being computed."""
    num_given_back: int = 0
    """Blocks that its evictions gave back to the pool, what they retained deducted."""
    num_pending: int = 0
    """Guarded evictions whose outcome has not arrived yet."""
    num_stale: int = 0
    """Pending outcomes of evictions that a preemption undid. Steps are scheduled ahead, so the
    request may be evicted again before they arrive, even into a region that starts with the same
    block."""

    @property
    def voters_of_cut(self) -> Voters:
        """Rows that vote at the next cut.

        At later cuts and under pressure they are the newest ones since the cut before, in place of
        every row set of the method.
        """
        if self.chooses_next:
            assert self.choice is not None
            rows = np.arange(self.choice - self.num_choice_rows, self.choice)
            return Voters(dict.fromkeys(self.kinds, rows), rows, every_row=False)
        # The scheduler asks for every request in every step; comparing fields takes longer.
        if self.cut is None or self.cut is self.cuts.first:
            return self.voters
        first = max(self.cut.at - self.num_answer_rows, self.num_cut)
        rows = np.arange(first if self.kinds else self.cut.at, self.cut.at)
        return Voters(dict.fromkeys(self.kinds, rows), rows, every_row=False)

    @property
    def chooses_next(self) -> bool:
        """Whether its next choice comes before its next cut, and before the rows that vote then."""
        if self.choice is None or self.cut is None:
            return self.choice is not None
        return self.choice <= self.cut.at - self.num_answer_rows

    @property
    def next_at(self) -> int | None:
        """Tokens that are computed at its next cut or choice; None if none is known."""
        if self.chooses_next:
            return self.choice
        return None if self.cut is None else self.cut.at

    def votes_after(self, end: int) -> bool:
        """Return whether a choice comes next, and rows before `end` do not vote at it."""
        # As most steps end so, without an array.
        return self.chooses_next and end <= (self.choice or 0) - self.num_choice_rows

    @property
    def num_choice_rows(self) -> int:
        """Newest rows that vote at a choice, each at one only."""
        return min(CHOICE_ROWS, self.every)

    def most_cached(self, num_known: int, num_drafts: int) -> int:
        """Return the most tokens that the request may take from the prefix cache.

        The step that evicts must run, even if a preempted request has all of its tokens and more in
        the cache. Under pressure it is a later one.

        Args:
            num_known: tokens of the prompt and of the answer so far.
            num_drafts: tokens that the server drafts a step. vLLM pads a first step of one token
                with draft positions, which would lie after the tokens that the eviction sees.
        """
        if self.cuts.first is None:
            return num_known
        limit = self.cuts.first.at - 1
        if num_drafts:
            limit = min(limit - 1, num_known - 2)
        last_cached = self.voters.last_cached
        return limit if last_cached is None else min(limit, last_cached)

    @property
    def num_votes(self) -> int:
        """Tokens between the decision of a cut under pressure and the cut."""
        return self.num_answer_rows if self.kinds else 1

    @property
    def num_stored(self) -> int:
        """Queries that are stored until a cut under pressure; none if nobody votes."""
        return self.num_answer_rows if self.kinds else 0

    def num_kept(self, cut: Cut, block_size: int) -> int:
        """Return the tokens per head that a cut without a guard keeps of the prompt."""
        num_filled, has_vision = cut.num_retained, self.prompt.has_vision
        if self.summaries is not None:
            kinds = self.summaries.kinds(cut.num_retained, cut.num_replaced, has_vision)
            num_filled -= len(kinds)
        num_filled -= self.num_sketch
        num_tail = max(self.prompt.num_tokens - cut.num_replaced * block_size, 0)
        return num_filled * block_size + num_tail

    # -- what the worker is told --------------------------------------------------------

    def observation(
        self, request_id: str, start: int, end: int, stored: np.ndarray | None
    ) -> Observation | None:
        """Return the rows of a chunk that vote at the next cut; None if there are none.

        Args:
            start: first token of the chunk; `end` follows its last.
            stored: rows of the query pool that the request holds, int64.
        """
        rows = self.voters_of_cut.rows
        first, last = rows.searchsorted((start, end))
        if first == last:
            return None
        part = None if stored is None else stored[first:last]
        return Observation(request_id, chunk_start=start, rows=rows[first:last], stored=part)

    def column_sums(
        self, request_id: str, start: int, end: int, blocks: np.ndarray
    ) -> ColumnSumChunk:
        """Return a chunk whose rows are all summed; `blocks` hold the row up to its end."""
        return ColumnSumChunk(
            request_id=request_id,
            method=self.options.policy,
            chunk_start=start,
            num_keys=end,
            blocks=blocks,
            prompt=self.prompt.followed_by(self.options.defer),
        )

    def eviction(
        self,
        request_id: str,
        cut: Cut,
        old_blocks: np.ndarray,
        row_blocks: np.ndarray,
        stored: np.ndarray | None,
        is_whole: bool,
        tier_blocks: np.ndarray | None = None,
        header: Header | None = None,
    ) -> Eviction:
        """Return the next cut, whose blocks are swapped, for the worker.

        Args:
            old_blocks: block ids of the tokens before the swap, int32.
            row_blocks: block ids of the row after it, int32.
            stored: rows of the query pool with the queries of the rows that vote, int64.
            is_whole: whether the row was not compressed.
            tier_blocks: blocks of the tier for the prompt, if it goes there now.
            header: where the region is described, if it goes to another server.
        """
        return Eviction(
            request_id=request_id,
            method=self.options.policy,
            prompt=self.prompt,
            voters=self.voters_of_cut,
            num_cached=self.num_cached if is_whole else 0,
            guard=self.guard,
            traced_budget=str(self.options) if self.options.trace else None,
            old_blocks=old_blocks,
            new_blocks=row_blocks[: cut.num_retained],
            row_blocks=row_blocks,
            num_answer=cut.at - self.prompt.num_tokens,
            num_replaced=cut.num_replaced,
            is_first=self.num_cuts == 0,
            is_whole=is_whole,
            stored=stored,
            is_reported=self.options.report,
            protected=self.options.protected,
            num_sketch=self.num_sketch,
            tier_blocks=tier_blocks,
            header=header,
        )

    def choice_of(
        self, request_id: str, stored: np.ndarray, row_blocks: np.ndarray, num_replaced: int
    ) -> Choice:
        """Return the next choice, for the worker.

        Args:
            stored: rows of the query pool with the queries of the rows that vote, int64.
            row_blocks: block ids of the row, int32.
            num_replaced: blocks of the row that its region replaces.
        """
        assert self.choice is not None
        rows, tail = self.voters_of_cut.rows, row_blocks[num_replaced:]
        return Choice(request_id, self.choice, rows, stored, tail)

    # -- its life -----------------------------------------------------------------------

    def advance(self) -> None:
        """Go on to the cut after the next one, which is made now."""
        assert self.cut is not None
        self.choice = self.cut.at if self.every else None
        if self.choice is not None:
            self.choose_later()
        self.was_evicted = True
        self.num_cuts += 1
        self.num_cut = self.cut.at
        self.cut = self.cuts.after(self.cut)

    def arrive(self, at: int) -> None:
        """Go on after the first cut, which another server made with `at` tokens computed."""
        self.was_evicted, self.num_cuts, self.num_cut = True, 1, at
        first = self.cuts.first
        self.cut = None if first is None else self.cuts.after(first)

    def choose_later(self) -> None:
        """Go on to the choice after the next one; the last tokens would serve no other."""
        assert self.choice is not None
        self.choice += self.every
        if self.choice + 1 >= self.cuts.longest:
            self.choice = None

    def restart(self) -> None:
        """Begin again after a preemption, with the whole cache."""
        self.choice = None
        self.cut, self.num_cut, self.num_cuts, self.num_given_back = self.cuts.first, 0, 0, 0


def make_candidate(
    request: Request,
    options: RequestOptions,
    config: EvictionConfig,
    block_size: int,
    model: ModelConfig,
    max_model_len: int,
    num_sketch: Callable[[int], int] = lambda num_tokens: 0,
) -> Candidate | str:
    """Return a candidate, or the key of `SKIP_REASONS` why the request is not evicted.

    `num_sketch` returns the blocks of a sketch, given its number of tokens.
    """
    num_tokens = request.num_prompt_tokens
    longest = min(num_tokens + request.max_tokens, max_model_len)
    longest_answer = longest - num_tokens
    is_short = num_tokens < config.min_prompt_tokens
    if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
        return "unsupported_request"
    if options.policy == NONE:
        return "policy_none"
    is_late = options.when == "pressure"
    if longest_answer <= 1 or (longest_answer <= options.defer + 1 and not is_late):
        return "answer_too_short" if longest_answer > 1 or options.defer else "single_token"
    if num_tokens < block_size or (is_short and options.ceiling is None):
        return "prompt_too_short"
    policy = config.build_policy(options.policy)
    prompt = map_prompt(num_tokens, request.mm_features, model.hf_config, prunes_videos(model))
    if reason := _refused_prompt(prompt, policy, config):
        return reason
    num_full = num_tokens // block_size
    # At least one token is judged, for methods that compare tokens after the sinks.
    options = replace(options, protected=min(options.protected, num_tokens - 1))
    least = _least_blocks(options, config, policy, prompt, block_size)
    recall = config.recall if options.recall else None
    every, sketch = 0, 0
    if recall is not None:
        every, sketch = recall.every, num_sketch(num_full * block_size)
    if is_late:
        cuts = Cuts((), None, block_size, longest)
        late = _late_candidate(options, prompt, policy, cuts, least, sketch)
        return "budget_covers_prompt" if late is None else replace(late, every=every)
    # A budget `auto` counts on text and sinks being kept.
    is_certain = ~prompt.is_vision()[: num_full * block_size]
    is_certain[: max(config.sinks, options.protected)] = True
    guard = options.budget.guard(num_tokens, int(is_certain.sum()), block_size)
    if guard is not None:
        guard = replace(guard, least_blocks=max(guard.least_blocks, least))
    # Of a short prompt only the ceiling evicts, as the answer grows.
    evictions = [(options.defer, options.budget), *options.later]
    scheduled = [
        (n, min(max(budget.retained_blocks(num_tokens, block_size), least) + sketch, num_full))
        for n, budget in evictions
    ]
    if is_short:
        scheduled[0] = options.defer, num_full
    ceiling = options.ceiling and options.ceiling.at_least(least * block_size)
    cuts = plan_cuts(num_tokens, scheduled, ceiling, block_size, longest)
    first = cuts.scheduled[0]
    covers_prompt = first.num_retained >= num_full and guard is None
    # A first cut that keeps everything is only made for the sake of those that follow.
    serves = cuts.after(first) is not None or config.debug.evict_at_full_budget
    if covers_prompt and not serves:
        return "prompt_too_short" if is_short else "budget_covers_prompt"
    weight = 1 if guard is None else config.auto_weight(policy)
    kinds, num_rows = policy.row_sets, config.num_answer_rows
    rows = voters(prompt, kinds, config.observation_window, options.defer)
    more = num_rows, (), policy.summaries, every, sketch, weight
    return Candidate(options, prompt, kinds, rows, cuts, guard, first, *more)


def _late_candidate(
    options: RequestOptions, prompt: PromptMap, policy: Policy, cuts: Cuts, least: int, sketch: int
) -> Candidate | None:
    """Return a candidate that only pressure cuts; None if its budget covers the prompt.

    No cut leaves less than `least` blocks and the sketch.
    """
    stages = options.budget.stages(STAGES, prompt.num_tokens, cuts.block_size, least)
    num_full = prompt.num_tokens // cuts.block_size
    stages = tuple(k + sketch for k in stages if k + sketch < num_full)
    nobody = Voters({}, np.empty(0, np.int64), every_row=False)
    more = options.defer or PRESSURE_ROWS, stages, policy.summaries, 0, sketch
    found = Candidate(options, prompt, policy.row_sets, nobody, cuts, None, None, *more)
    return found if stages else None


def _least_blocks(
    options: RequestOptions,
    config: EvictionConfig,
    policy: Policy,
    prompt: PromptMap,
    block_size: int,
) -> int:
    """Return the blocks that hold a prompt's protected tokens, floor and summaries; 0 for none."""
    if not options.protected:
        return 0
    num_pages = cdiv(options.protected, block_size) + config.floor_pages
    if policy.summaries is None:
        return num_pages
    num_summaries = len(policy.summaries.kinds(num_pages + 2, num_pages + 3, prompt.has_vision))
    return num_pages + num_summaries


def _refused_prompt(prompt: PromptMap, policy: Policy, config: EvictionConfig) -> str | None:
    if not prompt.is_well_formed:
        return "unsupported_request"
    if not prompt.has_vision and config.text_only == "keep":
        return "text_only"
    if not prompt.has_vision and policy.allocation.needs_vision:
        return "method_needs_vision"
    if policy.pooling.kind == "grid" and any(span.grid is None for span in prompt.vision):
        return "unknown_patch_grid"
    return None
