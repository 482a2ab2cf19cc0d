# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` in a process group, from start to end, and its `/metrics`."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

START_SECONDS = 240
STOP_SECONDS = 30
"""Time for an interrupted process group to end before it is killed."""

KILL_SECONDS = 10
METRICS_SECONDS = 10
MIB = 1024 * 1024


class ServingError(RuntimeError):
    """A server or its client failed; the message says why, with the errors of its log."""


@dataclass(frozen=True)
class Server:
    """A healthy server. A server found at its URL has no `process`, `log` or `command`."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    command: str | None = None
    """Without host and port, as a user would type it."""
    start_seconds: float | None = None

    def is_alive(self) -> bool:
        """Return whether the process runs; true for a server found at its URL."""
        return self.process is None or self.process.poll() is None

    def lines(self) -> list[str]:
        """Return the lines of the log so far."""
        return [] if self.log is None else self.log.read_text(errors="replace").splitlines()

    def memory_mib(self) -> float | None:
        """Return the resident memory of all processes; pages shared by two count twice."""
        total = self._sum(lambda process: process.memory_info().rss)
        return None if total is None else total / MIB

    def cpu_seconds(self) -> float | None:
        """Return the processor time that all processes have used."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def _sum(self, figure: Callable[[psutil.Process], float]) -> float | None:
        """Return the sum of a figure over all processes; None if there is no process."""
        if self.process is None:
            return None
        try:
            leader = psutil.Process(self.process.pid)
            family = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        total = 0.0
        for member in family:
            with suppress(psutil.NoSuchProcess):  # ended meanwhile
                total += figure(member)
        return total

    def metrics(self) -> str:
        """Return the text of `/metrics`.

        Raises:
            OSError: if the server does not answer.
        """
        request = urllib.request.Request(f"{self.url}/metrics", headers=authorization())
        with urllib.request.urlopen(request, timeout=METRICS_SECONDS) as response:
            text: str = response.read().decode()
        return text

    def samples(self, *names: str) -> list[Sample]:
        """Return the samples of the named metrics, or of all."""
        return [s for s in parse_samples(self.metrics()) if not names or s.name in names]


def parse_samples(text: str) -> list[Sample]:
    """Return all samples of a `/metrics` text."""
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def authorization() -> dict[str, str]:
    """Return the header with the API key of the environment, if it has one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def vllm_executable() -> str:
    """Return the `vllm` command of this Python's environment."""
    return str(Path(sys.executable).with_name("vllm"))


def flags(values: Mapping[str, Any]) -> list[str]:
    """Return command-line flags; true is a flag without value, a mapping or list is JSON."""
    arguments = []
    for name, value in values.items():
        arguments.append(f"--{name}")
        if value is not True:
            arguments.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return arguments


@contextmanager
def serving(
    arguments: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
    stop_seconds: float = STOP_SECONDS,
) -> Iterator[Server]:
    """Run `vllm` with `arguments` on a free port until the block ends.

    Args:
        arguments: `serve`, the model and flags, without host and port.
        log: file that takes the output of all processes.
        environment: variables added to those of this process, and to the name of our plugin, which
            the routes below `/kv-eviction` need.
        start_seconds: limit until the server is healthy.
        stop_seconds: limit for an orderly end, see `stop`.

    Raises:
        ServingError: if the server ends or is not healthy in time.
    """
    begin = time.monotonic()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [vllm_executable(), *arguments, "--host", "127.0.0.1", "--port", str(port)]
    variables = {"VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "tgvkv"), **(environment or {})}
    with process_group(command, log, variables, stop_seconds) as process:
        wait_until_healthy(url, process, log, start_seconds)
        taken = time.monotonic() - begin
        yield Server(url, process, log, shlex.join(["vllm", *arguments]), taken)


@contextmanager
def process_group(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    stop_seconds: float = STOP_SECONDS,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as the leader of a new process group, and stop the group afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process, stop_seconds)


def stop(process: subprocess.Popen[bytes], seconds: float = STOP_SECONDS) -> None:
    """Interrupt a process group as Ctrl-C does, and kill what is left after `seconds`.

    With 0 seconds it is killed at once.
    """
    for sign, limit in ((signal.SIGINT, seconds), (signal.SIGKILL, KILL_SECONDS)):
        if not limit:
            continue
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and group_members(process.pid):
            process.poll()  # reaps the leader
            time.sleep(0.2)
    process.wait(timeout=KILL_SECONDS)


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group; zombies do not count."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # ended meanwhile
    return members


def free_port() -> int:
    """Return a port of this machine on which nothing listens.

    It is not one of those that Linux gives to outgoing connections (from 32768 on, by default): one
    of them may take such a port before a server, which needs seconds to start, listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until_healthy(
    url: str,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    seconds: float = START_SECONDS,
) -> None:
    """Wait until `/health` answers.

    Raises:
        ServingError: if the process ends or the time is over.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise ServingError(f"vllm serve ended with status {process.returncode}{_said(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise ServingError(f"{url}/health did not answer in {seconds:g} s{_said(log)}")


def log_errors(log: Path, num_lines: int = 15) -> str:
    """Return the distinct errors that a log names, or its last lines if it names none."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [match.group() for line in lines if (match := re.search(r"\b\w+Error: .*", line))]
    if errors:
        return f"{log} has:\n" + "\n".join(dict.fromkeys(errors))
    return f"the end of {log}:\n" + "\n".join(lines[-num_lines:])


def _said(log: Path | None) -> str:
    return "" if log is None else f"; {log_errors(log)}"
