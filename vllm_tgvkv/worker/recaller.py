# SPDX-License-Identifier: Apache-2.0
"""Recall in the worker: choose a row's tokens again out of its whole prompt, and exchange them.

    at the cut         the prompt's keys and values -> the tier; a sketch of its keys -> the pool
    every few tokens   the newest rows' attention to the sketch, and to the answer's keys
                       -> the policy's scores -> the tokens that each (layer, head) shall have
                       -> the tokens that come are read from the tier
    the next step      they take the slots of the tokens that go

The pages of every (layer, head), and so the page tables, stay as the cut left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_tgvkv.config.recall import RecallOptions
from vllm_tgvkv.kernels.exchange import exchange
from vllm_tgvkv.kernels.row_chunks import observe_logits
from vllm_tgvkv.kernels.statistics import Scratch
from vllm_tgvkv.policies import LayerView, Policy, Prompt
from vllm_tgvkv.recall.sketches import SketchPages
from vllm_tgvkv.recall.tier import Tier, TierError
from vllm_tgvkv.shared.plan import Choice, ChoiceOutcome, Eviction
from vllm_tgvkv.shared.prompt import CHOICE_ROWS
from vllm_tgvkv.worker.context import ObserverContext
from vllm_tgvkv.worker.decision import Decision, ScoredPrompt
from vllm_tgvkv.worker.due import DueEviction
from vllm_tgvkv.worker.outcomes import start_trace

logger = init_logger("vllm.tgvkv")

_LOGITS_BYTES = 4 << 20
"""Bound of the logits of layers that are scored together, or one layer's."""


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
class _Exchange:
    """Tokens that are on their way from the tier."""

    request_id: str
    row: _Row
    tokens: Callable[[], Tensor]
    """Waits for them."""
    slots: Tensor
    """Slots of the pool, int64 [n]."""
    positions: Tensor
    """Of the tokens in the region's slots afterwards, int32 [pages, N]."""


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
        self._context = context
        self._tier = tier
        self._sketches = SketchPages(context.pool, options.sketch)
        self._every = options.every
        self._scales = scales
        self._scratch = Scratch()
        """Of this part's own: choices come every few steps, and mapping memory takes as long."""
        self._rows: dict[str, _Row] = {}
        self._exchanges: list[_Exchange] = []
        """Oldest first."""
        self._failed: list[str] = []

    def begin_step(self, ended: Sequence[str]) -> None:
        """Drop the rows of requests whose recall ended, and let tokens take their slots."""
        for request_id in ended:
            self._forget(request_id)
        waiting, self._exchanges = self._exchanges, []
        for due in waiting:
            # Unless it was cut meanwhile, or has no region any more.
            if self._rows.get(due.request_id) is due.row:
                self._put(due)

    def _put(self, due: _Exchange) -> None:
        request_id, row = due.request_id, due.row
        try:
            self._tier.put(due.tokens(), due.slots)
        except TierError as error:
            logger.error("KV eviction: %s has no recall any more: %s", request_id, error)
            self._forget(request_id)
            self._failed.append(request_id)
            return
        self._context.regions.store_positions(row.blocks, due.positions)

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
            tier_blocks = self._context.to_device(eviction.tier_blocks).long()
            num_candidates = due.prompt.num_candidates
            self._sketches.write(due.keys.tables.long(), num_candidates, sketch_blocks)
            self._tier.write(due.keys.blocks[: eviction.num_replaced].long(), tier_blocks)
            self._rows[eviction.request_id] = _Row(
                eviction,
                replace(due.policy, pooling=due.policy.pooling.serving(self._every + 1)),
                due.prompt.sinks,
                num_candidates,
                tier_blocks,
                sketch_blocks,
                token_blocks,
                offsets,
                positions,
            )

    def choose(self, choice: Choice) -> tuple[ChoiceOutcome, Decision] | None:
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

    def _choose(self, row: _Row, choice: Choice) -> tuple[ChoiceOutcome, Decision]:
        scored = self._score(row, choice)
        shape = self._context.shape
        counts = row.offsets.diff().long().view(shape.num_layers, shape.num_heads)
        decision = scored.fill(counts, len(row.blocks))
        positions = exchange(row.positions, decision.positions, row.offsets, row.num_candidates)
        # How many tokens move is known from the data only: this is for CPUs.
        moved = (positions != row.positions).flatten().nonzero().squeeze(1)
        page = moved // shape.block_size
        pair = torch.searchsorted(row.offsets, page, right=True) - 1
        slots = self._tier.slots(row.tier_blocks, pair, positions.flatten()[moved].long())
        where = self._pages(row)[page] * shape.block_size + moved % shape.block_size
        name, tokens = choice.request_id, self._tier.fetch(slots)
        self._exchanges.append(_Exchange(name, row, tokens, where, positions))
        row.positions = positions
        num_answer = choice.num_tokens - row.eviction.prompt.num_tokens
        trace, moved_by_pair = None, len(moved) / shape.num_pairs
        if self._context.ranks.size == 1:  # others know their own heads only
            num_blocks = len(row.blocks)
            trace = start_trace(
                row.eviction, scored, decision, num_blocks, num_answer, moved_by_pair
            )
        return ChoiceOutcome(name, num_answer, moved_by_pair, shape.num_pairs, trace), decision

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
            size = num_pairs, shape.group_size, len(stored), num_tokens
            logits = self._scratch.take("recalled", size, tail.device)
            products = logits.flatten(1, 2)
            queries = context.queries.load(layers, stored).float().mul_(scale)
            # [layers, O, H * G, D] -> [pairs, G * O, D]
            queries = queries.transpose(1, 2).reshape(num_pairs, -1, shape.head_size)
            self._sketches.logits(
                row.sketch_blocks, first, num_candidates, queries, products, self._scratch
            )
            pairs = torch.arange(first, first + num_pairs, device=tail.device)[:, None]
            newest = context.pool.keys[tail * shape.num_pairs + pairs].float().flatten(1, 2)
            keys = newest[:, : num_tokens - num_candidates].transpose(1, 2)
            # Into the slice at once it would take ten times as long on a CPU.
            products[..., num_candidates:] = torch.bmm(queries, keys)
            attention = observe_logits(
                logits,
                positions,
                row.policy.statistics(row.policy.score.rows),
                context.workspace_bytes,
                self._scratch,
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
        """Yield layers that are scored together, whose logits fit a cache, and their scale."""
        shape, first = self._context.shape, 0
        layer_bytes = 4 * shape.num_heads * shape.group_size * num_rows * num_tokens
        most = max(1, _LOGITS_BYTES // layer_bytes)
        for scale, alike in groupby(self._scales):
            last = first + len(list(alike))
            for start in range(first, last, most):
                yield slice(start, min(start + most, last)), scale
            first = last

    def _pages(self, row: _Row) -> Tensor:
        """Return the pool's pages of a region's pages, int64 [pages]."""
        num_pairs = self._context.shape.num_pairs
        pairs = torch.arange(num_pairs, device=row.blocks.device)
        return (row.blocks[:, None] * num_pairs + pairs).flatten()
