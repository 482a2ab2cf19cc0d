# SPDX-License-Identifier: Apache-2.0
"""`python -m evaluation`: a part of every field that this installation can run, within an hour.

Each field is a program of its own; this one runs them after each other with few questions, in
folders below build/, or with `--whole` as they are published, which takes many hours. Interrupted,
the same command continues.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.fingerprint import ROOT
from measure.smollm import INSTALL, find_weights

BRIEF = ROOT / "build" / "evaluation" / "brief"


@dataclass(frozen=True)
class Program:
    """The program of a field."""

    name: str
    module: str
    title: str
    brief: tuple[str, ...]
    """Its flags for a part of it."""
    needs_weights: bool = True


PROGRAMS = (
    Program("text", "evaluation.text", "texts", ("--only", "default", "--questions", "20")),
    Program("pages", "evaluation.pages", "pages", ("--only", "default", "--questions", "10")),
    Program(
        "demo",
        "evaluation.run",
        "the demonstration model",
        ("--only", "grid", "--questions", "10", "--budgets", "1", "0.5", "0.2", "0.1"),
        needs_weights=False,
    ),
)


def commands(names: Sequence[str], whole: bool, has_weights: bool) -> list[list[str]]:
    """Return the command of each field, without those that lack the weights of SmolLM2."""
    found = []
    for program in PROGRAMS:
        if program.name in names and (has_weights or not program.needs_weights):
            output = ("--output", str(BRIEF / program.name))
            flags = () if whole else (*program.brief, *output)
            found.append([sys.executable, "-m", program.module, *flags])
    return found


def left_out(names: Sequence[str], has_weights: bool) -> str:
    """Return a message about the fields that cannot be run; empty if all can."""
    missing = [p.title for p in PROGRAMS if p.needs_weights and p.name in names]
    if has_weights or not missing:
        return ""
    return f"Left out: {' and '.join(missing)}, which need SmolLM2's weights: {INSTALL}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fields and return the first exit status that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m evaluation", description=__doc__)
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--fields", nargs="+", choices=names, default=names)
    parser.add_argument("--whole", action="store_true", help="all parts, for docs/evaluation")
    parser.add_argument("--plan", action="store_true", help="print the commands, and end")
    options = parser.parse_args(arguments)
    has_weights = find_weights() is not None
    if message := left_out(options.fields, has_weights):
        print(message, flush=True)
    for command in commands(options.fields, options.whole, has_weights):
        print(" ".join(["python", *command[1:]]), flush=True)
        if not options.plan and (status := subprocess.run(command, check=False).returncode):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
