# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks run on tiny sizes, and their table judges what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.kernels import SMOKE as SMOKE_SIZES
from benchmarks.gpu.kernels import Kernels
from benchmarks.gpu.plan import SMOKE, engine_plans
from benchmarks.gpu.report import SMOKE_NOTICE, table
from tests.conftest import ROOT, has_cuda

KERNELS = {"part": "kernels", "bytes": 100, "note": "", "error": 1e-3}
OURS = {"shape": "M", "arm": "ours", "part": "M, ours"}
PRODUCTION = {"shape": "M", "arm": "production", "part": "M, production"}


@pytest.mark.nightly
@pytest.mark.engine
def test_smoke_run_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith(SMOKE_NOTICE)
    (json_file,) = tmp_path.glob("*-gpu-smoke.json")
    (markdown_file,) = tmp_path.glob("*-gpu-smoke.md")
    record = json.loads(json_file.read_text())
    assert record["notice"] == SMOKE_NOTICE
    assert all(end.startswith("done") for end in record["parts"].values()), record["parts"]
    assert len(record["parts"]) == 1 + len(SMOKE.setups)
    for plan in engine_plans(SMOKE):
        found = [e["phase"] for e in record["entries"] if e["part"] == plan.title]
        assert found == ["start", *(phase.name for phase in plan.phases())]
    rows = {row["measure"]: row for row in record["rows"]}
    assert any(name.endswith("memory scarce") and row["target"] for name, row in rows.items())
    evicted = next(row for name, row in rows.items() if name.endswith("requests evicted"))
    assert int(evicted["ours"]) > 0
    assert all(row["ours"] != "FAILED" for row in rows.values())
    assert all(name in markdown_file.read_text() for name in rows)


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--results", str(tmp_path)])
    assert main() == 1
    assert "No CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_targets_are_judged_against_production() -> None:
    def scarce(arm: dict[str, str], rate: float, running: int) -> dict[str, object]:
        values = {"output_tokens_per_second": rate, "peak_running": running, "evicted": 5}
        return {**arm, "phase": "scarce", "values": values, "arguments": {}}

    rows = table([scarce(PRODUCTION, 100.0, 4), scarce(OURS, 320.0, 27)])
    assert [row.target and row.target.met for row in rows] == [True, False, None]
    assert rows[0].note == "3.200 x production"

    def ample(arm: dict[str, str], rate: float | None) -> dict[str, object]:
        values = {"decode_tokens_per_second": rate, "ideal": 2.0}
        return {**arm, "phase": "ample", "values": values, "arguments": {}}

    for ours, met in ((172.0, True), (168.0, False)):
        row, _ = table([ample(PRODUCTION, 100.0), ample(OURS, ours)])
        assert row.target is not None
        assert row.target.met is met  # 0.85 of what bytes allow
    (row,) = table([ample(PRODUCTION, 100.0), ample(OURS, None)])
    assert row.measure.endswith("requests evicted")
    # Nothing to compare with: no verdict.
    assert [row.target for row in table([scarce(OURS, 320.0, 27)])] == [None, None, None]


def test_our_kernels_are_judged_as_they_are_launched() -> None:
    def case(name: str, seconds: float, error: float = 1e-3) -> dict[str, object]:
        share = 1e-4 / seconds
        return {**KERNELS, "name": name, "seconds": seconds, "share": share, "error": error}

    rows = table(
        [
            {"part": "kernels", "name": "copy bandwidth", "bandwidth": 3e12},
            case("decode attention, ragged, our kernel", 1.1e-4),
            case("decode attention, ragged, other", 1e-4, error=float("nan")),
            case("decode attention, uniform, FlashAttention over pages", 1.1e-4),
            case("decode attention, uniform, FlashAttention stock cache", 1e-4),
            {"part": "kernels", "name": "copy", "failed": "Traceback\nValueError: no"},
        ]
    )
    assert [row.target and row.target.met for row in rows] == [None, True, None, False, None, None]
    assert "WRONG RESULT" in rows[2].ours
    assert (rows[-1].ours, rows[-1].note) == ("FAILED", "ValueError: no")


def test_cases_of_attention_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch stands in for FlashAttention, so that its arguments are tested without a GPU."""
    from tests.engine.flash_on_cpu import attend

    cases = Kernels(SMOKE_SIZES, "cpu")
    flash = partial(attend, causal=True, max_seqlen_q=1)
    monkeypatch.setattr(cases, "_flash_attention", lambda: flash)
    errors = {}
    for ragged in (True, False):
        for case in cases.decode_attention(ragged=ragged):
            case.call()
            errors[case.name] = case.error() if case.error else 0.0
    names = "\n".join(errors)
    assert sum("FlashAttention" in name for name in errors) == 6, names
    assert sum("our kernel" in name for name in errors) == 2, names
    assert all(error < 0.01 for error in errors.values()), errors
