# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.cost`: what an answer takes of processor and memory, by block size.

Asks questions that are long to read with the full cache and with the recommended method, once to
fill the prefix cache and then again while the processor's time is taken, so that the prompt's own
computation is not in it. CPU time counts the threads of this process and nothing that runs beside
it; what others take of caches and memory bandwidth still makes it longer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

from evaluation.answers import Answer
from evaluation.fingerprint import ROOT
from evaluation.text_arms import DEFAULT, FULL, PASSAGES, WAIT, TextArm, number
from evaluation.text_engine import BYTES_PER_TOKEN, TextEngine, TextSettings
from evaluation.text_memory import mean_held, planned_cuts
from measure.document import Block, Items, Table, Text, percent, write_markdown
from measure.facts import machine, revision
from measure.text_tasks import FRESH, TextQuestion, TextTask

OUTPUT = ROOT / "docs" / "evaluation" / "cost"
OURS = TextArm(DEFAULT, 0.2, (("defer", WAIT),))
TASKS: tuple[TextTask, ...] = (PASSAGES[0], number("noise", 4096))
ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """Time and memory of the answers to a task, at one block size."""

    task: str
    block_size: int
    arm: str
    questions: int
    """That the full cache answers right."""
    right: int
    cpu_seconds: list[float]
    """Of all answers of a round."""
    held_after: float
    """Share of the prompt's blocks after the eviction."""
    held: float
    """Blocks held while decoding, as a share of the full cache's; mean over the answers."""
    full_mib: float
    """Of a request with the full cache while it decodes, mean over the answers."""

    @property
    def per_second(self) -> float:
        """Answers per second of CPU time."""
        return self.questions / median(self.cpu_seconds)

    @property
    def per_gib(self) -> float:
        """Requests that a GiB of cache holds while they decode, on average."""
        return 1024 / (self.full_mib * self.held)


def measured(engine: TextEngine, task: TextTask, questions: int, block_size: int) -> Iterator[Cost]:
    """Yield the costs of the full cache and of the recommended method."""
    asked = [TextQuestion(task, FRESH + index) for index in range(questions)]
    whole = {a.number: a for a in engine.answers([(q, FULL) for q in asked])}
    asked = [q for q in asked if whole[q.number].is_exact]
    answers: dict[TextArm, list[Answer]] = {}
    seconds: dict[TextArm, list[float]] = {FULL: [], OURS: []}
    list(engine.answers([(q, OURS) for q in asked]))  # the first of a kind sets up
    for _ in range(ROUNDS):
        for arm in seconds:
            began = time.process_time()
            answers[arm] = list(engine.answers([(q, arm) for q in asked]))
            seconds[arm].append(time.process_time() - began)
    for arm, found in answers.items():
        held = 1.0
        if arm != FULL:
            held = mean(_held(answer, block_size) for answer in found)
        full = mean(a.prompt_tokens + a.right_tokens / 2 for a in found) * BYTES_PER_TOKEN
        yield Cost(
            task.name,
            block_size,
            arm.key,
            len(found),
            sum(a.is_exact for a in found),
            [round(s, 3) for s in seconds[arm]],
            mean(a.blocks_held for a in found),
            held,
            full / 2**20,
        )


def _held(answer: Answer, block_size: int) -> float:
    cuts = planned_cuts(answer.prompt_tokens, OURS.steps, block_size)
    return mean_held(answer.prompt_tokens, answer.right_tokens, cuts, block_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write figures and page, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.cost", description=__doc__)
    parser.add_argument("--questions", type=int, default=12, help="of the first task; half of 4096")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report", action="store_true", help="only write the page again")
    options = parser.parse_args(arguments)
    file = options.output / "results.json"
    if options.report:
        facts = json.loads(file.read_text(encoding="utf-8"))
        costs = [Cost(**cost) for cost in facts["costs"]]
        write_markdown(list(page(costs, facts)), options.output)
        return 0
    costs = []
    for size in options.block_sizes:
        engine = TextEngine(replace(TextSettings(), block_size=size), [FULL, OURS])
        try:
            for task in TASKS:
                part = options.questions // (2 if task.tokens > 2048 else 1)
                costs += measured(engine, task, part, size)
        finally:
            engine.close()
        facts = {
            "day": date.today().isoformat(),
            "revision": revision(),
            "machine": machine(),
            "costs": [asdict(cost) for cost in costs],
        }
        options.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        write_markdown(list(page(costs, facts)), options.output)
    print(f"Written: {options.output / 'README.md'}")
    return 0


def page(costs: Sequence[Cost], facts: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the blocks of the page."""
    yield Text(
        "# What an answer takes\n\nSmolLM2-135M-Instruct in float32 on a CPU, questions that the "
        f"full cache answers right: the full cache against `{OURS.key}`, at some block "
        "sizes. The prompts come from the prefix cache, so the time is that of the answers. "
        "Made by\n\n    python -m evaluation.cost"
    )
    rows = [
        [
            cost.task,
            str(cost.block_size),
            "full cache" if cost.arm == FULL.key else f"`{cost.arm}`",
            f"{cost.right} of {cost.questions}",
            percent(cost.held_after),
            percent(cost.held),
            f"{cost.per_second:.2f} [{cost.questions / max(cost.cpu_seconds):.2f}, "
            f"{cost.questions / min(cost.cpu_seconds):.2f}]",
            f"{cost.per_gib:.1f}",
        ]
        for cost in costs
    ]
    yield Table(
        [
            "task",
            "block",
            "arm",
            "right",
            "held after",
            "held while decoding",
            "answers per second of CPU time",
            "requests per GiB",
        ],
        rows,
    )
    load = " to ".join(f"{value:.0f}" for value in sorted(facts["machine"]["load_average"])[::2])
    yield Items(
        [
            f"CPU time is that of all threads of the process: the median of {ROUNDS} rounds, and "
            f"their range. The machine had other work (load average {load} on two cores), which "
            "makes CPU time longer too.",
            "*Held while decoding* is the mean over the steps of the right answer, with the wait. "
            "*Requests per GiB* are those that a GiB of cache holds while they decode.",
            "Each block size has an engine of its own, which ran at another load: compare times "
            "within a block size. An eviction takes time once, so that answers of eight tokens are "
            "slower with it, and those of 40 are not.",
            f"On {facts['day']}, revision `{facts['revision']}`.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
