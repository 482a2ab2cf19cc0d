# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the worker about evictions, attached to one step's output."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from vllm_tgvkv.prompt import PromptMap


@dataclass(frozen=True)
class Observation:
    """Observation rows whose queries appear in this step's chunk of a prompt."""

    request_id: str
    chunk_start: int
    """Position of the chunk's first token."""
    first: int
    """Index of the first of these rows among all observation rows of the prompt."""
    rows: np.ndarray
    """Their positions, int64, ascending."""
    num_rows: int
    """Observation rows of the whole prompt."""


@dataclass(frozen=True)
class Eviction:
    """A prompt whose last chunk runs in this step and whose cache shrinks at its end."""

    request_id: str
    policy: str
    prompt: PromptMap
    first_row: int
    """Index of the first observation row that was computed; earlier ones came from
    the prefix cache and do not vote."""
    old_blocks: np.ndarray
    """Block ids of the prompt, int32 [ceil(P / N)]; the last may be partly filled."""
    new_blocks: np.ndarray
    """The k fresh blocks of the compressed region, int32 [k]."""
    row_blocks: np.ndarray
    """Block ids of the whole request afterwards: fresh, then zeros, then tail, int32."""

    @property
    def num_retained_blocks(self) -> int:
        return len(self.new_blocks)


@dataclass
class StepPlan:
    """All of a step's eviction work; the worker does the lists in this order."""

    released: list[int] = field(default_factory=list)
    """First block ids of regions whose requests ended or were preempted."""
    forgotten: list[str] = field(default_factory=list)
    """Requests whose kept observation queries are no longer needed."""
    poisoned: list[int] = field(default_factory=list)
    """Blocks given back since the last step (debug option `poison` only)."""
    observations: list[Observation] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    counters: dict[str, Any] | None = None
    """The scheduler's totals, if they changed; workers keep them for `collective_rpc`."""

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) for part in fields(self))


ATTRIBUTE = "kv_eviction_plan"
"""Name under which the plan hangs on vLLM's `SchedulerOutput`."""
