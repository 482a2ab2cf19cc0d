# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, which gets prompts from another one or hands them over.

This module imports nothing of vLLM, because model runner V2 has to be prepared before that is.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure.pairs import CONNECTOR, nixl_environment
from tests.engine.processes import FORKED

if TYPE_CHECKING:
    from tests.engine.running import Ask, SteppedEngine

SECONDS = 900
"""Of a call, the start of the engine included, on a machine with other work."""


@dataclass(frozen=True)
class Served:
    """One request's answer."""

    tokens: list[int]
    first: list[int]
    """The tokens of its first output."""
    parameters: dict[str, Any]
    num_cached: int
    """Prompt tokens that were not computed, as the answer's usage says."""


class Remote:
    """The other end of an engine's connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _call(self, *command: Any) -> Any:
        self._connection.send(command)
        assert self._connection.poll(SECONDS), command[0]
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run(self, asks: Sequence[Ask], parameters: Sequence[Any], **sampling: Any) -> list[Served]:
        """Serve requests at the same time, each with its `kv_transfer_params`."""
        found: list[Served] = self._call("run", asks, parameters, sampling)
        return found

    def fail(self) -> None:
        """Let every eviction from now on fail on the worker."""
        self._call("fail")

    def hang_up(self, ask: Ask, parameters: Any) -> None:
        """Send a request whose client hangs up while its first step runs."""
        self._call("hang_up", ask, parameters)

    def counters(self) -> dict[str, Any]:
        """Return the counters once every block is free again."""
        found: dict[str, Any] = self._call("counters")
        return found

    def end(self) -> None:
        self._connection.send(("end",))


@contextmanager
def engine_process(
    folder: Path, eviction: Mapping[str, Any] | None, kind: str = "cpu", **options: Any
) -> Iterator[Remote]:
    """Run an engine until the block ends.

    Args:
        kind: `cpu`, `ranks`, `ahead` (FlashAttention is pretended, with steps scheduled ahead), or
            `v2` (model runner V2).
    """
    # Model runner V2 needs a process that is prepared before it imports vLLM.
    context = multiprocessing.get_context("spawn") if kind == "v2" else FORKED
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(folder), eviction, kind, options))
    process.start()
    try:
        yield Remote(ours)
        ours.send(("end",))
        process.join(30)
    finally:
        process.kill()


def _serve(
    connection: Connection, folder: str, eviction: Any, kind: str, options: dict[str, Any]
) -> None:
    os.environ.update(nixl_environment())
    try:
        with _engine(folder, eviction, kind, options) as running:
            _listen(connection, running)
    except BaseException as error:
        connection.send(error)
        raise


@contextmanager
def _engine(
    folder: str, eviction: Any, kind: str, options: dict[str, Any]
) -> Iterator[SteppedEngine]:
    if kind == "v2":
        from tests.engine import runner_v2

        runner_v2.prepare()
    import pytest

    from tests.engine import flash_on_cpu
    from tests.engine.running import engine
    from tests.engine.test_parallel import workers

    patch = pytest.MonkeyPatch()
    if kind == "v2":
        runner_v2.pretend_gpu_worker()
    elif kind == "ahead":
        flash_on_cpu.pretend(patch)
        flash_on_cpu.schedule_ahead(patch)
    options = {"kv_transfer_config": CONNECTOR, **options}
    if kind == "ranks":
        with workers(Path(folder), eviction, tensor_parallel_size=2, **options) as running:
            yield running
    else:
        with engine(Path(folder), eviction, **options) as running:
            yield running


def _listen(connection: Connection, running: SteppedEngine) -> None:
    while True:
        if not connection.poll(0.01):
            running.engine.step()  # hears what other engines have read
            continue
        name, *rest = connection.recv()
        if name == "end":
            return
        do = {"run": _run, "counters": _counters, "fail": _fail, "hang_up": _hang_up}[name]
        connection.send(do(running, *rest))


def _fail(running: SteppedEngine) -> None:
    from vllm_tgvkv.worker.observation import PromptObservation

    def gather(*_: Any) -> None:
        raise RuntimeError("made up")

    PromptObservation.gather = gather  # type: ignore[method-assign,assignment]


def _hang_up(running: SteppedEngine, ask: Ask, parameters: Any) -> None:
    from dataclasses import replace

    running.add(replace(ask, xargs={**ask.xargs, "kv_transfer_params": parameters}))
    core: Any = running.engine.engine_core.engine_core
    (name,) = running.scheduler.requests
    # vLLM looks for such requests between a step and its outputs.
    core._process_aborts_queue = lambda: core.abort_requests([name])
    running.engine.step()
    del core._process_aborts_queue
    assert name in running.scheduler.requests, "its blocks may still be written"
    running.engine.abort_request([name], internal=True)


def _run(
    running: SteppedEngine, asks: Sequence[Ask], parameters: Sequence[Any], sampling: dict[str, Any]
) -> list[Served]:
    from dataclasses import replace

    names = []
    for ask, each in zip(asks, parameters, strict=True):
        xargs = {**ask.xargs, **({"kv_transfer_params": each} if each else {})}
        names.append(running.add(replace(ask, xargs=xargs), **sampling))
    first: dict[str, list[int]] = {}
    finished: dict[str, Any] = {}
    deadline = time.monotonic() + SECONDS / 2
    while len(finished) < len(names):
        states = [
            (r.request_id, r.num_computed_tokens, r.num_tokens, r.status)
            for r in running.scheduler.requests.values()
        ]
        assert time.monotonic() < deadline, states
        for output in running.engine.step():
            first.setdefault(output.request_id, list(output.outputs[0].token_ids))
            if output.finished:
                finished[output.request_id] = output
    return [
        Served(
            list(finished[name].outputs[0].token_ids),
            first[name],
            finished[name].kv_transfer_params or {},
            finished[name].num_cached_tokens,
        )
        for name in names
    ]


def _counters(running: SteppedEngine) -> dict[str, Any]:
    from tests.engine.running import Ask

    for _ in range(2000):
        running.engine.step()
        if not running.scheduler.requests:
            break
    running.assert_empty()
    counters = running.counters
    running.run([Ask("x", max_tokens=1)])  # with its steps the worker hears of the last regions
    running.assert_forgotten()
    return counters
