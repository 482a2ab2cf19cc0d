# SPDX-License-Identifier: Apache-2.0
"""Ask SmolLM2 questions with the full cache and with each arm, and write tables of right answers.

Without a field, a part of each within an hour. Interrupted, the same command continues. `load` asks
servers over HTTP instead, stock and evicting ones, at more and more requests in flight. `papers`
has the papers' own experiments: questions to arms, and statistics of attention.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from measure.engines import ENVIRONMENT, set_environment

# The modules below import torch and vLLM, which read these.
set_environment({**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})

from evaluation import load, pages, papers, results, texts  # noqa: E402
from evaluation.answers import AnswerLog  # noqa: E402
from evaluation.arms import METHODS, MIXES, ROOT, crossed  # noqa: E402
from evaluation.field import Field, Run, plan  # noqa: E402
from evaluation.load_report import write_load_report  # noqa: E402
from evaluation.load_results import LoadResult, Reply, read_points, summarise  # noqa: E402
from evaluation.papers_report import write_papers_report  # noqa: E402
from evaluation.parts import Part  # noqa: E402
from evaluation.report import write_report  # noqa: E402
from measure.facts import command_line  # noqa: E402
from measure.serving import ServingError  # noqa: E402
from measure.smollm import WeightsMissingError, find_weights  # noqa: E402
from measure.text_tasks import FRESH, TRAINING  # noqa: E402
from vllm_tgvkv.shared.errors import EvictionConfigError  # noqa: E402

FIELDS = {field.name: field for field in (texts.FIELD, pages.FIELD)}
BRIEF = {"text": 20, "pages": 10}
"""Questions of each task of the part `default` where no field is named."""

SPLITS = {"test": 0, "fresh": FRESH, "training": TRAINING}
"""Numbers of their first questions; see `measure.text_tasks`."""

LOAD = "load"
"""Stands for a field on the command line; its parts are kinds of questions."""
PAPERS = "papers"
"""Stands for a field too; its parts are experiments in both fields."""

DOCS = ROOT / "docs" / "evaluation"
BUILD = ROOT / "build" / "evaluation"


class UsageError(ValueError):
    """A flag is wrong; the message names it, its value and the way out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation by its command line and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(given)
    command = command_line("evaluation", given)
    try:
        if options.field == LOAD:
            _run_load(options, command)
            return 0
        if options.field == PAPERS:
            _run_papers(options, command)
            return 0
        for name in [options.field] if options.field else BRIEF:
            chosen = argparse.Namespace(**vars(options))
            if not options.field:
                chosen.questions = min(BRIEF[name], options.questions or BRIEF[name])
                chosen.parts = options.parts or ["default"]
            _run(FIELDS[name], chosen, command)
    except (
        UsageError,
        EvictionConfigError,
        WeightsMissingError,
        results.ResultsError,
        ServingError,
    ) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        said = "begins again" if options.field == LOAD else "continues from here"
        print(f"\nInterrupted; the same command {said}.", file=sys.stderr)
        return 130
    return 0


def _run(field: Field, options: argparse.Namespace, command: str) -> None:
    """Answer a field's parts, and write results and page after each one."""
    folder = (DOCS if options.publish else options.output or BUILD) / field.name
    found = results.read(folder, results.read_part)
    if options.report:
        _need(found, folder)
        write_report(field, found, folder)
        return
    parts = _parts(field, options)
    print("\n".join(plan(field, parts)), flush=True)
    if options.plan:
        return
    if find_weights() is None:
        raise WeightsMissingError
    with AnswerLog(BUILD / "answers" / field.name, field.fingerprint, options.fresh) as log:
        first = SPLITS[options.split]
        run = Run(field, parts, log, first)
        for name, result in run.results(field.facts(command, options.questions, first)):
            found[name] = result
            found = {name: found[name] for name in field.parts if name in found}
            results.write(found, folder)
            write_report(field, found, folder)
    print(f"Written: {folder / 'README.md'}")


def _run_load(options: argparse.Namespace, command: str) -> None:
    """Ask the servers' questions of each kind, and write results and page after each load."""
    folder = (DOCS if options.publish else options.output or BUILD) / LOAD
    found = results.read(folder, read_points)
    if options.report:
        _need(found, folder)
        write_load_report(found, folder)
        return
    names, count = options.parts or list(load.CROWDS), options.questions or load.QUESTIONS
    _check("--parts", names, load.CROWDS)
    if options.plan:
        asked = count * len(options.loads) * len(load.ARMS)
        for name in names:
            minutes = asked * load.CROWDS[name].seconds / 60
            print(f"{name}: {asked} answers, about {minutes:.0f} min on two cores")
        return
    for name in names:
        crowd = load.CROWDS[name]
        facts = FIELDS[name].facts(command, options.questions, 0)
        del facts["settings"]  # of an engine that is not used here
        facts["commands"] = {
            arm.key: shlex.join(["vllm", *crowd.serve_arguments(arm)]) for arm in load.ARMS
        }
        found[name] = LoadResult(facts, [])
        found = {each: found[each] for each in load.CROWDS if each in found}
        reference: Sequence[Reply] = ()
        logs, loads = BUILD / LOAD / name, sorted(options.loads)
        for point in load.points(crowd, load.ARMS, loads, count, logs):
            record = logs / f"{point.load:g}-{point.arm}.json"
            record.write_text(json.dumps(asdict(point)), encoding="utf-8")
            reference = reference or point.replies
            found[name].points.append(summarise(point, reference))
            print(f"{name}, load {point.load:g}, {point.arm}", flush=True)
            results.write(found, folder)
        write_load_report(found, folder)
    print(f"Written: {folder / 'README.md'}")


def _run_papers(options: argparse.Namespace, command: str) -> None:
    """Ask and measure experiments, and write results and page after each kind of them."""
    folder = (DOCS if options.publish else options.output or BUILD) / PAPERS
    found = results.read(folder, papers.read_result)
    if options.report:
        _need(found, folder)
        write_papers_report(found, folder)
        return
    names = options.parts or list(papers.EXPERIMENTS)
    _check("--parts", names, papers.EXPERIMENTS)
    chosen = {name: each for name, each in papers.EXPERIMENTS.items() if name in names}
    asked = {
        name: {n: e.part.limited(options.questions) for n, e in chosen.items() if e.field == field}
        for name, field in FIELDS.items()
    }
    measured = [name for name, each in chosen.items() if each.field is None]
    for name, parts in asked.items():
        if parts:
            print("\n".join(plan(FIELDS[name], parts)), flush=True)
    for name in measured:
        title, number = chosen[name].title, chosen[name].limited(options.questions)
        print(f"{name}: {title}, {number * len(chosen[name].tasks)} prompts")
    if options.plan:
        return
    if find_weights() is None:
        raise WeightsMissingError
    first = SPLITS[options.split]

    def write(name: str, result: papers.Result) -> None:
        found[name] = result
        ordered = {name: found[name] for name in papers.EXPERIMENTS if name in found}
        results.write(ordered, folder)
        write_papers_report(ordered, folder)

    if measured:
        facts = pages.FIELD.facts(command, options.questions, first)
        given = (measured, facts, options.questions, first, BUILD / PAPERS)
        for name, result in papers.measure(*given).items():
            write(name, result)
    for field, parts in ((FIELDS[name], parts) for name, parts in asked.items()):
        with AnswerLog(BUILD / "answers" / field.name, field.fingerprint, options.fresh) as log:
            facts = field.facts(command, options.questions, first)
            for name, answered in Run(field, parts, log, first).results(facts):
                write(name, answered)
    print(f"Written: {folder / 'README.md'}")


def _need(found: Mapping[str, object], folder: Path) -> None:
    if not found:
        raise UsageError(f"--report: {folder} holds no results; run a part first")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    parser.add_argument("field", nargs="?", choices=[*FIELDS, LOAD, PAPERS])
    parser.add_argument("--parts", nargs="+", metavar="PART", help="of the field; default: all")
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="ask the questions of the part `methods` with these, such as one of your own",
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.2, 0.1, 0.05])
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="default: all of each part")
    parser.add_argument("--questions", type=int, metavar="N", help="at most this many of each task")
    parser.add_argument(
        "--loads",
        nargs="+",
        type=float,
        default=list(load.LOADS),
        help="of `load`: requests in flight, times what the pool of stock holds",
    )
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="test",
        help="questions to report on, or `training` to make a choice (default: test)",
    )
    parser.add_argument("--plan", action="store_true", help="print tasks and times, and end")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    parser.add_argument(
        "--output", type=Path, help="folder of the fields' pages (default: build/evaluation)"
    )
    parser.add_argument("--publish", action="store_true", help="the same in docs/evaluation")
    parser.add_argument("--fresh", action="store_true", help="discard the answers of earlier runs")
    return parser


def _parts(field: Field, options: argparse.Namespace) -> dict[str, Part]:
    """Return the chosen parts with the chosen tasks.

    Raises:
        UsageError: naming the flag, its value and what it may be.
    """
    if options.publish and options.split == "training":
        raise UsageError("--publish: training questions are not reported on; leave it out")
    if options.questions is not None and options.questions < 1:
        raise UsageError(f"--questions {options.questions}: give a whole number of at least 1")
    if options.methods:
        return {"methods": _with_methods(field, options).limited(options.questions)}
    names = options.parts or list(field.parts)
    parts = {name: part for name, part in field.parts.items() if name in names}
    tasks = {task.name for part in parts.values() for task, _, _ in part.work}
    _check("--parts", names, field.parts)
    _check("--tasks", options.tasks or [], sorted(tasks))
    limited = {n: part.limited(options.questions, options.tasks) for n, part in parts.items()}
    return {name: part for name, part in limited.items() if part.cells}


def _check(flag: str, given: Iterable[str], known: Iterable[str], more: str = "") -> None:
    if wrong := [name for name in given if name not in known]:
        raise UsageError(f"{flag} {' '.join(wrong)}: choose from {' '.join(known)}{more}")


def _with_methods(field: Field, options: argparse.Namespace) -> Part:
    """Return the part `methods` with other methods, at other budgets."""
    if options.publish or options.parts:
        raise UsageError(
            "--methods: stands for a part that is not published, give neither --parts nor --publish"
        )
    _check("--methods", [n for n in options.methods if n not in MIXES], METHODS, ", or a mix")
    part = field.parts["methods"]
    arms = crossed(options.methods, options.budgets)
    return replace(part, cells=(replace(part.cells[0], arms=arms),), pairs=())


if __name__ == "__main__":
    sys.exit(main())
