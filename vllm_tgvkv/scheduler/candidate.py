# SPDX-License-Identifier: Apache-2.0
"""Which requests are evicted, and how many blocks each of them retains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PretrainedConfig
from vllm.v1.request import Request

from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import NONE, EvictionConfig
from vllm_tgvkv.policies import Summaries
from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.cuts import Cut, Cuts, plan_cuts
from vllm_tgvkv.shared.prompt import PromptMap, Voters, map_prompt, voters


@dataclass
class Candidate:
    """A request that is evicted at the end of its prefill, or after some tokens of its answer."""

    options: RequestOptions
    prompt: PromptMap
    voters: Voters
    """Rows that vote at the first cut."""
    cuts: Cuts
    guard: Guard | None
    cut: Cut | None
    """The next cut."""
    num_answer_rows: int
    """Last rows of the answer that vote at later cuts."""
    summaries: Summaries | None = None
    """How evicted tokens are summarised; None if they are dropped."""
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
        """Rows that vote at the next cut: at later ones, the last since the cut before.

        They take the place of every row set of the method.
        """
        # The scheduler asks for every request in every step; comparing fields takes longer.
        if self.cut is None or self.cut is self.cuts.first:
            return self.voters
        kinds = self.voters.kinds
        first = max(self.cut.at - self.num_answer_rows, self.num_cut)
        rows = np.arange(first if kinds else self.cut.at, self.cut.at)
        return Voters(dict.fromkeys(kinds, rows), rows, every_row=False)

    def num_summaries(self, cut: Cut) -> int:
        """Return the blocks that a cut fills with summaries, of those that it retains."""
        if self.summaries is None:
            return 0
        has_vision = self.prompt.has_vision
        return len(self.summaries.kinds(cut.num_retained, cut.num_replaced, has_vision))

    def advance(self) -> None:
        """Go on to the cut after the next one, which is made now."""
        assert self.cut is not None
        self.num_cut = self.cut.at
        self.cut = self.cuts.after(self.cut)

    def restart(self) -> None:
        """Begin again with the first cut, after a preemption."""
        self.cut, self.num_cut, self.num_given_back = self.cuts.first, 0, 0


def make_candidate(
    request: Request,
    options: RequestOptions,
    config: EvictionConfig,
    block_size: int,
    model: PretrainedConfig,
    max_model_len: int,
) -> Candidate | str:
    """Return a candidate, or the key of `SKIP_REASONS` why the request is not evicted."""
    num_tokens = request.num_prompt_tokens
    longest = min(num_tokens + request.max_tokens, max_model_len)
    if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
        return "unsupported_request"
    if options.policy == NONE:
        return "policy_none"
    if longest - num_tokens <= options.defer + 1:
        return "answer_too_short" if options.defer else "single_token"
    is_short = num_tokens < config.min_prompt_tokens
    if num_tokens < block_size or (is_short and options.ceiling is None):
        return "prompt_too_short"
    policy = config.build_policy(options.policy)
    prompt = map_prompt(num_tokens, request.mm_features, model)
    if not prompt.is_well_formed:
        return "unsupported_request"
    if not prompt.has_vision:
        if config.text_only == "keep":
            return "text_only"
        if policy.allocation.needs_vision:
            return "method_needs_vision"
    if policy.pooling.kind == "grid" and any(span.grid is None for span in prompt.vision):
        return "unknown_patch_grid"
    num_retained = options.budget.retained_blocks(num_tokens, block_size)
    num_full = num_tokens // block_size
    if is_short:  # only the ceiling evicts, once the answer has reached it
        num_retained = num_full
    is_certain = ~prompt.is_vision()[: num_full * block_size]
    is_certain[: config.sinks] = True
    guard = options.budget.guard(num_tokens, int(is_certain.sum()), block_size)
    scheduled = [(options.defer, num_retained)]
    scheduled += [(n, b.retained_blocks(num_tokens, block_size)) for n, b in options.later]
    cuts = plan_cuts(num_tokens, scheduled, options.ceiling, block_size, longest)
    covers_prompt = cuts.first.num_retained >= num_full and guard is None
    # A first cut that keeps everything is only made for the sake of those that follow.
    serves = cuts.after(cuts.first) is not None or config.debug.evict_at_full_budget
    if covers_prompt and not serves:
        return "prompt_too_short" if is_short else "budget_covers_prompt"
    rows = voters(prompt, policy.row_sets, config.observation_window, options.defer)
    return Candidate(
        options, prompt, rows, cuts, guard, cuts.first, config.num_answer_rows, policy.summaries
    )
