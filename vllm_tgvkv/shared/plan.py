# SPDX-License-Identifier: Apache-2.0
"""Messages between scheduler and worker, attached to each step's output and result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_tgvkv.shared.budget import Guard
from vllm_tgvkv.shared.prompt import PromptMap, Voters
from vllm_tgvkv.shared.trace import Trace

N = TypeVar("N", int, float)

NO_ROW = 0
"""The row that nobody reads. A step of fixed size stores the queries of all other tokens in it."""


@dataclass(frozen=True)
class Observation:
    """Observation rows within this step's chunk of a prompt."""

    request_id: str
    chunk_start: int
    """Position of the chunk's first token."""
    rows: np.ndarray
    """Their positions, int64, ascending."""
    stored: np.ndarray | None
    """Rows of the query pool for their queries, int64; None if they vote in this step."""


@dataclass(frozen=True)
class ColumnSumChunk:
    """A chunk whose rows are all added to the column sums."""

    request_id: str
    method: str
    chunk_start: int
    num_keys: int
    """Tokens of the request up to the chunk's end."""
    blocks: np.ndarray
    """Block ids of these tokens, int32."""
    prompt: PromptMap
    """The prompt, followed by the tokens of the answer whose rows are added as well."""


@dataclass(frozen=True)
class Header:
    """Blocks that describe a region to another server, see `cache/header.py`."""

    blocks: tuple[int, ...]
    nonce: tuple[int, ...]
    """What they begin with, int32."""


@dataclass(frozen=True)
class Eviction:
    """A prompt whose cache shrinks after this step, which ends the prompt or its wait."""

    request_id: str
    method: str
    prompt: PromptMap
    voters: Voters
    num_cached: int
    """Rows below this position came from the prefix cache and do not vote."""
    guard: Guard | None
    """If set, the worker may retain fewer blocks than it is given."""
    traced_budget: str | None
    """The budget in words, if the request asked for a trace."""
    old_blocks: np.ndarray
    """Block ids of prompt and answer, int32; the last may be partly filled."""
    num_replaced: int
    """Full blocks of the row, from its start, which the region replaces."""
    new_blocks: np.ndarray
    """The k fresh blocks of the compressed region, int32 [k]; the last ones hold the summaries."""
    row_blocks: np.ndarray
    """Block ids of the whole request after the eviction: fresh, zeros, tail, int32."""
    num_answer: int = 0
    """Tokens of the answer that are computed by then."""
    is_first: bool = True
    """Whether it is the request's first eviction, which is the one that metrics count."""
    is_whole: bool = True
    """Whether the row is not compressed before. If it is, `old_blocks` has zeros after its region,
    as the row has."""
    stored: np.ndarray | None = None
    """Rows of the query pool that hold the queries of `voters.rows`, int64; None if all vote in
    the step that computes them."""
    is_reported: bool = False
    """Whether the request asked for a report, which needs the outcome of each of its evictions."""
    protected: int = 0
    """First tokens of the prompt that every head keeps, if there are more than sinks."""
    num_sketch: int = 0
    """Last blocks of the region, which hold a sketch of the prompt's keys."""
    tier_blocks: np.ndarray | None = None
    """Blocks of the tier for the prompt's full blocks, int32; None if it can not be recalled, or
    lies there already."""
    header: Header | None = None
    """Where the region is described for another server; None if it stays here."""

    def protected_pages(self, block_size: int) -> int:
        """Return the pages that every head gets for them, beside its floor."""
        return -(-self.protected // block_size)

    @property
    def num_retained(self) -> int:
        """k, all blocks of the region, summaries included."""
        return len(self.new_blocks)

    @property
    def has_outcome(self) -> bool:
        """Whether the scheduler or a trace needs the outcome."""
        return self.is_first or self.is_reported or self.traced_budget is not None

    @property
    def observed(self) -> PromptMap:
        """The prompt and the answer so far."""
        return self.prompt.followed_by(self.num_answer)

    @property
    def first_row(self) -> int:
        """Index of the first observation row that was computed."""
        return int(np.searchsorted(self.voters.rows, self.num_cached))


@dataclass(frozen=True)
class Choice:
    """A compressed request whose tokens are chosen again after this step, see `recaller.py`."""

    request_id: str
    num_tokens: int
    """Tokens of the request that are computed then."""
    rows: np.ndarray
    """Positions of the rows that vote, the newest ones, int64."""
    stored: np.ndarray
    """Rows of the query pool with their queries, int64."""
    tail_blocks: np.ndarray
    """Block ids of the row behind its region, int32."""


@dataclass(frozen=True)
class Restored:
    """A request that has its whole prompt back from this step on."""

    request_id: str
    row_blocks: np.ndarray
    """Block ids of its row, int32."""


@dataclass(frozen=True)
class Arrival:
    """A prompt that another server has computed and cut, whose blocks are read in this step."""

    request_id: str
    header: Header
    region_blocks: tuple[int, ...]
    """Blocks of its region; the last planned ones are 0 if a guard left fewer."""
    num_replaced: int
    """Full blocks of the prompt, which the region replaces."""


@dataclass
class StepPlan:
    """All eviction work of a step; the worker goes through the lists in this order."""

    released: list[int] = field(default_factory=list)
    """First block ids of regions whose requests ended, were preempted or got their prompt back."""
    restored: list[Restored] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    """Requests whose observation state can be dropped."""
    arriving: list[Arrival] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    """Requests whose blocks are complete, on all ranks. They decode from this step on."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """The answers so far of new requests that have one, because another server began it. Model
    runner V1 believes that a new request has none."""
    poisoned: list[int] = field(default_factory=list)
    """Blocks given back since the last step (debug option `poison` only)."""
    observations: list[Observation] = field(default_factory=list)
    summings: list[ColumnSumChunk] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unrecallable: list[str] = field(default_factory=list)
    """Requests that have no blocks of the tier any more."""
    images: dict[str, list[MultiModalFeatureSpec]] = field(default_factory=dict)
    """All images of resumed requests with some to encode in this step. vLLM does not send a worker
    the data of images that a prefix-cache hit covered, and a preemption may lose the hit."""
    counters: dict[str, Any] | None = None
    """The scheduler's totals, if they changed; workers keep them for `collective_rpc`."""

    def __bool__(self) -> bool:
        return any(vars(self).values())


@dataclass(frozen=True)
class Outcome:
    """Result of an eviction that only the worker knows, for the scheduler.

    A pipeline stage's outcome is of its own layers; the last stage joins them.
    """

    request_id: str
    first_block: int
    """First block of the region, which identifies the eviction within the request."""
    num_retained: int | None
    """k, blocks that a guarded eviction retained; None if there was no guard."""
    method: str
    seen: dict[str, int]
    """Prompt tokens by modality, `text` and `vision`."""
    kept: dict[str, int]
    """Kept prompt tokens by modality, mean over layers and heads, rounded. Before stages are
    joined: tokens in the region, summed over `num_pairs` layers and heads."""
    seconds: dict[str, float]
    """Seconds on the device by part, see `stopwatch.PARTS`; empty without metrics."""
    num_answer: int = 0
    """Tokens of the answer that were computed by then."""
    is_first: bool = True
    """Whether it is the request's first eviction, which is the one that metrics count."""
    num_pairs: int = 1
    trace: Trace | None = None
    """For the last stage, which stores it."""


@dataclass(frozen=True)
class ChoiceOutcome:
    """Result of a choice, of the first rank; of one stage's layers, then of all."""

    request_id: str
    num_answer: int
    """Tokens of the answer that were computed by then."""
    num_recalled: float | None
    """Tokens that came back, mean over layers and heads; None if the tier failed, and nothing comes
    back any more."""
    num_pairs: int = 1
    """Layers times heads."""
    trace: Trace | None = None


@dataclass(frozen=True)
class Failure:
    """A prompt that could not be judged: its method raised, or memory ran out."""

    request_id: str
    error: str


def sums(parts: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """Return the sums of numbers by name; a missing one is 0."""
    total: dict[str, Any] = {}
    for name, number in chain.from_iterable(part.items() for part in parts):
        total[name] = total.get(name, 0) + number
    return total


# vLLM passes its two outputs between scheduler and worker by reference within a process and pickles
# them between processes. Subclasses with one more field survive both; steps without evictions keep
# the stock class. Outputs are copied, not modified: vLLM shares an empty result among steps.


@dataclass
class SchedulerOutputWithPlan(SchedulerOutput):
    """A step that evicts, from the scheduler to its workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class ModelRunnerOutputWithOutcomes(ModelRunnerOutput):
    """The result of a step that evicted, from a worker to the scheduler."""

    outcomes: Sequence[Outcome | ChoiceOutcome | Failure] = ()


def attach_plan(output: SchedulerOutput, plan: StepPlan) -> SchedulerOutput:
    """Return the step's output with its plan; `output` itself if the plan is empty."""
    return SchedulerOutputWithPlan(**vars(output), plan=plan) if plan else output


def plan_of(output: SchedulerOutput) -> StepPlan:
    """Return the plan that was attached to a step's output, or an empty one."""
    return output.plan if isinstance(output, SchedulerOutputWithPlan) else StepPlan()


def attach_outcomes(
    output: ModelRunnerOutput, outcomes: Sequence[Outcome | ChoiceOutcome | Failure]
) -> ModelRunnerOutput:
    """Return a step's result with its outcomes; `output` itself if there are none."""
    return ModelRunnerOutputWithOutcomes(**vars(output), outcomes=outcomes) if outcomes else output


def outcomes_of(output: ModelRunnerOutput) -> Sequence[Outcome | ChoiceOutcome | Failure]:
    """Return the outcomes that were attached to a step's result."""
    return output.outcomes if isinstance(output, ModelRunnerOutputWithOutcomes) else ()
