# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` of a tiny model, and requests to it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from measure import serving
from measure.messages import image_part, png_url, text_part
from measure.serving import START_SECONDS, group_members
from tests.models import random_image, random_text

STOP_SECONDS = 120
SOON_SECONDS = 120
BLOCK_SIZE = 32
VISION_TOKENS = 64
"""Tokens of an image of 112 x 112 pixels to the tiny LLaVA for images of that size."""
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PLUGINS": "tgvkv"}


@dataclass(frozen=True)
class ChatServer(serving.Server):
    """A running `vllm serve` and a client of it."""

    client: Any = None
    """An `openai.OpenAI`; requests are plain dictionaries here."""

    def ask(self, xargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Ask one chat question about a PNG image."""
        values = {"messages": messages(0), "max_tokens": 8, "temperature": 0, **options}
        extra: dict[str, Any] = {"ignore_eos": True}
        if xargs is not None:
            extra["vllm_xargs"] = xargs
        return self.client.chat.completions.create(model="tiny", **values, extra_body=extra)

    def interrupt(self) -> None:
        """End the server as Ctrl-C does; its processes must end, soon after the first.

        Python's tracker of shared resources outlives the process it tracks for a moment.
        """
        assert self.process is not None
        group = self.process.pid
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(STOP_SECONDS) in (0, -signal.SIGINT, 128 + signal.SIGINT)
        assert eventually(lambda: not group_members(group)), {
            member: Path(f"/proc/{member}/cmdline").read_bytes().split(b"\0")
            for member in group_members(group)
        }


def arguments_of(
    folder: Path, config: Mapping[str, Any] | None, budget: str | None = "0.1"
) -> list[str]:
    """Return the arguments of `vllm` that serve a model; without settings, without eviction."""
    arguments = ["serve", str(folder), "--served-model-name", "tiny"]
    arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    arguments += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "256"]
    arguments += ["--limit-mm-per-prompt", '{"image": 2}', "--generation-config", "vllm"]
    if config is None:
        return arguments
    arguments += ["--kv-eviction", config.get("policy", "tgv")]
    arguments += ["--kv-eviction-budget", budget] if budget else []
    return [*arguments, "--kv-eviction-config", json.dumps(config)]


@contextmanager
def serve(
    folder: Path,
    log: Path,
    config: Mapping[str, Any],
    *,
    key: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    budget: str | None = "0.1",
    start_seconds: float = START_SECONDS,
) -> Iterator[ChatServer]:
    """Serve a model with eviction until the block ends, then kill all processes.

    `budget` is None for a server whose `decode.schedule` has the budgets.
    """
    arguments = [*arguments_of(folder, config, budget), *(["--api-key", key] if key else [])]
    with serving.serving(
        [*arguments, *flags],
        log,
        environment={**ENVIRONMENT, **(environment or {})},
        start_seconds=start_seconds,
        stop_seconds=0,
    ) as server:
        client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key=key or "none", timeout=120, max_retries=0
        )
        yield ChatServer(**vars(server), client=client)


def eventually(check: Callable[[], bool]) -> bool:
    """Return whether `check` becomes true soon; statistics arrive after answers."""
    deadline = time.monotonic() + SOON_SECONDS
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def messages(seed: int, images: int = 1, length: int = 300) -> list[dict[str, Any]]:
    """Return one chat message with PNG images and a text of random characters."""
    pictures = [random_image(10 * seed + index, 112, 84) for index in range(images)]
    content = [image_part(png_url(picture)) for picture in pictures]
    return [{"role": "user", "content": [*content, text_part(random_text(seed, length))]}]


def report_of(answer: Any) -> dict[str, Any]:
    """Return the eviction report of an answer."""
    return answer.kv_transfer_params["kv_eviction"]
