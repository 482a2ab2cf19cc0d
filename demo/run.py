# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve the demonstration model with eviction and ask it about pages it never saw.

Starts the real `vllm serve` with `--kv-eviction tgv`, sends PNG pages with questions through
the official OpenAI client, and prints what the full cache and four budgets answer, with the KV
blocks each of them held. Ends by itself; the exit status is not zero if anything is wrong.
`python -m demo.run --pages 200` measures the same on more pages.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import openai
from PIL import Image

from demo.pages import Question, make_page

MODEL = Path(__file__).parent / "model"
BLOCK_SIZE = 16
DEFAULT_BUDGET = 0.1
BUDGETS = (0.5, 0.2, 0.1, 0.05)
STARTUP_SECONDS = 240
LEAST_FULL_CACHE_ACCURACY = 0.75
"""Of the few questions asked here; the tests measure the model on many."""


class DemoError(RuntimeError):
    """Something did not go as it must; the message says what."""


@dataclass(frozen=True)
class Answer:
    """One answer and the KV blocks its request held before and after the eviction."""

    text: str
    blocks_before: int
    blocks_after: int

    @property
    def memory_saved(self) -> float:
        return 1 - self.blocks_after / self.blocks_before


def main() -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve the demonstration model and ask it.")
    parser.add_argument("--pages", type=int, default=8, help="one question each (default: 8)")
    parser.add_argument("--granularity", choices=("layer", "head"), default="layer")
    options = parser.parse_args()
    print(f"Starting: {shlex.join(serve_command('PORT', options.granularity))}")
    started = time.monotonic()
    try:
        with server(options.granularity) as url:
            print(f"The server is ready after {time.monotonic() - started:.0f} s.\n")
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            rows = [ask_about_page(client, index) for index in range(options.pages)]
        return summarise(rows)
    except (DemoError, openai.OpenAIError) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1


def serve_command(port: int | str, granularity: str) -> list[str]:
    """The command a user would type; `vllm` is the one beside this Python."""
    config = [] if granularity == "layer" else ["--kv-eviction-config", '{"granularity": "head"}']
    return [
        *(str(Path(sys.executable).with_name("vllm")), "serve", os.path.relpath(MODEL)),
        *("--kv-eviction", "tgv", "--kv-eviction-budget", str(DEFAULT_BUDGET)),
        *config,
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--enforce-eager", "--served-model-name", "demo"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


@contextmanager
def server(granularity: str) -> Iterator[str]:
    """A running server's URL; its whole process group is gone afterwards.

    Raises:
        DemoError: if it does not come up; the end of its log is printed.
    """
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            serve_command(port, granularity),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process, log)
            yield url
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"vllm serve ended with status {process.returncode}:\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise DemoError(f"vllm serve was not ready after {STARTUP_SECONDS} s:\n{tail(log)}")


def tail(log: IO[str], num_lines: int = 30) -> str:
    log.seek(0)
    return "".join(log.readlines()[-num_lines:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server as Ctrl-C would, then make sure that none of its processes is left."""
    for sign, seconds in ((signal.SIGINT, 30), (signal.SIGKILL, 10)):
        if not signal_group(process.pid, sign):
            break
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and signal_group(process.pid, 0):
            process.poll()  # reaps the leader, which would count as alive otherwise
            time.sleep(0.2)
    process.wait(timeout=5)


def signal_group(group: int, sign: int) -> bool:
    """Send a signal to a process group; whether the group still exists. 0 only asks."""
    try:
        os.killpg(group, sign)
    except ProcessLookupError:
        return False
    return True


def ask_about_page(client: openai.OpenAI, index: int) -> tuple[Question, list[Answer]]:
    """Put one question about a test page to the full cache and to every budget; print a row."""
    page = make_page("test", index)
    question = page.questions[index % len(page.questions)]
    full = ask(client, page.image, question.text, {"kv_eviction": "none"})
    answers = [full]
    for budget in BUDGETS:
        answer = ask(client, page.image, question.text, {"kv_eviction_budget": budget})
        if not answer.blocks_after < answer.blocks_before:
            raise DemoError(f"budget {budget} gave no block back for {question.text!r}")
        answers.append(answer)
    if index == 0:
        print_header()
    print_row(question, answers)
    return question, answers


def ask(client: openai.OpenAI, image: Image.Image, question: str, xargs: dict[str, Any]) -> Answer:
    """Send one page as a PNG with one question.

    Raises:
        DemoError: if the response does not tell what was evicted.
    """
    response = client.chat.completions.create(
        model="demo",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": png_url(image)}},
                    {"type": "text", "text": question},
                ],
            }
        ],
        temperature=0,
        max_tokens=12,
        extra_body={"vllm_xargs": {**xargs, "kv_eviction_report": 1}},
    )
    report = (getattr(response, "kv_transfer_params", None) or {}).get("kv_eviction")
    if report is None:
        raise DemoError("the response carries no eviction report")
    before = report["blocks_before"]
    return Answer(
        text=(response.choices[0].message.content or "").strip(),
        blocks_before=before,
        blocks_after=before if report["blocks_after"] is None else report["blocks_after"],
    )


def png_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def print_header() -> None:
    columns = "".join(f"{budget:>10.0%}" for budget in BUDGETS)
    print(f"{'question':34}{'truth':>8}{'full':>10}{columns}   KV blocks full -> ...")


def print_row(question: Question, answers: list[Answer]) -> None:
    marked = "".join(
        f"{answer.text[:7] + (' ' if answer.text == question.answer else '*'):>10}"
        for answer in answers
    )
    blocks = " ".join(str(answer.blocks_after) for answer in answers)
    print(f"{question.text[:33]:34}{question.answer:>8}{marked}   {blocks}", flush=True)


def summarise(rows: list[tuple[Question, list[Answer]]]) -> int:
    """Print the last lines of the table; returns the exit status."""
    columns = list(zip(*(answers for _, answers in rows), strict=True))
    right = [
        sum(a.text == question.answer for a, (question, _) in zip(column, rows, strict=True))
        for column in columns
    ]
    saved = [sum(a.memory_saved for a in column) / len(column) for column in columns]
    print(
        f"\n{'right answers (* marks a wrong one)':42}"
        + "".join(f"{f'{n}/{len(rows)}':>9} " for n in right)
    )
    print(f"{'KV memory of the prompt given back':42}" + "".join(f"{s:>9.0%} " for s in saved))
    if right[0] < LEAST_FULL_CACHE_ACCURACY * len(rows):
        print("\nThe full cache answers too few questions: is demo/model intact?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
