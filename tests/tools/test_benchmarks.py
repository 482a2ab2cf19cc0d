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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks import cuts, report, switched
from benchmarks.bench import Bench, Part
from benchmarks.costs import pool_tokens
from benchmarks.measurement import Line, Target
from benchmarks.probe import Waits
from benchmarks.remote import Remote, RemoteError, TimeUpError
from benchmarks.run import PARTS
from benchmarks.scale import FULL, QUICK, SCALES, SMOKE, Scale
from tests.conftest import ROOT
from vllm_tgvkv.shared.cuts import Ceiling, Cut, plan_cuts

pytestmark = pytest.mark.apparatus

if TYPE_CHECKING:
    from vllm_tgvkv.scheduler.scheduler import EvictionScheduler


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


MEASURES = {
    "costs": "acf",
    "gain": "bd",
    "scheduler": "i",
    "methods": "g",
    "metrics": "h",
    "waiting": "j",
    "cuts": "j",
    "long": "j",
}
"""Letters of what each part measures."""


@pytest.mark.compatibility
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_smoke_run_from_start_to_end(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "--smoke", "--eager"]
    command += ["--only", part, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    ends = {name: run["end"] for name, run in result["parts"].items()}
    assert ends == dict.fromkeys(PARTS, "not run") | {part: "finished"}
    assert {line["part"] for line in result["lines"]} == {part}
    assert {line["measure"][0] for line in result["lines"]} == set(MEASURES[part])
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


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_waits_outlast_what_is_measured(scale: Scale) -> None:
    """A request whose wait ended would be evicted in the middle, and store nothing after it."""
    given, waits = bench(scale), scale.waiting
    steps = switched.STEPS_PER_ROUND * waits.rounds
    for batch, workload in waits.decodes:
        longest = switched.longest_wait(given)
        assert longest > batch + steps
        blocks = -(-(workload.prompt_tokens + longest) // switched.BLOCK_SIZE)
        assert switched.wait_pool(given) // switched.BLOCK_SIZE > batch * blocks
    assert switched.wait_pool(given) > switched.burst_pool(given)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_the_ceiling_cuts_once_in_a_period(scale: Scale) -> None:
    """The scheduler's own plan of cuts is asked, for both engines that have a ceiling."""
    waits, size = scale.cuts, switched.BLOCK_SIZE
    for most, prompt in (
        (waits.ceiling, cuts.ceiling_prompt(waits.ceiling)),
        (waits.long_ceiling, waits.long_prompt.prompt_tokens),
    ):
        ceiling = Ceiling.of(most)
        planned = plan_cuts(prompt, [(0, most // size)], ceiling, size, prompt + 4000)
        cut: Cut | None = planned.first
        assert cut is not None
        assert cut.num_replaced > cut.num_retained, "the prompt is not evicted"
        for _ in range(3):
            later = planned.after(cut)
            assert later is not None
            assert later.at - cut.at == cuts.period(most)
            assert later.num_retained * size == most
            cut = later


def test_the_share_of_cuts_is_what_they_add_to_plain_steps() -> None:
    """Steps of 10 ms; in each period one of 50 ms cuts, the next takes 12 ms, 8 store for 1 ms."""
    tokens = 128
    steps = 2 * tokens
    found: dict[str, list[float]] = {
        "seconds": [0.010] * steps,
        "cuts": [0.0] * steps,
        "stored": [0.0] * steps,
        "eviction": [0.0] * steps,
    }
    for cut in (40, 40 + tokens):
        found["cuts"][cut], found["seconds"][cut], found["eviction"][cut] = 1, 0.050, 0.039
        found["seconds"][cut + 1] = 0.012
        for step in range(cut - 8, cut):
            found["stored"][step], found["seconds"][step] = 1, 0.011
    for first in (0, tokens):
        period = cuts.Period.of(found, first, tokens)
        assert period.plain == 0.010
        assert period.cuts == pytest.approx(0.042)
        assert period.storing == pytest.approx(0.008)
        assert period.evicting == pytest.approx(0.039)
        whole = sum(found["seconds"][first : first + tokens])
        assert period.share == pytest.approx(100 * 0.050 / whole)
    found["stored"] = [1.0] * steps
    with pytest.raises(ValueError, match="every step"):
        cuts.Period.of(found, 0, tokens)


def test_a_long_answer_is_shown_by_hundred_tokens() -> None:
    falling = [100.0 - 10 * number for number in range(8)]
    rates = {"ours": [90.0] * 8, "constrained": falling}
    blocks = {"ours": [20.0] * 8, "constrained": [30.0 + number for number in range(8)]}
    held, speed = cuts.long_lines(bench(), rates, blocks, cuts=48)
    assert [target.met for target in (*held.targets, *speed.targets)] == [True, True]
    text = report.tables(recorded([held, speed]))
    assert "| 800 | 20 | 37 | 90 | 30 |" in text
    assert "last quarter by first: ours 1.000, constrained 0.368" in text
    rates["ours"], blocks["ours"] = falling, [20.0] * 7 + [21.0]
    held, speed = cuts.long_lines(bench(), rates, blocks, cuts=48)
    assert [target.met for target in (*held.targets, *speed.targets)] == [False, False]


def recorded(lines: list[Line]) -> dict[str, Any]:
    """Return the record of a run that gave these lines, as it is read from its file."""
    run = bench()
    run.run({"costs": lambda given: iter(lines)})
    result = report.record(run, "command", 1.0, (0.0, 0.0, 0.0))
    loaded: dict[str, Any] = json.loads(json.dumps(result))
    return loaded


@dataclass
class Requests:
    """What `Waits` uses of a scheduler, and the cuts that its manager was told to expect."""

    cuts: dict[str, Cut | None]
    expected: dict[str, Cut | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = {name: name for name in self.cuts}
        self.candidates = {name: SimpleNamespace(cut=cut) for name, cut in self.cuts.items()}
        self.manager = self

    def expect(self, request: str, cut: Cut | None) -> None:
        self.expected[request] = cut


def test_waits_are_set_aside_and_taken_up_again() -> None:
    first, second = Cut(100, 2, 3), Cut(200, 2, 5)
    scheduler = Requests({"waits": first, "done": None, "ends": second})
    waits = Waits(cast("EvictionScheduler", scheduler))

    def found() -> dict[str, Cut | None]:
        return {name: candidate.cut for name, candidate in scheduler.candidates.items()}

    for _ in range(2):  # a second time changes nothing
        waits.switch(False)
        assert set(found().values()) == {None}
        assert scheduler.expected == {"waits": None, "ends": None}
    del scheduler.candidates["ends"]
    for _ in range(2):
        waits.switch(True)
        assert found() == {"waits": first, "done": None}
        assert scheduler.expected["waits"] == first


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
