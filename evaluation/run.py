# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation.run`: which method at which budget for my task?

Asks the demonstration model every question with every method and budget through a real engine, and
writes tables and pictures. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tqdm import tqdm

from demo.tasks import TASKS
from evaluation.answers import AnswerLog
from evaluation.arms import (
    BLOCK_BUDGETS,
    BLOCK_METHODS,
    BLOCK_SIZES,
    BUDGETS,
    CLOSE_BUDGETS,
    METHODS,
    EvaluatedArm,
    ablation_arms,
    auto_arms,
    block_arms,
    crossed,
    granularity_arms,
)
from evaluation.engine import PACKAGES, AnsweringEngine, Settings
from evaluation.fingerprint import ROOT
from evaluation.pictures import QUESTIONS as PICTURE_QUESTIONS
from evaluation.pictures import take_pictures
from evaluation.questions import Question, questions
from evaluation.record import FILE, Record, ResultTable
from evaluation.report import write_report
from evaluation.results import (
    Side,
    cells,
    collect,
    compare_ablations,
    compare_granularities,
    compare_methods,
    compare_pairs,
    first_token_changes,
    same_texts,
)
from measure.facts import command_line, versions
from measure.statistics import RESAMPLES, SEED

if TYPE_CHECKING:
    from evaluation.emulation import Emulation

PARTS = ("grid", "ablations", "blocks", "pictures")
REPORT = "report"
OUTPUT = ROOT / "docs" / "evaluation"
LOGS = ROOT / "build" / "evaluation"
NUM_QUESTIONS = 100
EMULATED_QUESTIONS = 40
"""Limit on the questions of a task for the emulation, which is slow."""

QUICK_PARTS = ("grid", "pictures")
QUICK_BUDGETS = (1.0, 0.5, 0.1)
QUICK_QUESTIONS = 6

T = TypeVar("T", bound="AnsweringEngine | Emulation")


class UsageError(ValueError):
    """A flag is wrong; the message names it, its value and the way out."""


@dataclass(frozen=True)
class Plan:
    """The measurements of one run."""

    parts: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    tasks: tuple[str, ...]
    num_questions: int
    close: bool
    """Whether to measure the other granularities as well."""
    output: Path
    logs: Path
    fresh: bool
    command: str

    @property
    def questions(self) -> list[Question]:
        return questions(self.tasks, self.num_questions)

    @property
    def grid_arms(self) -> list[EvaluatedArm]:
        budgets = [1.0, *(b for b in self.budgets if b != 1.0)]
        return crossed(self.methods, budgets) + (auto_arms() if "tgv" in self.methods else [])

    @property
    def granularity_arms(self) -> list[EvaluatedArm]:
        return granularity_arms(self.methods, self.budgets) if self.close else []

    @property
    def block_arms(self) -> list[EvaluatedArm]:
        return block_arms(self.methods, self.budgets)

    @property
    def close_budgets(self) -> list[float]:
        return [b for b in CLOSE_BUDGETS if b in self.budgets]


class Evaluation:
    """One run, and the record it fills."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self.plan = plan
        self.record = record

    def run(self) -> None:
        """Measure all parts of the plan, with one engine after the other per block size."""
        settings = Settings()
        with (
            AnswerLog(self.plan.logs, settings.fingerprint, self.plan.fresh) as log,
            engine(settings) as answering,
        ):
            self._ask(answering, log, self._common_arms(), self.plan.questions)
            if "grid" in self.plan.parts:
                self._grid(log, settings.block_size)
            if "ablations" in self.plan.parts:
                self._ablations(log, settings.block_size)
            if "pictures" in self.plan.parts:
                count = min(self.plan.num_questions, PICTURE_QUESTIONS)
                self.record.pictures = take_pictures(answering.get(), self.plan.methods, count)
        if "blocks" in self.plan.parts:
            self._blocks()

    def _common_arms(self) -> list[EvaluatedArm]:
        """Return the arms of all parts that the first engine answers, each once."""
        plan, arms = self.plan, []
        if "grid" in plan.parts:
            arms += [*plan.grid_arms, *plan.granularity_arms]
        if "ablations" in plan.parts:
            arms += ablation_arms(plan.budgets)
        return list(dict.fromkeys(arms))

    def _ask(
        self,
        engine: Lazy[Any],
        log: AnswerLog,
        arms: Sequence[EvaluatedArm],
        asked: Sequence[Question],
    ) -> None:
        """Have an engine answer what its log lacks."""
        work = []
        for question in asked:
            missing = [a for a in arms if (question.task, question.number, a.key) not in log]
            if missing:
                work.append((question, missing))
        total, left = len(arms) * len(asked), sum(len(missing) for _, missing in work)
        if not left:
            return
        running = engine.get()
        with tqdm(total=total, initial=total - left, desc=engine.label, unit="answer") as bar:
            for answer in running.answers(work):
                log.add(answer)
                bar.update()

    def _grid(self, log: AnswerLog, block_size: int) -> None:
        plan, asked = self.plan, self.plan.questions
        fixed = [arm for arm in plan.grid_arms if isinstance(arm.budget, float)]
        changed, total = first_token_changes(log, plan.grid_arms, asked)
        self.record.tables["grid"] = ResultTable(
            cells(log, plan.grid_arms, asked, block_size),
            compare_methods(log, fixed, asked),
            {"first_token_changes": [changed, total]},
        )
        if plan.granularity_arms:
            own = [arm for arm in fixed if arm.budget in plan.close_budgets]
            self.record.tables["granularity"] = ResultTable(
                cells(log, [*own, *plan.granularity_arms], asked, block_size),
                compare_granularities(log, plan.granularity_arms, asked),
            )

    def _ablations(self, log: AnswerLog, block_size: int) -> None:
        plan, asked = self.plan, self.plan.questions
        self.record.tables["ablations"] = ResultTable(
            cells(log, ablation_arms(plan.budgets), asked, block_size),
            compare_ablations(log, plan.close_budgets, asked),
        )

    def _blocks(self) -> None:
        """Measure pages of several sizes, and emulated ones of 1 token and, to compare, of 16."""
        plan, asked = self.plan, self.plan.questions
        some = questions(plan.tasks, min(plan.num_questions, EMULATED_QUESTIONS))
        kinds: list[tuple[int, bool]] = [(size, False) for size in BLOCK_SIZES]
        kinds += [(1, True), (BLOCK_SIZES[0], True)]
        measured, sides = [], {}
        for size, emulated in kinds:
            settings = Settings(block_size=size)
            suffix = "-emulated" if emulated else ""
            # The first engine has emptied its log already.
            fresh = plan.fresh and (emulated or size != Settings().block_size)
            with (
                AnswerLog(plan.logs, settings.fingerprint + suffix, fresh) as log,
                emulation(size) if emulated else engine(settings) as answering,
            ):
                mine = some if emulated else asked
                self._ask(answering, log, plan.block_arms, mine)
                measured += cells(log, plan.block_arms, mine, size, emulated)
                for arm in plan.block_arms:
                    sides[size, emulated, arm] = collect(log, arm, some)
        first = BLOCK_SIZES[0]
        pairs = [
            (
                arm.budget,
                Side(f"{arm.method}, exact", sides[1, True, arm]),
                Side(f"{arm.method}, {first} emulated", sides[first, True, arm]),
            )
            for arm in plan.block_arms
        ]
        equal = [
            same_texts(sides[first, True, arm], sides[first, False, arm])
            for arm in plan.block_arms
            if arm.method != "random"
        ]
        self.record.tables["blocks"] = ResultTable(
            measured,
            compare_pairs(pairs),
            {"same_as_engine": [sum(same for same, _ in equal), sum(of for _, of in equal)]},
        )


class Lazy(Generic[T]):
    """An engine that starts when it is first needed; a complete log needs none."""

    def __init__(self, label: str, start: Callable[[], T]) -> None:
        self.label = label
        self._start = start
        self._started: T | None = None

    def get(self) -> T:
        if self._started is None:
            self._started = self._start()
        return self._started

    def __enter__(self) -> Lazy[T]:
        return self

    def __exit__(self, *details: Any) -> None:
        if self._started is not None:
            self._started.__exit__(*details)
            self._started = None


def engine(settings: Settings) -> Lazy[AnsweringEngine]:
    return Lazy(f"blocks of {settings.block_size}", lambda: AnsweringEngine(settings))


def emulation(block_size: int) -> Lazy[Emulation]:
    def start() -> Emulation:
        # Its changes to transformers must not reach an engine.
        from evaluation.emulation import Emulation

        return Emulation(block_size)

    return Lazy(f"blocks of {block_size}, emulated", start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        output = _output(options)
        if options.only == [REPORT]:
            record = _read(output)
        else:
            plan = _plan(options, output, given)
            record = _start(plan)
            Evaluation(plan, record).run()
            record.write(output)
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted; the same command continues from here.", file=sys.stderr)
        return 130
    write_report(record, output)
    print(f"Written: {output / 'README.md'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.run", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"only {', '.join(QUICK_PARTS)}, with {QUICK_QUESTIONS} questions a task",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*PARTS, REPORT),
        metavar="PART",
        help=f"of {', '.join(PARTS)}; {REPORT} alone rewrites the report of an earlier run",
    )
    parser.add_argument(
        "--questions", type=int, metavar="N", help=f"of each task (default: {NUM_QUESTIONS})"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all")
    parser.add_argument(
        "--budgets", nargs="+", type=float, metavar="B", help=f"default: {_words(BUDGETS)}"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"default: {_words(TASKS)}")
    parser.add_argument(
        "--output", type=Path, help="folder of the report (default: docs/evaluation)"
    )
    parser.add_argument(
        "--log", type=Path, default=LOGS, help="folder of the answers (default: build/evaluation)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard the answers of earlier runs")
    return parser


def _output(options: argparse.Namespace) -> Path:
    if options.output is not None:
        return Path(options.output)
    return LOGS / "quick" if options.quick else OUTPUT


def _plan(options: argparse.Namespace, output: Path, given: Sequence[str]) -> Plan:
    """Check the flags.

    Raises:
        UsageError: naming the flag, its value and what it may be.
    """
    parts = options.only or (QUICK_PARTS if options.quick else PARTS)
    if REPORT in parts:
        raise UsageError(f"--only {' '.join(parts)}: {REPORT} stands alone, give it no other part")
    methods, tasks = options.methods or METHODS, options.tasks or TASKS
    budgets = options.budgets or (QUICK_BUDGETS if options.quick else BUDGETS)
    _check_names("--methods", methods, METHODS)
    _check_names("--tasks", tasks, TASKS)
    if wrong := [budget for budget in budgets if not 0 < budget <= 1]:
        raise UsageError(
            f"--budgets {_words(wrong)}: give fractions of the prompt, above 0 and at most 1"
        )
    count = options.questions
    if count is None:
        count = QUICK_QUESTIONS if options.quick else NUM_QUESTIONS
    if count < 1:
        raise UsageError(f"--questions {count}: give a whole number of at least 1")
    for part, flag, wanted, needed in (
        ("ablations", "--budgets", budgets, CLOSE_BUDGETS),
        ("blocks", "--budgets", budgets, BLOCK_BUDGETS),
        ("blocks", "--methods", methods, BLOCK_METHODS),
    ):
        if part in parts and not set(wanted) & set(needed):
            raise UsageError(
                f"{flag} {_words(wanted)}: the part {part} has {_words(needed)}; "
                "add one of these, or leave the part out with --only"
            )
    return Plan(
        parts=tuple(parts),
        methods=tuple(dict.fromkeys(methods)),
        budgets=tuple(sorted(set(budgets), reverse=True)),
        tasks=tuple(dict.fromkeys(tasks)),
        num_questions=count,
        close=not options.quick,
        output=output,
        logs=options.log,
        fresh=options.fresh,
        command=command_line("evaluation.run", given),
    )


def _check_names(flag: str, given: Iterable[str], known: Sequence[str]) -> None:
    if wrong := [name for name in given if name not in known]:
        raise UsageError(f"{flag} {_words(wrong)}: choose from {_words(known)}")


def _read(output: Path) -> Record:
    if not (output / FILE).exists():
        raise UsageError(f"--output {output}: holds no {FILE}; leave out --only report")
    return Record.read(output)


def _start(plan: Plan) -> Record:
    """Return the record of an earlier run of other parts, or a new one."""
    settings = Settings()
    facts = {
        "commands": {},
        "fingerprint": settings.fingerprint,
        "versions": versions(PACKAGES),
        "settings": asdict(settings),
        "seeds": {"engine": settings.seed, "bootstrap": SEED},
        "resamples": RESAMPLES,
    }
    record = Record(facts)
    others = set(PARTS) - set(plan.parts)
    if others and not plan.fresh and (plan.output / FILE).exists():
        earlier = Record.read(plan.output)
        if earlier.facts["fingerprint"] != facts["fingerprint"]:
            raise UsageError(
                f"--output {plan.output}: its {FILE} is of another model, version or source "
                f"({earlier.facts['fingerprint']}, now {facts['fingerprint']}) and would lose its "
                "other parts; run all parts, name another folder, or give --fresh"
            )
        record = earlier
    record.facts["commands"] |= dict.fromkeys(plan.parts, plan.command)
    return record


def _words(values: Iterable[Any]) -> str:
    return " ".join(str(value) for value in values)


if __name__ == "__main__":
    sys.exit(main())
