# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.text`: what methods keep of a text that a real language model reads.

Asks SmolLM2-135M questions about long texts through the vLLM engine, with the full cache and with
every arm, and writes tables and pictures. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

from tqdm import tqdm

from evaluation import text_results
from evaluation.answers import AnswerLog
from evaluation.fingerprint import ROOT
from evaluation.text_arms import FULL, PARTS, Part, TextArm, check, eviction_settings
from evaluation.text_engine import PACKAGES, TextEngine, TextSettings, Work
from evaluation.text_report import write_report
from evaluation.text_tasks import TRAINING, TextQuestion, TextTask
from measure.facts import command_line, machine, revision, versions
from measure.smollm import WeightsMissingError, find_weights
from vllm_tgvkv.errors import EvictionConfigError

OUTPUT = ROOT / "docs" / "evaluation" / "text"
LOGS = ROOT / "build" / "evaluation" / "text"
REPORT = "report"

TEST = "test"
SPLITS = {TEST: 0, "training": TRAINING}
"""Numbers of their first questions."""

CACHE_SHARE = 0.6
"""Questions are asked in groups whose prompts fill this part of the cache, so that the arms of a
question find its prefix, and their regions have room."""


class Run:
    """One run: parts, their answers, and an engine that starts when it is first needed."""

    def __init__(
        self,
        parts: dict[str, Part],
        limit: int | None,
        log: AnswerLog,
        settings: TextSettings | None = None,
        first: int = 0,
    ) -> None:
        """Ask nothing yet.

        Args:
            limit: on the questions of a task.
            first: number of the first question.
        """
        self.parts = parts
        self.limit = limit
        self.log = log
        self.first = first
        self.settings = settings or TextSettings()
        self._engine: TextEngine | None = None

    @property
    def arms(self) -> list[TextArm]:
        found = (arm for part in self.parts.values() for _, _, arms in part.work for arm in arms)
        return list(dict.fromkeys(found))

    def answer(self, part: Part) -> None:
        """Have the engine answer what the log lacks, task by task."""
        for task, questions, arms in part.work:
            most = questions if self.limit is None else min(questions, self.limit)
            began, before = time.monotonic(), len(self.log)
            for numbers in self._groups(task, most):
                self._ask(task, [(n, FULL) for n in numbers])
                right = [n for n in numbers if self.log[_key(task, n, FULL)].is_exact]
                self._ask(
                    task,
                    [
                        (n, arm)
                        for n in right
                        for arm in arms
                        if arm != FULL and n - self.first < part.asked(task, arm)
                    ],
                )
            if new := len(self.log) - before:
                seconds = time.monotonic() - began
                print(f"{task.name}: {new} answers in {seconds:.0f} s", flush=True)

    def _groups(self, task: TextTask, questions: int) -> Iterator[range]:
        size = max(1, int(CACHE_SHARE * self.settings.cache_tokens / task.tokens))
        last = self.first + questions
        for start in range(self.first, last, size):
            yield range(start, min(start + size, last))

    def _ask(self, task: TextTask, wanted: Sequence[tuple[int, TextArm]]) -> None:
        missing: list[Work] = [
            (TextQuestion(task, number), arm)
            for number, arm in wanted
            if _key(task, number, arm) not in self.log
        ]
        if not missing:
            return
        engine = self._started()
        size = 2 * self.settings.max_num_seqs
        with tqdm(total=len(missing), desc=task.name, unit="answer", leave=False) as bar:
            for start in range(0, len(missing), size):
                for answer in engine.answers(missing[start : start + size]):
                    self.log.add(answer)
                    bar.update()

    def _started(self) -> TextEngine:
        if self._engine is None:
            self._engine = TextEngine(self.settings, self.arms)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _key(task: TextTask, number: int, arm: TextArm) -> tuple[str, int, str]:
    return task.name, number, arm.identity


# -- what a run takes -----------------------------------------------------------------------


LONG_ANSWERS = {"passage": 0.35, "numbers": 0.35, "names": 0.35, "fact": 0.1, "words": 0.1}
"""Seconds that an answer takes longer than a number, by kind of task."""


def prompt_seconds(tokens: int) -> float:
    """Return about how long the engine takes for a prompt on two cores, as measured once."""
    return tokens * (1.3e-3 + 1.7e-7 * tokens)


def answer_seconds(task: TextTask) -> float:
    """Return the same for a further answer to a prompt that the prefix cache holds."""
    return 0.2 + 1e-5 * task.tokens + LONG_ANSWERS.get(task.kind, 0.0)


def print_plan(parts: dict[str, Part], limit: int | None) -> None:
    """Print every cell with its questions, and what it takes if the full cache answers them all."""
    total = 0.0
    for name, part in parts.items():
        print(f"{name}: {part.title}")
        for task, questions, arms in part.work:
            most = questions if limit is None else min(questions, limit)
            first = most * (prompt_seconds(task.tokens) + answer_seconds(task))
            asked = {arm: min(part.asked(task, arm), most) for arm in arms if arm != FULL}
            seconds = {arm: number * answer_seconds(task) for arm, number in asked.items()}
            task_total = first + sum(seconds.values())
            total += task_total
            print(f"  {task.name}: {most} questions, about {_minutes(task_total)}")
            print(f"    {FULL.key:<44} {most:>4} questions {_minutes(first):>9}")
            for arm, number in asked.items():
                print(f"    {arm.key:<44} {number:>4} questions {_minutes(seconds[arm]):>9}")
    print(f"At most about {_minutes(total)} on two cores.", flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# -- command line ---------------------------------------------------------------------------


class UsageError(ValueError):
    """A flag is wrong; the message names it, its value and the way out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    if options.output is None:
        is_whole = options.tasks is None and options.questions is None
        for_test = options.split == TEST
        options.output = (
            OUTPUT if is_whole and for_test else LOGS / ("some" if for_test else options.split)
        )
    try:
        if options.only == [REPORT]:
            results = text_results.read(options.output)
            if not results:
                raise UsageError(f"--output {options.output}: holds no results; run a part first")
        else:
            parts = _parts(options)
            print_plan(parts, options.questions)
            if options.plan:
                return 0
            results = _run(parts, options, given)
    except (
        UsageError,
        EvictionConfigError,
        WeightsMissingError,
        text_results.ResultsError,
    ) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted; the same command continues from here.", file=sys.stderr)
        return 130
    write_report(results, options.output)
    print(f"Written: {options.output / 'README.md'}")
    return 0


def _run(
    parts: dict[str, Part], options: argparse.Namespace, given: Sequence[str]
) -> dict[str, text_results.PartResult]:
    """Answer part by part, and write the results after each one."""
    if find_weights() is None:
        raise WeightsMissingError
    settings = TextSettings()
    results = text_results.read(options.output)
    with AnswerLog(options.log, settings.fingerprint, options.fresh) as log:
        first = SPLITS[options.split]
        run = Run(parts, options.questions, log, first=first)
        check(run.arms, eviction_settings(run.arms))
        facts = {
            "command": command_line("evaluation.text", given),
            "day": date.today().isoformat(),
            "revision": revision(),
            "fingerprint": settings.fingerprint,
            "settings": asdict(settings),
            "versions": versions(PACKAGES),
            "machine": {name: value for name, value in machine().items() if name != "load_average"},
        }
        try:
            for name, part in parts.items():
                run.answer(part)
                results[name] = text_results.part_result(part, log, facts, options.questions, first)
                results = {name: results[name] for name in PARTS if name in results}
                text_results.write(results, options.output)
        finally:
            run.close()
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.text", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*PARTS, REPORT),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; {REPORT} alone rewrites the page of an earlier run",
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="default: all of each part")
    parser.add_argument("--questions", type=int, metavar="N", help="at most this many of each task")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default=TEST,
        help="questions to report on, or others to choose by (default: test)",
    )
    parser.add_argument("--plan", action="store_true", help="print cells and times, and end")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the page (default: docs/evaluation/text; with --tasks or --questions "
        "build/evaluation/text/some, with --split training .../training)",
    )
    parser.add_argument(
        "--log", type=Path, default=LOGS, help="folder of the answers (build/evaluation/text)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the answers of earlier runs")
    return parser


def _parts(options: argparse.Namespace) -> dict[str, Part]:
    """Return the chosen parts with the chosen tasks.

    Raises:
        UsageError: naming the flag, its value and what it may be.
    """
    names = options.only or list(PARTS)
    if REPORT in names:
        raise UsageError(f"--only {' '.join(names)}: {REPORT} stands alone, give it no other part")
    if options.questions is not None and options.questions < 1:
        raise UsageError(f"--questions {options.questions}: give a whole number of at least 1")
    parts = {name: part for name, part in PARTS.items() if name in names}
    known = {task.name for part in parts.values() for task, _, _ in part.work}
    if options.tasks is None:
        return parts
    if wrong := [name for name in options.tasks if name not in known]:
        raise UsageError(f"--tasks {' '.join(wrong)}: choose from {' '.join(sorted(known))}")
    chosen = {name: _with_tasks(part, options.tasks) for name, part in parts.items()}
    return {name: part for name, part in chosen.items() if part.cells}


def _with_tasks(part: Part, names: Sequence[str]) -> Part:
    cells = [
        replace(cells, tasks=tuple(task for task in cells.tasks if task.name in names))
        for cells in part.cells
    ]
    return replace(part, cells=tuple(c for c in cells if c.tasks))


if __name__ == "__main__":
    sys.exit(main())
