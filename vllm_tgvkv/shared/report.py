# SPDX-License-Identifier: Apache-2.0
"""The report on a request's cache that its response carries, if it asked for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_tgvkv.shared.cuts import When
from vllm_tgvkv.shared.plan import Outcome, sums

CutCause = Literal["first", "later", "pressure"]
"""Why a request's cache was cut: at a known token, the first one or a later one, or because memory
was short."""

Cause = CutCause | Literal["restored", "preempted"]
"""Why a request's cache changed: a cut; the whole prompt came back; or a preemption undid cuts
under pressure, so that prompt and answer are computed again, whole."""


@dataclass
class CutReport:
    """One change of a request's cache: an eviction, or the prompt's return."""

    answer_tokens: int
    """Tokens of the answer that were computed by then."""
    blocks_before: int
    blocks_after: int
    kept_tokens: int
    """Tokens in full blocks kept, and tokens of the prompt's last block, mean over layers and
    heads."""
    cause: Cause = "first"


@dataclass
class MemoryReport:
    """Memory of a request in the pool, in bytes: whole blocks, on the first of several workers.

    Blocks that other requests share are part of what a request holds. They are not given back.
    """

    before: int
    """Before its first eviction."""
    after: int
    """After its last eviction."""
    windows: int
    """Part of both that layers with a sliding window hold. Eviction does not reach it."""
    states: int
    """Part of both that layers with a state hold, the same."""
    drafts: int
    """Part of both that the layers of a draft model hold, the same."""
    given_back: int
    """Memory that its evictions gave back to the pool, less what they retained. Negative if other
    requests share so much of the prompt that its region takes more."""


@dataclass
class RecallReport:
    """One choice of a request's tokens out of its whole prompt."""

    answer_tokens: int
    """Tokens of the answer that were computed by then."""
    recalled_tokens: float
    """Tokens that came back, and as many that went, mean over layers and heads."""


@dataclass
class EvictionReport:
    """Report on a request's cache in its response, if the request asked for one."""

    policy: str
    prompt_tokens: int
    blocks_before: int
    budget: float | int | str
    """Budget of the first eviction, as settings have it."""
    defer: int
    """Tokens of the answer that the first eviction waits for."""
    when: When
    """`pressure` if only a lack of memory evicts the request."""
    decode: dict[str, Any] | None
    """Later evictions, as the setting `decode` has them; None if there are none."""
    protected_tokens: int = 0
    """First tokens of the prompt that every layer and head keeps, see the setting `protect`."""
    kept_tokens: int | None = None
    """Prompt tokens kept, mean over layers and heads; None if nothing was evicted."""
    blocks_after: int | None = None
    vision_tokens: int | None = None
    """Tokens of images and videos in the prompt; this and the next three are None if nothing was
    evicted."""
    kept_text_tokens: int | None = None
    """Part of `kept_tokens` that is text."""
    kept_vision_tokens: int | None = None
    """Part of `kept_tokens` that is images and videos."""
    seconds: dict[str, float] | None = None
    """Time on the device of all evictions together, by part: `statistics`, `selection` and `copy`.
    Those that a preemption undid count as well. Empty with `metrics: false`."""
    skip_reason: str | None = None
    trace: str | None = None
    """Name of the trace below `/kv-eviction/requests`, if the request asked for one."""
    memory: MemoryReport | None = None
    """Of all layers; None if nothing was evicted."""
    cuts: list[CutReport] = field(default_factory=list)
    """All changes of the request's cache, in order."""
    sketch_blocks: int = 0
    """Part of `blocks_after` that holds a sketch of the prompt's keys, for recall."""
    recalls: list[RecallReport] = field(default_factory=list)
    """All choices, in order; those that a preemption undid as well."""
    understood: str = ""
    """How much is kept, in words, as the options were read."""

    def add_cut(self, cut: CutReport) -> None:
        """Add a cut; if it is at a known token, a preemption undid those from this token on."""
        is_known = cut.cause in ("first", "later")
        if is_known and self.cuts and self.cuts[-1].answer_tokens >= cut.answer_tokens:
            self.cuts.clear()
        self.cuts.append(cut)
        self.blocks_before = self.cuts[0].blocks_before
        self.blocks_after, self.kept_tokens = cut.blocks_after, cut.kept_tokens
        self.kept_text_tokens = self.kept_vision_tokens = None  # the worker knows them

    def add_outcome(self, outcome: Outcome) -> None:
        """Add what only the worker knows of an eviction."""
        self.seconds = sums((self.seconds or {}, outcome.seconds))
        self.vision_tokens = outcome.seen["vision"]
        # If the next eviction is scheduled already, its own outcome tells what is kept in the end.
        if self.cuts and self.cuts[-1].answer_tokens == outcome.num_answer:
            self.kept_vision_tokens = outcome.kept["vision"]
            self.kept_text_tokens = self.cuts[-1].kept_tokens - outcome.kept["vision"]
