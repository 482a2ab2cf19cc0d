# SPDX-License-Identifier: Apache-2.0
"""`python -m loadtests.soak --minutes 30`: mixed traffic whose every answer is checked.

Serves a small model with random weights and a small pool, and asks a fixed list of requests one by
one. Then the same requests arrive at random, all kinds mixed, and each must be answered as it was
alone. Meanwhile memory, blocks and latency are watched. `vllm bench serve`, which drives the other
load tests, does not compare answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
from tqdm import tqdm

from loadtests.mix import MIXES, Case, make_cases, make_pressed_cases
from loadtests.model import model_folder
from loadtests.run import ROOT, add_arguments, facts
from loadtests.soak_report import write_report
from loadtests.verdict import (
    ANSWERED,
    FAILED,
    FILE,
    LEFT,
    Moment,
    Soak,
    SoakedArm,
    Token,
    Visit,
    compare,
    failures,
    undecided,
)
from measure.engines import MACHINE
from measure.samples import Scraper, drain, scrape
from measure.serving import Server, ServingError, log_errors, serving

OUTPUT = ROOT / "build" / "soak"
SERVED = "random"
"""Name of the served model."""

# Rounding differs between batches. In float32 it hardly ever changes a greedy token.
SERVE = [
    *("--served-model-name", SERVED, "--dtype", "float32"),
    *("--block-size", "32", "--max-model-len", "1536"),
    # Prompts are split into chunks, and several prefill at once.
    *("--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256"),
    *("--max-num-seqs", "16", "--enforce-eager", "--mm-processor-cache-gb", "0.1"),
]
EVICTING = ["--kv-eviction", "reach", "--kv-eviction-when", "always", "--kv-eviction-budget", "0.1"]
EVICTING += ["--kv-eviction-config", json.dumps({"methods": MIXES})]
# Text as well, so that every request of the traffic may shrink.
PRESSED_CONFIG = {"text_only": "evict", "debug": {"check_integrity": True}}
PRESSED = ["--kv-eviction", "reach", "--kv-eviction-when", "pressure"]
PRESSED += ["--kv-eviction-budget", "0.1", "--kv-eviction-config", json.dumps(PRESSED_CONFIG)]
STOCK_ARM, EVICTING_ARM, PRESSED_ARM = "stock", "evicting", "pressure"
WAVES = (0.2, 1.0, 3.0, 0.2, 2.0)
"""Factors of the rate under pressure, one after the other."""
ROUNDS = 6
"""Times that the waves come. Thirds of the time are compared, so each has as many."""
POOL_BLOCKS = {
    # Room for four whole prompts: requests wait, and some are preempted.
    EVICTING_ARM: 80,
    PRESSED_ARM: 120,
    # Room for all requests in flight: stock vLLM 0.32 ends when it preempts a request with an image
    # that began with a prefix-cache hit (docs/compatibility.md), within half a minute here.
    STOCK_ARM: 640,
}

ENVIRONMENT = {
    **MACHINE,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # oneDNN keeps what it compiled for the last 1024 shapes of a matrix product, some 200 MiB, and
    # a batch's number of tokens is one. It takes hours to fill and would hide what really leaks.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
SEED = 0
"""Of order and arrival times."""
IN_FLIGHT = 12
"""Most requests at a time."""
STREAMED = 0.5
LEAVING = 0.1
"""Share of clients that leave before their answer is complete."""
ANSWER_SECONDS = 300.0
DRAIN_SECONDS = 30.0
SCRAPE_SECONDS = 2.0
LOG_ERROR = re.compile(r"\bERROR\b|\bCRITICAL\b|Traceback|Integrity")


@dataclass(frozen=True)
class Plan:
    """How one request of the traffic is sent."""

    case: int
    is_streamed: bool
    leaves_after: float | None = None
    """Tokens of a stream, or seconds without stream, after which the client leaves."""


def plans(num_cases: int, seed: int) -> Iterator[Plan]:
    """Yield all cases in random order, again and again, so that the mix stays constant."""
    rng = random.Random(seed)
    while True:
        for case in rng.sample(range(num_cases), num_cases):
            is_streamed = rng.random() < STREAMED
            leaves = rng.random() < LEAVING
            # Tokens heard, or seconds: a client may also leave before the first token.
            after = float(rng.randint(0, 30)) if is_streamed else rng.uniform(0, 2)
            yield Plan(case, is_streamed, after if leaves else None)


class Client:
    """A client of one server."""

    def __init__(self, url: str, cases: Sequence[Case], arm: str) -> None:
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0
        )
        self._bodies = [case.body(evicting=arm != STOCK_ARM) for case in cases]
        self.close = self._openai.close

    async def ask(self, plan: Plan, heard: list[Token], report: dict[str, Any]) -> bool:
        """Add the tokens of the answer to `heard`; return whether it is complete.

        Its report of eviction, if it has one, is added to `report`.

        Raises:
            openai.OpenAIError, httpx.HTTPError: if there is no answer, or a stream breaks off.
        """
        create: Any = self._openai.chat.completions.create
        body = self._bodies[plan.case]
        if not plan.is_streamed:
            answer = await create(model=SERVED, **body)
            heard.extend(_tokens(answer.choices[0]))
            report |= (getattr(answer, "kv_transfer_params", None) or {}).get("kv_eviction", {})
            return True
        async with await create(model=SERVED, **body, stream=True) as stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    heard.extend(_tokens(choice))
                if plan.leaves_after is not None and len(heard) >= plan.leaves_after:
                    return False
            return True

    async def all_alone(self) -> list[list[Token]]:
        """Ask all cases one after the other and return the answers."""
        answers: list[list[Token]] = [[] for _ in self._bodies]
        for case, answer in enumerate(answers):
            await self.ask(Plan(case, is_streamed=False), answer, {})
        return answers


def _tokens(choice: Any) -> list[Token]:
    if choice.logprobs is None or choice.logprobs.content is None:
        return []
    return [
        Token(part.token, part.logprob, {rival.token: rival.logprob for rival in part.top_logprobs})
        for part in choice.logprobs.content
    ]


class Traffic:
    """Requests that arrive as a Poisson process, with a limit on those in flight."""

    def __init__(
        self,
        client: Client,
        expected: Sequence[Sequence[Token]],
        is_alive: Callable[[], bool],
        rate: float,
        changes: bool = False,
    ) -> None:
        """Make the traffic.

        With `changes` its rate does, and all answers come whole: streams have no reports.
        """
        self.visits: list[Visit] = []
        self._client = client
        self._is_alive = is_alive
        self._expected = expected
        self._rate = rate
        self._changes = changes
        self._begin = 0.0

    async def run(self, seconds: float, bar: tqdm) -> None:
        """Send requests for `seconds`, or until the server ends, and wait for the last answer."""
        rng, places = random.Random(SEED + 1), asyncio.Semaphore(IN_FLIGHT)
        self._begin = time.monotonic()
        arrival = self._begin
        tasks: list[asyncio.Task[None]] = []
        for plan in plans(len(self._expected), SEED):
            # If all places are taken, this and all later requests wait.
            now = time.monotonic()
            arrival = max(
                arrival + rng.expovariate(self.rate_at((now - self._begin) / seconds)), now
            )
            if arrival - self._begin > seconds or not self._is_alive():
                break
            await asyncio.sleep(arrival - now)
            await places.acquire()
            if self._changes:
                plan = replace(plan, is_streamed=False, leaves_after=None)
            task = asyncio.create_task(self._visit(plan, bar))
            tasks.append(task)
            task.add_done_callback(lambda _: places.release())
        await asyncio.gather(*tasks)

    def rate_at(self, share: float) -> float:
        """Return the requests a second once a share of the time is over."""
        wave = int(share * ROUNDS * len(WAVES)) % len(WAVES)
        return self._rate * (WAVES[wave] if self._changes else 1)

    async def _visit(self, plan: Plan, bar: tqdm) -> None:
        heard: list[Token] = []
        report: dict[str, Any] = {}
        begin, ended, error = time.monotonic(), LEFT, ""
        patience = None if plan.is_streamed else plan.leaves_after
        try:
            # The limit of the HTTP client is for a part of a stream, not for all of it.
            async with asyncio.timeout(ANSWER_SECONDS if patience is None else patience):
                if await self._client.ask(plan, heard, report):
                    ended = ANSWERED
        except TimeoutError:
            if patience is None:
                ended, error = FAILED, f"no answer in {ANSWER_SECONDS:g} s"
        except (openai.OpenAIError, httpx.HTTPError) as raised:
            ended, error = FAILED, f"{type(raised).__name__}: {raised}"[:300]
        comparison = None
        cuts = report.get("cuts", ()) if self._changes else ()
        state = cuts[-1]["cause"] if cuts else ""
        if ended != FAILED and not cuts:
            comparison = compare(self._expected[plan.case], heard, whole=ended == ANSWERED)
        since, seconds = round(begin - self._begin, 2), round(time.monotonic() - begin, 3)
        its = (since, seconds, ended, plan.is_streamed, len(heard), comparison, error, state)
        self.visits.append(Visit(plan.case, *its))
        bar.update()


async def soak_arm(
    server: Server, name: str, cases: Sequence[Case], rate: float, arm: SoakedArm
) -> None:
    """Ask each case alone, then mixed traffic, then each alone again; fill the record.

    Raises:
        openai.OpenAIError: if a request that is alone fails.
        OSError: if the server has ended.
    """
    client = Client(server.url, cases, name)
    expected = await client.all_alone()
    traffic = Traffic(client, expected, server.is_alive, rate, name == PRESSED_ARM)
    arm.visits = traffic.visits  # what there is if the rest fails
    begin = time.monotonic()
    try:
        with tqdm(desc=name, unit=" requests") as bar, Scraper(server, SCRAPE_SECONDS) as scraper:
            await traffic.run(arm.seconds, bar)
    finally:
        arm.moments = [Moment.of(sample, begin) for sample in scraper.samples]
    # In a thread: meanwhile the event loop closes connections of clients that left.
    await asyncio.to_thread(drain, server, DRAIN_SECONDS)
    again = await client.all_alone()
    arm.afterwards = [
        compare(right, answer, whole=True) for right, answer in zip(expected, again, strict=True)
    ]
    _, last = await asyncio.to_thread(drain, server, DRAIN_SECONDS)
    arm.left, arm.eviction = last.left, last.eviction
    await client.close()


def errors_in(log: Path) -> list[str]:
    """Return the lines that report an error."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if LOG_ERROR.search(line)]


def run(options: Any, soak: Soak, cases: Sequence[Case]) -> None:
    """Soak our server, then a stock one with `--stock`, and fill the record.

    The record is written in any case, with what there is.

    Raises:
        ServingError: if a server does not start, or ends, or refuses a request that is alone.
    """
    arms = {EVICTING_ARM: [*SERVE, *EVICTING], **({STOCK_ARM: SERVE} if options.stock else {})}
    if options.pressure:
        arms = {PRESSED_ARM: [*SERVE, *PRESSED]}
    for name, arguments in arms.items():
        pool = ["--num-gpu-blocks-override", str(POOL_BLOCKS[name])]
        log = OUTPUT / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with serving(
            ["serve", os.path.relpath(model_folder()), *arguments, *pool],
            log,
            environment=ENVIRONMENT,
        ) as server:
            arm = SoakedArm(server.command or "", scrape(server).pool, 60 * options.minutes)
            soak.arms[name] = arm
            try:
                asyncio.run(soak_arm(server, name, cases, options.rate, arm))
            except (openai.OpenAIError, OSError) as error:
                what = "did not answer a request alone" if server.is_alive() else "ended"
                raise ServingError(
                    f"the {name} server {what}: {error}; {log_errors(log)}"
                ) from error
            finally:
                soak.write(options.output)
            arm.log_errors = errors_in(log)
            soak.write(options.output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    if options.report_only is not None:
        soak = Soak.read(options.report_only)
        options.output = options.report_only
    else:
        cases = make_pressed_cases() if options.pressure else make_cases()
        about = facts("loadtests.soak", given, options.note)
        about["machine_load_before"] = round(os.getloadavg()[0], 2)
        about |= {"rate": options.rate, "in_flight": IN_FLIGHT}
        soak = Soak(about, [case.kind for case in cases])
        soak.control = STOCK_ARM if options.stock else None
        try:
            run(options, soak, cases)
        except (ServingError, OSError, KeyboardInterrupt) as error:
            is_stopped = isinstance(error, KeyboardInterrupt)
            said = "was interrupted" if is_stopped else f"failed: {error}"
            print(f"\nThe soak {said}", file=sys.stderr)
            if soak.arms:
                print(f"--report-only {options.output} reports what there is.", file=sys.stderr)
            return 130 if is_stopped else 1
    write_report(soak, options.output)
    print(f"Written: {options.output / 'README.md'} and {options.output / FILE}")
    for failure in failures(soak):
        print(f"FAILED: {failure}", file=sys.stderr)
    for question in undecided(soak):
        print(f"Undecided: {question}", file=sys.stderr)
    return 1 if failures(soak) else 0


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak", description=__doc__)
    parser.add_argument("--minutes", type=_positive, default=30, help="of traffic (default: 30)")
    parser.add_argument(
        "--stock", action="store_true", help="then a stock server for as long: the control"
    )
    parser.add_argument(
        "--pressure",
        action="store_true",
        help="in place of all this: requests evicted when memory is short, at a changing rate",
    )
    parser.add_argument("--rate", type=_positive, default=2, help="requests a second (default: 2)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the report")
    add_arguments(parser, parser)
    return parser.parse_args(given)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
