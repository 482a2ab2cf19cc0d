# SPDX-License-Identifier: Apache-2.0
"""Objects that live in other processes and are called through pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measure.engines import ENVIRONMENT
from measure.serving import log_errors

FOLDER = Path(__file__).parents[1] / "build/benchmarks"
"""Where runs leave their records."""


class RemoteError(RuntimeError):
    """A remote object raised; the message is its traceback."""


class TimeUpError(RuntimeError):
    """The run's time is up."""


class Remote:
    """An object in a new process. Several can be alive; only the one that is asked computes."""

    def __init__(
        self,
        name: str,
        build: Callable[..., Any],
        *args: Any,
        threads: int | None = None,
        deadline: float = float("inf"),
        log: Path | None = None,
    ) -> None:
        """Start the process and let it call `build(*args)`.

        Args:
            build: a function or class that can be pickled.
            threads: of the object's computations; None: one for each core.
            deadline: end of the run, on the clock of `time.monotonic`.
            log: file to which its output is added; None: this process's standard error.
        """
        self.name = name
        self._deadline = deadline
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, build, args, log), daemon=True)
        given = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        # torch and vLLM read their variables before a process could set them.
        with _environment(**ENVIRONMENT, **given):
            # The Makefile's value would replace the size of the pool that an arm asks for.
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
            self._process.start()
        child.close()

    def wait_until_built(self) -> None:
        """Wait for `build` to return.

        Raises:
            RemoteError: if it raised.
            TimeUpError: at the deadline.
        """
        self._receive()

    def ask(self, method: str, **kwargs: Any) -> Any:
        """Call a method of the object and return its result.

        Raises:
            RemoteError: if it raised, or the process is gone.
            TimeUpError: at the deadline.
        """
        self._pipe.send((method, kwargs))
        return self._receive()

    def _receive(self) -> Any:
        left = self._deadline - time.monotonic()
        if not self._pipe.poll(None if left == float("inf") else max(left, 0.0)):
            raise TimeUpError(f"{self.name} did not answer in time")
        try:
            succeeded, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            said = f"; {log_errors(self._log)}" if self._log else ""
            raise RemoteError(f"{self.name} ended with exit code {code}{said}") from None
        if not succeeded:
            raise RemoteError(f"{self.name}:\n{result}")
        return result

    def close(self) -> None:
        """End the process; one that is still busy is killed."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout=5 if time.monotonic() < self._deadline else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    pipe: Connection, build: Callable[..., Any], args: tuple[Any, ...], log: Path | None
) -> None:
    """Build the object, then answer `(method, kwargs)` with `(succeeded, result)`."""
    if log is not None:  # with what libraries say when they end
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)  # what an engine prints is no part of a table
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        try:
            remote = build(*args)
            pipe.send((True, None))
            while (request := pipe.recv()) is not None:
                method, kwargs = request
                pipe.send((True, getattr(remote, method)(**kwargs)))
        except EOFError:
            raise
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for the processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
