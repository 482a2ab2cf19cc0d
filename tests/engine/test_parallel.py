# SPDX-License-Identifier: Apache-2.0
"""Eviction on two tensor-parallel ranks, each a process with its own core."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.executor import multiproc_executor

from oracle.emulation import Eviction, Oracle
from tests.engine.processes import FORKED
from tests.engine.questions import DEBUG, album, budget
from tests.engine.running import SHARED, Ask, SteppedEngine, name_of
from vllm_tgvkv.worker.ranks import Exchanges

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

METHODS = {
    "layer": ("tgv", "snapkv", "vlcache", "aircache", "h2o", "prefixkv"),
    "head": ("tgv", "adakv", "snapkv", "prefixkv"),
}
NAMES = {
    f"{method}_by_{granularity}": {"base": method, "granularity": granularity}
    for granularity, methods in METHODS.items()
    for method in methods
}
SETTINGS = {"policy": "tgv", "budget": 0.2, "methods": NAMES, "debug": DEBUG}


class ParallelEngine(SteppedEngine):
    """An engine whose scheduler runs in this process and whose workers do not."""

    keeps_traces = 0
    """Index of the worker that keeps the traces of all workers."""

    def only_answer(self, method: str, *args: Any) -> Any:
        """Return the answer of the worker that keeps the traces; the others must return None."""
        answers = self.llm.collective_rpc(method, args=args)
        answer = answers.pop(self.keeps_traces)
        assert set(answers) == {None}
        return answer

    def kept_on_workers(self, name: str, num_tokens: int) -> list[torch.Tensor]:
        """Return the positions that each worker's heads kept, bool [L, H, P] with the tail."""
        masks = [cuts[-1][..., :num_tokens] for cuts in self.cuts_on_workers(name)]
        size = self.scheduler.tokens_per_block
        for mask in masks:
            mask[..., num_tokens // size * size :] = True
        return masks

    def kept(self, request_id: str, num_tokens: int) -> torch.Tensor | None:
        """Return the positions that the heads of all ranks kept, bool [L, H, P] with the tail."""
        return torch.cat(self.kept_on_workers(request_id, num_tokens), dim=1)

    def assert_forgotten(self) -> None:
        """Assert that no worker has state of a request."""
        assert set(self.llm.collective_rpc(remembered)) == {0}

    def cuts_on_workers(self, name: str) -> list[list[torch.Tensor]]:
        """Return what each worker's regions held after each cut of a request, bool [L, H, n].

        n is beyond the last position. Cuts that a preemption undid are included.
        """
        return [
            [self._mask(kept) for kept in found if name_of(kept["request_id"]) == name]
            for found in self.llm.collective_rpc("kv_eviction_kept")
        ]

    def _mask(self, kept: Mapping[str, Any]) -> torch.Tensor:
        counts = torch.from_numpy(kept["counts"])
        positions = torch.from_numpy(kept["positions"]).long()
        length = self.llm.model_config.max_model_len
        mask = torch.zeros(counts.numel(), length, dtype=torch.bool)
        pair = torch.repeat_interleave(torch.arange(counts.numel()), counts.flatten())
        mask[pair[:, None], positions[: len(pair)]] = True
        size = self.scheduler.tokens_per_block
        assert torch.equal(mask.sum(-1), counts.flatten() * size)  # each page is full
        return mask.unflatten(0, counts.shape)


def remembered(worker: Any) -> int:
    """Return the number of things that a worker stores about requests."""
    evictor = worker.evictor
    return evictor.regions.num_live + len(evictor.observations) + len(evictor.ended)


@contextmanager
def workers(
    folder: Path,
    eviction: Mapping[str, Any],
    kind: type[ParallelEngine] = ParallelEngine,
    cores: str = "0|1",
    **options: Any,
) -> Iterator[Any]:
    """Run an engine with one worker for each of `cores`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        patch.setattr(multiproc_executor, "get_mp_context", lambda: FORKED)
        SHARED.close()
        running = kind(folder, eviction, **options)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ParallelEngine]:
    """Chunks of 128 tokens run together with compressed decodes, in a pool too small for all."""
    options = {"max_num_batched_tokens": 128, "max_model_len": 768, "num_gpu_blocks_override": 30}
    with workers(folder, SETTINGS, tensor_parallel_size=2, **options) as found:
        yield found


def with_method(ask: Ask, method: str, value: Any, max_tokens: int = 40) -> Ask:
    xargs = {"kv_eviction": method, **budget(value), "kv_eviction_trace": 1}
    return Ask(ask.text, ask.images, max_tokens, xargs, ask.arrival)


def serve(
    oracle: Oracle, running: ParallelEngine, asks: Sequence[Ask]
) -> Iterator[tuple[Ask, torch.Tensor]]:
    """Serve the requests and yield what was kept, bool [L, H, P], of all heads.

    Both ranks use the same number of pages, the text follows from what they kept, and the first
    rank's trace has the heads of both.
    """
    outputs = running.run(asks)
    size = running.scheduler.tokens_per_block
    for ask, output in zip(asks, outputs, strict=True):
        prompt = oracle.prompt(ask.text, ask.images)
        num_tokens = len(prompt.token_ids)
        full = num_tokens // size * size
        parts = running.kept_on_workers(output.request_id, num_tokens)
        assert len({int(part[..., :full].sum()) for part in parts}) == 1
        kept = torch.cat(parts, dim=1)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == oracle.generate(prompt, ask.max_tokens, kept, guess=tokens), ask.xargs
        trace = running.only_answer("kv_eviction_trace", output.request_id)
        assert trace["kept_by"] == kept.flatten(0, 1).sum(0).tolist()
        assert trace["pages"] == (kept[..., :full].sum(-1) // size).tolist()
        yield ask, kept


def test_a_layers_heads_keep_the_same_on_two_ranks_as_on_one(
    running: ParallelEngine, oracle: Oracle
) -> None:
    """The oracle is one rank; every prompt is prefilled in several chunks."""
    asks = [
        with_method(
            album(seed, 20 + 9 * seed, 190 + 23 * seed, arrival=2 * seed), f"{name}_by_layer", value
        )
        for seed, (name, value) in enumerate(product(METHODS["layer"], (0.45, 0.15)))
    ]
    for ask, kept in serve(oracle, running, asks):
        method = NAMES[ask.xargs["kv_eviction"]]["base"]
        eviction = Eviction(
            ask.xargs["kv_eviction_budget"],
            granularity="layer",
            method=method,
            observation_window=128,
        )
        assert torch.equal(kept, oracle.select(oracle.prompt(ask.text, ask.images), eviction).kept)


def test_heads_with_their_own_token_sets_share_the_pages_of_their_rank(
    running: ParallelEngine, oracle: Oracle
) -> None:
    """The pool is too small for all: some requests are preempted and evicted again."""
    asks = [
        with_method(
            album(20 + seed, 20, 170 + 23 * seed, arrival=seed), f"{name}_by_head", 0.5, 120
        )
        for seed, name in enumerate(METHODS["head"])
    ]
    before = running.counters["requests_evicted"]
    for ask, kept in serve(oracle, running, asks):
        if ask.xargs["kv_eviction"] == "snapkv_by_head":  # with equal shares, ranks change nothing
            eviction = Eviction(0.5, granularity="head", method="snapkv")
            prompt = oracle.prompt(ask.text, ask.images)
            assert torch.equal(kept, oracle.select(prompt, eviction).kept)
    assert running.counters["requests_evicted"] > before + len(asks)


def test_ranks_find_one_number_of_blocks(running: ParallelEngine, oracle: Oracle) -> None:
    """With the budget `auto`; `run` recounts the blocks that the scheduler took back."""
    asks = [
        with_method(album(40 + i, 20, 200 + 30 * i), f"tgv_by_{granularity}", f"auto:{share}")
        for i, (granularity, share) in enumerate(product(METHODS, (0.5, 0.8)))
    ]
    assert len(list(serve(oracle, running, asks))) == len(asks)


def test_ranks_report_the_same_status(running: ParallelEngine) -> None:
    first, second = running.llm.collective_rpc("kv_eviction_status")
    assert first == second
    assert first["pool"]["kv_heads"] == 2


def count_exchanges(worker: Any) -> int:
    """Return how often a worker has exchanged anything since the last call, and count on."""
    ranks = worker.evictor.ranks
    counted, ranks.num_exchanges = ranks.num_exchanges, 0
    return int(counted)


def fail_at(worker: Any, call: int | None) -> None:
    """Let the second rank run out of memory at an exchange of a prompt, before it is made."""
    gather = Exchanges.gather
    original = getattr(gather, "original", gather)
    Exchanges.gather = original  # type: ignore[method-assign]
    if call is None or worker.evictor.ranks.rank != 1:
        return
    calls = itertools.count()

    def failing(self: Exchanges, values: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return original(self, values)

    failing.original = original  # type: ignore[attr-defined]
    Exchanges.gather = failing  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "value", "exchanges"),
    [
        *(("tgv_by_layer", 0.4, 2), ("snapkv_by_layer", 0.4, 1), ("h2o_by_layer", 0.4, 1)),
        *(("tgv_by_head", 0.4, 1), ("snapkv_by_head", 0.4, 0), ("tgv_by_head", "auto:0.8", 2)),
    ],
)
def test_a_failure_before_any_exchange_ends_one_request(
    running: ParallelEngine, oracle: Oracle, name: str, value: Any, exchanges: int
) -> None:
    """And so often a prompt exchanges something; a step once more, for what ended in it."""
    xargs = {"kv_eviction": name, **budget(value)}
    ask = album(70, 20, 180, max_tokens=12, xargs=xargs)
    running.llm.collective_rpc(count_exchanges)
    assert running.run([ask])
    found = running.llm.collective_rpc(count_exchanges)
    assert found == [exchanges + 1] * 2
    for call in range(exchanges):
        running.llm.collective_rpc(fail_at, args=(call,))
        (failed,) = running.run([ask])
        assert failed.outputs[0].finish_reason == "error"
        running.llm.collective_rpc(fail_at, args=(None,))
        running.assert_forgotten()
    good = with_method(album(71, 20, 150), name, value)
    assert len(list(serve(oracle, running, [good]))) == 1
