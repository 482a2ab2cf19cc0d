# SPDX-License-Identifier: Apache-2.0
"""Recall in the worker: choose a row's tokens again out of its whole prompt, and exchange them.

    at the cut         the prompt's keys and values -> the tier; a sketch of its keys -> the pool
    every few tokens   the newest rows' attention to the sketch, and to the answer's keys
                       -> the policy's scores -> the tokens that each (layer, head) shall have
                       -> the tokens that come are read from the tier
    the next step      they take the slots of the tokens that go

The pages of every (layer, head), and so the page tables, stay as the cut left them. A GPU reads the
tokens itself, right after the choice, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_tgvkv.cache.pages import CacheShape
from vllm_tgvkv.config.recall import RecallOptions
from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.exchange import Exchange, exchange
from vllm_tgvkv.kernels.row_chunks import observe_logits
from vllm_tgvkv.kernels.sketch import sketch_bytes
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.policies import LayerView, Policy, Prompt
from vllm_tgvkv.recall.sketches import SketchPages
from vllm_tgvkv.recall.tier import Tier, TierError
from vllm_tgvkv.shared.plan import Choice, Eviction
from vllm_tgvkv.shared.prompt import CHOICE_ROWS
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt
from vllm_tgvkv.worker.due import DueEviction
from vllm_tgvkv.worker.outcomes import PendingChoice, start_trace

logger = init_logger("vllm.tgvkv")

_LOGITS_BYTES = 4 << 20
"""On a CPU, bound of the logits of layers that are scored together, or one layer's."""


@dataclass
class _Row:
    """A compressed row whose tokens may be exchanged."""

    eviction: Eviction
    """The first cut."""
    policy: Policy
    """Of choices: its pooling reaches as far as a choice serves."""
    sinks: int
    num_candidates: int
    """C."""
    tier_blocks: Tensor
    """int64 [t]."""
    sketch_blocks: Tensor
    """int64 [s]."""
    blocks: Tensor
    """Blocks of the region that hold tokens, int64 [k]."""
    offsets: Tensor
    """int32 [M + 1]."""
    positions: Tensor
    """Of the tokens in the region's slots, exchanges that are on their way included, int32
    [pages, N]."""
    votes: list[_Votes] = field(default_factory=list)
    """Of the last choices since the newest cut, oldest first."""


class _Votes(NamedTuple):
    """What the rows of a choice say."""

    num_tokens: int
    """Tokens of the request at the choice."""
    scores: Tensor
    """Before pooling, float32 [L * H, C]."""


@dataclass
class _Due:
    """Tokens that are on their way from the tier."""

    request_id: str
    row: _Row
    end: Callable[[], None]
    """Waits for them, and lets them take their slots."""


class Recaller:
    """Keeps the rows whose evicted tokens can come back."""

    def __init__(
        self,
        context: ObserverContext,
        tier: Tier,
        options: RecallOptions,
        scales: Sequence[float],
    ) -> None:
        """Make it; `scales` has the factor of products of queries and keys by layer."""
        self.tier = tier
        self._context = context
        self._sketches = SketchPages(context.pool, options.sketch)
        self._every = options.every
        self._scales = scales
        self._scratch = Scratch()
        """Of this part's own: choices come every few steps, and mapping memory takes as long."""
        self._rows: dict[str, _Row] = {}
        self._due: list[_Due] = []
        """Oldest first."""
        self._failed: list[str] = []

    def begin_step(self, ended: Sequence[str]) -> None:
        """Drop the rows of requests whose recall ended, and let tokens take their slots."""
        for request_id in ended:
            self._forget(request_id)
        waiting, self._due = self._due, []
        for due in waiting:
            # Unless it was cut meanwhile, or has no region any more.
            if self._rows.get(due.request_id) is due.row:
                self._end(due)

    def _end(self, due: _Due) -> None:
        try:
            due.end()
        except TierError as error:
            logger.error("KV eviction: %s has no recall any more: %s", due.request_id, error)
            self._forget(due.request_id)
            self._failed.append(due.request_id)

    def _forget(self, request_id: str) -> None:
        if (row := self._rows.pop(request_id, None)) is not None:
            self._sketches.clear(row.sketch_blocks)

    def take_failed(self) -> list[str]:
        """Return the requests that lost their recall since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def cut(self, due: DueEviction, positions: Tensor, offsets: Tensor) -> None:
        """Keep what a cut evicts, once the kept tokens are copied; what it holds comes with it.

        `positions` and `offsets` describe the new region.
        """
        eviction = due.eviction
        num_sketch = eviction.num_sketch
        if not num_sketch:
            return
        blocks = due.new_blocks.long()
        sketch_blocks, token_blocks = blocks[-num_sketch:], blocks[: due.num_token_blocks]
        row = self._rows.get(eviction.request_id)
        if row is not None:
            self._sketches.move(row.sketch_blocks, sketch_blocks)
            self._rows[eviction.request_id] = replace(
                row,
                sketch_blocks=sketch_blocks,
                blocks=token_blocks,
                offsets=offsets,
                positions=positions,
                votes=[],
            )
        elif eviction.tier_blocks is not None:
            tier_blocks = eviction.tier_blocks
            num_candidates = due.prompt.num_candidates
            self._sketches.write(due.keys.tables.long(), num_candidates, sketch_blocks)
            self.tier.write(due.keys.blocks[: eviction.num_replaced].long(), tier_blocks)
            self._rows[eviction.request_id] = _Row(
                eviction,
                replace(due.policy, pooling=due.policy.pooling.serving(self._every + 1)),
                due.prompt.sinks,
                num_candidates,
                self._context.to_device(tier_blocks).long(),
                sketch_blocks,
                token_blocks,
                offsets,
                positions,
            )

    def choose(self, choice: Choice) -> tuple[PendingChoice, Decision] | None:
        """Choose a row's tokens again, after the step's layers; None if it has no recall.

        Both are of this worker's layers and heads. If the method raises, the row keeps what it has
        from now on.
        """
        row = self._rows.get(choice.request_id)
        if row is None:
            return None
        try:
            with torch.inference_mode():  # as the layers run, with which it shares buffers
                return self._choose(row, choice)
        except Exception:
            logger.exception("KV eviction: %s has no recall any more", choice.request_id)
            self._forget(choice.request_id)
            self._failed.append(choice.request_id)
            return None

    def _choose(self, row: _Row, choice: Choice) -> tuple[PendingChoice, Decision]:
        scored = self._score(row, choice)
        context, shape = self._context, self._context.shape
        counts = row.offsets.diff().long().view(shape.num_layers, shape.num_heads)
        decision = scored.fill(counts, len(row.blocks))
        positions = exchange(row.positions, decision.positions, row.offsets, row.num_candidates)
        moves = Exchange(row.positions, positions, row.offsets, row.blocks, row.tier_blocks)
        name, end = choice.request_id, self.tier.exchange(moves, context.regions.positions)
        self._due.append(_Due(name, row, end))
        row.positions = positions
        num_answer = choice.num_tokens - row.eviction.prompt.num_tokens
        trace = None
        if context.ranks.size == 1:  # others know their own heads only
            trace = start_trace(row.eviction, scored, decision, len(row.blocks), num_answer)
        return PendingChoice(name, num_answer, moves.num_moved, shape.num_pairs, trace), decision

    def _score(self, row: _Row, choice: Choice) -> ScoredPrompt:
        """Score all of a prompt by its sketch, layer by layer."""
        context, shape = self._context, self._context.shape
        num_tokens, num_candidates = choice.num_tokens, row.num_candidates
        num_answer = num_tokens - row.eviction.prompt.num_tokens
        prompt = Prompt(
            num_tokens=num_tokens,
            num_candidates=num_candidates,
            is_vision=context.to_device(row.eviction.prompt.followed_by(num_answer).is_vision()),
            sinks=row.sinks,
            images=row.eviction.prompt.vision,
        )
        size = shape.block_size
        stored, positions = context.to_device(choice.stored), context.to_device(choice.rows)
        tail = context.to_device(choice.tail_blocks).long()
        # Every row votes once, and its vote counts at all choices of the next tokens.
        counts_from = num_tokens - CHOICE_ROWS
        row.votes[:] = (votes for votes in row.votes if votes.num_tokens > counts_from)
        combine = torch.maximum if row.policy.reduction == "max" else torch.add
        scores, found = [], []
        for layers, scale in self._parts(len(stored), num_tokens):
            num_layers = layers.stop - layers.start
            first, num_pairs = layers.start * shape.num_heads, num_layers * shape.num_heads
            sinks = context.sinks and context.sinks(layers).flatten(0, 1)
            width = num_tokens + (sinks is not None)
            of_logits = num_pairs, shape.group_size, len(stored), width
            logits = self._scratch.take("recalled", of_logits, tail.device)
            products = logits.flatten(1, 2)
            queries = context.queries.load(layers, stored).float().mul_(scale)
            # [layers, O, H * G, D] -> [pairs, G * O, D]
            queries = queries.transpose(1, 2).reshape(num_pairs, -1, shape.head_size)
            self._sketches.logits(
                row.sketch_blocks, first, num_candidates, queries, products, self._scratch
            )
            pairs = torch.arange(first, first + num_pairs, device=tail.device)[:, None]
            for start, end in self._tail_parts(num_pairs, num_candidates, num_tokens):
                part = tail[(start - num_candidates) // size : -(-(end - num_candidates) // size)]
                newest = context.pool.keys[part * shape.num_pairs + pairs].float().flatten(1, 2)
                keys = newest[:, : end - start].transpose(1, 2)
                # Into the slice at once it would take ten times as long on a CPU.
                products[..., start:end] = torch.bmm(queries, keys)
            attention = observe_logits(
                logits,
                positions,
                row.policy.statistics(row.policy.score.rows),
                context.workspace_bytes,
                self._scratch,
                sinks,
            )
            view = LayerView(
                context.stages.first_layer + layers.start,
                num_pairs,
                prompt,
                attention,
                context.ranks.part * shape.num_heads,
            )
            voted = row.policy.scores(view)
            own = voted[:, :num_candidates]
            found.append(own.clone())
            for earlier in row.votes:
                combine(own, earlier.scores[first : first + num_pairs], out=own)
            pooled = row.policy.pooled(voted, prompt)
            scores.append(pooled[:, :num_candidates].unflatten(0, (num_layers, -1)))
        row.votes.append(_Votes(num_tokens, torch.cat(found)))
        stacked = torch.cat(scores)
        return ScoredPrompt(
            row.policy,
            prompt,
            stacked,
            stacked.new_empty(*stacked.shape[:2], 0),
            num_heads=shape.num_heads,
            block_size=shape.block_size,
            floor_pages=0,
        )

    def _parts(self, num_rows: int, num_tokens: int) -> Iterator[tuple[slice, float]]:
        """Yield layers that are scored together, and their scale."""
        context, first = self._context, 0
        if gpu.runs(context.pool.raw):
            sizes = context.shape, self._sketches.bits, num_rows, num_tokens
            most = layers_at_once(*sizes, context.workspace_bytes)
        else:  # logits that fit a cache
            most = max(1, _LOGITS_BYTES // logits_bytes(context.shape, num_rows, num_tokens))
        for scale, alike in groupby(self._scales):
            last = first + len(list(alike))
            for start in range(first, last, most):
                yield slice(start, min(start + most, last)), scale
            first = last

    def _tail_parts(self, num_pairs: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield parts of the tokens behind the region, whose keys fit the workspace in float32."""
        shape = self._context.shape
        page_bytes = 4 * num_pairs * shape.block_size * shape.head_size
        step = max(1, self._context.workspace_bytes // page_bytes) * shape.block_size
        for first in range(start, end, step):
            yield first, min(first + step, end)


def layers_at_once(
    shape: CacheShape, bits: int, num_rows: int, num_tokens: int, workspace_bytes: int
) -> int:
    """Return how many layers a GPU scores together: their logits and sketches fit the workspace.

    Every part takes some dozens of launches, which cost the host more than the GPU.
    """
    of_layer = max(
        logits_bytes(shape, num_rows, num_tokens),
        shape.num_heads * sketch_bytes(num_tokens, shape.head_size, bits),
    )
    return max(1, min(shape.num_layers, workspace_bytes // of_layer))


def logits_bytes(shape: CacheShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of a layer's logits of rows that vote."""
    return 4 * shape.num_heads * shape.group_size * num_rows * num_tokens
