# SPDX-License-Identifier: Apache-2.0
"""Prompts that one server computes and cuts, and another one decodes.

Where a prompt is computed, a router asks for one token and says `do_remote_decode`. The prompt is
cut as it would be here, after as many tokens of the answer as its method waits for, and region,
tail and a header stay until the other server has read them. That one appends the answer's first
tokens, which the client gets at once, and has the blocks read. Whatever is not as it should be ends
in the same way: the prompt is computed and cut where it is decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from vllm_tgvkv.config.digest import digest, settings_of_worker
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.scheduler.candidate import Candidate
from vllm_tgvkv.shared.connector import TRANSPORTS
from vllm_tgvkv.shared.cuts import Cut
from vllm_tgvkv.shared.handover import (
    KEY,
    MOST_BLOCKS,
    Handover,
    HandoverError,
    Region,
    digest_of,
    new_nonce,
    num_header_ints,
)
from vllm_tgvkv.shared.plan import Arrival, Header, StepPlan

if TYPE_CHECKING:
    from vllm_tgvkv.scheduler.scheduler import EvictionScheduler

logger = init_logger("vllm.tgvkv")

_REMOTE = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
}
"""Types of the parameters without which a connector can not read, besides the blocks. vLLM's ends
the engine at another type."""


@dataclass
class _Delivery:
    """The first tokens of an answer, for the client."""

    request: Request
    tokens: list[int]
    is_all: bool
    """Whether the answer ends with them."""
    stats: PrefillStats
    """By default the whole prompt comes from elsewhere."""


class Handovers:
    """Both ends of the way of a prompt, in the scheduler of a server with a KV connector."""

    def __init__(
        self,
        scheduler: EvictionScheduler,
        candidate_of: Callable[[Request, RequestOptions], Candidate | str],
    ) -> None:
        """Make it for a scheduler.

        Args:
            candidate_of: returns how a request is evicted, or why it is not.
        """
        self._scheduler = scheduler
        self._candidate_of = candidate_of
        self._config = scheduler.eviction_config
        self._manager = scheduler.manager
        self._candidates = scheduler.candidates
        self._records = scheduler.records
        self._vllm_config = scheduler.vllm_config
        (group,) = scheduler.kv_cache_config.kv_cache_groups
        self._spec, self._num_layers = group.kv_cache_spec, len(group.layer_names)
        self._nonces: dict[str, tuple[int, ...]] = {}
        """Of requests that go to another server."""
        self._coming: dict[str, Region] = {}
        """Regions whose blocks are not here yet."""
        self._given_back: set[str] = set()
        """Requests whose blocks on another server are not read."""
        self._deliveries: list[_Delivery] = []
        self._arriving: list[Arrival] = []
        self._arrived: list[str] = []
        self._read: list[KVCacheBlock] = []
        """Headers that the worker reads in this step."""

    @cached_property
    def _settings(self) -> str:
        return digest(settings_of_worker(self._vllm_config))

    @property
    def _reads_blocks(self) -> bool:
        """Whether the connector reads the blocks of a request that another server names."""
        return self._vllm_config.kv_transfer_config.kv_connector in TRANSPORTS

    @property
    def _num_ranks(self) -> int:
        return self._vllm_config.parallel_config.tensor_parallel_size

    # -- where a prompt is computed -----------------------------------------------------

    def leaves(self, request: Request) -> bool:
        """Return whether a request is decoded by another server."""
        parameters = request.kv_transfer_params or {}
        return self._reads_blocks and bool(parameters.get("do_remote_decode"))

    def consider(self, request: Request, options: RequestOptions) -> tuple[Candidate | str, int]:
        """Return how a request is evicted, or why it is not, and the blocks of its header.

        One that goes elsewhere waits for its cut before it goes.
        """
        if not self.leaves(request):
            if KEY in (request.kv_transfer_params or {}):
                options = replace(options, recall=False)  # its tier would be on the other server
            return self._candidate_of(request, options), 0
        # One that asks for more tokens gets them all here.
        if self._is_whole(request, options) or request.max_tokens > options.defer + 1:
            return "handed_over_whole", 0
        asked, request.max_tokens = request.max_tokens, options.defer + 2
        found = self._candidate_of(request, journey_of(options))
        if isinstance(found, str):
            request.max_tokens = asked
            return found, 0
        request.max_tokens = options.defer + 1
        self._nonces[request.request_id] = new_nonce()
        return found, self.num_header(request, found)

    def num_header(self, request: Request, candidate: Candidate) -> int:
        """Return the blocks of a request's header; 0 if it stays here."""
        first = candidate.cuts.first
        if first is None or not self.leaves(request):
            return 0
        return self._num_header_blocks(first.num_retained)

    def _is_whole(self, request: Request, options: RequestOptions) -> bool:
        """Return whether a prompt goes to another server without being cut.

        Under pressure it does unless the server is to cut it all the same. Answers whose beginning
        can not travel wait for their cut over there.
        """
        only_under_pressure = options.when == "pressure" and self._config.handover == "whole"
        return only_under_pressure or not _may_begin_elsewhere(request)

    def _num_header_blocks(self, num_retained: int) -> int:
        """Return the blocks that describe a region of `num_retained` blocks."""
        spec = self._spec
        num_pairs = self._num_layers * spec.num_kv_heads
        sizes = num_pairs, num_retained, spec.block_size, self._config.keeps_positions
        return cdiv(4 * num_header_ints(*sizes), self._num_layers * spec.page_size_bytes)

    def header_of(self, request_id: str) -> Header | None:
        """Return where the region of a request that goes elsewhere is described."""
        nonce = self._nonces.get(request_id)
        if nonce is None:
            return None
        blocks = self._manager.compressions[request_id].header
        return Header(tuple(block.block_id for block in blocks), nonce)

    def blocks_to_send(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[list[int], ...]:
        if request.request_id not in self._nonces:
            # Nobody could read a region without its header.
            return ([],) if self._manager.is_compressed(request.request_id) else block_ids
        if not self._is_read(request):
            return ([],)
        num_cut = self._candidates[request.request_id].num_cut
        return (self._manager.blocks_to_send(request.request_id, num_cut),)

    def _is_read(self, request: Request) -> bool:
        """Return whether another server needs the blocks of a request that goes there."""
        # After a failure its pages have any content.
        is_cut = self._manager.is_compressed(request.request_id)
        has_failed = self._candidates[request.request_id].has_failed
        return is_cut and not has_failed and not _is_answered(request)

    def parameters(self, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        nonce = self._nonces.get(request.request_id)
        if nonce is None:
            return parameters
        candidate = self._candidates[request.request_id]
        region = None
        if self._is_read(request):
            region = self._region(request.request_id, candidate, nonce)
        message = Handover(
            self._settings,
            self._num_ranks,
            candidate.options.policy,
            digest_of(request),
            tuple(request.output_token_ids),
            candidate.num_cached,
            region,
        )
        if region is not None:
            num_sent = sum(map(len, parameters["remote_block_ids"]))
            num_whole = cdiv(request.num_prompt_tokens, self._manager.block_size)
            self._records.sent(candidate, num_sent, num_whole)
        # A server that does not read the message computes the prompt itself.
        return {**parameters, "do_remote_prefill": False, KEY: message.as_dict()}

    def _region(self, request_id: str, candidate: Candidate, nonce: tuple[int, ...]) -> Region:
        compression, cut = self._manager.compressions[request_id], candidate.cuts.first
        assert cut is not None
        return Region(
            at=cut.at,
            num_planned=cut.num_retained,
            num_retained=compression.num_retained,
            num_replaced=cut.num_replaced,
            num_header=len(compression.header),
            nonce=nonce,
        )

    # -- where a prompt is decoded ------------------------------------------------------

    def accept(self, request: Request, options: RequestOptions) -> None:
        """Go on with an answer that another server has begun, before the connector hears of it."""
        parameters = request.kv_transfer_params or {}
        if KEY not in parameters or self.leaves(request):
            return
        parameters = request.kv_transfer_params = dict(parameters)
        # It reads nothing, unless the message is for this request.
        parameters["do_remote_prefill"] = False
        policy, region = options.policy, None
        try:
            message = Handover.parse(parameters.pop(KEY))
            region = message.region
            self._check(request, message)
        except HandoverError as error:
            self._give_back(request, region)
            self._refuse(request, policy, "refused", str(error))
            return
        report = parameters.pop(CONFIG_KEY, None)
        delivery = self._append(request, message)
        if request.is_finished():
            self._give_back(request, region)
            self._records.counters.handed_over(policy, "answered")
            return
        problem = self._problem(request, options, region, parameters)
        if region is None or problem is not None:
            self._give_back(request, region)
            delivery.stats.set(request.num_prompt_tokens, 0, 0)
            self._refuse(request, policy, "refused", problem or "")
            return
        parameters["do_remote_prefill"] = True
        if report is not None:
            self._records.take_over(request, report)
        self._coming[request.request_id] = region
        cut = Cut(region.at, region.num_retained, region.num_replaced)
        self._manager.expect_arrival(request, cut, region.num_header)

    def _check(self, request: Request, message: Handover) -> None:
        """Check that a message is about this request.

        Raises:
            HandoverError: if it is not.
        """
        if not self._reads_blocks:
            raise HandoverError("the connector reads no blocks of other servers")
        if request.prompt_token_ids is None or request.skip_reading_prefix_cache:
            raise HandoverError("its prompt has no tokens, or must not be read")
        if message.settings != self._settings:
            raise HandoverError("the servers differ in settings or versions")
        if message.num_ranks != self._num_ranks:
            raise HandoverError(f"{message.num_ranks} ranks and not {self._num_ranks}")
        if message.prompt != digest_of(request):
            # vLLM's digests of images depend on the model's path, as NIXL's handshake does.
            raise HandoverError("it is about another prompt, or a model of another path")
        if not _may_begin_elsewhere(request):
            raise HandoverError("the answer can not begin elsewhere")
        if message.num_cached > request.num_prompt_tokens:
            raise HandoverError(f"{message.num_cached} prompt tokens were cached")
        if max(message.tokens) >= self._vllm_config.model_config.get_vocab_size():
            raise HandoverError("a token is not in the vocabulary")
        params = request.sampling_params
        if message.region is None and params and len(message.tokens) < params.min_tokens:
            raise HandoverError("the answer ended before min_tokens")
        if message.region is not None:
            at = request.num_prompt_tokens + len(message.tokens) - 1
            if message.region.at != at:
                raise HandoverError(f"it is cut at {message.region.at} and not at {at}")

    def _problem(
        self,
        request: Request,
        options: RequestOptions,
        region: Region | None,
        parameters: dict[str, Any],
    ) -> str | None:
        """Return why a region can not be taken over; None if it can."""
        if region is None:
            return "the answer does not end here"
        if request.request_id not in self._candidates:
            return "the request is not evicted here"
        found = self._candidate_of(request, journey_of(options))
        if isinstance(found, str) or (journey := found.cuts.first) is None:
            return "its prompt would not be cut here"
        if (region.at, region.num_planned, region.num_replaced) != (
            journey.at,
            journey.num_retained,
            journey.num_replaced,
        ):
            return f"its cut is not the one that is made here, {journey}"
        if region.num_header != self._num_header_blocks(region.num_planned):
            return "its header has another size"
        return self._missing(region, parameters)

    def _missing(self, region: Region, parameters: dict[str, Any]) -> str | None:
        """Return what a connector lacks to read a region; None if nothing."""
        size = self._manager.block_size
        num_tail = cdiv(region.at, size) - region.num_replaced
        wanted = region.num_header + region.num_retained + num_tail
        blocks = parameters.get("remote_block_ids")
        if not _are_blocks(blocks, wanted):
            return f"{wanted} blocks are expected"
        sizes = {"tp_size": self._num_ranks, "pp_size": 1, "dcp_size": 1}
        if not (
            all(type(parameters.get(name)) is kind for name, kind in _REMOTE.items())
            and 0 < parameters["remote_port"] < 1 << 16
            and all(parameters.get(name, size) == size for name, size in sizes.items())
        ):
            return f"{', '.join(_REMOTE)} are expected"
        return None

    def _give_back(self, request: Request, region: Region | None) -> None:
        """Let the other server free the blocks that it holds for a request, if it holds any.

        The connector tells it so, as it does after a hit of the whole prompt, see `limit`.
        """
        parameters = request.kv_transfer_params or {}
        if region and self._reads_blocks and self._missing(region, parameters) is None:
            parameters["do_remote_prefill"] = True
            self._given_back.add(request.request_id)

    def _append(self, request: Request, message: Handover) -> _Delivery:
        """Append the answer so far, as far as vLLM does not stop it before, and deliver it.

        The request's statistics go with it. vLLM makes them when it admits a request, of one that
        has no answer yet.
        """
        tokens, _ = Scheduler._update_request_with_output(
            self._scheduler, request, list(message.tokens)
        )
        stats = request.take_prefill_stats() or PrefillStats()
        stats.set(request.num_prompt_tokens, 0, request.num_prompt_tokens)
        # What the client reads in the answer's usage.
        stats.num_cached_tokens = message.num_cached
        delivery = _Delivery(request, tokens, request.is_finished(), stats)
        self._deliveries.append(delivery)
        return delivery

    def _refuse(self, request: Request, policy: str, outcome: str, problem: str) -> None:
        logger.warning(
            "KV eviction computes the prompt of %s itself, which another server has computed: %s",
            request.request_id,
            problem,
        )
        self._records.counters.handed_over(policy, outcome)

    def is_coming(self, request_id: str) -> bool:
        """Return whether blocks of a request are on their way, or will be."""
        return request_id in self._coming

    def limit(self, request: Request, num_local: int, num_found: int) -> int:
        if request.request_id in self._given_back:
            return 0
        candidate = self._candidates.get(request.request_id)
        if candidate is None or self.is_coming(request.request_id):
            return num_found
        size = self._manager.block_size
        most = candidate.most_cached(request.num_tokens, self._scheduler.num_spec_tokens)
        if num_local + num_found > most:
            num_found = max(most // size * size - num_local, 0)
            self._shorten(request, num_local + num_found)
        candidate.num_cached = num_local + num_found
        return num_found

    def _shorten(self, request: Request, num_tokens: int) -> None:
        """Leave the blocks of a prompt that are read from another server, and no later ones."""
        parameters = request.kv_transfer_params or {}
        if blocks := parameters.get("remote_block_ids"):
            num_blocks = num_tokens // self._manager.block_size
            request.kv_transfer_params = {
                **parameters,
                "remote_block_ids": [ids[:num_blocks] for ids in blocks],
            }

    def with_header(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks:
        region = self._coming.get(request.request_id)
        if region is None:
            return blocks
        row, header = blocks.blocks[0], self._manager.compressions[request.request_id].header
        first = [block.block_id for block in row[: region.num_planned]]
        arrival = Arrival(
            request.request_id,
            Header(tuple(block.block_id for block in header), region.nonce),
            tuple(first),
            region.num_replaced,
        )
        self._arriving.append(arrival)
        return KVCacheBlocks(((*header, *row),))

    def fail(self, request_ids: Iterable[str]) -> set[str]:
        """Let prompts whose blocks could not be read be computed here; return those that are ours.

        vLLM does so once all ranks have stopped reading.
        """
        ours = {name for name in request_ids if self.is_coming(name)}
        for name in ours:
            request = self._scheduler.requests[name]
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self._scheduler.failed_recving_kv_req_ids.add(name)
        return ours

    def holders(self, block_ids: set[int]) -> dict[str, set[int]]:
        """Return which requests wait for some of these blocks, and for which."""
        found = {}
        for name in self._coming:
            header = self._manager.compressions[name].header
            row = (*header, *self._manager.req_to_blocks.get(name, ()))
            if own := block_ids.intersection(block.block_id for block in row):
                found[name] = own
        return found

    def end(self, request: Request, is_failed: bool) -> None:
        """Go on with a request whose transfer has ended."""
        request_id = request.request_id
        region = self._coming.pop(request_id)
        candidate = self._candidates[request_id]
        self._read += self._manager.arrived(request_id)
        if is_failed:
            self._manager.expect(request, candidate.cut)
            self._refuse(request, candidate.options.policy, "failed", "its blocks were not read")
            return
        self._arrived.append(request_id)
        request.num_computed_tokens = region.at
        candidate.arrive(region.at)
        self._manager.expect(request, candidate.cut)
        self._records.counters.handed_over(candidate.options.policy, "received")

    # -- each step ----------------------------------------------------------------------

    def plan(self, plan: StepPlan, new_requests: Iterable[Request]) -> list[KVCacheBlock]:
        """Add to a step's plan; return blocks of headers that are free once the step has run."""
        plan.arriving, self._arriving = self._arriving, []
        plan.arrived, self._arrived = self._arrived, []
        for request in new_requests:
            if request.num_output_tokens:
                plan.answers[request.request_id] = list(request.output_token_ids)
        read, self._read = self._read, []
        return read

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the beginnings of answers to the outputs of a step, before what follows them."""
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            request, scheduler = delivery.request, self._scheduler
            if request.status is RequestStatus.FINISHED_ABORTED:
                continue  # whose blocks may still be written
            reason = parameters = None
            if delivery.is_all:
                reason = request.get_finished_reason()
                parameters, _ = scheduler._free_request(request)
            if scheduler.log_stats:
                # Before the first token, as everywhere; vLLM ignores a later one.
                request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
            output = EngineCoreOutput(
                request.request_id,
                delivery.tokens,
                finish_reason=reason,
                stop_reason=request.stop_reason if delivery.is_all else None,
                events=request.take_events(),
                prefill_stats=delivery.stats,
                kv_transfer_params=parameters,
                trace_headers=request.trace_headers,
            )
            found = outputs.setdefault(request.client_index, EngineCoreOutputs())
            found.outputs.insert(0, output)

    def forget(self, request_id: str) -> None:
        """Drop a request that ended; its blocks may still be read."""
        self._nonces.pop(request_id, None)
        self._coming.pop(request_id, None)
        self._given_back.discard(request_id)


def journey_of(options: RequestOptions) -> RequestOptions:
    """Return the options by which a prompt is cut for its journey.

    It is cut even if memory is not short. What it lacks stays behind, so that nothing can be
    recalled.
    """
    return replace(options, when="always", recall=False)


def _may_begin_elsewhere(request: Request) -> bool:
    """Return whether the first tokens of an answer are all that is known of them.

    Log probabilities, the state of a grammar and of a seeded random generator do not travel.
    """
    params = request.sampling_params
    return isinstance(params, SamplingParams) and (
        params.logprobs is None
        and params.prompt_logprobs is None
        and params.structured_outputs is None
        and params.seed is None
    )


def _is_answered(request: Request) -> bool:
    """Return whether a request's answer ended by itself."""
    return request.status is not RequestStatus.FINISHED_LENGTH_CAPPED


def _are_blocks(value: Any, num_blocks: int) -> bool:
    """Return whether a value lists blocks of one group."""
    is_list = isinstance(value, list | tuple) and len(value) == 1
    if not is_list or not isinstance(value[0], list | tuple) or len(value[0]) != num_blocks:
        return False
    return all(type(block) is int and 0 < block < MOST_BLOCKS for block in value[0])
