# SPDX-License-Identifier: Apache-2.0
"""Everything that has to be found out on a GPU, part by part, in calls of a few minutes.

`python tools/gpu_first_run.py` runs the parts of `PARTS` in order, each in its own processes with a
time limit of its own. All output goes to one folder: a log for each part, `results.json`, and
`summary.md`. A call starts no part whose limit exceeds the time left. The next call goes on with
what has no verdict yet, and then repeats what failed.

Exit code: 0 if every part passed or was skipped for the reason shown, 1 if one failed, 2 if some
have not run yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_GRACE_SECONDS = 5.0
"""Between the interrupt that ends a part and the kill."""
_SUMMARY_CHARACTERS = 700
"""Most characters of a part's figures in the summary; `results.json` has all."""


@dataclass(frozen=True)
class Part:
    """A command with a time limit. `{out}` in it is the folder of the results."""

    name: str
    about: str
    command: Sequence[str]
    seconds: float
    rehearsal: Sequence[str] = ()
    """Command that replaces it without a GPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    under: Sequence[str] = ()
    """A program that runs the command; without it the part is skipped."""
    needed: bool = False
    """Whether nothing else can pass if this fails."""


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _check(name: str, about: str, seconds: float, **fields: Any) -> Part:
    """Return a part that runs a function of `benchmarks.gpu.checks`."""
    command = _module("benchmarks.gpu.checks", name, "{out}/" + name + ".jsonl")
    return Part(name, about, command, seconds, (*command, "--smoke"), **fields)


def _tests(name: str, about: str, seconds: float, *selection: str, **fields: Any) -> Part:
    """Return a part that runs tests; a rehearsal only collects them."""
    command = _module("pytest", "-v", "-p", "no:cacheprovider", *selection)
    return Part(name, about, command, seconds, (*command, "--collect-only", "-qq"), **fields)


def _engine(runner: str, mode: str, selection: str) -> Part:
    return _tests(
        f"engine-{runner}-{mode}",
        f"check 4: engines against the oracle, model runner {runner.upper()}, {mode}",
        240,
        "tests/gpu/test_engine.py",
        "-k",
        f"runner-{runner} and {selection}",
        environment={"VLLM_GPU_SYNC_CHECK": "error"},
    )


_NAMES = (
    "copy", "page_tables", "select", "apportion", "statistics", "decode",
    "summaries",
)  # fmt: skip
_KERNELS = tuple(f"tests/gpu/test_{name}.py" for name in _NAMES)
_ENVIRONMENT = _module("benchmarks.gpu.environment", "{out}/environment.jsonl")
_BENCH = _module("benchmarks.gpu", "--results", "{out}/bench")

PARTS = (
    Part(
        "environment", "driver, packages, plugin, device", _ENVIRONMENT, 60,
        (*_ENVIRONMENT, "--smoke"), needed=True,
    ),
    _check("compile", "check 1: every Triton kernel builds for this device", 150),
    _check("smoke", "a tiny model without graphs, two evictions", 120),
    _tests("kernels", "check 2: kernels against their references", 300, *_KERNELS),
    _tests(
        "memcheck", "check 2: most of these under compute-sanitizer", 300, *_KERNELS,
        "-k", "not equal and not reference and not any_shares and not large and not 31_values",
        under=("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9"),
        # Each tensor has memory of its own, so that an access beyond its end is seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    _tests("flash", "check 3: FlashAttention over pages", 150, "tests/gpu/test_flash_pages.py"),
    _engine("v1", "eager", "not graphs"),
    _engine("v1", "graphs", "graphs"),
    _engine("v2", "eager", "not graphs"),
    _engine("v2", "graphs", "graphs"),
    _tests(
        "mixed", "hybrids and models with windows against their oracles, both model runners", 300,
        "tests/gpu/test_mixed.py", environment={"VLLM_GPU_SYNC_CHECK": "error"},
    ),
    _tests(
        "reset", "check 5: the prefix cache is reset right after an eviction", 180,
        "tests/gpu/test_reset.py", environment={"VLLM_GPU_SYNC_CHECK": "error"},
    ),
    _check("defaults", "check 6: an 8B model at vLLM's defaults, memory, late compilation", 240),
    _check("layout", "check 7: stock vLLM in the default layout and in BLHNC", 300),
    _check("decode", "check 8: decode steps at many batches, with and without a long one", 240),
    _check("evictions", "check 9: evicting and mixed steps, host against device", 240),
    _check("memory", "check 10: huge prompts in 97 % of the memory", 240),
    Part(
        "bench", "make bench-gpu", (*_BENCH, "--minutes", "8"), 510,
        (*_BENCH, "--smoke"),
    ),
)  # fmt: skip


@dataclass
class Result:
    """Result of a part that ran."""

    verdict: str
    """`passed`, `failed`, `time limit` or `skipped`; `rehearsed` if it passed without a GPU."""
    seconds: float
    figures: list[str]
    error: list[str]
    """First lines of what went wrong."""
    ended: str
    """UTC."""


def run(part: Part, out: Path, rehearse: bool) -> Result:
    """Run a part for at most its time; whatever it left behind is judged."""
    command = list(part.rehearsal if rehearse else (*part.under, *part.command))
    log = out / f"{part.name}.log"
    (out / f"{part.name}.jsonl").unlink(missing_ok=True)
    shutil.rmtree(out / part.name, ignore_errors=True)
    begin = time.monotonic()
    code: int | None = 0
    missing = bool(part.under) and not rehearse and shutil.which(part.under[0]) is None
    if missing:
        log.write_text(f"{part.under[0]} is not installed\n", encoding="utf-8")
    else:
        code = _execute([word.format(out=out) for word in command], part, log)
    text = log.read_text(encoding="utf-8", errors="replace")
    figures = _figures(part, out)
    verdict = "time limit" if code is None else "passed" if code == 0 else "failed"
    if "pytest" in command:
        line = r"::.* (PASSED|FAILED|ERROR|SKIPPED) .*\[ *\d+%\]$"
        tests = Counter(re.findall(line, text, re.MULTILINE))
        figures = [f"{number} {word.lower()}" for word, number in tests.items()]
        figures += re.findall(r"^\d+ tests? collected|^\d+/\d+ tests collected", text, re.MULTILINE)
        if verdict == "passed" and not rehearse and not tests["PASSED"]:
            verdict = "failed"  # every test was skipped
    if missing:
        verdict = "skipped"
    error = [] if verdict == "passed" else _error_lines(text)
    if verdict == "passed" and rehearse:
        verdict = "rehearsed"
    seconds = round(time.monotonic() - begin, 1)
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Result(verdict, seconds, figures, error, ended)


def _heed_interrupts() -> None:
    """Undo what a shell does to its background commands, and all they start: ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _execute(command: Sequence[str], part: Part, log: Path) -> int | None:
    """Return the exit code, or None if the time was up; no process of the part is left."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **part.environment,
    }
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
        except OSError as error:
            file.write(f"ERROR {error}\n".encode())
            return 127
        try:
            return process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # First an interrupt, at which a part ends processes that have groups of their own.
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(_GRACE_SECONDS)


def _figures(part: Part, out: Path) -> list[str]:
    """Return what a check recorded, or what a benchmark compares with a target."""
    figures = []
    journal = out / f"{part.name}.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line of a part that was killed
            entry = json.loads(line)
            if "figure" in entry:
                figures.append(f"{entry['figure']}: {entry['value']}")
    for path in sorted(out.glob(f"{part.name}/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["met"] is not None:
                met = "met" if row["met"] else "MISSED"
                figures.append(f"{row['measure']}: {row['ours']}, target {met}")
    return figures


def _error_lines(text: str, number: int = 4) -> list[str]:
    """Return the first lines that tell of an error, or else the last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: *)?(E  |ERROR |FAILED |\S*(Error|Exception)\b)", line)
    ]
    return [line[:240] for line in (told[:number] or lines[-number:])]


class Folder:
    """The folder of all results, and the results so far."""

    def __init__(self, path: Path, parts: Sequence[Part], rehearse: bool) -> None:
        self.path = path.resolve()
        self.parts = parts
        self.good = ("passed", "skipped", *(["rehearsed"] if rehearse else []))
        """Verdicts of parts that need not run again."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Result] = {}
        state = self.path / "results.json"
        if state.exists():
            known = json.loads(state.read_text(encoding="utf-8"))
            self.results = {name: Result(**fields) for name, fields in known.items()}

    def add(self, part: Part, result: Result, copy_to: Path | None) -> None:
        """Keep a result, and write all files anew."""
        self.results[part.name] = result
        known = {name: asdict(result) for name, result in self.results.items()}
        state = self.path / "results.json"
        fresh = state.with_suffix(".new")
        fresh.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        fresh.replace(state)  # a call that is killed leaves a whole file
        (self.path / "summary.md").write_text(self.summary(), encoding="utf-8")
        if copy_to is not None:
            copy_to.mkdir(parents=True, exist_ok=True)
            for name in ("results.json", "summary.md"):
                shutil.copy(self.path / name, copy_to)
            with tarfile.open(copy_to / "all.tar.gz", "w:gz") as archive:
                archive.add(self.path, "gpu-first-run")

    def summary(self) -> str:
        """Return one page of Markdown."""
        rows = ["| part | verdict | seconds | figures |", "| :-- | :-- | --: | :-- |"]
        errors = []
        for part in self.parts:
            result = self.results.get(part.name)
            if result is None:
                rows.append(f"| {part.name} | not run | | {part.about} |")
                continue
            figures = "; ".join(result.figures)
            if len(figures) > _SUMMARY_CHARACTERS:
                figures = figures[:_SUMMARY_CHARACTERS] + " ..."
            verdict = result.verdict if self.is_good(part) else f"**{result.verdict}**"
            cells = [part.name, verdict, f"{result.seconds:.0f}", figures.replace("|", "/")]
            rows.append(f"| {' | '.join(cells)} |")
            if result.error:
                lines = "\n".join(f"    {line}" for line in result.error)
                errors.append(f"{part.name} ({part.about}):\n\n{lines}\n")
        return "\n".join(["# First run on a GPU", "", *rows, "", *errors]).rstrip() + "\n"

    def is_good(self, part: Part) -> bool:
        """Return whether a part need not run again."""
        return part.name in self.results and self.results[part.name].verdict in self.good

    def exit_code(self, parts: Sequence[Part]) -> int:
        """Return 0 if all parts are good, 1 if one failed, 2 if some have not run."""
        if all(self.is_good(part) for part in parts):
            return 0
        return 1 if any(p.name in self.results and not self.is_good(p) for p in parts) else 2


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is due; see the module's docstring for the exit code."""
    options = _parse(arguments, parts)
    deadline = time.monotonic() + 60 * options.minutes
    folder = Folder(options.out, parts, options.rehearse)
    chosen = [part for part in parts if not options.only or part.name in options.only]
    due = [part for part in chosen if options.again or not folder.is_good(part)]
    due.sort(key=lambda part: part.name in folder.results)  # what failed before comes last
    for part in due:
        left = deadline - time.monotonic()
        if part.seconds + _GRACE_SECONDS > left:
            print(f"{part.name}: left to the next call ({left:.0f} of {part.seconds:.0f} s)")
            continue
        print(f"{part.name}: {part.about} ...", flush=True)
        result = run(part, folder.path, options.rehearse)
        folder.add(part, result, options.copy_to)
        print(f"{part.name}: {result.verdict} in {result.seconds:.0f} s", flush=True)
        for line in [*result.figures, *result.error]:
            print(f"    {line}", flush=True)
        if part.needed and not folder.is_good(part):
            print(f"nothing else can pass without {part.name}")
            break
    code = folder.exit_code(chosen)
    print({0: "all passed", 1: "some failed", 2: "not done: call again"}[code])
    return code


def _parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts]
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call (default: 9)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gpu-first-run", help="folder of all results"
    )
    parser.add_argument(
        "--copy-to", type=Path, help="folder that gets three files with everything after each part"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="repeat parts that passed, too")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU: collect the tests, run the other code on tiny sizes",
    )
    options = parser.parse_args(arguments)
    for part in parts:
        if (not options.only or part.name in options.only) and (
            part.seconds + _GRACE_SECONDS > 60 * options.minutes
        ):
            needed = (part.seconds + _GRACE_SECONDS) / 60
            parser.error(
                f"--minutes {options.minutes:g}: {part.name} may take {needed:.1f} minutes; "
                "allow more, or leave it out with --only"
            )
    return options


if __name__ == "__main__":
    sys.exit(main())
