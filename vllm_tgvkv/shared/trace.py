# SPDX-License-Identifier: Apache-2.0
"""Traces of evictions: pages, kept positions and scores, for requests that ask for one.

A request asks with `vllm_xargs: {"kv_eviction_trace": 1}`. Its trace has no text and no image of
the prompt, only positions and numbers, for each of its cuts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_tgvkv.shared.prompt import PromptMap

logger = init_logger("vllm.tgvkv")

MAX_TRACE_BYTES = 64 << 20
"""Host memory of all kept traces together."""


@dataclass(frozen=True)
class Trace:
    """The trace of a request: its last cut, and those before it.

    L is the number of layers, H of KV heads, S of token sets in a layer (1 or H), N of tokens in a
    block, P of prompt tokens, and C of the tokens in full blocks that the cut could evict: from
    the prompt, and under a ceiling from the answer.
    """

    id: str
    """The request's id in the engine."""
    policy: str
    budget: str
    granularity: str
    time: float
    """Seconds since 1970."""
    prompt: PromptMap
    num_answer: int
    """Tokens of the answer that were computed by then."""
    num_replaced: int
    """Full blocks that hold the C tokens."""
    blocks_before: int
    """Blocks that the request held."""
    block_size: int
    counts: np.ndarray
    """Pages, int64 [L, H]."""
    positions: np.ndarray
    """Kept positions, int32 [pages, N], pages in (layer, head) order; those after the sum of
    `counts` have no meaning."""
    scores: np.ndarray
    """Pooled scores of the tokens in full blocks, float32 [L, S, C]."""
    unpooled: np.ndarray | None
    """The scores before pooling, float32 [L, S, C]; None if nothing was pooled."""
    preference: np.ndarray
    """Whether a token came before others, whatever its score, uint8 [C] or [L, S, C]; see
    `ScoredPrompt.preference`."""
    preferred: str
    """The kind of token that the method's retention prefers, in one word."""
    sinks: int
    """Number of first tokens that are kept before all others."""
    stage_blocks: int = 0
    """Blocks of the region if pipeline stages needed different numbers, else 0."""
    sketch_blocks: int = 0
    """Blocks of the region that hold a sketch of the prompt, for recall."""
    recalled: float | None = None
    """Tokens that came back by a choice, mean over layers and heads; None for a cut."""
    earlier: tuple[Trace, ...] = ()
    """The request's earlier cuts, oldest first, each without earlier ones of its own."""

    @property
    def num_token_blocks(self) -> int:
        """Blocks of the region that hold tokens."""
        return self.stage_blocks or int(self.counts.sum()) // self.counts.size

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all cuts."""
        arrays = (self.counts, self.positions, self.scores, self.unpooled, self.preference)
        own = sum(array.nbytes for array in arrays if array is not None)
        return own + sum(cut.nbytes for cut in self.earlier)

    @property
    def cuts(self) -> tuple[Trace, ...]:
        """All cuts of the request, oldest first."""
        return *self.earlier, self

    def after(self, trace: Trace) -> Trace:
        """Return this cut as one that follows the cuts of `trace`, of the same request.

        A cut that comes after no more tokens of the answer than earlier ones replaces them: they
        were undone by a preemption.
        """
        before = [cut for cut in trace.cuts if cut.num_answer < self.num_answer]
        return replace(self, earlier=tuple(replace(cut, earlier=()) for cut in before))

    def within(self, max_bytes: int) -> Trace:
        """Return the trace without its oldest cuts, until the others take at most `max_bytes`."""
        found = self
        while found.nbytes > max_bytes and found.earlier:
            found = replace(found, earlier=found.earlier[1:])
        return found

    def summary(self) -> dict[str, Any]:
        """Return the size of the request's cache before the first cut and after each one."""
        cuts = [cut._sizes() for cut in self.cuts]
        names = ("id", "policy", "budget", "granularity", "time")
        return {
            **{name: getattr(self, name) for name in names},
            "prompt_tokens": self.prompt.num_tokens,
            "kept_tokens": cuts[-1]["kept_tokens"],
            "blocks_before": cuts[0]["blocks_before"],
            "blocks_after": cuts[-1]["blocks_after"],
            "cuts": cuts,
        }

    def detail(self, cut: int | None = None) -> dict[str, Any] | None:
        """Return the summary with image positions, and the pages of one cut.

        `kept_by` has the number of (layer, head) pairs that keep each token: of the prompt,
        then of the answer as far as the cut could evict it.

        Args:
            cut: index among the cuts; the last one by default. None is returned if there is none.
        """
        shown = self._cut(cut)
        if shown is None:
            return None
        num_layers, num_heads = shown.counts.shape
        kept_by = np.bincount(
            shown.positions[: shown.counts.sum()].ravel(), minlength=shown._num_tokens
        )
        kept_by[shown._num_candidates :] = shown.counts.size
        return {
            **self.summary(),
            "cut": len(self.earlier) if cut is None else cut,
            "block_size": self.block_size,
            "layers": num_layers,
            "kv_heads": num_heads,
            "vision": [
                {"start": run.start, "length": run.length, "grid": run.grid and list(run.grid)}
                for run in self.prompt.vision
            ],
            "pages": shown.counts.tolist(),
            "kept_by": kept_by.tolist(),
        }

    def layer(self, layer: int, cut: int | None = None) -> dict[str, Any] | None:
        """Return positions and scores of a layer's token sets, at the last cut or at cut `cut`.

        `reasons` divides the kept positions by what kept them: `sink`, `tail` (after the full
        blocks), what the retention prefers (`text`, `vision`, `recent`, ...), `score`, and
        `neighbour` where only pooling raised the score to the level of kept tokens.

        None is returned if there is no such layer or cut.
        """
        shown = self._cut(cut)
        if shown is None or not 0 <= layer < len(shown.counts):
            return None
        token_sets = []
        heads = np.split(np.arange(shown.counts.shape[1]), shown.scores.shape[1])
        for index, of_set in enumerate(heads):
            kept = shown._positions(layer, int(of_set[0]))
            token_sets.append(
                {
                    "heads": of_set.tolist(),
                    "positions": kept.tolist(),
                    "scores": _rounded(shown.scores[layer, index]),
                    "reasons": shown._reasons(layer, index, kept),
                }
            )
        return {"layer": layer, "token_sets": token_sets}

    def _cut(self, index: int | None) -> Trace | None:
        if index is None:
            return self
        return self.cuts[index] if 0 <= index < len(self.cuts) else None

    def _sizes(self) -> dict[str, Any]:
        """Return when this cut was made, and the sizes of the cache around it."""
        num_kept = round(int(self.counts.sum()) * self.block_size / self.counts.size)
        num_blocks = -(-(self.prompt.num_tokens + self.num_answer) // self.block_size)
        num_after = num_blocks - self.num_replaced + self.num_token_blocks + self.sketch_blocks
        return {
            "answer_tokens": self.num_answer,
            "blocks_before": self.blocks_before if self.recalled is None else num_after,
            "blocks_after": num_after,
            "kept_tokens": num_kept + self._num_tokens - self._num_candidates,
            "recalled_tokens": self.recalled,
        }

    @property
    def _num_candidates(self) -> int:
        return self.num_replaced * self.block_size

    @property
    def _num_tokens(self) -> int:
        """Tokens of the prompt, and of the answer as far as the cut could evict it."""
        return max(self.prompt.num_tokens, self._num_candidates)

    def _positions(self, layer: int, head: int) -> np.ndarray:
        """Return the positions that one head keeps, ascending, with the tail that all keep."""
        ends = self.counts.ravel().cumsum()
        pair = layer * self.counts.shape[1] + head
        pages = self.positions[ends[pair] - self.counts[layer, head] : ends[pair]]
        tail = np.arange(self._num_candidates, self._num_tokens)
        return np.concatenate([np.sort(pages, axis=None), tail])

    def _reasons(self, layer: int, token_set: int, kept: np.ndarray) -> dict[str, list[int]]:
        """Return the kept positions of a token set by what kept them; together, all of them."""
        judged = kept[kept < self._num_candidates]
        of_set = self.preference if self.preference.ndim == 1 else self.preference[layer, token_set]
        level = np.broadcast_to(of_set, self._num_candidates)[judged]
        is_sink = judged < self.sinks
        by_score = ~is_sink & (level == 0)
        is_raised = np.zeros(len(judged), bool)
        if self.unpooled is not None and by_score.any():
            # The lowest score that was kept; NaN ranks below all others.
            scores = np.nan_to_num(self.scores[layer, token_set, judged], nan=-np.inf)
            own = np.nan_to_num(self.unpooled[layer, token_set, judged], nan=-np.inf)
            is_raised = own < scores[by_score].min()
        found = {
            "sink": judged[is_sink],
            "text": judged[~is_sink & (level == 2)],
            "score": judged[by_score & ~is_raised],
            "neighbour": judged[by_score & is_raised],
            "tail": kept[kept >= self._num_candidates],
        }
        preferred = judged[~is_sink & (level == 1)]
        others = found.get(self.preferred, np.empty(0, kept.dtype))
        found[self.preferred] = np.sort(np.concatenate([others, preferred]))
        return {reason: positions.tolist() for reason, positions in found.items() if len(positions)}


def join_traces(parts: Sequence[Trace]) -> Trace:
    """Return the trace of one eviction from the traces of all pipeline stages, in order."""
    last = parts[-1]
    by_layer = {"counts", "scores"}
    if last.unpooled is not None:
        by_layer.add("unpooled")
    if last.preference.ndim > 1:
        by_layer.add("preference")
    return replace(
        last,
        positions=np.concatenate([part.positions[: part.counts.sum()] for part in parts]),
        stage_blocks=max(part.num_token_blocks for part in parts),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in by_layer},
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
        """Store a cut with the request's earlier ones, and keep the bounds.

        The oldest requests are dropped first, then the oldest cuts of this one.
        """
        if trace.nbytes > self._max_bytes:
            logger.warning(
                "KV eviction keeps no trace of %s: it takes %d MiB of the %d of all traces",
                trace.id,
                -(-trace.nbytes // 2**20),
                self._max_bytes // 2**20,
            )
            return
        with self._lock:
            known = self._traces.pop(trace.id, None)
            if known is not None:
                trace = trace.after(known).within(self._max_bytes)
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
