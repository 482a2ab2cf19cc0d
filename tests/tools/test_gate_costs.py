# SPDX-License-Identifier: Apache-2.0
"""The benchmark of gates: what it counts, and a run in tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gates

pytestmark = pytest.mark.apparatus


def test_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the sizes of Qwen3-VL-8B, written out; and `docs/gates.md` has them."""
    gates.main(["--only", "counts"])
    found = capsys.readouterr().out
    layer = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 12288
    read = 2 * (36 * layer + 4096 * 151936)
    inner = 4096 * 512 + 512
    last = 512 * 8 + 8
    page = Path(__file__).parents[2].joinpath("docs", "gates.md").read_text(encoding="utf-8")
    for name, of_inner, of_last in (
        ("TrimKV", inner, last),
        ("DBTrimKV", inner + 512 * 512 + 512, last),
        ("KVzap, a hidden layer", inner, last),
        ("KVzap, linear", 0, 4096 * 8 + 8),
    ):
        stored = 36 * (2 * of_inner + 4 * of_last)
        shares = (36 * (of_inner + of_last) / (36 * layer), stored / read, 4 / (2 * 128 * 2))
        cells = [name, f"{stored / 2**20:.1f}", *(f"{100 * share:.2f} %" for share in shares)]
        row = f"| {' | '.join(cells)} |"
        assert row in found
        assert row in page
        assert max(shares[:2]) < 0.02  # the aim


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_in_tiny_sizes() -> None:
    options = ["--only", "times", "--smoke", "--rounds", "1", "--tokens", "300"]
    command = [sys.executable, "-m", "benchmarks.gates", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("DBTrimKV", "KVzap, linear"):
        assert f"| {name} | " in done.stdout
