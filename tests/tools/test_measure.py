# SPDX-License-Identifier: Apache-2.0
"""The shared apparatus: its imports, process groups and model folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from measure.folders import written_once
from measure.serving import (
    ServingError,
    flags,
    group_members,
    log_errors,
    process_group,
    serving,
)

pytestmark = pytest.mark.apparatus


@pytest.mark.parametrize("stop_seconds", [0, 600])
def test_a_stopped_group_leaves_no_process(tmp_path: Path, stop_seconds: float) -> None:
    """Also not the children of its leader, one of which ignores Ctrl-C."""
    ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    seconds = 600 if stop_seconds == 0 else 3
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", code, f"{ignore}; print(1, flush=True); time.sleep({seconds})"]
    log = tmp_path / "log"
    with process_group(command, log, stop_seconds=stop_seconds) as process:
        while not log.read_text():
            assert process.poll() is None
        assert len(group_members(process.pid)) == 2
    assert group_members(process.pid) == []


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServingError, match="ended with status 2"),
        serving(["serve", "--no-such-flag"], tmp_path / "log"),
    ):
        pass


def test_errors_of_a_log_are_named_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["all is well", "E ValueError: bad", "ValueError: bad", "the end"]))
    assert log_errors(log).endswith("has:\nValueError: bad")
    log.write_text("\n".join(map(str, range(30))))
    assert log_errors(log).endswith("\n".join(map(str, range(15, 30))))


def test_a_folder_is_written_once_and_completely(tmp_path: Path) -> None:
    written = []

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        written.append(folder)

    def fail(folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space"):
        written_once(tmp_path, "tiny", {"layers": 2}, fail)
    assert list(tmp_path.iterdir()) == []
    first = written_once(tmp_path, "tiny", {"layers": 2}, write)
    assert written_once(tmp_path, "tiny", {"layers": 2}, write) == first
    assert written_once(tmp_path, "tiny", {"layers": 3}, write) != first
    assert len(written) == 2
    assert (first / "config.json").exists()


def test_flags_of_a_command() -> None:
    assert flags({"a": True, "b": 1, "c": {"d": [2]}}) == ["--a", "--b", "1", "--c", '{"d": [2]}']
