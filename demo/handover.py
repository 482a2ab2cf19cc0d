# SPDX-License-Identifier: Apache-2.0
"""`make demo-handover`: prompts are computed by one server, and decoded by another one.

Starts two `vllm serve` and vLLM's router, and asks questions about pages through the router, once
with prompts that are cut before they travel and once with whole ones, as stock vLLM sends them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai

from demo.asking import (
    MAX_TOKENS,
    MODEL_NAME,
    PLUGINS,
    Question,
    command_line,
    exit_status,
    shown,
)
from measure.pairs import CONNECTOR, Pair, served_apart
from measure.samples import Scraper
from measure.serving import flags
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion, PageTask

NUM_QUESTIONS = 3
BUDGET = 0.1
TASK = PageTask("number", "prose", pages=2)
ARMS: dict[str, dict[str, Any]] = {"cut": {}, "whole": {"kv_eviction": "none"}}
"""Options of requests; the server's settings cut. The last arm sends what stock vLLM sends."""

_ROW = "{:22}{:8}{:>16}{:>15}{:>15}{:>15}"


@dataclass(frozen=True)
class Seen:
    """An answer, and its cost."""

    text: str
    num_bytes: int
    """Read by the server that decodes."""
    first: float
    """Seconds until its first token."""
    blocks: int
    """Most that the request held where it was decoded."""


def demonstrate(folder: Path, num_questions: int) -> int:
    """Run the demonstration and return its exit status.

    Raises:
        ServingError: if a server fails, or reads nothing from the other one.
        openai.OpenAIError: if a request fails.
    """
    vocabulary = load_vocabulary(folder)
    asked = [Question(PageQuestion(TASK, n).example(vocabulary)) for n in range(num_questions)]
    arguments = serve_arguments(folder)
    connector = flags({"kv-transfer-config": CONNECTOR})
    print(
        "Model      SmolLM2-135M and a vision tower that reads pages (docs/page_model.md)\n"
        f"Questions  {num_questions}, each about two pages of text, 2,048 vision tokens; a number "
        "is hidden there\n"
        f"Servers    one computes prompts and cuts them to {BUDGET:.0%}, the other one decodes\n\n"
        f"{command_line([*arguments, *connector])}\n"
        "$ # the same on another port\n"
        "$ vllm-router --vllm-pd-disaggregation --prefill URL --decode URL --kv-connector nixl\n"
        "Starting takes a minute or more.",
        flush=True,
    )
    began = time.monotonic()
    with TemporaryDirectory() as logs:
        both = {"prefill": arguments, "decode": arguments}
        with served_apart(both, Path(logs), PLUGINS) as pair:
            print(f"They are ready after {time.monotonic() - began:.0f} s.\n", flush=True)
            compare(pair, asked)
    print("\nServers and router have ended. Two machines: docs/production.md.")
    return 0


def serve_arguments(folder: Path) -> list[str]:
    """Return the arguments of `vllm` for both servers, without host, port and connector."""
    # The same prompt is sent twice: nothing of it may be cached.
    return [
        *("serve", shown(folder), "--kv-eviction", "reach", "--kv-eviction-budget", str(BUDGET)),
        *("--kv-eviction-when", "always", "--dtype", "float32", "--block-size", "16"),
        *("--max-model-len", "4096", "--max-num-seqs", "4", "--no-enable-prefix-caching"),
        *("--enforce-eager", "--served-model-name", MODEL_NAME),
    ]


def compare(pair: Pair, asked: Sequence[Question]) -> None:
    """Ask each question in both ways, and print what each took."""
    client = openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="none", max_retries=0)
    ask(pair, client, asked[0], {})  # the first one makes the servers' connection
    print(_ROW.format("number of", "prompt", "answer", "travelled", "first token", "blocks held"))
    seen: dict[str, list[Seen]] = {name: [] for name in ARMS}
    right = dict.fromkeys(ARMS, 0)
    for question in asked:
        told = question.example.asked
        name = told.start.split(" for ")[1].split()[0]
        for arm, xargs in ARMS.items():
            found = ask(pair, client, question, xargs)
            is_right = found.text == told.answer
            answer = f"{found.text[:10]} {'right' if is_right else 'WRONG'}"
            print(_row(name, arm, answer, [found]), flush=True)
            seen[arm].append(found)
            right[arm] += is_right
            name = ""
    print()
    for arm, each in seen.items():
        print(_row("mean" * (arm == "cut"), arm, f"{right[arm]} of {len(asked)} right", each))


def _row(name: str, arm: str, answer: str, seen: Sequence[Seen]) -> str:
    count = len(seen)
    return _ROW.format(
        name,
        arm,
        answer,
        f"{sum(each.num_bytes for each in seen) / count / 1e6:.1f} MB",
        f"{sum(each.first for each in seen) / count:.1f} s",
        round(sum(each.blocks for each in seen) / count),
    )


def ask(pair: Pair, client: openai.OpenAI, question: Question, xargs: dict[str, Any]) -> Seen:
    """Ask about pages through the router, greedily."""
    count, before = pair.transfers()
    text, first, began = "", 0.0, time.monotonic()
    with Scraper(pair.decode, 0.1) as scraper:
        stream: Any = client.chat.completions.create(
            model=MODEL_NAME,
            messages=question.messages,
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            extra_body={
                "vllm_xargs": xargs,
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        )
        for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    first = first or time.monotonic() - began
                    text += choice.delta.content
    _, after = pair.transfers(count)
    blocks = max(each.kv_usage * (each.pool[0] - 1) for each in scraper.samples if each.pool)
    said = question.example.asked.found(text.strip())
    return Seen(said, after - before, first, round(blocks))


def main() -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description="Compute prompts here, decode them there.")
    parser.add_argument(
        "--questions", type=int, default=NUM_QUESTIONS, help="to ask (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.questions < 1:
        parser.error(f"--questions must be at least 1, got {options.questions}")
    return exit_status(
        "The demonstration", lambda: demonstrate(page_model_folder(), options.questions)
    )


if __name__ == "__main__":
    sys.exit(main())
