# SPDX-License-Identifier: Apache-2.0
"""Results of a step on their way from the device through the host to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_tgvkv.shared.plan import ChoiceOutcome, Eviction, Failure, Outcome
from vllm_tgvkv.shared.trace import Trace, Traces
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt
from vllm_tgvkv.worker.stages import StageOutcomes
from vllm_tgvkv.worker.stopwatch import Stopwatch

logger = init_logger("vllm.tgvkv")

_REASON_BYTES = 256
"""Of the text of what failed, as far as other ranks learn it."""


@dataclass(frozen=True)
class PendingOutcome:
    """An eviction that this rank has carried out, while its numbers are still on the device.

    It counts if all ranks have carried it out.
    """

    eviction: Eviction
    num_token_blocks: torch.Tensor
    """Blocks of the region that hold tokens, int64 scalar."""
    num_vision: torch.Tensor | None
    """Vision tokens in the region, summed over layers and heads, int64 scalar; None if the eviction
    is not reported."""
    num_pairs: int
    """(layer, head) pairs in that sum, of all ranks."""
    stopwatch: Stopwatch
    trace: Trace | None
    """If the request asked for one; the first rank's has the heads of all ranks. Its arrays may
    still be on their way to the host."""
    decision: Decision | None
    """Only with the debug option `record_kept`."""

    def numbers(self) -> torch.Tensor:
        """Return the blocks of tokens and the vision tokens, int64 [2]."""
        num_vision = self.num_vision
        if num_vision is None:
            num_vision = torch.zeros_like(self.num_token_blocks)
        return torch.stack((self.num_token_blocks, num_vision))

    def of_stage(self, numbers: Sequence[int], block_size: int) -> Outcome:
        """Return the outcome in this stage's layers from its `numbers`; vision counts all ranks."""
        num_token_blocks, num_vision = numbers
        eviction, is_vision = self.eviction, self.eviction.prompt.is_vision()
        num_seen = int(is_vision.sum())
        num_kept = num_token_blocks * self.num_pairs * block_size
        return Outcome(
            request_id=eviction.request_id,
            first_block=int(eviction.new_blocks[0]),
            num_retained=num_token_blocks if eviction.guard is not None else None,
            method=eviction.method,
            seen={"text": len(is_vision) - num_seen, "vision": num_seen},
            kept={"text": num_kept - num_vision, "vision": num_vision},
            seconds=self.stopwatch.seconds(),
            num_answer=eviction.num_answer,
            is_first=eviction.is_first,
            num_pairs=self.num_pairs,
            trace=self.trace,
        )


@dataclass(frozen=True)
class PendingChoice:
    """A choice that this rank has made, while its number of tokens is still on the device."""

    request_id: str
    num_answer: int
    """Tokens of the answer that were computed by then."""
    num_moved: torch.Tensor
    """Tokens that come back, summed over layers and heads, int64 scalar."""
    num_pairs: int
    """(layer, head) pairs in that sum."""
    trace: Trace | None
    """As in `PendingOutcome`; the number that came back is still missing."""

    def of_stage(self, num_moved: int) -> ChoiceOutcome:
        """Return the outcome in this stage's layers from the number of tokens."""
        moved = num_moved / self.num_pairs
        trace = None if self.trace is None else replace(self.trace, recalled=moved)
        return ChoiceOutcome(self.request_id, self.num_answer, moved, self.num_pairs, trace)


class Outcomes:
    """Outcomes of the evictions and choices of one step; starts their copy to the host.

    Where there are several ranks, it gathers the evictions' numbers first, with a reason for each
    that failed. All ranks have the same evictions.
    """

    def __init__(
        self,
        ended: Sequence[PendingOutcome | PendingChoice | ChoiceOutcome | Failure],
        context: ObserverContext,
        traces: Traces,
    ) -> None:
        several = context.ranks.size > 1
        self._evictions = [
            part
            for part in ended
            if isinstance(part, PendingOutcome) or (several and isinstance(part, Failure))
        ]
        self._choices = [part for part in ended if isinstance(part, PendingChoice)]
        self._known = [
            part
            for part in ended
            if isinstance(part, ChoiceOutcome) or (not several and isinstance(part, Failure))
        ]
        self._ranks, self._stages = context.ranks, context.stages
        self._block_size = context.shape.block_size
        self._traces = traces
        self._of_evictions = self._of_choices = torch.empty(0, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        if self._evictions:
            gathered = context.ranks.gather(_numbers_and_reasons(self._evictions, context))
            self._of_evictions = gathered.to("cpu", non_blocking=True)
        if self._choices:
            moved = torch.stack([part.num_moved for part in self._choices])
            self._of_choices = moved.to("cpu", non_blocking=True)
        if context.device.type == "cuda" and (self._evictions or self._choices):
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def of_stage(self) -> StageOutcomes:
        """Wait for the copy and return the outcomes in this stage's layers."""
        if self._copied is not None:
            self._copied.synchronize()
        outcomes: StageOutcomes = []
        for index, part in enumerate(self._evictions):
            outcomes.append(self._outcome(part, self._of_evictions[:, index].numpy()))
        for choice, moved in zip(self._choices, self._of_choices.tolist(), strict=True):
            outcomes.append(choice.of_stage(moved))
        return [*outcomes, *self._known]

    def _outcome(self, part: PendingOutcome | Failure, of_ranks: np.ndarray) -> Outcome | Failure:
        """Return an eviction's outcome from the numbers and reasons of all ranks, int64 [R, *]."""
        if isinstance(part, Failure):
            return part
        for rank, words in enumerate(of_ranks[:, 2:]):
            if words[:1].any():
                reason = words.tobytes().rstrip(b"\0").decode(errors="ignore")
                error, name = f"failed on rank {rank}: {reason}", part.eviction.request_id
                logger.error("KV eviction of %s %s", name, error)
                return Failure(name, error)
        num_token_blocks, num_vision = of_ranks[self._ranks.rank, 0], of_ranks[:, 1].sum()
        return part.of_stage([int(num_token_blocks), int(num_vision)], self._block_size)

    def read(self) -> list[Outcome | ChoiceOutcome | Failure]:
        """Wait for the copy and for all stages, store traces, and return what is to be counted.

        Returns:
            Outcomes in all layers: failures, first evictions, and all evictions of requests that
            asked for a report. And outcomes of choices.
        """
        evictions = {
            pending.eviction.request_id: pending.eviction
            for pending in self._evictions
            if isinstance(pending, PendingOutcome)
        }
        found: list[Outcome | ChoiceOutcome | Failure] = []
        for part in self._stages.join(self.of_stage()):
            if isinstance(part, Failure):
                found.append(part)
                continue
            if part.trace is not None:
                self._traces.add(part.trace)
            if isinstance(part, ChoiceOutcome):
                found.append(replace(part, trace=None))
                continue
            eviction = evictions[part.request_id]
            if eviction.is_first or eviction.is_reported:
                found.append(_of_request(part, eviction, self._block_size))
        return found


def _numbers_and_reasons(
    evictions: Sequence[PendingOutcome | Failure], context: ObserverContext
) -> torch.Tensor:
    """Return the numbers of evictions, int64 [E, 2 + words], with several ranks also reasons.

    A reason is the text of what failed, in UTF-8; bytes are 0 if nothing did.
    """
    nothing = torch.zeros(2, dtype=torch.int64, device=context.device)
    numbers = torch.stack(
        [nothing if isinstance(part, Failure) else part.numbers() for part in evictions]
    )
    if context.ranks.size == 1:
        return numbers
    texts = np.zeros((len(evictions), _REASON_BYTES), np.uint8)
    for text, part in zip(texts, evictions, strict=True):
        if isinstance(part, Failure):
            encoded = part.error.encode()[:_REASON_BYTES]
            text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    words = texts.view(np.int64)
    if not words.any():
        return torch.cat((numbers, numbers.new_zeros(words.shape)), dim=1)
    return torch.cat((numbers, context.to_device(words)), dim=1)


def _of_request(joined: Outcome, eviction: Eviction, block_size: int) -> Outcome:
    """Return the outcome in all layers with means, in which the prompt's tail is counted."""
    tail = eviction.prompt.is_vision()[eviction.num_replaced * block_size :]
    of_region, of_vision = sum(joined.kept.values()), joined.kept["vision"]
    kept = round(of_region / joined.num_pairs) + len(tail)
    vision = round(of_vision / joined.num_pairs) + int(tail.sum())
    means = {"text": kept - vision, "vision": vision}
    return replace(joined, kept=means, num_pairs=1, trace=None)


def start_trace(
    eviction: Eviction,
    scored: ScoredPrompt,
    decision: Decision,
    num_token_blocks: int,
    num_answer: int | None = None,
) -> Trace | None:
    """Start the copy of a trace to the host, if the request asked for one.

    It covers the heads of all ranks. Its arrays are valid once the step is done.

    Args:
        num_token_blocks: blocks that were dealt.
        num_answer: tokens of the answer at a choice that follows the eviction.
    """

    def on_host(array: torch.Tensor) -> np.ndarray:
        return array.to("cpu", non_blocking=True).numpy()

    if eviction.traced_budget is None:
        return None
    if scored.num_parts > 1:
        decision = scored.of_all_heads().decide(num_token_blocks, eviction.guard)
    preference = scored.preference(decision.counts, eviction.guard is not None)
    scores, unpooled = scored.scores, scored.unpooled
    if scored.present is not None:  # tokens that an earlier cut evicted have no score
        scores = scores.where(scored.present, torch.nan)
    return Trace(
        id=eviction.request_id,
        policy=eviction.method,
        budget=eviction.traced_budget,
        granularity=scored.policy.granularity,
        time=time.time(),
        prompt=eviction.prompt,
        num_answer=eviction.num_answer if num_answer is None else num_answer,
        num_replaced=eviction.num_replaced,
        blocks_before=int(np.count_nonzero(eviction.old_blocks)),
        block_size=scored.block_size,
        counts=on_host(decision.counts),
        positions=on_host(decision.positions),
        scores=on_host(scores),
        unpooled=None if unpooled is None else on_host(unpooled),
        preference=on_host(preference),
        preferred=scored.policy.retention.preferred,
        sinks=scored.prompt.sinks,
        sketch_blocks=eviction.num_sketch,
    )
