# SPDX-License-Identifier: Apache-2.0
"""Traces of evictions: pages, kept positions and scores, for requests that ask for one.

A request asks with `vllm_xargs: {"kv_eviction_trace": 1}`. Its trace has no text and no image of
the prompt, only positions and numbers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_tgvkv.prompt import PromptMap

logger = init_logger("vllm.tgvkv")


@dataclass(frozen=True)
class Trace:
    """The trace of one eviction.

    L is the number of layers, H of KV heads, S of token sets in a layer (1 or H), N of tokens in a
    block, P of prompt tokens, and C of those in full blocks.
    """

    id: str
    """The request's id in the engine."""
    policy: str
    budget: str
    granularity: str
    time: float
    """Seconds since 1970."""
    prompt: PromptMap
    block_size: int
    counts: np.ndarray
    """Pages, int64 [L, H]."""
    positions: np.ndarray
    """Kept positions, int32 [pages, N], pages in (layer, head) order; those after the sum of
    `counts` have no meaning."""
    scores: np.ndarray
    """Pooled scores of the tokens in full blocks, float32 [L, S, C]."""
    stage_blocks: int = 0
    """Blocks of the region if pipeline stages needed different numbers, else 0."""

    @property
    def num_retained(self) -> int:
        """Blocks of the region."""
        return self.stage_blocks or int(self.counts.sum()) // self.counts.size

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.positions.nbytes + self.scores.nbytes

    def summary(self) -> dict[str, Any]:
        """Return the sizes of the prompt before and after the eviction."""
        num_tokens, num_pairs = self.prompt.num_tokens, self.counts.size
        num_full, num_tail = divmod(num_tokens, self.block_size)
        num_kept = round(int(self.counts.sum()) * self.block_size / num_pairs)
        return {
            "id": self.id,
            "policy": self.policy,
            "budget": self.budget,
            "granularity": self.granularity,
            "time": self.time,
            "prompt_tokens": num_tokens,
            "kept_tokens": num_kept + num_tail,
            "blocks_before": num_full + bool(num_tail),
            "blocks_after": self.num_retained + bool(num_tail),
        }

    def detail(self) -> dict[str, Any]:
        """Return the summary with image positions and pages.

        `kept_by` has the number of (layer, head) pairs that keep each token.
        """
        num_layers, num_heads = self.counts.shape
        kept_by = np.bincount(
            self.positions[: self.counts.sum()].ravel(), minlength=self.prompt.num_tokens
        )
        kept_by[self._num_candidates :] = self.counts.size
        return {
            **self.summary(),
            "block_size": self.block_size,
            "layers": num_layers,
            "kv_heads": num_heads,
            "vision": [
                {"start": run.start, "length": run.length, "grid": run.grid and list(run.grid)}
                for run in self.prompt.vision
            ],
            "pages": self.counts.tolist(),
            "kept_by": kept_by.tolist(),
        }

    def layer(self, layer: int) -> dict[str, Any] | None:
        """Return positions and scores of a layer's token sets; None if there is no such layer."""
        num_layers, num_heads = self.counts.shape
        if not 0 <= layer < num_layers:
            return None
        heads = np.split(np.arange(num_heads), self.scores.shape[1])
        return {
            "layer": layer,
            "token_sets": [
                {
                    "heads": of_set.tolist(),
                    "positions": self._positions(layer, int(of_set[0])).tolist(),
                    "scores": _rounded(scores),
                }
                for of_set, scores in zip(heads, self.scores[layer], strict=True)
            ],
        }

    @property
    def _num_candidates(self) -> int:
        return self.prompt.num_tokens // self.block_size * self.block_size

    def _positions(self, layer: int, head: int) -> np.ndarray:
        """Return the positions that one head keeps, ascending, with the tail that all keep."""
        ends = self.counts.ravel().cumsum()
        pair = layer * self.counts.shape[1] + head
        pages = self.positions[ends[pair] - self.counts[layer, head] : ends[pair]]
        tail = np.arange(self._num_candidates, self.prompt.num_tokens)
        return np.concatenate([np.sort(pages, axis=None), tail])


def join_traces(parts: Sequence[Trace]) -> Trace:
    """Return the trace of one eviction from the traces of all pipeline stages, in order."""
    return replace(
        parts[-1],
        counts=np.concatenate([part.counts for part in parts]),
        positions=np.concatenate([part.positions[: part.counts.sum()] for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        stage_blocks=max(part.num_retained for part in parts),
    )


class Traces:
    """The last traces, bounded by their number and by their total size."""

    def __init__(self, max_traces: int, max_bytes: int) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._traces: dict[str, Trace] = {}
        # With asynchronous outputs one thread adds traces while another reads them.
        self._lock = threading.Lock()

    def add(self, trace: Trace) -> None:
        """Store a trace, and drop the oldest ones until the bounds hold again."""
        if trace.nbytes > self._max_bytes:
            logger.warning(
                "KV eviction keeps no trace of %s: it takes %d MiB; raise max_trace_mib",
                trace.id,
                -(-trace.nbytes // 2**20),
            )
            return
        with self._lock:
            self._traces.pop(trace.id, None)  # the request was preempted and evicted again
            self._traces[trace.id] = trace
            size = sum(kept.nbytes for kept in self._traces.values())
            while len(self._traces) > self._max_traces or size > self._max_bytes:
                size -= self._traces.pop(next(iter(self._traces))).nbytes

    def newest_first(self) -> list[Trace]:
        with self._lock:
            return list(reversed(self._traces.values()))

    def find(self, name: str) -> Trace | None:
        """Return the trace of this request id, or the newest of this response id.

        vLLM appends eight random characters to the id that a client sees, and with several choices
        puts the number of the choice before it.
        """
        with self._lock:
            if name in self._traces:
                return self._traces[name]
        its_own = re.compile(rf"(\d+_)?{re.escape(name)}-[0-9a-f]{{8}}")
        return next((t for t in self.newest_first() if its_own.fullmatch(t.id)), None)


def _rounded(scores: np.ndarray) -> list[float | None]:
    """Round scores to five digits; None for values that JSON does not have."""
    finite = np.isfinite(scores)
    values = np.where(finite, scores, 0).astype(np.float64)
    magnitude = np.floor(np.log10(np.abs(values), where=values != 0, out=np.zeros_like(values)))
    # Dividing by a power of ten gives the double next to the short decimal; multiplying would not.
    scale = 10.0 ** (4 - magnitude)
    rounded: list[float | None] = (np.round(values * scale) / scale).tolist()
    for index in np.flatnonzero(~finite):
        rounded[index] = None
    return rounded
