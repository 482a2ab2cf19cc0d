# SPDX-License-Identifier: Apache-2.0
"""The server of one arm: started as `vllm serve` and stopped afterwards, or found at its URL."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from demo.run import free_port, stop
from loadtests.profile import Arm, Profile

MIB = 1024 * 1024


class LoadTestError(RuntimeError):
    """The load test cannot go on; the message says why, with the end of a log."""


@dataclass(frozen=True)
class Server:
    """A server that answers. `command` and `process` are None if it was not started here."""

    url: str
    command: str | None = None
    process: subprocess.Popen[bytes] | None = None
    start_seconds: float | None = None

    def is_alive(self) -> bool:
        """Whether it runs, as far as can be told: one that was not started here does."""
        return self.process is None or self.process.poll() is None

    def memory_mib(self) -> float | None:
        """Resident memory of all its processes; pages that two of them share count twice."""
        if self.process is None:
            return None
        try:
            leader = psutil.Process(self.process.pid)
            family = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        total = 0
        for member in family:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # ended meanwhile
        return total / MIB


def executable() -> str:
    """The `vllm` beside this Python."""
    return str(Path(sys.executable).with_name("vllm"))


def environment(profile: Profile) -> dict[str, str]:
    return {**os.environ, **profile.environment}


def serve_arguments(profile: Profile, arm: Arm) -> list[str]:
    """Arguments of `vllm` that serve an arm, without its host and port."""
    arguments = ["serve", profile.model, "--served-model-name", profile.request_model]
    return arguments + flags({**profile.serve, **arm.serve})


def flags(values: Mapping[str, Any]) -> list[str]:
    """Command-line flags of a mapping; true is a flag without value, a mapping is JSON."""
    arguments = []
    for name, value in values.items():
        arguments.append(f"--{name}")
        if value is not True:
            arguments.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return arguments


@contextmanager
def serving(profile: Profile, arm: Arm, log: Path) -> Iterator[Server]:
    """The running server of an arm; one that was started here is gone afterwards.

    Raises:
        LoadTestError: if it does not answer in `startup_seconds`.
    """
    if arm.url is not None:
        url = arm.url.rstrip("/")
        _wait_until_healthy(url, None, log, profile.startup_seconds)
        yield Server(url)
        return
    arguments = serve_arguments(profile, arm)
    with launched(arguments, environment(profile), log, profile.startup_seconds) as server:
        yield server


@contextmanager
def launched(
    arguments: Sequence[str], variables: Mapping[str, str], log: Path, seconds: float
) -> Iterator[Server]:
    """A server that is started with these arguments of `vllm`; it is gone afterwards.

    Raises:
        LoadTestError: if it does not answer in so many seconds.
    """
    started = time.monotonic()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [executable(), *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(url, process, log, seconds)
        taken = time.monotonic() - started
        yield Server(url, shlex.join(["vllm", *arguments]), process, taken)
    finally:
        stop(process)


def _wait_until_healthy(
    url: str, process: subprocess.Popen[bytes] | None, log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise LoadTestError(f"vllm serve ended with status {process.returncode}; {said(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    what = f"{url}/health did not answer in {seconds:g} s"
    raise LoadTestError(what if process is None else f"{what}; {said(log)}")


def said(log: Path, num_lines: int = 15) -> str:
    """The errors that a log names, each once, or else how it ends."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [match.group() for line in lines if (match := re.search(r"\b\w+Error: .*", line))]
    if errors:
        return f"{log} has:\n" + "\n".join(dict.fromkeys(errors))
    return f"the end of {log}:\n" + "\n".join(lines[-num_lines:])
