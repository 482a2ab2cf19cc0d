# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.shape import ModelShape


@dataclass(frozen=True)
class Arm:
    """A name and the arguments that make this engine different from the others."""

    name: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    """Of the model's computations; None: as many as there are cores."""

    @property
    def evicts(self) -> bool:
        return "additional_config" in self.engine_args


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Variables for what starts meanwhile: torch reads its own before a process can set them."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class ArmError(RuntimeError):
    """An arm's process raised; the message is its traceback."""


class ArmProcess:
    """A running arm. Only one arm is asked at a time; the others sleep in `recv`."""

    def __init__(self, arm: Arm, shape: ModelShape, root: str) -> None:
        from benchmarks.engine import serve

        context = multiprocessing.get_context("spawn")
        self.arm = arm
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, arm, shape, root), daemon=True)
        with _environment(OMP_NUM_THREADS=str(arm.threads) if arm.threads else None):
            self._process.start()
        child.close()
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        self.facts = self._receive()

    def ask(self, method: str, **kwargs: Any) -> Any:
        """Call a method of the arm's `Engine` and return its result.

        Raises:
            ArmError: if it raised, or the process is gone.
        """
        self._pipe.send((method, kwargs))
        return self._receive()

    def _receive(self) -> Any:
        try:
            ok, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise ArmError(f"arm {self.arm.name} ended with exit code {code}") from None
        if not ok:
            raise ArmError(f"arm {self.arm.name}:\n{result}")
        return result

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Arms:
    """All arms of a comparison, alive together; a context manager that ends them all."""

    def __init__(self, arms: list[Arm], shape: ModelShape, root: str) -> None:
        self.shape = shape
        first, *others = arms
        self.processes = {first.name: ArmProcess(first, shape, root)}
        # What the first one compiles, the others find in torch's cache.
        self.processes[first.name].wait_until_ready()
        self.processes.update((arm.name, ArmProcess(arm, shape, root)) for arm in others)
        for arm in others:
            self.processes[arm.name].wait_until_ready()

    def __getitem__(self, name: str) -> ArmProcess:
        return self.processes[name]

    def __enter__(self) -> Arms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.close()
