# SPDX-License-Identifier: Apache-2.0
"""What tests of a real `vllm serve` share."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from demo.run import free_port
from tests.models import random_image, random_text

START_SECONDS = 240
STOP_SECONDS = 120
SOON_SECONDS = 120
BLOCK_SIZE = 32
VISION_TOKENS = 64
"""Of an image, to the tiny LLaVA for images of 112 x 112."""


@dataclass
class Server:
    """A running `vllm serve` and a client for it."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    client: Any
    """An `openai.OpenAI`; requests are plain dictionaries here."""

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def ask(self, xargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """One chat question about a PNG image."""
        values = {"messages": messages(0), "max_tokens": 8, "temperature": 0, **options}
        extra: dict[str, Any] = {"ignore_eos": True}
        if xargs is not None:
            extra["vllm_xargs"] = xargs
        return self.client.chat.completions.create(model="tiny", **values, extra_body=extra)

    def samples(self, *names: str) -> list[Any]:
        """Samples of some of the metrics, or of all."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
        return [sample for sample in samples if not names or sample.name in names]

    def interrupt(self) -> None:
        """End the server as Ctrl-C does; nothing of it is left, soon after it has ended itself.

        Python's tracker of shared resources outlives whom it tracks for a moment.
        """
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(STOP_SECONDS) in (0, -signal.SIGINT, 128 + signal.SIGINT)
        assert eventually(lambda: not group_members(self.process.pid)), {
            member: Path(f"/proc/{member}/cmdline").read_bytes().split(b"\0")
            for member in group_members(self.process.pid)
        }


@contextmanager
def serve(
    folder: Path,
    log: Path,
    config: Mapping[str, Any],
    *,
    key: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    start_seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """A server with eviction, in a process group of its own; all of it is gone afterwards."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "256"]
    command += ["--limit-mm-per-prompt", '{"image": 2}', "--generation-config", "vllm"]
    command += ["--kv-eviction", "tgv", "--kv-eviction-budget", "0.1"]
    command += ["--kv-eviction-config", json.dumps(config)]
    command += ["--api-key", key] if key else []
    command += flags
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PLUGINS": "tgvkv", **(environment or {})}
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, address, log, start_seconds)
        client = openai.OpenAI(
            base_url=f"{address}/v1", api_key=key or "none", timeout=120, max_retries=0
        )
        yield Server(process, log, address, client)
    finally:
        for member in group_members(process.pid):  # the server is the leader of its group
            os.kill(member, signal.SIGKILL)
        process.wait(STOP_SECONDS)


def group_members(group: int) -> list[int]:
    """Processes of a process group that have not ended, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # ended meanwhile
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def eventually(check: Callable[[], bool]) -> bool:
    """Whether something comes true before long; statistics arrive after answers."""
    deadline = time.monotonic() + SOON_SECONDS
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def messages(seed: int, images: int = 1, length: int = 300) -> list[dict[str, Any]]:
    """One chat message with PNG images and a text of random characters."""
    content: list[dict[str, Any]] = []
    for index in range(images):
        url = png_url(10 * seed + index)
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": random_text(seed, length)})
    return [{"role": "user", "content": content}]


def png_url(seed: int) -> str:
    """A random image as a data URL."""
    png = io.BytesIO()
    random_image(seed, 112, 84).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def report_of(answer: Any) -> dict[str, Any]:
    return answer.kv_transfer_params["kv_eviction"]


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def wait_until_healthy(
    process: subprocess.Popen, address: str, log: Path, seconds: float = START_SECONDS
) -> None:
    """Fail with the end of the log if the server ends or takes too long."""
    deadline = time.monotonic() + seconds
    while not is_healthy(address):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
