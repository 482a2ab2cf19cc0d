# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and their tables show what was recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cuts, report, step_costs, switched
from benchmarks.bench import Bench
from benchmarks.costs import pool_tokens
from benchmarks.gain import full_caches
from benchmarks.measurement import Line, Target
from benchmarks.remote import FOLDER, Remote, RemoteError, TimeUpError
from benchmarks.run import PARTS
from benchmarks.scale import FULL, QUICK, SCALES, SMOKE, Scale
from measure.smollm import find_weights
from tests.conftest import ROOT
from vllm_tgvkv.fleet.costs import Step, StepCosts
from vllm_tgvkv.shared.cuts import Ceiling, Cut, plan_cuts

pytestmark = pytest.mark.apparatus
every_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


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
    "gain": "bdo",
    "grid": "s",
    "scheduler": "i",
    "steps": "k",
    "methods": "g",
    "metrics": "h",
    "recall": "l",
    "drafts": "e",
    "ranks": "r",
    "handover": "n",
}
"""Letters of what each part measures; of the others it is j."""
SHORT = ("metrics", "scheduler")
"""Parts whose smoke run is short; others start engines in the same way."""


@pytest.mark.compatibility
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[pytest.mark.nightly] * (p not in SHORT)) for p in PARTS]
)
def test_smoke_run_from_start_to_end(part: str, tmp_path: Path) -> None:
    if part == "handover" and (find_weights() is None or find_spec("nixl") is None):
        pytest.skip("SmolLM2's weights or nixl are not installed")
    command = [sys.executable, "-m", "benchmarks.run", "--smoke", "--eager"]
    command += ["--only", part, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    ends = {name: run["end"] for name, run in result["parts"].items()}
    assert ends == dict.fromkeys(PARTS, "not run") | {part: "finished"}
    assert {line["part"] for line in result["lines"]} == {part}
    assert {line["measure"][0] for line in result["lines"]} == set(MEASURES.get(part, "j"))
    assert report.tables(result) in done.stdout
    assert "leak" not in done.stderr  # libraries' last words stand in the engines' log


@every_scale
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


@every_scale
def test_waits_outlast_what_is_measured(scale: Scale) -> None:
    """A request whose wait ended would be evicted in the middle, and store nothing after it."""
    given, waits, size = bench(scale), scale.waiting, switched.BLOCK_SIZE
    longest = switched.longest_wait(given)
    for batch, workload in waits.decodes:
        assert longest > batch + switched.STEPS_PER_ROUND * waits.rounds
        blocks = -(-(workload.prompt_tokens + longest) // size)
        assert switched.wait_pool(given) // size > batch * blocks
    assert switched.wait_pool(given) > full_caches(given, size)


@every_scale
def test_the_ceiling_cuts_once_in_a_period(scale: Scale) -> None:
    """The scheduler's own plan of cuts is asked."""
    most, prompt, size = scale.cuts.ceiling, scale.cuts.prompt.prompt_tokens, switched.BLOCK_SIZE
    longest = prompt + 5 * cuts.period(most)
    planned = plan_cuts(prompt, [(0, most // size)], Ceiling.of(most), size, longest)
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
    """Steps of 10 ms; one of 50 ms cuts, the next takes 12 ms, and 8 store for 1 ms each."""
    steps = 128
    found = {"seconds": [0.010] * steps, "cuts": [0.0] * steps, "stored": [0.0] * steps}
    found["cuts"][40], found["seconds"][40], found["seconds"][41] = 1, 0.050, 0.012
    for step in range(32, 40):
        found["stored"][step], found["seconds"][step] = 1, 0.011
    assert cuts.share_of_cuts(found) == pytest.approx(100 * 0.050 / sum(found["seconds"]))
    found["stored"] = [1.0] * steps
    with pytest.raises(ValueError, match="every step"):
        cuts.share_of_cuts(found)


def test_a_long_answer_stays_in_its_blocks_and_keeps_its_speed() -> None:
    def turns(rates: list[float], blocks: list[float]) -> list[dict[str, list[float]]]:
        return [
            {"seconds": [8 / rate], "blocks": [8 * held]}
            for rate, held in zip(rates, blocks, strict=True)
        ]

    falling = [100.0 - 10 * number for number in range(8)]
    stock = turns(falling, [30.0 + number for number in range(8)])
    for rates, blocks, met in (
        ([90.0] * 8, [21.0] * 8, True),
        (falling, [21.0] * 7 + [22.0], False),
    ):
        found = {"ours": turns(rates, blocks), "constrained": stock}
        held, speed = cuts.long_lines(bench(), found)
        assert [target.met for target in (*held.targets, *speed.targets)] == [met, met]
        assert held.rounds["constrained"][-1] == 37
        assert f"ours {1 if met else 0.368:.3f}, constrained 0.368" in speed.notes


@pytest.mark.parametrize(
    ("scale", "parts", "only", "ends"),
    [
        (FULL, (fails, one_line), (), ["failed", "finished"]),
        (FULL, (takes_too_long, one_line), (), ["time is up", "not run"]),
        (QUICK, (one_line, one_line), (), ["finished", "not run"]),
        (QUICK, (one_line, one_line), ("methods",), ["not run", "finished"]),
    ],
)
def test_parts_end_and_keep_their_lines(
    scale: Scale, parts: tuple[Any, Any], only: tuple[str, ...], ends: list[str]
) -> None:
    """A part that fails leaves the others alone; only the full sizes have targets."""
    run, names = bench(scale), ("costs", "methods")
    run.run(dict(zip(names, parts, strict=True)), only)
    assert [ending.end for ending in run.endings.values()] == ends
    ran = [name for name, end in zip(names, ends, strict=True) if end != "not run"]
    assert [line.part for line in run.lines] == ran
    assert run.failed == ("failed" in ends)
    assert {len(line.targets) for line in run.lines} == {int(scale.has_targets)}
    result = json.loads(json.dumps(report.record(run, "command", 1.0, (0.0, 0.0, 0.0))))
    text = report.tables(result)
    for name, end in zip(names, ends, strict=True):
        assert re.search(f"- {end}: .*{name}", text)
    assert "| a. speed, s | 1 | production 2 | production 2.000 |" in text


def test_remote_objects_answer_fail_and_are_killed_at_the_deadline(tmp_path: Path) -> None:
    remote = Remote("event", threading.Event)
    try:
        remote.wait_until_built()
        assert remote.ask("wait", timeout=0.01) is False
        with pytest.raises(RemoteError, match="no attribute 'fail'"):
            remote.ask("fail")
    finally:
        remote.close()
    lost = Remote("lost", os.abort, log=(log := tmp_path / "log"))
    with pytest.raises(RemoteError, match=f"lost ended with exit code -6; the end of {log}"):
        lost.wait_until_built()
    lost.close()
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
    assert ROOT / "build" in FOLDER.parents  # other runs leave none there


def test_costs_of_steps_are_found() -> None:
    """From steps that cost exactly that; one cost is none, and no cost is negative."""
    costs = StepCosts(host=2e-3, weights=0, token=1e-5, pair=1e-9, read=1e-12, row=0)
    steps = [
        Step(tokens=float(n), pairs=float(n * n * k), read=1e8 * k * (n % 3), rows=float(k))
        for n in (1, 16, 100, 512, 2000)
        for k in (1, 2, 5)
    ]
    found, error = step_costs.fit([(each, costs.seconds(each)) for each in steps])
    assert error < 1e-6
    assert found == pytest.approx({name: getattr(costs, name) for name in step_costs.NAMES})
    assert min(found.values()) >= 0
