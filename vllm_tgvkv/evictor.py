# SPDX-License-Identifier: Apache-2.0
"""The worker's side of an eviction: observe each layer, decide, select, copy.

Within one forward pass, for every prompt whose last chunk is in the batch:

    after each layer   attention statistics of the observation rows
                       -> the policy's scores and its strength of the layer
    after the last     strengths -> shares -> pages of every (layer, head)
                       scores    -> the kept tokens, every page full
                       one copy into the fresh blocks; the region's offsets are stored

Nothing here waits for the device: every size is known from the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.select import page_offsets, select_tokens
from vllm_tgvkv.kernels.statistics import Scratch, observe
from vllm_tgvkv.pages import PagePool
from vllm_tgvkv.plan import Eviction, Observation, StepPlan
from vllm_tgvkv.policies import ImageSpan, Policy, Prompt, build_policy
from vllm_tgvkv.regions import Regions


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the cache: L layers, H KV heads, G query heads each, D values a head, N slots."""

    num_layers: int
    num_heads: int
    group_size: int
    head_size: int
    block_size: int

    @property
    def num_pairs(self) -> int:
        return self.num_layers * self.num_heads


@dataclass
class Judgement:
    """A prompt that is evicted in this forward pass, and what its layers showed so far."""

    eviction: Eviction
    policy: Policy
    prompt: Prompt
    old_blocks: torch.Tensor
    """Block ids of the prompt, int32 [ceil(P / N)]."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """A layer each, float32 [H or 1, C]."""
    strengths: list[torch.Tensor] = field(default_factory=list)
    """A layer each, float32 [H or 1]."""


@dataclass
class PromptWork:
    """One prompt's part of the current forward pass."""

    request_id: str
    observation: Observation | None = None
    token_index: torch.Tensor | None = None
    """Rows of the batch's queries that are the observation's rows, int64."""
    judgement: Judgement | None = None

    @property
    def in_one_chunk(self) -> bool:
        """Whether every row that votes is in the chunk that ends the prefill."""
        return (
            self.judgement is not None
            and self.observation is not None
            and self.observation.first == self.judgement.eviction.first_row
        )


@dataclass(frozen=True)
class KeptTokens:
    """What one eviction kept (debug option `record_kept`)."""

    request_id: str
    counts: torch.Tensor
    """Pages of every (layer, head), int64 [L, H]."""
    positions: torch.Tensor
    """Kept positions, int32 [pages, N], pages in (layer, head) order."""


class Evictor:
    """Carries out `StepPlan`s; owned by the attention metadata builder of a worker."""

    def __init__(self, config: EvictionConfig, shape: CacheShape, pool: PagePool) -> None:
        self.config = config
        self.shape = shape
        self.pool = pool
        self.device = pool.raw.device
        self.regions = Regions(pool.num_blocks, shape.num_pairs, self.device)
        self.kept: deque[KeptTokens] = deque(maxlen=256)
        self._policies: dict[str, Policy] = {}
        self._queries: dict[str, torch.Tensor] = {}
        """Observation queries of prompts that span several chunks, [L, O, H * G, D]."""
        self._plan = StepPlan()
        self._work: list[PromptWork] = []
        self._scratch = Scratch()

    # -- a step -------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Take over what the scheduler decided, before the batch is built."""
        self._plan = plan
        self._work = []
        self._scratch = Scratch()  # the layers of a step share it; then its memory is free
        self.regions.release(plan.released)
        for request_id in plan.forgotten:
            self._queries.pop(request_id, None)
        if plan.poisoned:
            self.pool.poison(plan.poisoned)

    @property
    def has_work(self) -> bool:
        """Whether prompts have to be observed in this step."""
        return bool(self._plan.observations or self._plan.evictions)

    def prepare(self, first_token: Callable[[str], int]) -> bool:
        """Resolve the plan's requests in the batch; whether the layers have to be observed.

        `first_token(request_id)` is the index of the request's first token in the
        batch's queries.
        """
        works: dict[str, PromptWork] = {}
        for observation in self._plan.observations:
            work = works.setdefault(observation.request_id, PromptWork(observation.request_id))
            start = first_token(observation.request_id) - observation.chunk_start
            work.observation = observation
            work.token_index = self._to_device(observation.rows + start)
        for eviction in self._plan.evictions:
            work = works.setdefault(eviction.request_id, PromptWork(eviction.request_id))
            work.judgement = Judgement(
                eviction,
                self._policy(eviction.policy),
                self._prompt(eviction),
                self._to_device(eviction.old_blocks),
            )
        self._work = list(works.values())
        return bool(self._work)

    def observe_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Look at one layer, after its keys were cached and its attention ran.

        `queries` is [tokens, H * G, D], rotated, of the whole batch.
        """
        for work in self._work:
            chunk = self._chunk_rows(work, layer, queries)
            if work.judgement is None:
                continue
            if chunk is not None and work.in_one_chunk:
                rows = chunk
            else:
                first = work.judgement.eviction.first_row
                rows = self._queries[work.request_id][layer, first:]
            self._judge_layer(work.judgement, layer, rows, scale)
            if len(work.judgement.scores) == self.shape.num_layers:
                self._finish(work.judgement)

    # -- observation --------------------------------------------------------------------

    def _chunk_rows(
        self, work: PromptWork, layer: int, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Queries of this chunk's observation rows, [n, H * G, D], or None if it has none.

        They are kept until the prefill ends, unless it ends with this chunk and no
        earlier one had rows.
        """
        observation = work.observation
        if observation is None or work.token_index is None:
            return None
        chunk = queries.index_select(0, work.token_index)
        if not work.in_one_chunk:
            if work.request_id not in self._queries:
                shape = (self.shape.num_layers, observation.num_rows, *queries.shape[1:])
                self._queries[work.request_id] = queries.new_empty(shape)
            last = observation.first + len(observation.rows)
            self._queries[work.request_id][layer, observation.first : last] = chunk
        return chunk

    def _judge_layer(
        self, judgement: Judgement, layer: int, rows: torch.Tensor, scale: float
    ) -> None:
        shape, prompt = self.shape, judgement.prompt
        rows_on_host = judgement.eviction.prompt.rows[judgement.eviction.first_row :]
        attention = observe(
            rows.unflatten(1, (shape.num_heads, shape.group_size)),
            self.pool.layer_keys(layer),
            judgement.old_blocks,
            prompt.rows,
            prompt.num_tokens,
            scale,
            num_common_keys=int(rows_on_host[0]) + 1,
            scratch=self._scratch,
        )
        scores, strength = judgement.policy.look(attention, prompt)
        # A copy of the candidates: a view would keep the tail's columns alive as well.
        judgement.scores.append(scores[:, : prompt.num_candidates].contiguous())
        judgement.strengths.append(strength)

    # -- decision -----------------------------------------------------------------------

    def _finish(self, judgement: Judgement) -> None:
        """Deal the pages, select the tokens, copy them, store the region."""
        eviction, prompt, policy = judgement.eviction, judgement.prompt, judgement.policy
        shape, num_retained = self.shape, eviction.num_retained_blocks
        num_full = prompt.num_candidates // shape.block_size
        counts = self._deal(policy, torch.stack(judgement.strengths), num_retained, num_full)
        positions = select_tokens(
            torch.stack(judgement.scores),
            policy.retention.tiers(prompt)[: prompt.num_candidates],
            counts,
            num_retained * shape.num_pairs,
            shape.block_size,
        )
        offsets = page_offsets(counts)
        copy_kept(
            self.pool.keys,
            self.pool.values,
            positions,
            offsets,
            judgement.old_blocks[:num_full],
            self._to_device(eviction.new_blocks),
            shape.num_layers,
            shape.num_heads,
        )
        self.regions.add(int(eviction.new_blocks[0]), num_retained, num_full, offsets)
        self._queries.pop(eviction.request_id, None)
        if self.config.debug.record_kept:
            self.kept.append(KeptTokens(eviction.request_id, counts, positions))

    def _deal(
        self, policy: Policy, strengths: torch.Tensor, num_retained: int, num_full: int
    ) -> torch.Tensor:
        """Pages of every (layer, head), int64 [L, H], that sum to k * L * H.

        At granularity `layer` a layer gets the same number for each of its heads, so
        what is dealt is k * L units of H pages.
        """
        shape = self.shape
        floor = min(self.config.floor_pages, num_retained)
        shares = policy.budget.shares(strengths)
        total = num_retained * shares.numel()
        counts = apportion(shares.flatten(), total, floor, num_full).view_as(shares)
        return counts.expand(shape.num_layers, shape.num_heads).contiguous()

    # -- the plan on the device ---------------------------------------------------------

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            config = self.config
            self._policies[name] = build_policy(
                name, granularity=config.granularity, pooling=config.pooling
            )
        return self._policies[name]

    def _prompt(self, eviction: Eviction) -> Prompt:
        prompt = eviction.prompt
        return Prompt(
            num_tokens=prompt.num_tokens,
            num_candidates=prompt.num_tokens // self.shape.block_size * self.shape.block_size,
            is_vision=self._to_device(prompt.is_vision()),
            rows=self._to_device(prompt.rows[eviction.first_row :]),
            sinks=self.config.sinks,
            images=tuple(ImageSpan(run.start, run.length, run.grid) for run in prompt.vision),
        )

    def _to_device(self, array: Sequence[int] | object) -> torch.Tensor:
        return torch.as_tensor(array).to(self.device, non_blocking=True)
