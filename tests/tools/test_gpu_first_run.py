# SPDX-License-Identifier: Apache-2.0
"""The first run on a GPU: its runner over quick made-up parts, and the real parts' commands."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu.checks import CHECKS
from tests.conftest import ROOT, has_cuda
from tools import gpu_first_run
from tools.gpu_first_run import PARTS, Part

pytestmark = pytest.mark.apparatus

FAILS = "print('start'); print('E   assert 1 == 2'); raise SystemExit(3)"


def python(name: str, code: str, seconds: float = 30.0, **fields: Any) -> Part:
    return Part(name, f"about {name}", [sys.executable, "-c", code], seconds, **fields)


def counted(name: str, code: str = "", **fields: Any) -> Part:
    """Return a part that appends a letter to a file each time it runs."""
    return python(name, f"open(r'{{out}}/{name}.runs', 'a').write('x')\n{code}", **fields)


Call = Callable[..., int]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def call(out: Path) -> Call:
    """Return a function that calls the tool with made-up parts; it returns the exit code."""
    return lambda *arguments, parts: gpu_first_run.main(["--out", str(out), *arguments], parts)


def results(out: Path) -> dict[str, dict[str, Any]]:
    return json.loads((out / "results.json").read_text())


def verdicts(out: Path) -> dict[str, str]:
    return {name: result["verdict"] for name, result in results(out).items()}


def runs(out: Path, *names: str) -> list[int]:
    paths = [out / f"{name}.runs" for name in names]
    return [len(path.read_text()) if path.exists() else 0 for path in paths]


def test_parts_that_passed_are_not_repeated(call: Call, out: Path) -> None:
    """And what has not run comes before what failed."""
    parts = [counted("bad", FAILS), counted("good")]
    assert call("--only", "bad", parts=parts) == 1
    assert call(parts=parts) == 1
    assert verdicts(out) == {"bad": "failed", "good": "passed"}
    assert results(out)["good"]["ended"] <= results(out)["bad"]["ended"]
    parts[0] = counted("bad")  # repaired
    assert call(parts=parts) == 0
    assert runs(out, "bad", "good") == [3, 1]
    assert call("--again", "--only", "good", parts=parts) == 0
    assert runs(out, "bad", "good") == [3, 2]


def test_a_call_starts_no_part_that_may_not_end_in_it(
    call: Call, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        counted("slow", "import time; time.sleep(2)", seconds=50),
        counted("long", seconds=54),
        counted("short", seconds=20),
    ]
    assert call("--minutes", "1", parts=parts) == 2
    assert verdicts(out) == {"slow": "passed", "short": "passed"}
    assert "long: left to the next call" in capsys.readouterr().out
    assert "| long | not run |" in (out / "summary.md").read_text()
    assert call("--minutes", "1", parts=parts) == 0
    assert runs(out, "slow", "long", "short") == [1, 1, 1]


HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(r"{out}/pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
print("hangs", flush=True)
time.sleep(600)
"""


def test_a_part_that_hangs_is_killed_with_its_children(
    call: Call, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it ignores interrupts; what it printed is kept, and the next part runs."""
    monkeypatch.setattr(gpu_first_run, "_GRACE_SECONDS", 0.5)
    begin = time.monotonic()
    assert call(parts=[python("hangs", HANGS, seconds=3), counted("next")]) == 1
    assert time.monotonic() - begin < 25
    assert verdicts(out) == {"hangs": "time limit", "next": "passed"}
    assert results(out)["hangs"]["error"] == ["hangs"]
    for pid in map(int, (out / "pids").read_text().split()):
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_nothing_runs_after_a_needed_part_failed_and_a_rehearsal_is_no_result(
    call: Call, out: Path
) -> None:
    assert call(parts=[counted("needed", FAILS, needed=True), counted("next")]) == 1
    assert runs(out, "needed", "next") == [1, 0]
    part = python("part", "import sys; print('ERROR', sys.argv); sys.exit('--smoke' in sys.argv)")
    assert call("--rehearse", parts=[part]) == 1  # the rehearsal's words are added
    assert call(parts=[part]) == 0
    assert call("--rehearse", "--again", parts=[replace(part, rehearsal=())]) == 0
    assert verdicts(out)["part"] == "rehearsed"
    assert call(parts=[part]) == 0
    assert verdicts(out)["part"] == "passed"


def test_the_summary_has_figures_and_first_errors(call: Call, out: Path) -> None:
    entry = json.dumps({"figure": "decode, ms", "value": 6.5}).replace("{", "{{").replace("}", "}}")
    figure = f"open(r'{{out}}/decode.jsonl', 'a').write('''{entry}\\n{{{{\"figure\": \"cut''')"
    names = "measure", "ours", "production", "note", "met"
    rows = [
        dict(zip(names, row, strict=True))
        for row in (
            ("scarce", "320", "100", "3.2 x production", True),
            ("share", "1", "", "", False),
            ("other", "1", "", "", None),
        )
    ]
    table = str({"rows": rows}).replace("{", "{{").replace("}", "}}")
    bench = (
        "import json, pathlib; folder = pathlib.Path(r'{out}/bench'); folder.mkdir()\n"
        f"(folder / 'x.json').write_text(json.dumps({table}))"
    )
    parts = [python("decode", figure), python("bench", bench), python("bad", FAILS)]
    assert call(parts=parts) == 1
    summary = (out / "summary.md").read_text()
    assert re.search(r"^\| decode \| passed \| \d+ \| decode, ms: 6.5 \|$", summary, re.M), summary
    found = "scarce: 320 against 100, 3.2 x production, target met; share: 1, target MISSED"
    assert f"| {found} |" in summary
    assert "| bad | **failed** |" in summary
    assert "bad (about bad):\n\n    E   assert 1 == 2" in summary


@pytest.mark.parametrize(
    ("body", "verdict", "figures"),
    [
        ("def test_a(): pass\ndef test_b(): pass", "passed", ["2 passed"]),
        ("def test_a(): pass\ndef test_b(): assert 0", "failed", ["1 passed", "1 failed"]),
        ("import pytest\ndef test_a(): pytest.skip('no')", "failed", ["1 skipped"]),
        ("x = 1", "failed", []),
    ],
)
def test_tests_are_counted_and_must_run(
    call: Call, out: Path, tmp_path: Path, body: str, verdict: str, figures: list[str]
) -> None:
    """A part whose every test is skipped, or that has none, did not pass."""
    path = tmp_path / "test_made_up.py"
    path.write_text(body)
    call(parts=[gpu_first_run._tests("tests", "", 60, str(path))])
    (result,) = results(out).values()
    assert (result["verdict"], result["figures"]) == (verdict, figures)


def test_every_check_is_a_part_and_fits_a_call() -> None:
    checks = {word for part in PARTS for word in part.command if word in CHECKS}
    assert checks == CHECKS.keys() - {"stock"}  # which `layout` runs
    assert len({part.name for part in PARTS}) == len(PARTS)
    about = " ".join(part.about for part in PARTS)
    assert all(f"check {number}:" in about for number in range(1, 11))
    page = (ROOT / "docs/benchmarks.md").read_text().partition("## First run on a GPU")[2]
    told = re.findall(r"^\| ([\w-]+) \| (\d+) \|", page, re.MULTILINE)
    assert told == [(part.name, f"{part.seconds:g}") for part in PARTS]
    gpu_first_run._parse([], PARTS)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_selection_of_tests_finds_some(out: Path) -> None:
    """The engine's parts together are their whole file, each test once."""
    tests = [part for part in PARTS if "pytest" in part.command]
    names = [part.name for part in tests]
    assert len(names) == 8
    options = ["--rehearse", "--minutes", "60", "--out", str(out), "--only", *names]
    assert gpu_first_run.main(options) == 0
    for part in tests:
        (figure,) = results(out)[part.name]["figures"]
        selected = int(re.split(r"\D", figure)[0])
        assert selected > 3, (part.name, figure)
        assert ("-k" in part.command) == ("/" in figure), (part.name, figure)
    logs = [(out / f"{name}.log").read_text() for name in names if name.startswith("engine-")]
    found = re.findall(r"^tests/gpu/test_engine.py::.*$", "\n".join(logs), re.MULTILINE)
    (whole,) = {int(n) for log in logs for n in re.findall(r"^\d+/(\d+) tests", log, re.MULTILINE)}
    assert len(found) == len(set(found)) == whole


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_without_a_gpu_the_environment_says_what_is_missing(out: Path) -> None:
    assert gpu_first_run.main(["--out", str(out), "--only", "environment"]) == 1
    (result,) = results(out).values()
    assert result["verdict"] == "failed"
    assert any("device" in line for line in result["error"])
    assert any(figure.startswith("vllm: 0.32") for figure in result["figures"])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name",
    [
        "evictions",
        *(
            pytest.param(name, marks=pytest.mark.compatibility)
            for name in ("smoke", "reach", "defaults", "layout", "decode", "recall", "memory")
        ),
    ],
)
def test_every_check_runs_on_tiny_sizes(out: Path, name: str) -> None:
    code = gpu_first_run.main(["--rehearse", "--out", str(out), "--only", name])
    (result,) = results(out).values()
    assert code == 0, result["error"]
    assert len(result["figures"]) >= 2
