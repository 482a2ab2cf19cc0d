# SPDX-License-Identifier: Apache-2.0
"""One run of load: `vllm bench serve`, with the requests of a workload."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.pages import page_message
from loadtests.profile import Pages, Profile, Random
from measure import serving
from measure.arm import Arm
from measure.serving import (
    Server,
    ServingError,
    authorization,
    flags,
    log_errors,
    process_group,
    vllm_executable,
    wait_until_healthy,
)

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
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

    @property
    def label(self) -> str:
        return f"{self.workload} {self.rate:g}/s"


def plan(profile: Profile) -> list[Load]:
    """Return all loads in order; its number determines a load's seed and pages."""
    named = [(name, rate) for name, each in profile.workloads.items() for rate in each.rates]
    return [
        Load(
            name,
            rate,
            profile.workloads[name].requests(rate),
            profile.seed + number,
            number * 10_000,
        )
        for number, (name, rate) in enumerate(named)
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
    arguments = ["bench", "serve", "--backend", "openai-chat"]
    arguments += ["--base-url", server.url, "--endpoint", "/v1/chat/completions"]
    arguments += ["--model", profile.model_path, "--served-model-name", profile.request_model]
    if profile.tokenizer is not None:
        arguments += ["--tokenizer", profile.tokenizer]
    arguments += ["--num-prompts", str(load.requests), "--request-rate", str(load.rate)]
    # A burstiness of 1 is a Poisson process. Greedy, so that arms can be compared.
    arguments += ["--burstiness", "1", "--seed", str(load.seed), "--temperature", "0"]
    arguments += ["--percentile-metrics", ",".join(METRICS)]
    arguments += ["--metric-percentiles", ",".join(map(str, PERCENTILES))]
    if profile.goodput:
        arguments += ["--goodput", *(f"{name}:{value}" for name, value in profile.goodput.items())]
    if arm.extra_body:
        arguments += ["--extra-body", json.dumps(arm.extra_body)]
    arguments += ["--disable-tqdm", "--disable-shuffle", "--save-result", "--save-detailed"]
    arguments += ["--result-dir", str(folder), "--result-filename", "bench.json"]
    if isinstance(workload, Random):
        return arguments + _random_arguments(workload)
    requests = folder / REQUESTS
    with requests.open("w", encoding="utf-8") as file:
        for content in page_requests(workload, load.first_page, load.requests):
            file.write(json.dumps({"content": content}) + "\n")
    arguments += ["--dataset-name", "custom_image", "--dataset-path", str(requests)]
    arguments += ["--enable-multimodal-chat", "--no-oversample"]
    arguments += ["--custom-output-len", str(workload.output_tokens)]
    return arguments if workload.natural_end else [*arguments, "--ignore-eos"]


def _random_arguments(workload: Random) -> list[str]:
    size = workload.image_size
    arguments = ["--dataset-name", "random-mm"]
    arguments += ["--random-input-len", str(workload.input_tokens)]
    arguments += ["--random-output-len", str(workload.output_tokens)]
    arguments += ["--random-range-ratio", str(workload.spread)]
    arguments += ["--random-prefix-len", str(workload.prefix_tokens)]
    arguments += ["--random-mm-base-items-per-request", str(workload.images)]
    limit = {"image": max(1, workload.images), "video": 0}
    arguments += ["--random-mm-limit-mm-per-prompt", json.dumps(limit)]
    return [*arguments, "--random-mm-bucket-config", f"{{({size}, {size}, 1): 1.0}}"]


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
        ServingError: if one is refused; the message has the server's.
    """
    workload = Pages(rates=(1,), seconds=1, output_tokens=8)
    for content in page_requests(workload, WARM_UP_PAGE, profile.warmup_requests):
        body = {
            "model": profile.request_model,
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": workload.output_tokens,
            "temperature": 0,
            **arm.extra_body,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **authorization()},
        )
        try:
            with urllib.request.urlopen(request, timeout=profile.startup_seconds) as response:
                response.read()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")[:2000]
            raise ServingError(f"{server.url} refused a request: {answer}") from None
        except OSError as error:
            raise ServingError(f"{server.url} did not answer a request: {error}") from None
