# SPDX-License-Identifier: Apache-2.0
"""`make bench` runs from start to end, reports what it skipped, and the page shows its records."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.bench import Bench, Part
from benchmarks.costs import pool_tokens
from benchmarks.measurement import Line, Target
from benchmarks.remote import Remote, RemoteError, TimeUpError
from benchmarks.run import PARTS
from benchmarks.scale import FULL, QUICK, SCALES, SMOKE, Scale
from tests.conftest import ROOT


def bench(scale: Scale = FULL, block_size: int = 128, seconds: float = 60.0) -> Bench:
    return Bench(scale, "", block_size, True, lambda text: None, time.monotonic() + seconds)


def one_line(given: Bench) -> Iterator[Line]:
    line = Line("a. speed", "s", "lower", {"ours": [1.0], "production": [2.0]})
    line.targets.append(Target(">= 1", 2.0, 1.0))
    yield line


def fails(given: Bench) -> Iterator[Line]:
    yield from one_line(given)
    raise RemoteError("the engine is gone")


def takes_too_long(given: Bench) -> Iterator[Line]:
    yield from one_line(given)
    given.deadline = time.monotonic()
    raise TimeUpError


@pytest.mark.compatibility
@pytest.mark.engine
@pytest.mark.slow
def test_smoke_run_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "--smoke", "--eager"]
    command += ["--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert {name: part["end"] for name, part in result["parts"].items()} == dict.fromkeys(
        PARTS, "finished"
    )
    assert {line["part"] for line in result["lines"]} == set(PARTS)
    assert {line["measure"][0] for line in result["lines"]} == set("abcdefghi")
    assert report.tables(result) in done.stdout


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_known_parts_are_run(scale: Scale) -> None:
    assert set(scale.parts) <= set(PARTS)
    assert set(FULL.parts) == set(SMOKE.parts) == set(PARTS)


@pytest.mark.parametrize("scale", [FULL, QUICK])
@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
def test_the_pool_holds_all_requests_to_the_last_step(scale: Scale, block_size: int) -> None:
    """The pool of `costs` was once too small for 32 requests and all steps of line f."""
    size = max(block_size, 128)
    batch = max(scale.overhead_batches)
    steps = scale.rounds * scale.overhead_steps
    longest = scale.overhead.prompt_tokens + batch + steps  # as many steps as prompts to fill
    assert pool_tokens(bench(scale, block_size)) // size >= batch * -(-longest // size) + 1


def test_a_part_that_fails_keeps_its_lines_and_leaves_the_others() -> None:
    run = bench()
    run.run({"costs": fails, "gain": one_line})
    assert [line.part for line in run.lines] == ["costs", "gain"]
    assert [ending.end for ending in run.endings.values()] == ["failed", "finished"]
    assert run.failed


def test_parts_after_the_deadline_do_not_run() -> None:
    run = bench()
    run.run({"costs": takes_too_long, "gain": one_line})
    assert [line.part for line in run.lines] == ["costs"]
    assert [ending.end for ending in run.endings.values()] == ["time is up", "not run"]
    assert not run.failed


def test_only_named_parts_run() -> None:
    parts: dict[str, Part] = {"costs": one_line, "methods": one_line}
    for scale, only, wanted in (
        (QUICK, (), ["finished", "not run"]),
        (QUICK, ("methods",), ["not run", "finished"]),
        (FULL, (), ["finished", "finished"]),
    ):
        run = bench(scale)
        run.run(parts, only)
        assert [ending.end for ending in run.endings.values()] == wanted


def test_targets_belong_to_the_full_sizes() -> None:
    for scale, count in ((FULL, 1), (QUICK, 0)):
        run = bench(scale)
        run.run({"costs": one_line})
        assert len(run.lines[0].targets) == count


def test_remote_objects_answer_fail_and_are_killed_at_the_deadline() -> None:
    remote = Remote("event", threading.Event)
    try:
        remote.wait_until_built()
        assert remote.ask("wait", timeout=0.01) is False
        with pytest.raises(RemoteError, match="no attribute 'fail'"):
            remote.ask("fail")
    finally:
        remote.close()
    late = Remote("late", threading.Event)
    try:
        late.wait_until_built()
        late._deadline = time.monotonic() + 0.1
        with pytest.raises(TimeUpError, match="late"):
            late.ask("wait", timeout=3600)
    finally:
        late.close()
    assert late._process.exitcode == -signal.SIGKILL


def test_tables_of_the_page_are_those_of_their_records() -> None:
    """`python -m benchmarks.report` makes them."""
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.page(text)
    marked = re.findall(r"<!-- results: (\S+)", text)
    assert sorted({*marked}) == sorted(path.name for path in report.RESULTS.glob("*.json"))


def test_the_page_shows_which_parts_ran() -> None:
    run = bench(QUICK)
    run.run({"costs": fails, "gain": one_line, "methods": one_line})
    result = report.record(run, "command", 1.0, (0.0, 0.0, 0.0))
    text = report.tables(json.loads(json.dumps(result)))
    assert "- failed: costs" in text
    assert "- finished: gain" in text
    assert "- not run: methods" in text
    assert "a. speed, s | 1 | 2 |  | 2.000 [2.000 .. 2.000]" in text
