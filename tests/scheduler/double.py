# SPDX-License-Identifier: Apache-2.0
"""The real scheduler and block manager over a worker without a model.

The worker is a double of vLLM's model runner V1 with our worker in front of it. It keeps rows of
block ids, writes a digest of the content into each slot, and checks each slot that it reads. So a
block that is freed too early, a row that was not rewritten or a region that was not dropped ends a
step with an `AssertionError`, where a model would only write worse text.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import lcm
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.configs import AdjustedConfig
from vllm_tgvkv.blocks.integrity import check_integrity
from vllm_tgvkv.blocks.manager import DraftSpec, EvictingSpec, StateSpec, WindowSpec
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.scheduler import scheduler as scheduler_module
from vllm_tgvkv.scheduler.scheduler import AsyncEvictionScheduler, EvictionScheduler
from vllm_tgvkv.shared.cuts import Cuts
from vllm_tgvkv.shared.plan import (
    NO_ROW,
    Choice,
    ChoiceOutcome,
    ColumnSumChunk,
    Eviction,
    Failure,
    Observation,
    Outcome,
    attach_outcomes,
    plan_of,
)

END = 2
"""The token that ends an answer."""

BLOCK_BYTES = 4096
"""Bytes of a block, as the scheduler is told."""

_MASK = (1 << 62) - 1

init_none_hash(sha256_cbor)


@dataclass(frozen=True)
class Setup:
    """The parts of a server's configuration that its scheduler sees."""

    num_blocks: int = 64
    """Blocks that can be allocated."""
    block_size: int = 16
    max_num_seqs: int = 64
    chunk: int = 256
    """Tokens per step, `--max-num-batched-tokens`."""
    long_prefill: int = 0
    """Tokens of one prompt per step, `--long-prefill-token-threshold`."""
    max_model_len: int = 1024
    policy: str = "fcfs"
    prefix_caching: bool = True
    ahead: bool = False
    """Whether a step is scheduled while the last one runs."""
    reads: bool = False
    """Whether a KV connector may write to a block that is free: blocks of steps in flight are freed
    later."""
    watermark: float = 0.0
    encoder_budget: int = 4096
    """Image tokens per step, and in the encoder's cache."""
    window: int = 0
    """Tokens of a group of layers with a sliding window; 0 for none."""
    states: int = 0
    """Groups of layers with a state, as in hybrid models."""
    drafts: int = 0
    """Tokens of a draft model's block, in blocks of the model; 0 without a draft model."""
    lookahead: int = 0
    """Tokens that the draft model writes behind the tokens of a step."""
    retention: int | None = 0
    """Tokens between cached windows and states, `--prefix-cache-retention-interval`; None: all,
    and 0, vLLM's default: no more than a repeated prompt needs."""
    eviction: Mapping[str, Any] | None = field(default_factory=lambda: {"policy": "tgv"})
    """The fields of an `AdjustedConfig`; None: stock vLLM."""


@dataclass(frozen=True)
class Job:
    """A request and the length of its answer."""

    name: str
    prompt: tuple[int, ...]
    answer: int = 16
    images: tuple[tuple[int, int], ...] = ()
    """Offset and length of each; the first tokens of equal images are equal."""
    max_tokens: int = 0
    """At least `answer`; 0 for exactly that."""
    xargs: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    arrival: int = 0
    fails: str = ""
    """`observe` or `evict`: the part of its eviction that fails on the worker."""

    def request(self, block_size: int) -> Request:
        params = SamplingParams(
            max_tokens=max(self.max_tokens, self.answer),
            temperature=0,
            extra_args=dict(self.xargs) or None,
        )
        params._eos_token_id = END
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"{self.prompt[offset : offset + length]}",
                mm_position=PlaceholderRange(offset=offset, length=length),
            )
            for offset, length in self.images
        ]
        return Request(
            self.name,
            list(self.prompt),
            params,
            None,
            arrival_time=float(self.arrival),
            mm_features=features,
            priority=self.priority,
            block_hasher=get_request_block_hasher(block_size, sha256_cbor),
        )


def make_scheduler(setup: Setup) -> Scheduler:
    """Return vLLM's scheduler, or ours with eviction, over a pool of `setup.num_blocks` blocks."""
    config = VllmConfig()
    register_all_kvcache_specs(config)
    config.model_config = SimpleNamespace(
        uses_mrope=False,
        max_model_len=setup.max_model_len,
        runner_type="generate",
        is_diffusion=False,
        is_encoder_decoder=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        multimodal_config=None,
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
        get_total_num_hidden_layers=lambda: 2,
    )
    config.scheduler_config = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.chunk,
        max_model_len=setup.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=setup.long_prefill,
        policy=setup.policy,
        watermark=setup.watermark,
        async_scheduling=setup.ahead,
    )
    mode = "align" if setup.states and setup.prefix_caching else "none"
    state_size = setup.block_size if setup.prefix_caching else setup.max_model_len
    config.cache_config = CacheConfig(
        block_size=setup.block_size,
        enable_prefix_caching=setup.prefix_caching,
        mamba_cache_mode=mode,
    )
    num_blocks = setup.num_blocks + 1  # vLLM keeps one as the null block
    config.cache_config.num_gpu_blocks = num_blocks
    spec_class, scheduler_class = FullAttentionSpec, AsyncScheduler if setup.ahead else Scheduler
    if setup.eviction is not None:
        known = {field.name for field in fields(EvictionConfig)}
        config.additional_config = {
            CONFIG_KEY: {name: each for name, each in setup.eviction.items() if name in known}
        }
        spec_class = EvictingSpec
        scheduler_class = AsyncEvictionScheduler if setup.ahead else EvictionScheduler
    sizes = {"block_size": setup.block_size, "num_kv_heads": 2, "head_size": 4}
    spec = spec_class(**sizes, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer.0", "layer.1"], spec)]
    tokens_per_block = setup.block_size * max(setup.drafts, 1)
    if setup.drafts:
        draft = DraftSpec(**{**sizes, "block_size": tokens_per_block}, dtype=torch.float32)
        groups.insert(0, KVCacheGroupSpec(["draft.0"], draft))
    if setup.window:
        window_class = SlidingWindowSpec if setup.eviction is None else WindowSpec
        sliding = window_class(**sizes, dtype=torch.float32, sliding_window=setup.window)
        groups.append(KVCacheGroupSpec(["layer.2", "layer.3"], sliding))
    state_class = MambaSpec if setup.eviction is None else StateSpec
    state = state_class(
        block_size=state_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=setup.lookahead,
    )
    groups += [KVCacheGroupSpec([f"state.{i}"], state) for i in range(setup.states)]
    adjusted = AdjustedConfig.from_mapping(setup.eviction or {})
    with (
        mock.patch.object(scheduler_module, "config_of", return_value=adjusted),
        mock.patch.object(VllmConfig, "num_lookahead_tokens", setup.lookahead),
    ):
        scheduler = scheduler_class(
            config,
            KVCacheConfig(
                num_blocks,
                [
                    KVCacheTensor(
                        size=num_blocks * BLOCK_BYTES,
                        layers=group.layer_names,
                        layer_stride=BLOCK_BYTES // 2,
                        block_stride=BLOCK_BYTES,
                    )
                    for group in groups
                ],
                groups,
                prefix_cache_retention_interval=setup.retention if groups[1:] else None,
            ),
            SimpleNamespace(accept_tokens=lambda *_: True),  # type: ignore[arg-type]
            block_size=lcm(tokens_per_block, state_size) if setup.states else tokens_per_block,
            hash_block_size=setup.block_size if setup.prefix_caching else None,
            log_stats=False,
        )
    scheduler.use_v2_model_runner = False
    if setup.reads and setup.ahead:
        scheduler.defer_block_free = True
        if setup.eviction is not None:
            scheduler.manager.free_later = scheduler._free_later
    # As for a model with a vision tower.
    scheduler.max_num_encoder_input_tokens = setup.encoder_budget
    scheduler.encoder_cache_manager = EncoderCacheManager(setup.encoder_budget)
    return scheduler


@dataclass
class Row:
    """The model runner's record of a request."""

    job: Job
    tokens: list[int]
    blocks: list[int]
    states: list[list[int]]
    """Blocks of each group of states."""
    num_computed: int
    last_state: int | None = None
    """Index among the blocks of the state after the last step; None in a request's first one."""


@dataclass(frozen=True)
class Region:
    """A compressed region: its owner and the blocks of its pages."""

    owner: str
    blocks: np.ndarray
    mark: int
    at: int
    """Tokens that were computed when it was made."""
    num_replaced: int
    """Blocks in whose place it stands."""


def planned_cuts(cuts: Cuts) -> dict[int, tuple[int, int]]:
    """Return retained and replaced blocks by the number of tokens of each cut, token by token."""
    size, ceiling = cuts.block_size, cuts.ceiling
    scheduled = {cut.at: cut for cut in cuts.scheduled}
    found: dict[int, tuple[int, int]] = {}
    num_spared = 0
    if cuts.first is None:
        return found
    for at in range(cuts.first.at, cuts.longest - 1):
        num_full = at // size
        if at in scheduled:
            cut = scheduled[at]
            found[at] = cut.num_retained, cut.num_replaced
        elif ceiling is not None and at % size == 0:
            least = max(ceiling.max_tokens // size, 1)
            most = max((ceiling.max_tokens + ceiling.buffer) // size, least + 1)
            if num_full - num_spared > most:
                found[at] = least, num_full
        if at in found:
            num_spared = found[at][1] - found[at][0]
    return found


class WorkerDouble:
    """Executes scheduled steps on slots that record their content."""

    def __init__(self, setup: Setup, seed: int = 0, verify: bool = True) -> None:
        self.block_size = setup.block_size
        self.num_states, self.num_drafts = setup.states, int(setup.drafts > 0)
        self.state_size = setup.block_size if setup.prefix_caching else setup.max_model_len
        self.verify = verify
        self.memory = np.full((setup.num_blocks + 1, setup.block_size), -1, dtype=np.int64)
        self.jobs: dict[str, Job] = {}
        self.rows: dict[str, Row] = {}
        self.regions: dict[int, Region] = {}
        self.observed: set[str] = set()
        """Requests with observation state kept between chunks."""
        self.planned: dict[str, dict[int, tuple[int, int]]] = {}
        """Of requests that are evicted: their cuts, see `planned_cuts`; under pressure, those that
        were made and not undone."""
        self.late: set[str] = set()
        """Requests that are evicted under pressure."""
        self.changed: dict[str, dict[int, str]] = {}
        """By such a request and token: the cut or the return of its prompt before this token."""
        self.shrunk: set[str] = set()
        """Such requests that were cut, also if they are whole again."""
        self.num_restored = 0
        self.queries: dict[int, tuple[str, int]] = {}
        """By row of the query pool: the request and the position whose query was stored last."""
        self.num_summed: dict[str, int] = {}
        """First rows of a request that are added to its column sums."""
        self.num_later = 0
        """Cuts after the first."""
        self.num_cached: dict[str, int] = {}
        """Tokens that each request took from the prefix cache when it was first scheduled."""
        self.failed: set[str] = set()
        """Requests whose eviction failed."""
        self.num_evictions = 0
        self.most_cut_tokens = setup.max_model_len + setup.chunk
        self.num_cut_together = 0
        """Most requests that were evicted in one step."""
        self.tier: dict[int, tuple[str, int]] = {}
        """By block of the tier: the request, and which block of its prompt it holds."""
        self.recalling: dict[str, Sequence[int]] = {}
        """Blocks of the tier by request."""
        self.num_choices = 0
        self._shrunk: list[Eviction] = []
        self._num_new: Mapping[str, int] = {}
        self._random = random.Random(seed)
        self._chains: dict[str, tuple[int, np.ndarray]] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        plan = plan_of(output)
        for change in (*self._shrunk, *plan.restored):
            if row := self.rows.get(change.request_id):
                row.blocks[: len(change.row_blocks)] = change.row_blocks.tolist()
        for restored in plan.restored:
            name = restored.request_id
            self.planned[name].clear()
            self.changed[name][self.rows[name].num_computed] = "restored"
            self.num_restored += 1
        self._shrunk = plan.evictions
        for first in plan.released:
            del self.regions[first]  # a `KeyError` would end a worker as well
        for name in plan.unrecallable:
            self.recalling.pop(name, None)
        for name in plan.forgotten:
            self.observed.discard(name)
            self.num_summed.pop(name, None)
        self.memory[plan.poisoned] = -1
        self._update_rows(output)
        self._num_new = output.num_scheduled_tokens
        self._copy_states()
        for name, num_new in output.num_scheduled_tokens.items():
            self._run(name, num_new)
        self._observe(plan.observations, plan.summings)
        for eviction in plan.evictions:
            name, sizes = eviction.request_id, (eviction.num_retained, eviction.num_replaced)
            if name in self.late:
                at = len(self.rows[name].job.prompt) + eviction.num_answer
                self.planned[name][at] = sizes
                self.changed[name][at] = "cut"
                self.shrunk.add(name)
        evicted = {e.request_id for e in plan.evictions}
        self.num_cut_together = max(self.num_cut_together, len(evicted))
        cut_tokens = sum(e.observed.num_tokens for e in plan.evictions)
        # Scores take the place of column sums, which exist from a request's first chunk on.
        for name in self.num_summed.keys() - evicted:
            cut_tokens += min(self.planned[name])
        assert cut_tokens <= self.most_cut_tokens, "scores need more memory than is set aside"
        for name in output.num_scheduled_tokens:
            due = self.rows[name].num_computed in self.planned.get(name, ())
            assert due == (name in evicted), f"{name} is evicted at another token than planned"
        failing = set()
        for part in (*plan.observations, *plan.summings):
            self.observed.add(part.request_id)
            assert part.chunk_start == self._start(part.request_id, output)
            if self.jobs[part.request_id].fails == "observe":
                failing.add(part.request_id)
        outcomes: list[Outcome | ChoiceOutcome | Failure] = []
        for eviction in plan.evictions:
            outcome = self._evict(eviction)  # also of one that fails: its region gets a shape
            if self.jobs[eviction.request_id].fails == "evict":
                failing.add(eviction.request_id)
            if eviction.request_id not in failing:
                outcomes.append(outcome)
        outcomes += [Failure(name, "made up") for name in sorted(failing)]
        outcomes += [outcome for choice in plan.choices for outcome in self._choose(choice)]
        self.observed -= failing
        self.failed |= failing
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[self._sample(name) for name in names],
        )
        return attach_outcomes(result, outcomes)

    def assert_empty(self) -> None:
        assert not self.rows
        assert not self.regions
        assert not self.observed
        assert not self.recalling

    def _update_rows(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            blocks, *others = new.block_ids[self.num_drafts :]
            assert new.req_id not in self.rows
            self.num_cached[new.req_id] = new.num_computed_tokens
            self.rows[new.req_id] = Row(
                self.jobs[new.req_id],
                list(new.prompt_token_ids or ()),
                list(blocks),
                [list(blocks) for blocks in others[len(others) - self.num_states :]],
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            row = self.rows[name]
            row.num_computed = cached.num_computed_tokens[i]
            new_blocks = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                assert new_blocks is not None
                row.blocks, *others = map(list, new_blocks[self.num_drafts :])
                row.states = others[len(others) - self.num_states :]
                row.last_state = None
                if name in self.late:
                    self.planned[name].clear()
                    self.changed[name].clear()
                    self._chains.pop(name, None)
                row.tokens = list(cached.all_token_ids[name])
            elif new_blocks is not None:
                row.blocks.extend(new_blocks[self.num_drafts])
                first = len(new_blocks) - self.num_states
                for blocks, added in zip(row.states, new_blocks[first:], strict=True):
                    blocks.extend(added)

    def _start(self, name: str, output: SchedulerOutput) -> int:
        return self.rows[name].num_computed - output.num_scheduled_tokens[name]

    def _copy_states(self) -> None:
        """Copy states to the blocks that this step overwrites, as vLLM's runner does.

        A state that is taken from the prefix cache, or from the step before, has to be that of the
        request's tokens.
        """
        if not self.num_states or not self.verify:
            return
        sources, targets = set[int](), list[int]()
        for name, num_new in self._num_new.items():
            row = self.rows[name]
            start, end = row.num_computed, row.num_computed + num_new
            last, row.last_state = row.last_state, -(-end // self.state_size) - 1
            if last is None:
                last = (start - 1) // self.state_size
            chain = self._chain(row)
            for group, blocks in enumerate(row.states):
                target = blocks[row.last_state]
                assert target, f"{name} has no block for its state"
                targets.append(target)
                if not start:
                    continue
                wanted = self._state(chain[start - 1], group)
                assert (self.memory[blocks[last]] == wanted).all(), f"{name} reads a foreign state"
                if last != row.last_state:
                    sources.add(blocks[last])
                    self.memory[target] = wanted
        assert len(targets) == len(set(targets)), "a block takes two states"
        assert sources.isdisjoint(targets), "a state is copied and overwritten in the same step"

    @staticmethod
    def _state(digest: np.int64, group: int) -> int:
        """Return what a block holds that has the state after a token with this digest."""
        return -(1 << 40) - (hash((int(digest), group)) & _MASK)

    def _run(self, name: str, num_new: int) -> None:
        """Write the slots of new tokens and check every slot that their attention reads."""
        row = self.rows[name]
        start, end = row.num_computed, row.num_computed + num_new
        assert end <= len(row.tokens), f"{name} computes unknown tokens"
        assert end <= len(row.blocks) * self.block_size, f"{name} has no slots for its tokens"
        region = self.regions.get(row.blocks[0])
        first_slot = 0
        planned = self.planned.get(name, {})
        assert not any(start < at < end for at in planned), f"{name} goes past a cut"
        last_cut = max((at for at in planned if at <= start), default=None)
        assert last_cut == (region and region.at), f"{name} reads the cache of another cut"
        if region is not None:
            assert region.owner == name, f"{name} decodes over the region of {region.owner}"
            assert (self.memory[region.blocks] == region.mark).all(), f"region of {name} damaged"
            first_slot = region.num_replaced * self.block_size
        if not self.verify:
            row.num_computed = end
            return
        chain = self._chain(row)
        ids = np.array(row.blocks, dtype=np.int64)
        slots = np.arange(first_slot, end)
        slots = ids[slots // self.block_size] * self.block_size + slots % self.block_size
        assert (slots[start - first_slot :] >= self.block_size).all(), "writes to the null block"
        flat = self.memory.reshape(-1)
        flat[slots[start - first_slot :]] = chain[start:end]
        held = flat[slots]
        wrong = np.flatnonzero(held != chain[first_slot:end])
        assert not len(wrong), f"{name} reads a foreign token at {wrong[0] + first_slot}"
        for group, blocks in enumerate(row.states):
            self.memory[blocks[-(-end // self.state_size) - 1]] = self._state(chain[end - 1], group)
        row.num_computed = end

    def _observe(
        self, observations: Sequence[Observation], summings: Sequence[ColumnSumChunk]
    ) -> None:
        """Store queries, and check that every row is summed once."""
        rows = [part.stored for part in observations if part.stored is not None]
        flat = np.concatenate([*rows, np.empty(0, np.int64)])
        assert (flat != NO_ROW).all()
        assert len(flat) == len(set(flat.tolist())), "a row of the query pool has two owners"
        for part in observations:
            end = self.rows[part.request_id].num_computed
            assert part.chunk_start <= part.rows[0] <= part.rows[-1] < end
            if part.stored is not None:
                assert len(part.stored) == len(part.rows)
                for position, stored in zip(part.rows.tolist(), part.stored.tolist(), strict=True):
                    self.queries[stored] = part.request_id, position
        for summing in summings:
            name = summing.request_id
            assert summing.chunk_start == self.num_summed.get(name, 0), f"{name} sums rows twice"
            self.num_summed[name] = summing.num_keys

    def _evict(self, eviction: Eviction) -> Outcome:
        name, size = eviction.request_id, self.block_size
        row = self.rows[name]
        at = len(row.job.prompt) + eviction.num_answer
        assert row.num_computed == at
        planned = self.planned[name]
        assert (eviction.num_retained, eviction.num_replaced) == planned[at]
        if name not in self.late:
            assert eviction.is_first == (at == min(planned))
        self._check_queries(eviction, at)
        replaced, new = planned[at][1], eviction.new_blocks.tolist()
        nulls = [0] * (replaced - len(new))
        assert eviction.row_blocks.tolist() == [*new, *nulls, *row.blocks[replaced:]]
        assert eviction.old_blocks.tolist() == row.blocks[: -(-at // size)]
        if self.verify:
            region = self.regions.get(row.blocks[0])
            assert (region is None) == eviction.is_whole
            slots = np.arange(region.num_replaced * size if region else 0, at)
            held = self.memory[eviction.old_blocks[slots // size], slots % size]
            assert (held == self._chain(row)[slots]).all(), f"cache of {name} damaged"
        self.num_later += not eviction.is_first
        retained = eviction.num_retained
        num_dealt = retained
        if eviction.guard is not None:
            least = min(eviction.guard.least_blocks, retained)
            num_dealt = self._random.randint(least, retained)
        blocks = eviction.new_blocks[:num_dealt].astype(np.int64)
        self.num_evictions += 1
        mark = -2 - self.num_evictions
        self.memory[blocks] = mark
        first = int(eviction.new_blocks[0])
        assert first not in self.regions, f"the region of {self.regions[first].owner} is in use"
        self.regions[first] = Region(name, blocks, mark, at, replaced)
        if eviction.tier_blocks is not None:
            assert eviction.is_whole
            assert len(eviction.tier_blocks) == eviction.num_replaced
            self.recalling[name] = eviction.tier_blocks.tolist()
            self.tier.update({b: (name, i) for i, b in enumerate(self.recalling[name])})
        self.observed.discard(name)
        self.num_summed.pop(name, None)
        return Outcome(
            request_id=name,
            first_block=first,
            num_retained=num_dealt if eviction.guard is not None else None,
            method=eviction.method,
            seen={"text": len(row.job.prompt) - 1, "vision": 1},
            kept={"text": num_dealt * size - 1, "vision": 1},
            seconds={"copy": 1.0},
            num_answer=eviction.num_answer,
            is_first=eviction.is_first,
        )

    def _choose(self, choice: Choice) -> list[ChoiceOutcome]:
        """Check that a choice finds its rows, its prompt and its tail."""
        name = choice.request_id
        if name not in self.recalling:
            return []  # it loses its blocks in this step, or the tier failed
        row, region = self.rows[name], self.regions[self.rows[name].blocks[0]]
        assert region.owner == name
        assert choice.num_tokens == row.num_computed
        blocks = row.blocks[region.num_replaced : -(-row.num_computed // self.block_size)]
        assert choice.tail_blocks.tolist() == blocks
        assert choice.rows.tolist() == list(range(choice.rows[0], choice.num_tokens))
        for position, query_row in zip(choice.rows.tolist(), choice.stored.tolist(), strict=True):
            assert self.queries[query_row] == (name, position), f"{name} reads a foreign query"
        for number, block in enumerate(self.recalling[name]):
            assert self.tier[block] == (name, number), f"{name} reads a foreign block of the tier"
        self.num_choices += 1
        moved = self._random.choice((0.0, 0.5, 2.0, None)) if self.num_choices % 9 == 0 else 1.0
        if moved is None:
            del self.recalling[name]
        return [ChoiceOutcome(name, row.num_computed - len(row.job.prompt), moved)]

    def _check_queries(self, eviction: Eviction, at: int) -> None:
        """Check that the queries of all rows that vote were stored, or are those of this step."""
        name, voters = eviction.request_id, eviction.voters
        rows = voters.rows[eviction.first_row :]
        if voters.every_row:
            assert self.num_summed[name] == at
        elif voters.sets:
            assert len(rows)
        if eviction.stored is None:
            assert not len(rows) or rows[0] >= at - self._num_new[name], f"no queries of {name}"
            return
        stored = eviction.stored[eviction.first_row :].tolist()
        for position, query_row in zip(rows.tolist(), stored, strict=True):
            assert self.queries[query_row] == (name, position), f"{name} reads a foreign query"

    def _sample(self, name: str) -> list[int]:
        row = self.rows[name]
        if row.num_computed < len(row.tokens):
            return []
        num_answer = len(row.tokens) - len(row.job.prompt) + 1
        token = END
        if num_answer != row.job.answer:
            # Depends on what was read, so equal prompts over equal caches continue equally.
            token = self._token(self._chain(row)) if self.verify else num_answer + 3
        row.tokens.append(token)
        return [token]

    def expected(self, job: Job) -> list[int]:
        """Return the whole answer of a request that runs alone."""
        row = Row(job, list(job.prompt), [], [], 0)
        while len(row.tokens) < len(job.prompt) + job.answer - 1:
            row.tokens.append(self._token(self._chain(row)))
        return [*row.tokens[len(job.prompt) :], END]

    @staticmethod
    def _token(chain: np.ndarray) -> int:
        return 3 + int(chain[-1]) % 1000

    def _chain(self, row: Row) -> np.ndarray:
        """Return the content of each token's slot: a digest of all tokens up to it, int64 [tokens].

        Keys behind a cut depend on what was kept, so the digest names the request and the cut.
        """
        name = row.job.name
        changed: Mapping[int, Any] = self.changed.get(name) or self.planned.get(name, {})
        known, chain = self._chains.get(name, (0, np.zeros(0, np.int64)))
        num_tokens = len(row.tokens)
        if known < num_tokens:
            if num_tokens > len(chain):
                chain = np.concatenate([chain, np.zeros(num_tokens, np.int64)])
            digest = int(chain[known - 1]) if known else 17
            for position in range(known, num_tokens):
                if position in changed:
                    digest = hash((digest, name, position))
                digest = hash((digest, row.tokens[position])) & _MASK
                chain[position] = digest
            self._chains[name] = num_tokens, chain
        return chain[:num_tokens]


class Double:
    """A server driven step by step: arrivals and `EngineCore`'s loop, checked after each call."""

    def __init__(self, setup: Setup, seed: int = 0, check: bool = True) -> None:
        self.setup = setup
        self.scheduler: Any = make_scheduler(setup)
        self.worker = WorkerDouble(setup, seed, check)
        self.check = check and setup.eviction is not None
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}
        """Step in which each request ended."""
        self.errors: set[str] = set()
        """Requests that ended with an error."""
        self.admitted: list[str] = []
        """Requests in the order of their first admission."""
        self.num_stalls = 0
        """Consecutive turns in which requests waited, none was scheduled and none was in flight."""
        self.num_steps = 0
        self.num_tokens = 0
        self.num_preemptions = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def arrive(self, job: Job) -> Request:
        request = job.request(self.setup.block_size)
        self.worker.jobs[job.name] = job
        self.answers[job.name] = []
        self.scheduler.add_request(request)
        if self.setup.eviction is not None and job.name in self.scheduler.candidates:
            candidate = self.scheduler.candidates[job.name]
            if candidate.stages:
                self.worker.late.add(job.name)
                self.worker.changed[job.name] = {}
            self.worker.planned[job.name] = planned_cuts(candidate.cuts)
        return request

    def preempt(self, name: str) -> None:
        """Preempt a running request, as vLLM's scheduler does when blocks run out."""
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.prev_step_scheduled_req_ids.discard(name)
        self.checked()

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished.setdefault(name, self.num_steps)
        self.checked()

    def reset_prefix_cache(self, running: bool = True) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.checked()

    @property
    def is_idle(self) -> bool:
        return not (self._in_flight or self.scheduler.has_requests())

    def schedule(self) -> int:
        """Schedule a step, execute it and return its number of tokens."""
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        self.admitted.extend(new.req_id for new in output.scheduled_new_reqs)
        num_tokens = output.total_num_scheduled_tokens
        is_stalled = not (num_tokens or self._in_flight) and self.scheduler.requests
        self.num_stalls = self.num_stalls + 1 if is_stalled else 0
        assert self.num_stalls < 3, f"{sorted(self.scheduler.requests)} wait for each other"
        self.num_tokens += num_tokens
        self.num_steps += num_tokens > 0
        self._in_flight.append((output, self.worker.execute(output)))
        self.checked()
        return num_tokens

    def update(self) -> None:
        """Update the scheduler with the result of the oldest step in flight."""
        outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        for batch in outputs.values():
            for output in batch.outputs:
                self.answers[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finished.setdefault(output.request_id, self.num_steps)
                if output.finish_reason == FinishReason.ERROR:
                    self.errors.add(output.request_id)
        self.checked()

    def step(self) -> int:
        """Run one turn of the engine's loop and return the number of scheduled tokens."""
        num_tokens = 0
        if self.scheduler.has_requests():
            num_tokens = self.schedule()
            if self.setup.ahead and num_tokens and len(self._in_flight) < 2:
                return num_tokens
        if self._in_flight:
            self.update()
        return num_tokens

    def run(self, jobs: Sequence[Job], max_steps: int = 100_000) -> None:
        """Serve jobs that arrive at their steps, and check that everything is released."""
        queue = deque(sorted(jobs, key=lambda job: job.arrival))
        for turn in range(max_steps):
            while queue and queue[0].arrival <= turn:
                self.arrive(queue.popleft())
            if not queue and self.is_idle:
                break
            self.step()
        else:
            raise AssertionError(f"{sorted(self.scheduler.requests)} did not end")
        self.assert_empty()

    def assert_answered(self, job: Job, aborted: bool) -> None:
        """Check that the answer is the one given alone, or its start if the request ended early."""
        expected, answer = self.worker.expected(job), self.answers[job.name]
        assert job.name in self.finished
        has_failed = job.name in self.worker.failed
        if job.name in self.worker.shrunk:
            # What it says depends on when memory was short.
            is_whole = len(answer) == job.answer and answer[-1] == END
            assert is_whole or aborted or job.name in self.errors
            return
        num_waited = min(self.worker.planned.get(job.name) or [0]) - len(job.prompt)
        if job.name in self.worker.late:
            num_waited = job.answer  # for a cut that was not made
        if job.name in self.errors:
            assert has_failed, f"{job.name} ends with an error and nothing failed"
            assert len(answer) <= num_waited + 1  # the last one in the step that failed
        elif not aborted:
            assert answer == expected, f"{job.name} answers differently than alone"
            ended = job.answer <= num_waited + 1
            assert not has_failed or ended, f"{job.name} continues after a failure"
        assert answer == expected[: len(answer)]

    def checked(self) -> None:
        if self.check:
            check_integrity(
                self.scheduler.manager,
                self.scheduler.other_managers,
                self.scheduler.requests.keys(),
                [block for _, blocks in self.scheduler.deferred_frees for block in blocks],
            )

    def assert_empty(self) -> None:
        """Check that every block is free and no request is remembered."""
        assert self.num_free == self.setup.num_blocks
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler._inflight_prefills
        if self.setup.eviction is not None:
            manager = scheduler.manager
            assert not manager.compressions
            assert not manager.req_to_blocks
            assert not scheduler.candidates
            assert not scheduler.records.reports
            assert scheduler.recalls.num_held == 0
            rows = scheduler.query_rows
            assert rows.num_free == scheduler.eviction_config.num_query_rows
            self.worker.assert_empty()
