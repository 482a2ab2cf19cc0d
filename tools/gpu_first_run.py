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
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_GRACE_SECONDS = 5.0
"""Between the interrupt that ends a part and the kill."""

Results = dict[str, dict[str, Any]]
"""By part: `verdict`, `seconds`, `figures`, `error` (its first lines) and `ended` (UTC).

Verdicts are `passed`, `failed`, `time limit`, `skipped`, and `rehearsed` without a GPU.
"""


@dataclass(frozen=True)
class Part:
    """A command with a time limit. `{out}` in it is the folder of the results."""

    name: str
    about: str
    command: Sequence[str]
    seconds: float
    rehearsal: Sequence[str] = ("--smoke",)
    """What is added to the command without a GPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    under: Sequence[str] = ()
    """A program that runs the command; without it the part is skipped."""
    needed: bool = False
    """Whether nothing else can pass if this fails."""


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _check(name: str, about: str, seconds: float) -> Part:
    """Return a part that runs a function of `benchmarks.gpu.checks`."""
    return Part(
        name, about, _module("benchmarks.gpu.checks", name, f"{{out}}/{name}.jsonl"), seconds
    )


def _tests(name: str, about: str, seconds: float, *selection: str, **fields: Any) -> Part:
    """Return a part that runs tests; a rehearsal only collects them."""
    command = _module("pytest", "-v", "-p", "no:cacheprovider", *selection)
    return Part(name, about, command, seconds, ("--collect-only", "-qq"), **fields)


def _engine(runner: str, mode: str, selection: str) -> Part:
    about = f"check 4: engines against the oracle, model runner {runner.upper()}, {mode}"
    chosen = ("tests/gpu/test_engine.py", "-k", f"runner-{runner} and {selection}")
    return _tests(f"engine-{runner}-{mode}", about, 240, *chosen)


_NAMES = (
    "copy", "page_tables", "select", "apportion", "ragged", "statistics", "decode", "sinks",
    "summaries", "sketch", "exchange", "gates", "pooling",
)  # fmt: skip
_KERNELS = tuple(f"tests/gpu/test_{name}.py" for name in _NAMES)

PARTS = (
    Part(
        "environment", "driver, packages, plugin, device",
        _module("benchmarks.gpu.environment", "{out}/environment.jsonl"), 60, needed=True,
    ),
    _check("compile", "check 1: every Triton kernel builds for this device", 90),
    _check("smoke", "a tiny model without graphs, two evictions", 90),
    Part(
        "reach", "an 8B model against stock: decoding, requests at once, eviction's share",
        _module("benchmarks.gpu", "--first", "--results", "{out}/reach", "--minutes", "6.5"), 400,
    ),
    _engine("v2", "graphs", "graphs"),
    _tests(
        "kernels", "check 2: kernels against their references; check 3: FlashAttention over pages",
        400, *_KERNELS, "tests/gpu/test_flash_pages.py",
    ),
    _check("evictions", "check 9: first and later cuts, mixed steps, host against device", 300),
    _engine("v2", "eager", "not graphs"),
    _check("defaults", "check 6: an 8B model at vLLM's defaults, memory, late compilation", 240),
    _check("decode", "check 8: decode steps at many batches, with and without a long one", 240),
    _engine("v1", "graphs", "graphs"),
    _engine("v1", "eager", "not graphs"),
    _tests(
        "features", "check 5: gates, sinks, sleep mode, fp8 caches, resets; both model runners",
        420, "tests/gpu/test_features.py", "tests/gpu/test_reset.py",
    ),
    _tests(
        "mixed", "hybrids and models with windows against their oracles, both model runners", 300,
        "tests/gpu/test_mixed.py",
    ),
    _check("recall", "decode steps while tokens come back from pinned memory, and without", 180),
    _check("memory", "check 10: huge prompts in 97 % of the memory", 240),
    _check("layout", "check 7: stock vLLM in the default layout and in BLHNC", 300),
    _tests(
        "memcheck", "check 2: most of the kernels' tests under compute-sanitizer", 400, *_KERNELS,
        "-k", "not equal and not reference and not any_shares and not large and not 31_values",
        under=("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9"),
        # Each tensor has memory of its own, so that an access beyond its end is seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Part(
        "bench", "make bench-gpu",
        _module("benchmarks.gpu", "--results", "{out}/bench", "--minutes", "8"), 510,
    ),
)  # fmt: skip
"""In the order in which users want to know their results: a call has time for a few."""


def run(part: Part, out: Path, rehearse: bool) -> dict[str, Any]:
    """Run a part for at most its time; whatever it left behind is judged."""
    command = [*part.command, *part.rehearsal] if rehearse else [*part.under, *part.command]
    log = out / f"{part.name}.log"
    (out / f"{part.name}.jsonl").unlink(missing_ok=True)
    shutil.rmtree(out / part.name, ignore_errors=True)
    begin = time.monotonic()
    if part.under and not rehearse and shutil.which(part.under[0]) is None:
        log.write_text(f"{part.under[0]} is not installed\n", encoding="utf-8")
        verdict = "skipped"
    else:
        code = _execute([word.format(out=out) for word in command], part, log)
        verdict = "time limit" if code is None else "failed" if code else "passed"
    text = log.read_text(encoding="utf-8", errors="replace")
    figures = _figures(part, out)
    if "pytest" in command:
        line = r"::.* (PASSED|FAILED|ERROR|SKIPPED) .*\[ *\d+%\]$"
        tests = Counter(re.findall(line, text, re.MULTILINE))
        figures = [f"{number} {word.lower()}" for word, number in tests.items()]
        figures += re.findall(r"^\d+ tests? collected|^\d+/\d+ tests collected", text, re.MULTILINE)
        if verdict == "passed" and not rehearse and not tests["PASSED"]:
            verdict = "failed"  # every test was skipped
    error = [] if verdict == "passed" else _error_lines(text)
    return {
        "verdict": "rehearsed" if rehearse and verdict == "passed" else verdict,
        "seconds": round(time.monotonic() - begin, 1),
        "figures": figures,
        "error": error,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _heed_interrupts() -> None:
    """Undo what a shell does to its background commands, and all they start: ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _execute(command: Sequence[str], part: Part, log: Path) -> int | None:
    """Return the exit code, or None if the time was up; no process of the part is left."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, **own, **part.environment},
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
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
                stock = f" against {row['production']}" if row["production"] else ""
                note = f", {row['note']}" if row["note"] else ""
                figures.append(f"{row['measure']}: {row['ours']}{stock}{note}, target {met}")
    return figures


def _error_lines(text: str) -> list[str]:
    """Return the first lines that tell of an error, or else the last lines."""
    lines = [line.strip()[:240] for line in text.splitlines() if line.strip()]
    error = re.compile(r"(\[rank\d+\]: *)?(E  |ERROR |FAILED |\S*(Error|Exception)\b)")
    return [line for line in lines if error.match(line)][:4] or lines[-4:]


def _write(out: Path, parts: Sequence[Part], results: Results, good: Sequence[str]) -> None:
    """Write the results, and a page of Markdown about them."""
    fresh = out / "results.new"
    fresh.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    fresh.replace(out / "results.json")  # a call that is killed leaves a whole file
    rows, errors = ["| part | verdict | seconds | figures |", "| :-- | :-- | --: | :-- |"], []
    for part in parts:
        if part.name not in results:
            rows.append(f"| {part.name} | not run | | {part.about} |")
            continue
        result = results[part.name]
        figures = "; ".join(result["figures"]).replace("|", "/")
        if len(figures) > 1500:
            figures = figures[:1500] + " ..."
        verdict = result["verdict"] if result["verdict"] in good else f"**{result['verdict']}**"
        rows.append(f"| {part.name} | {verdict} | {result['seconds']:.0f} | {figures} |")
        if result["error"]:
            errors.append(f"{part.name} ({part.about}):\n")
            errors.append("".join(f"    {line}\n" for line in result["error"]))
    text = "\n".join(["# First run on a GPU", "", *rows, "", *errors]).rstrip() + "\n"
    (out / "summary.md").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is due; see the module's docstring for the exit code."""
    options = _parse(arguments, parts)
    deadline = time.monotonic() + 60 * options.minutes
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    state = out / "results.json"
    results: Results = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    good = ("passed", "skipped", *(["rehearsed"] if options.rehearse else []))

    def is_good(part: Part) -> bool:
        return part.name in results and results[part.name]["verdict"] in good

    chosen = [part for part in parts if not options.only or part.name in options.only]
    due = [part for part in chosen if options.again or not is_good(part)]
    due.sort(key=lambda part: part.name in results)  # what failed before comes last
    for part in due:
        left = deadline - time.monotonic()
        if part.seconds + _GRACE_SECONDS > left:
            print(f"{part.name}: left to the next call ({left:.0f} of {part.seconds:.0f} s)")
            continue
        print(f"{part.name}: {part.about} ...", flush=True)
        results[part.name] = result = run(part, out, options.rehearse)
        _write(out, parts, results, good)
        print(f"{part.name}: {result['verdict']} in {result['seconds']:.0f} s", flush=True)
        for line in [*result["figures"], *result["error"]]:
            print(f"    {line}", flush=True)
        if part.needed and not is_good(part):
            print(f"nothing else can pass without {part.name}")
            break
    if all(map(is_good, chosen)):
        print("all passed")
        return 0
    failed = any(part.name in results and not is_good(part) for part in chosen)
    print("some failed" if failed else "not done: call again")
    return 1 if failed else 2


def _parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names, out = [part.name for part in parts], ROOT / "build/gpu-first-run"
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call (default: 9)")
    parser.add_argument("--out", type=Path, default=out, help="folder of all results")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="repeat parts that passed, too")
    collects = "without a GPU: collect the tests, run the other code on tiny sizes"
    parser.add_argument("--rehearse", action="store_true", help=collects)
    options = parser.parse_args(arguments)
    for part in parts:
        needed = (part.seconds + _GRACE_SECONDS) / 60
        if (not options.only or part.name in options.only) and needed > options.minutes:
            parser.error(
                f"--minutes {options.minutes:g}: {part.name} may take {needed:.1f} minutes; "
                "allow more, or leave it out with --only"
            )
    return options


if __name__ == "__main__":
    sys.exit(main())
