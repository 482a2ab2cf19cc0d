# SPDX-License-Identifier: Apache-2.0
"""Results of a step's evictions on their way from the device through the host to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.shared.plan import Eviction, Failure, Outcome
from vllm_tgvkv.shared.trace import Trace, Traces
from vllm_tgvkv.worker.stages import StageOutcome, Stages
from vllm_tgvkv.worker.stopwatch import Stopwatch


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that one eviction kept (debug option `record_kept`)."""

    request_id: str
    counts: torch.Tensor
    """Pages of every (layer, head), int64 [L, H]."""
    positions: torch.Tensor
    """Kept positions, int32 [pages, N], pages in (layer, head) order."""


@dataclass(frozen=True)
class PendingOutcome:
    """The outcome of one eviction while its numbers are still on the device."""

    eviction: Eviction
    num_retained: torch.Tensor
    """Blocks of the region that hold pages, int64 scalar."""
    num_vision: torch.Tensor
    """Vision tokens in the region, summed over layers and the heads of all ranks, int64 scalar."""
    num_pairs: int
    """(layer, head) pairs in that sum."""
    stopwatch: Stopwatch
    trace: Trace | None
    """Its arrays may still be on their way to the host."""


class Outcomes:
    """Outcomes of the evictions of one step; starts their copy to the host."""

    def __init__(
        self,
        ended: Sequence[PendingOutcome | Failure],
        shape: CacheShape,
        traces: Traces,
        stages: Stages,
    ) -> None:
        self._pending = [part for part in ended if isinstance(part, PendingOutcome)]
        self._failures = [part for part in ended if isinstance(part, Failure)]
        self._block_size = shape.block_size
        self._traces = traces
        self._stages = stages
        self._numbers = torch.empty(0, 2, dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        if self._pending:
            numbers = [torch.stack((p.num_retained, p.num_vision)) for p in self._pending]
            on_device = torch.stack(numbers)
            self._numbers = on_device.to("cpu", non_blocking=True)
            if on_device.is_cuda:
                self._copied = torch.cuda.Event(blocking=True)
                self._copied.record()

    def of_stage(self) -> list[StageOutcome | Failure]:
        """Wait for the copy and return the outcomes in this stage's layers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = zip(self._pending, self._numbers.tolist(), strict=True)
        outcomes = [
            StageOutcome(
                request_id=pending.eviction.request_id,
                num_retained=num_retained,
                num_pages=num_retained * pending.num_pairs,
                num_vision=num_vision,
                num_pairs=pending.num_pairs,
                seconds=pending.stopwatch.seconds(),
                trace=pending.trace,
            )
            for pending, (num_retained, num_vision) in numbers
        ]
        return [*outcomes, *self._failures]

    def read(self) -> list[Outcome | Failure]:
        """Wait for the copy and for all stages, store traces, and return what is to be counted.

        Returns:
            Outcomes in all layers: failures, evictions that are their request's first, and all
            those of requests that asked for a report.
        """
        evictions = {pending.eviction.request_id: pending.eviction for pending in self._pending}
        found: list[Outcome | Failure] = []
        for part in self._stages.join(self.of_stage()):
            if isinstance(part, Failure):
                found.append(part)
                continue
            if part.trace is not None:
                self._traces.add(part.trace)
            eviction = evictions[part.request_id]
            if eviction.is_first or eviction.is_reported:
                found.append(self._outcome(eviction, part))
        return found

    def _outcome(self, eviction: Eviction, joined: StageOutcome) -> Outcome:
        is_vision = eviction.prompt.is_vision()
        num_tokens, num_vision = len(is_vision), int(is_vision.sum())
        first_tail = eviction.num_replaced * self._block_size
        num_kept = round(joined.num_pages * self._block_size / joined.num_pairs)
        kept = num_kept + max(num_tokens - first_tail, 0)
        kept_vision = round(joined.num_vision / joined.num_pairs)
        kept_vision += int(is_vision[first_tail:].sum())
        return Outcome(
            request_id=eviction.request_id,
            first_block=int(eviction.new_blocks[0]),
            num_blocks=joined.num_retained if eviction.guard is not None else None,
            method=eviction.method,
            seen={"text": num_tokens - num_vision, "vision": num_vision},
            kept={"text": kept - kept_vision, "vision": kept_vision},
            seconds=joined.seconds,
            num_answer=eviction.num_answer,
            is_first=eviction.is_first,
        )
