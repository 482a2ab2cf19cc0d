# SPDX-License-Identifier: Apache-2.0
"""Answers of full and evicted caches, and their speed, while more and more requests are in flight.

A server for each arm, with pools of the same size. Clients ask a fixed list of questions, each the
next one as soon as its last is answered, so that equally many are always in flight: at a load of x,
x times as many as stock's pool holds whole, prompt and answer. The servers are alive together and
are asked in turn, load by load, in an order that rotates: drift of the machine reaches all alike.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from evaluation.engine import MODELS, TextWriter
from evaluation.load_results import Point, Reply
from evaluation.parts import Task
from measure.arm import Arm
from measure.samples import drain, scrape
from measure.serving import Server, ServingError, flags, log_errors, serving
from measure.smollm import model_folder
from measure.text_tasks import TRAINING, TextExample, TextQuestion, TextTask
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion, PageTask

LOADS = (0.5, 1.0, 2.0, 4.0, 8.0)
QUESTIONS = 102
"""At each load, a third of each task."""
WARM_UP = 8

EVICTING = {
    "kv-eviction": "reach",
    "kv-eviction-budget": 0.2,
    "kv-eviction-config": {"text_only": "evict"},
}
ARMS = (
    Arm(name="stock"),
    Arm(name="always", server={**EVICTING, "kv-eviction-when": "always"}),
    Arm(name="pressure", server={**EVICTING, "kv-eviction-when": "pressure"}),
)
"""The first is what the others are compared with."""

MODEL_NAME = "smollm2"
FLAGS = {
    "served-model-name": MODEL_NAME,
    "dtype": "float32",
    "max-model-len": 1024,
    "max-num-seqs": 64,  # more than are ever in flight
    "enforce-eager": True,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
BLOCK_SIZE = 32
"""The smallest of stock vLLM on a CPU."""
HELD = 4
"""Whole requests that the pool holds."""
MAX_TOKENS = 48
"""Limit of an answer; a passage has up to 45 tokens."""
ANSWER_SECONDS = 1200.0
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Question:
    """A question as it is sent, and what is right."""

    task: str
    number: int
    messages: list[dict[str, Any]]
    """Of the conversation; the last one is the beginning of the answer."""
    example: TextExample


@dataclass(frozen=True)
class Crowd:
    """Questions of one kind, and the model that is asked."""

    title: str
    tasks: Sequence[Task]
    model: Callable[[], Path]
    """Returns the model's folder, written on the first call."""
    writer: Callable[[Path], Callable[[Any, int], Question]]
    """Returns what writes the question of a task and a number, for a model's folder."""
    seconds: float
    """Time for an answer on two cores, about, measured once."""

    @property
    def pool_blocks(self) -> int:
        """Return the blocks of a pool for `HELD` whole requests; one is never given out."""
        longest = max(task.tokens for task in self.tasks) + MAX_TOKENS
        return HELD * -(-longest // BLOCK_SIZE) + 1

    def questions(self, count: int, first: int = 0) -> list[Question]:
        """Return questions of all tasks in turn, of each from the number `first` on."""
        write, kinds = self.writer(self.model()), len(self.tasks)
        return [write(self.tasks[n % kinds], first + n // kinds) for n in range(count)]

    def serve_arguments(self, arm: Arm) -> list[str]:
        """Return the arguments of `vllm` that serve an arm, without host and port."""
        pool = {"block-size": BLOCK_SIZE, "num-gpu-blocks-override": self.pool_blocks}
        model = os.path.relpath(self.model())
        return ["serve", model, *flags({**FLAGS, **pool, **arm.server})]


def in_flight(load: float) -> int:
    """Return the number of requests in flight at a load."""
    return max(1, round(load * HELD))


def _text_writer(folder: Path) -> Callable[[TextTask, int], Question]:
    from transformers import AutoTokenizer

    text = TextWriter(AutoTokenizer.from_pretrained(folder))

    def write(task: TextTask, number: int) -> Question:
        example = text(TextQuestion(task, number))
        roles = {"user": example.message, "assistant": example.start}
        messages = [{"role": role, "content": content} for role, content in roles.items()]
        return Question(task.name, number, messages, example)

    return write


def _page_writer(folder: Path) -> Callable[[PageTask, int], Question]:
    vocabulary = load_vocabulary(folder)

    def write(task: PageTask, number: int) -> Question:
        example = PageQuestion(task, number).example(vocabulary)
        return Question(task.name, number, example.chat(), example.asked)

    return write


_TOKENS, _SIDE = 584, 23
"""Tokens of a text's prompt, and the side of a page with as many, about. A budget of 20 % is three
blocks of such a prompt and its last, partly filled one."""

CROWDS = {
    "text": Crowd(
        "Texts",
        (
            TextTask("number", "prose", _TOKENS, 4),
            TextTask("passage", "noise", _TOKENS),
            TextTask("numbers", "noise", _TOKENS, 3),
        ),
        lambda: model_folder(MODELS),
        _text_writer,
        seconds=1.3,
    ),
    "pages": Crowd(
        "Pages",
        (
            PageTask("number", "prose", keys=4, side=_SIDE),
            PageTask("passage", "noise", side=_SIDE),
            PageTask("numbers", "noise", keys=3, side=_SIDE),
        ),
        lambda: page_model_folder(MODELS, side=_SIDE),
        _page_writer,
        seconds=1.7,
    ),
}
"""By the name on the command line: an answer from one place, a long one, and one from three places.
Prompts are short, so that a run of one kind takes less than an hour on two cores."""


# -- asking ---------------------------------------------------------------------------------


async def ask_all(url: str, questions: Sequence[Question], at_once: int) -> list[Reply]:
    """Return a server's replies in the order of the questions, `at_once` of them in flight.

    Raises:
        openai.OpenAIError: in a group, if a question is not answered.
    """
    left, replies = iter(enumerate(questions)), dict[int, Reply]()
    base = f"{url}/v1"
    async with openai.AsyncOpenAI(
        base_url=base, api_key="none", timeout=ANSWER_SECONDS, max_retries=0
    ) as server:
        began = time.monotonic()

        async def client() -> None:
            for place, question in left:
                replies[place] = await ask(server, question, began)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(client())
    return [replies[place] for place in range(len(questions))]


async def ask(server: openai.AsyncOpenAI, question: Question, began: float) -> Reply:
    """Return the reply to a question, with times since `began`.

    Raises:
        openai.OpenAIError: if it is not answered.
    """
    asked, first, text, pieces, ended, usage = time.monotonic(), None, "", 0, False, None
    create: Any = server.chat.completions.create
    async with await create(
        model=MODEL_NAME,
        messages=question.messages,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    ) as stream:
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if first is None and (choice.delta.content or choice.finish_reason):
                    first = time.monotonic()
                text += choice.delta.content or ""
                pieces += bool(choice.delta.content)
                ended = ended or choice.finish_reason == "stop"
    assert usage is not None
    assert first is not None
    return Reply(
        task=question.task,
        number=question.number,
        text=text,
        is_right=question.example.hits(text, ())[-1] == "1",
        prompt_tokens=usage.prompt_tokens,
        tokens=usage.completion_tokens,
        ended=ended,
        asked=asked - began,
        first=first - began,
        last=time.monotonic() - began,
        pieces=pieces,
    )


def measure(server: Server, arm: Arm, load: float, questions: Sequence[Question]) -> Point:
    """Ask an arm all questions at a load.

    Raises:
        ServingError: if a question is not answered, with the errors of the server's log.
    """
    before, cpu_before = scrape(server), server.cpu_seconds()
    try:
        replies = asyncio.run(ask_all(server.url, questions, in_flight(load)))
    except* openai.OpenAIError as group:
        said = log_errors(server.log) if server.log else "it has no log"
        raise ServingError(f"{arm.key} at load {load:g}: {group.exceptions[0]}; {said}") from group
    cpu_after, (_, after) = server.cpu_seconds(), drain(server, DRAIN_SECONDS)
    counts = {name: n - before.eviction.get(name, 0.0) for name, n in after.eviction.items()}
    return Point(
        arm=arm.key,
        load=load,
        in_flight=in_flight(load),
        cpu_seconds=(cpu_after or 0.0) - (cpu_before or 0.0),
        preemptions=after.preemptions - before.preemptions,
        counts=counts,
        replies=replies,
    )


def points(
    crowd: Crowd, arms: Sequence[Arm], loads: Sequence[float], count: int, logs: Path
) -> Iterator[Point]:
    """Yield the points of all arms, load by load.

    Raises:
        ServingError: if a server does not start, or does not answer a question.
    """
    logs.mkdir(parents=True, exist_ok=True)
    questions, warm_up = crowd.questions(count), crowd.questions(WARM_UP, TRAINING)
    with ExitStack() as stack:
        servers = []
        for arm in arms:
            log = logs / f"{arm.key}.log"
            server = serving(crowd.serve_arguments(arm), log, environment=ENVIRONMENT)
            servers.append(stack.enter_context(server))
            measure(servers[-1], arm, 1.0, warm_up)
        for number, load in enumerate(loads):
            for place in range(len(arms)):
                turn = (number + place) % len(arms)
                yield measure(servers[turn], arms[turn], load, questions)
