# SPDX-License-Identifier: Apache-2.0
"""One run of load: `vllm bench serve`, with the requests of a workload."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from loadtests.pages import page_message
from loadtests.profile import Pages, Profile, Random
from measure import serving
from measure.arm import Arm
from measure.serving import (
    Server,
    ServingError,
    flags,
    log_errors,
    process_group,
    vllm_executable,
    wait_until_healthy,
)

REQUESTS = "requests.jsonl"
WARM_UP_PAGE = 900_000
"""First of the pages that only warm-up requests show."""

DETAILS = ("itls", "start_times", "queue_times", "latencies", "generated_texts")
"""Lists in the result of `vllm bench serve` that are dropped."""


@dataclass(frozen=True)
class Load:
    """Requests of one workload at one rate; all arms get the same at the same times."""

    workload: str
    rate: float
    requests: int
    seed: int
    first_page: int
    """This page and those after it are shown by this load alone."""


def plan(profile: Profile) -> list[Load]:
    """Return all loads in order; its number determines a load's seed and pages."""
    named = [(n, each, rate) for n, each in profile.workloads.items() for rate in each.rates]
    return [
        Load(name, rate, max(1, round(rate * each.seconds)), profile.seed + number, number * 10_000)
        for number, (name, each, rate) in enumerate(named)
    ]


def serve_arguments(profile: Profile, arm: Arm) -> list[str]:
    """Return the arguments of `vllm` that serve an arm, without host and port."""
    arguments = ["serve", profile.model_path, "--served-model-name", profile.request_model]
    return arguments + flags({**profile.serve, **arm.server})


@contextmanager
def served(profile: Profile, arm: Arm, log: Path) -> Iterator[Server]:
    """Yield the running server of an arm; stop it afterwards if it was started here.

    Raises:
        ServingError: if it is not healthy within `startup_seconds`.
    """
    if arm.url is not None:
        url = arm.url.rstrip("/")
        wait_until_healthy(url, seconds=profile.startup_seconds)
        yield Server(url)
        return
    with serving.serving(
        serve_arguments(profile, arm),
        log,
        environment=profile.environment,
        start_seconds=profile.startup_seconds,
    ) as server:
        yield server


def run_load(
    profile: Profile, arm: Arm, server: Server, load: Load, folder: Path
) -> dict[str, Any]:
    """Run `vllm bench serve` and return its result, see `read_result`.

    Raises:
        ServingError: if the command fails; failed requests are counted in the result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / "bench.json", folder / "bench.log"
    result.unlink(missing_ok=True)
    command = [vllm_executable(), *bench_arguments(profile, arm, server, load, folder)]
    try:
        with process_group(command, log, profile.environment) as process:
            status = process.wait()
    finally:
        (folder / REQUESTS).unlink(missing_ok=True)
    if status != 0 or not result.exists():
        raise ServingError(f"vllm bench serve ended with status {status}; {log_errors(log)}")
    return read_result(result)


def bench_arguments(
    profile: Profile, arm: Arm, server: Server, load: Load, folder: Path
) -> list[str]:
    """Return the arguments of `vllm` for a load; write the requests of a `pages` workload."""
    workload = profile.workloads[load.workload]
    # A burstiness of 1 is a Poisson process. Greedy, so that arms can be compared.
    fixed = (
        "--backend openai-chat --endpoint /v1/chat/completions --burstiness 1 --temperature 0 "
        "--disable-tqdm --disable-shuffle --save-result --save-detailed "
        "--result-filename bench.json --percentile-metrics ttft,tpot,itl,e2el "
        "--metric-percentiles 50,90,99"
    )
    options: dict[str, Any] = {
        "base-url": server.url,
        "model": profile.model_path,
        "served-model-name": profile.request_model,
        "num-prompts": load.requests,
        "request-rate": load.rate,
        "seed": load.seed,
        "result-dir": folder,
    }
    if profile.tokenizer is not None:
        options["tokenizer"] = profile.tokenizer
    if arm.extra_body:
        options["extra-body"] = dict(arm.extra_body)
    if isinstance(workload, Random):
        size = workload.image_size
        options |= {
            "dataset-name": "random-mm",
            "random-input-len": workload.input_tokens,
            "random-output-len": workload.output_tokens,
            "random-range-ratio": workload.spread,
            "random-prefix-len": workload.prefix_tokens,
            "random-mm-base-items-per-request": workload.images,
            "random-mm-limit-mm-per-prompt": {"image": max(1, workload.images), "video": 0},
            "random-mm-bucket-config": f"{{({size}, {size}, 1): 1.0}}",
        }
    else:
        requests = folder / REQUESTS
        with requests.open("w", encoding="utf-8") as file:
            for content in page_requests(workload, load.first_page, load.requests):
                file.write(json.dumps({"content": content}) + "\n")
        options |= {
            "dataset-name": "custom_image",
            "dataset-path": requests,
            "enable-multimodal-chat": True,
            "no-oversample": True,
            "custom-output-len": workload.output_tokens,
            **({} if workload.natural_end else {"ignore-eos": True}),
        }
    arguments = ["bench", "serve", *fixed.split(), *flags(options)]
    if profile.goodput:
        arguments += ["--goodput", *(f"{name}:{value}" for name, value in profile.goodput.items())]
    return arguments


def page_requests(workload: Pages, first: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the contents of `count` messages: images, then the question."""
    most = max(workload.pages)
    for number in range(count):
        group, asked = divmod(number, workload.questions_per_page)
        start = first + group * most
        pages = list(range(start, start + workload.pages[group % len(workload.pages)]))
        yield page_message(pages, asked, workload.scale)


def read_result(path: Path) -> dict[str, Any]:
    """Return what `vllm bench serve` saved: its figures, and the lists by request used later."""
    result = json.loads(path.read_text(encoding="utf-8"))
    texts = result["generated_texts"]
    result["texts"] = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    result["errors"] = [
        error.strip().splitlines()[-1] if error else "" for error in result["errors"]
    ]
    return {name: value for name, value in result.items() if name not in DETAILS}


def warm_up(profile: Profile, arm: Arm, server: Server) -> None:
    """Send `warmup_requests` requests one after the other.

    Raises:
        ServingError: if one is refused.
    """
    client = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        timeout=profile.startup_seconds,
        max_retries=0,
    )
    create: Any = client.chat.completions.create
    for page in range(WARM_UP_PAGE, WARM_UP_PAGE + profile.warmup_requests):
        try:
            create(
                model=profile.request_model,
                messages=[{"role": "user", "content": page_message([page])}],
                max_completion_tokens=8,
                temperature=0,
                extra_body=dict(arm.extra_body),
            )
        except openai.OpenAIError as error:
            raise ServingError(f"{server.url} refused a request: {error}") from None
