# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine that is driven step by step through `remote.py`."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.models import Shape, model_folder
from benchmarks.probe import Metrics, Stopwatches, Waits, num_stored, reduced_pool, spoil_drafts
from benchmarks.scale import Workload
from measure.arm import Arm
from measure.engines import LocalEngine
from vllm_tgvkv.shared.plan import Outcome, StepPlan, outcomes_of
from vllm_tgvkv.worker import base as worker


class ArmEngine:
    """The engine of one arm, with its stopwatches."""

    def __init__(self, arm: Arm, shape: Shape, root: str) -> None:
        self.arm = arm
        self.shape = shape
        start = time.perf_counter()
        self.parts = LocalEngine(
            model_folder(root, shape),
            as_served=True,
            load_format="dummy",
            dtype=shape.dtype,
            seed=0,
            **({} if shape.arch == "llama" else {"limit_mm_per_prompt": {"image": 64}}),
            **arm.server,
        )
        self.engine = self.parts.engine
        self.start_seconds = time.perf_counter() - start
        self.watches = Stopwatches()
        builder = self.parts.attention_group.get_metadata_builder()
        self.watches.watch(builder, "build", "metadata")
        for method in ("schedule", "update_from_output"):
            self.watches.watch(self.parts.scheduler, method, "scheduling")
        if arm.evicts:
            for method in ("observe_layer", "evict_stored"):  # in the layers, and after them
                self.watches.watch(self.parts.evictor, method, "eviction")
        self._shuffler = random.Random(0)
        self._count = 0
        self._live: set[str] = set()

    def describe(self) -> dict[str, Any]:
        """Return the settings that vLLM arrived at, for the report."""
        return {"start_seconds": round(self.start_seconds, 1), **self.parts.facts()}

    # -- requests -----------------------------------------------------------------------

    def _submit(
        self,
        prompt: dict[str, Any],
        max_tokens: int,
        budget: float | None,
        policy: str | None = None,
        defer: int | None = None,
    ) -> None:
        """Add a request; stock engines ignore budget, policy and defer."""
        options = {
            "kv_eviction_budget": budget,
            "kv_eviction": policy,
            "kv_eviction_defer": defer,
        }
        given = {name: value for name, value in options.items() if value is not None}
        self._count += 1
        request_id = self.engine.add_request(
            f"{self.arm.name}-{self._count}",
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args=(given or None) if self.arm.evicts else None,
            ),
        )
        self._live.add(request_id)

    def _step_until_token(self) -> None:
        while not self.engine.step():
            pass

    def _decode_step(self) -> None:
        """Run a step in which every request decodes.

        Raises:
            RuntimeError: if one of them did not.
        """
        num_outputs = len(self.engine.step())
        if num_outputs != len(self._live):
            raise RuntimeError(
                f"{num_outputs} of {len(self._live)} requests got a token: the pool is too small "
                "for all of them, or one reached max_model_len"
            )

    def clear(self) -> None:
        """Abort all requests and let the scheduler notice."""
        self.engine.abort_request(list(self._live), internal=True)
        self._live.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()

    # -- measurements -------------------------------------------------------------------

    def prefill(
        self,
        workload: Workload,
        seed: int,
        budget: float | None,
        policy: str | None = None,
        defer: int | None = None,
    ) -> dict[str, float]:
        """Time one prompt alone: from arrival to first token, and the eviction in it."""
        prompt = workload.prompt(self.shape, seed)
        self.watches.reset()
        start = time.perf_counter()
        self._submit(prompt, 2, budget, policy, defer)
        self._step_until_token()
        seconds = time.perf_counter() - start
        self.clear()
        return {"seconds": seconds, "eviction": self.watches.seconds["eviction"]}

    def eviction_parts(
        self, workload: Workload, seed: int, budget: float, policy: str
    ) -> dict[str, float]:
        """Return the seconds of one prompt's eviction, and of its parts as the worker reports them.

        The prompt's own attention is left out: the cost of an eviction does not depend on it.
        """
        outcomes: list[Outcome] = []
        attach = worker.attach_outcomes

        def attach_outcomes(*args: Any, **kwargs: Any) -> ModelRunnerOutput:
            output = attach(*args, **kwargs)
            outcomes.extend(o for o in outcomes_of(output) if isinstance(o, Outcome))
            return output

        prompt = workload.prompt(self.shape, seed)
        self.watches.reset()
        with patch.object(worker, "attach_outcomes", attach_outcomes), prompts_unattended():
            self._submit(prompt, 2, budget, policy, defer=0)
            self._step_until_token()
        (outcome,) = outcomes
        spent = outcome.seconds
        self.clear()
        return {
            "all": self.watches.seconds["eviction"],
            "statistics": spent.get("statistics", 0.0),
            "decision": spent["selection"] + spent["copy"],
        }

    def fill(
        self,
        workload: Workload,
        batch: int,
        seed: int,
        budget: float | None,
        attend: bool = True,
        policy: str | None = None,
        defer: int | None = None,
    ) -> None:
        """Prefill `batch` requests and leave them running.

        Without `attend` the prompts' attention is left out, in every arm: decoding speed does not
        depend on the values in the cache, and 16k-token prompts take minutes.

        Raises:
            RuntimeError: if the pool is too small for all of them.
        """
        room = self.engine.vllm_config.model_config.max_model_len - workload.prompt_tokens
        for index in range(batch):
            prompt = workload.prompt(self.shape, seed + index)
            self._submit(prompt, room, budget, policy, defer)
        started: set[str] = set()
        with nullcontext() if attend else prompts_unattended():
            while len(started) < batch:
                started.update(output.request_id for output in self.engine.step())
                if any(r.num_preemptions for r in self.parts.scheduler.requests.values()):
                    # Requests would take each other's blocks for ever.
                    raise RuntimeError(
                        f"the pool is too small for {batch} requests: one was preempted"
                    )

    def decode(self, steps: int) -> dict[str, Any]:
        """Time decode steps of all running requests, and return what happened in each.

        Returns:
            `cached_tokens` after the last step, `tokens` that were generated, and lists:
            `seconds`; `metadata`, `scheduling` and `eviction`, seconds of these; `blocks` that all
            requests hold; `cuts`, evictions; `stored`, tokens whose queries were stored.
        """
        found: dict[str, Any] = defaultdict(list)
        before = self._num_generated()
        for _ in range(steps):
            self.watches.reset()
            start = time.perf_counter()
            self._decode_step()
            found["seconds"].append(time.perf_counter() - start)
            for name in ("metadata", "scheduling", "eviction"):
                found[name].append(self.watches.seconds[name])
            found["blocks"].append(self._num_blocks())
            plan = self.parts.evictor.plan if self.arm.evicts else StepPlan()
            found["cuts"].append(len(plan.evictions))
            found["stored"].append(num_stored(plan))
        tokens = self._num_generated() - before
        return {**found, "cached_tokens": self._cached_tokens(), "tokens": tokens}

    def _num_generated(self) -> int:
        """Return the tokens of all answers."""
        return sum(len(r.output_token_ids) for r in self.parts.scheduler.requests.values())

    def _num_blocks(self) -> int:
        """Return the blocks that all requests hold."""
        managers = self.parts.scheduler.kv_cache_manager.coordinator.single_type_managers
        rows = (row for manager in managers for row in manager.req_to_blocks.values())
        return sum(not block.is_null for row in rows for block in row)

    def spoil_drafts(self, accepted: float) -> None:
        """Let the model reject drafts, each with a probability of 1 - `accepted`."""
        runner = self.parts.worker.model_runner
        if getattr(runner, "drafter", None) is not None:
            spoil_drafts(runner.drafter, accepted, self.shape.vocabulary)

    def touch_query_pool(self) -> None:
        """Write to all of the query pool, as a server that has run for a while has done.

        The kernel hands out a page of memory when it is first written to, which takes longer than
        to store a query.
        """
        self.parts.evictor.context.queries._queries.zero_()

    @functools.cached_property
    def _switches(self) -> dict[str, Metrics | Waits]:
        scheduler, loggers = self.parts.scheduler, self.engine.logger_manager.stat_loggers
        waits = Waits(scheduler, self.parts.evictor)
        return {"waits": waits, "metrics": Metrics(scheduler, loggers)}

    def decode_switched(
        self, states: dict[str, bool], what: str
    ) -> dict[str, dict[str, list[float]]]:
        """Return seconds of decode steps, wall and CPU, by state of what is switched.

        The state changes with every step, so values at the same index are neighbours in time. A
        call has all orders of the states, so that the growing caches favour none. They are
        shuffled against the rhythms of a shared machine. Everything is on afterwards.

        Raises:
            RuntimeError: unless waiting requests store queries, and others none; or unless metrics
                are exported exactly where they are on.
        """
        switch = self._switches[what]
        orders = list(itertools.permutations(states))
        self._shuffler.shuffle(orders)
        spent: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in states}
        for name in itertools.chain.from_iterable(orders):
            switch.turn(states[name])
            wall, cpu = time.perf_counter(), time.process_time()
            self._decode_step()
            spent[name]["wall"].append(time.perf_counter() - wall)
            spent[name]["cpu"].append(time.process_time() - cpu)
            switch.check(states[name])
        switch.turn(True)
        return spent

    def _cached_tokens(self) -> float:
        """Return the tokens of all requests that a step reads, mean over layers and KV heads."""
        scheduler = self.parts.scheduler
        total = sum(request.num_computed_tokens for request in scheduler.running)
        if self.arm.evicts:
            swapped = [c for c in scheduler.manager.compressions.values() if c.swapped]
            num_freed = sum(c.num_replaced - c.num_retained for c in swapped)
            total -= num_freed * scheduler.block_size
        return float(total)

    def burst(
        self,
        workload: Workload,
        requests: int,
        seed: int,
        max_tokens: int,
        budget: float | None,
        pool_tokens: int,
        policy: str | None = None,
        defer: int | None = None,
    ) -> dict[str, float]:
        """Serve `requests` that arrive at once; return how many ran together, and how fast.

        `scheduling_of_one` are the scheduler's seconds in a step for each request that runs in it.

        Of the pool, all blocks but those for `pool_tokens` are taken away meanwhile.
        """
        prompts = [workload.prompt(self.shape, seed + index) for index in range(requests)]
        self.watches.reset()
        running = []
        with reduced_pool(self.parts.scheduler, pool_tokens):
            start = time.perf_counter()
            for prompt in prompts:
                self._submit(prompt, max_tokens, budget, policy, defer)
            while self.engine.has_unfinished_requests():
                self.engine.step()
                running.append(self.parts.scheduler.get_request_counts()[0])
            seconds = time.perf_counter() - start
        self._live.clear()
        return {
            "tokens_per_second": requests * (workload.prompt_tokens + max_tokens) / seconds,
            "output_tokens_per_second": requests * max_tokens / seconds,
            "peak_running": max(running),
            "scheduling_of_one": self.watches.seconds["scheduling"] / sum(running),
        }


@contextmanager
def prompts_unattended() -> Iterator[None]:
    """Zero the output of the prompts' attention inside the block."""
    original = CPUAttentionBackendImpl.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        metadata = given["attn_metadata"]
        if metadata is None or metadata.max_query_len <= 1:
            return original(self, *args, **kwargs)
        return given["output"].zero_()

    with patch.object(CPUAttentionBackendImpl, "forward", forward):
        yield
