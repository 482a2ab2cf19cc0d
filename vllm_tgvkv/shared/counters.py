# SPDX-License-Identifier: Apache-2.0
"""Totals of evictions and skipped requests, kept by the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_tgvkv.shared.metrics import HANDOVERS, MetricsBuffer
from vllm_tgvkv.shared.plan import Outcome

SKIP_REASONS = {
    "policy_none": "the request asked for kv_eviction none",
    "text_only": "the prompt has no image or video",
    "prompt_too_short": "the prompt is shorter than min_prompt_tokens or than a block",
    "budget_covers_prompt": "the budget holds the whole prompt",
    "single_token": "the request generates one token only",
    "answer_too_short": "the answer ended before the wait for it (`defer`) did",
    "pool_too_small": "the pool cannot hold the prompt and the retained blocks together",
    "auto_too_long": "a budget `auto` in every head takes more memory than the server's own budget",
    "method_needs_vision": "the method's budget is attention to images, and there are none",
    "unknown_patch_grid": "grid pooling is asked for and an image's patch grid is not known",
    "invalid_request": "its vllm_xargs are wrong, and no front end of vLLM has checked them",
    "handed_over_whole": "another server decodes it, and cuts it if memory is short there",
    "policy_failed": "the method raised or memory ran out; the request ended with an error",
    "unsupported_request": "prompt embeddings, streamed inputs, or images that overlap",
}


@dataclass
class EvictionCounters:
    """Totals since the start of the engine."""

    requests_evicted: int = 0
    requests_skipped: Counter[str] = field(default_factory=Counter)
    """By reason, see `SKIP_REASONS`."""
    prompt_tokens_seen: int = 0
    """Prompt tokens of evicted requests."""
    prompt_tokens_kept: int = 0
    """Prompt tokens kept of them: region and tail, mean over layers and heads."""
    cuts: Counter[str] = field(default_factory=Counter)
    """Evictions by cause: `first`, `later`, `pressure`. A request may have several."""
    requests_restored: int = 0
    """Times that a request got its whole prompt back."""
    requests_whole: int = 0
    """Requests that ended without a cut, because memory was never short (`when: pressure`)."""
    choices: int = 0
    """Times that the tokens of a request were chosen again out of its whole prompt."""
    recalled_tokens: float = 0.0
    """Tokens that came back by these, mean over layers and heads."""
    recalls_lost: Counter[str] = field(default_factory=Counter)
    """Requests whose evicted tokens can not come back any more, by `TIER_FAULTS`."""
    blocks_given_back: int = 0
    """Blocks returned to the pool, less the fresh ones taken. Blocks shared with another request
    are not returned, so it may be negative."""
    handovers: Counter[str] = field(default_factory=Counter)
    """Prompts that went to another server or came from one, by `HANDOVERS`."""
    bytes_sent: int = 0
    """Of cut prompts that went to another server, if it read them, on the first worker."""
    bytes_sent_whole: int = 0
    """The same, had they not been cut."""
    metrics: MetricsBuffer | None = None
    """For Prometheus; None if metrics are off."""

    def __post_init__(self) -> None:
        self._told = self.as_dict()

    def skip(self, policy: str, reason: str) -> None:
        assert reason in SKIP_REASONS, reason
        self.requests_skipped[reason] += 1
        self._count("skipped_requests", policy, reason)

    def evicted(self, policy: str, num_prompt_tokens: int, num_kept: int) -> None:
        self.requests_evicted += 1
        self.prompt_tokens_seen += num_prompt_tokens
        self.prompt_tokens_kept += num_kept
        self._count("requests", policy)
        self._observe("kept_fraction", policy, value=num_kept / num_prompt_tokens)

    def cut(self, policy: str, cause: str) -> None:
        self.cuts[cause] += 1
        self._count("cuts", policy, cause)

    def restored(self, policy: str) -> None:
        self.requests_restored += 1
        self._count("restored_requests", policy)

    def recalled(self, policy: str, num_tokens: float) -> None:
        self.choices += 1
        self.recalled_tokens += num_tokens
        self._count("choices", policy)
        self._observe("recalled_tokens", policy, value=num_tokens)

    def recall_lost(self, policy: str, fault: str) -> None:
        self.recalls_lost[fault] += 1
        self._count("recalls_lost", policy, fault)

    def sent(self, policy: str, num_bytes: int, num_whole: int) -> None:
        self.bytes_sent += num_bytes
        self.bytes_sent_whole += num_whole
        self.handed_over(policy, "sent")
        for cache, number in (("sent", num_bytes), ("whole", num_whole)):
            self._count("handover_bytes", policy, cache, by=number)

    def handed_over(self, policy: str, outcome: str) -> None:
        assert outcome in HANDOVERS, outcome
        self.handovers[outcome] += 1
        self._count("handovers", policy, outcome)

    def stayed_whole(self, policy: str) -> None:
        self.requests_whole += 1
        self._count("whole_requests", policy)

    def gave_back(self, policy: str, num_blocks: int) -> None:
        self.blocks_given_back += num_blocks
        # If others share the prompt's blocks, an eviction may take more than it gives back.
        if num_blocks > 0:
            self._count("blocks_given_back", policy, by=num_blocks)

    def deferred(self, policy: str) -> None:
        self._count("deferred_requests", policy)

    def record_outcome(self, outcome: Outcome) -> None:
        """Count what the worker reports of an eviction."""
        for name, tokens in (("prompt_tokens", outcome.seen), ("kept_tokens", outcome.kept)):
            for modality, number in tokens.items():
                self._count(name, outcome.method, modality, by=number)
        for part, seconds in outcome.seconds.items():
            self._observe("seconds", outcome.method, part, value=seconds)

    def _count(self, name: str, *labels: str, by: int = 1) -> None:
        if self.metrics is not None:
            self.metrics.count(name, *labels, by=by)

    def _observe(self, name: str, *labels: str, value: float) -> None:
        if self.metrics is not None:
            self.metrics.observe(name, *labels, value=value)

    def take_if_changed(self) -> dict[str, Any] | None:
        """Return the totals if they changed since the last call."""
        totals = self.as_dict()
        if totals == self._told:
            return None
        self._told = totals
        return totals

    def __str__(self) -> str:
        """Return one line for the log."""
        blocks = self.blocks_given_back
        skipped = ", ".join(f"{reason} {n}" for reason, n in self.requests_skipped.items())
        return (
            f"{self.requests_evicted} requests evicted, {self.requests_whole} left whole, "
            f"{self.requests_restored} restored, "
            f"{self.requests_skipped.total()} skipped{f' ({skipped})' if skipped else ''}, "
            f"{self.prompt_tokens_kept} of {self.prompt_tokens_seen} prompt tokens kept, "
            f"{abs(blocks)} blocks {'given back' if blocks >= 0 else 'more in use'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON and for other processes."""
        return {
            "requests_evicted": self.requests_evicted,
            "requests_skipped": dict(self.requests_skipped),
            "prompt_tokens_seen": self.prompt_tokens_seen,
            "prompt_tokens_kept": self.prompt_tokens_kept,
            "cuts": dict(self.cuts),
            "requests_restored": self.requests_restored,
            "requests_whole": self.requests_whole,
            "choices": self.choices,
            "recalled_tokens": round(self.recalled_tokens, 3),
            "recalls_lost": dict(self.recalls_lost),
            "blocks_given_back": self.blocks_given_back,
            "handovers": dict(self.handovers),
            "bytes_sent": self.bytes_sent,
            "bytes_sent_whole": self.bytes_sent_whole,
        }
