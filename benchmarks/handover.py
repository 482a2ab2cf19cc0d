# SPDX-License-Identifier: Apache-2.0
"""Part `handover`: prompts that one server computes and another one decodes, against stock's.

Real processes: for each arm two `vllm serve` and vLLM's router, which are asked about pages. NIXL
keeps a core busy in each server even if nothing is asked, so that the arms that are not asked are
stopped by a signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai

from benchmarks.bench import Bench
from benchmarks.measurement import Better, Line, Target
from benchmarks.remote import RemoteError, TimeUpError
from benchmarks.scale import BUDGET
from evaluation.load import MODEL_NAME, Question, ask_all
from evaluation.load_results import Reply
from measure.engines import MACHINE
from measure.pairs import COMPUTE, CONNECTOR, Pair, served_apart
from measure.samples import Scraper
from measure.serving import ServingError, flags, log_errors
from measure.smollm import WeightsMissingError
from measure.text_tasks import TRAINING
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion, PageTask

EVICTING = {"kv-eviction": "reach", "kv-eviction-budget": BUDGET}
ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "whole": {**EVICTING, "kv-eviction-config": {"when": "pressure", "handover": "whole"}},
    "ours": {**EVICTING, "kv-eviction-config": {"when": "pressure", "handover": "cut"}},
}
"""Flags of both servers by arm. Memory is short in the burst alone."""

BLOCK_SIZE = 32
"""The smallest of stock vLLM on a CPU."""
BURST_TOKENS = 48
"""Of an answer in the burst."""
PROMPT_TOKENS = 1152
"""Most of a prompt of one page."""
POOL = 4 * -(-(PROMPT_TOKENS + BURST_TOKENS) // BLOCK_SIZE) + 1
"""Blocks of a decode server: four prompts of a page with their answers. One is never given out."""
SECONDS = 600.0
_PRESSURE = ", under pressure"
"""Of lines that compare two settings for prompts that only a lack of memory cuts."""


class Visit(NamedTuple):
    """A question that was answered through a router."""

    reply: Reply
    num_bytes: int
    """Bytes that the decode server has read for it, by NIXL's metric."""


def handover(bench: Bench) -> Iterator[Line]:
    """Measure lines n: bytes, times and answers of single prompts, then many at once.

    Two arms are alive at a time, so that their memory suffices: stock and ours, then whole and
    ours.
    """
    scale, logs = bench.scale.handover, Path(bench.root, "handover")
    logs.mkdir()
    try:
        folder = page_model_folder()
        vocabulary = load_vocabulary(folder)

        def questions(pages: int, first: int, count: int) -> list[Question]:
            task = PageTask("passage", "noise", pages)
            numbers = range(first, first + count)
            examples = [(n, PageQuestion(task, n).example(vocabulary)) for n in numbers]
            return [Question(task.name, n, e.chat(), e.asked) for n, e in examples]

        @contextmanager
        def served(arm: str) -> Iterator[Pair]:
            bench.say(f"n. starts two servers and a router, {arm}")
            with _stopped(_arguments(folder, ARMS[arm]), logs / arm) as pair:
                with _running(pair):
                    asyncio.run(ask_all(pair.router.url, questions(1, TRAINING, 1), 1))
                yield pair

        with ExitStack() as stack:
            ours, peaks = stack.enter_context(served("ours")), dict[str, list[float]]()
            # No question twice: its prompt would be in the prefix cache.
            crowd, first = questions(1, 5000, scale.burst_requests), 0
            for rival in ("stock", "whole"):
                with served(rival) as other:
                    pairs = {rival: other, "ours": ours}
                    for name in pairs.keys() - peaks.keys():
                        bench.say(f"n. {scale.burst_requests} requests at once, {name}")
                        with _running(pairs[name]):
                            peaks[name] = [asyncio.run(_burst(pairs[name], crowd))]
                    yield _peak({name: peaks[name] for name in pairs}, rival, len(crowd))
                    for pages, rounds in scale.prompts if rival == "stock" else scale.prompts[:1]:
                        asked = questions(pages, first, rounds)
                        yield from _lines(_visits(bench, pairs, asked), rival, pages)
                first += 1000
    except (
        *(ServingError, WeightsMissingError),
        *(openai.OpenAIError, httpx.HTTPError, ExceptionGroup),
    ) as error:
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        said = "; ".join(log_errors(log) for log in logs.glob("*/*.log"))
        raise RemoteError(f"{type(cause).__name__}: {cause}; {said}") from error


def _arguments(folder: Path, arm: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the arguments of an arm's servers; the decode server has a small pool."""
    same = {
        "served-model-name": MODEL_NAME,
        "dtype": "float32",
        "max-model-len": 4608,
        "block-size": BLOCK_SIZE,
        "max-num-seqs": 32,
        "enforce-eager": True,
        "mm-processor-cache-gb": 0.25,  # no image comes twice, and four servers share the memory
        **arm,
    }
    pools = {"prefill": 6 * POOL, "decode": POOL}
    return {
        name: ["serve", str(folder), *flags({**same, "num-gpu-blocks-override": pool})]
        for name, pool in pools.items()
    }


@contextmanager
def _stopped(arguments: Mapping[str, Sequence[str]], logs: Path) -> Iterator[Pair]:
    """Serve an arm; stop its processes by a signal until they are asked."""
    logs.mkdir()
    # Blocks of a burst wait until all its prompts are computed.
    waiting = {**CONNECTOR, "kv_connector_extra_config": {"kv_lease_duration": int(SECONDS)}}
    environment = {**MACHINE, "VLLM_PLUGINS": "tgvkv"}
    with served_apart(arguments, logs, environment, waiting, SECONDS) as pair:
        _signal(pair, signal.SIGSTOP)
        try:
            yield pair
        finally:
            _signal(pair, signal.SIGCONT)


@contextmanager
def _running(pair: Pair) -> Iterator[None]:
    _signal(pair, signal.SIGCONT)
    yield
    _signal(pair, signal.SIGSTOP)


def _signal(pair: Pair, number: signal.Signals) -> None:
    for server in (pair.prefill, pair.decode, pair.router):
        if server.process is not None and server.is_alive():
            os.killpg(server.process.pid, number)


def _visits(
    bench: Bench, pairs: Mapping[str, Pair], questions: Sequence[Question]
) -> dict[str, list[Visit]]:
    """Ask each arm each question, in an order that rotates."""
    names, found = list(pairs), defaultdict(list)
    for number, question in enumerate(questions):
        bench.say(f"n. {question.task}, {number + 1} of {len(questions)}")
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with _running(pairs[name]):
                found[name].append(_visit(bench, pairs[name], question))
    return found


def _visit(bench: Bench, pair: Pair, question: Question) -> Visit:
    """Ask a question through the router."""
    if time.monotonic() >= bench.deadline:
        raise TimeUpError
    count, before = pair.transfers()
    (reply,) = asyncio.run(ask_all(pair.router.url, [question], 1))
    return Visit(reply, pair.transfers(count)[1] - before)


def _lines(found: Mapping[str, Sequence[Visit]], rival: str, pages: int) -> Iterator[Line]:
    """Return the lines of prompts of a length."""
    lengths = [visit.reply.prompt_tokens for visit in found["ours"]]
    what = f"{statistics.median(lengths):.0f} tokens{_PRESSURE * (rival == 'whole')}"

    def line(measure: str, unit: str, values: Mapping[str, list[float]], better: Better) -> Line:
        return Line(f"n. {measure}, {what}", unit, better, dict(values), against=(rival,))

    def each(figure: Callable[[Visit], float]) -> dict[str, list[float]]:
        return {name: [figure(visit) for visit in visits] for name, visits in found.items()}

    sizes = line("bytes read", "MB", each(lambda visit: visit.num_bytes / 1e6), "lower")
    share = sizes.median("ours") / sizes.median(rival)
    sizes.notes = f"{share:.4f} of {rival}"
    first = each(lambda visit: visit.reply.first - visit.reply.asked)
    firsts = line("time to first token", "s", first, "lower")
    if rival == "stock":
        firsts.require(1.0)
        if pages > 1:
            sizes.targets.append(Target("<= 0.12 of stock", share, 0.12, "lower"))
    yield from (sizes, firsts)
    if pages == 1:
        tails = {name: [float(np.quantile(values, 0.95))] for name, values in first.items()}
        yield line("time to first token, 95th percentile", "s", tails, "lower")
    gaps = each(lambda visit: 1e3 * _gap(visit.reply))
    yield line("between pieces of an answer", "ms", gaps, "lower")
    whole = each(lambda visit: visit.reply.last - visit.reply.asked)
    yield line("whole request", "s", whole, "lower")
    right = {name: [sum(values)] for name, values in each(lambda v: v.reply.is_right).items()}
    answers = line(f"right of {len(lengths)}", "answers", right, "higher")
    answers.against = ()  # no ratio to none
    yield answers


def _peak(peaks: dict[str, list[float]], rival: str, requests: int) -> Line:
    what = f"{requests} requests of a page{_PRESSURE * (rival == 'whole')}"
    line = Line(
        f"n. peak running, pool of 4: {what}", "requests", "higher", peaks, against=(rival,)
    )
    if rival == "stock":
        line.targets.append(Target(">= 20 at once", line.median("ours"), 20))
    return line


def _gap(reply: Reply) -> float:
    """Return the mean seconds between the pieces of an answer.

    The first piece of a prompt that was cut has all tokens for which the cut has waited.
    """
    return (reply.last - reply.first) / max(reply.pieces - 1, 1)


async def _burst(pair: Pair, questions: Sequence[Question]) -> float:
    """Return how many of the questions the decode server answers at once.

    It gets all of them together once their prompts are computed: how fast they are computed does
    not count.
    """
    body = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "max_tokens": BURST_TOKENS}
    async with httpx.AsyncClient(timeout=SECONDS) as client:

        async def post(url: str, **more: Any) -> dict[str, Any]:
            answer = await client.post(f"{url}/v1/chat/completions", json={**body, **more})
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        parameters = []
        for question in questions:
            asked = {"messages": question.messages, "max_tokens": 1, "kv_transfer_params": COMPUTE}
            computed = await post(pair.prefill.url, **asked)
            parameters.append(computed["kv_transfer_params"])
        with Scraper(pair.decode, 0.2) as scraper:
            async with asyncio.TaskGroup() as group:
                for question, given in zip(questions, parameters, strict=True):
                    more = {"messages": question.messages, "kv_transfer_params": given}
                    group.create_task(post(pair.decode.url, **more))
    return max(sample.running for sample in scraper.samples)
