# SPDX-License-Identifier: Apache-2.0
"""The tutorials: every command of a page's numbered steps, in order, prints what the page says."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from measure.serving import free_port, process_group
from measure.smollm import WeightsMissingError, find_weights
from reader.assemble import page_model_folder
from tests.conftest import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = 1800
NOT_RUN = ("Install", "Prometheus and Grafana")
"""Steps with tests of their own: `tools/test_install.py` and `tools/test_dashboards.py`."""

SERVED = ("requests", "http", "judge")
"""Pages whose first example asks a server: they ask the quickstart's."""

PART = re.compile(r"^## (\d*)[. ]*(.*?)$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVING = """
vllm() {
  command vllm "$@" --port $PORT > $LOG 2>&1 &
  local server=$!
  disown  # `wait` is for the page's own jobs
  until curl -sf 127.0.0.1:$PORT/health; do kill -0 $server || exit 1; sleep 1; done
}
"""
"""A server runs in the background; the page has it in another terminal."""


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, and the outputs that follow each."""
    found: list[tuple[str, list[str]]] = []
    is_run = is_output = False
    for number, title, language, block in PART.findall((ROOT / f"docs/{page}.md").read_text()):
        if title:
            is_run, is_output = bool(number) and title not in NOT_RUN, False
        elif is_run and language == "":
            found.append((block, []))
            is_output = True
        elif language == "text" and is_output:
            found[-1][1].append(block)
        else:  # a file, such as the method itself
            is_output = False
    return found


def example(page: str) -> str:
    """Return the command that runs a page's first example, a file or commands."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = re.search(r"^```(python|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, page
    language, block = found.groups()
    if language == "bash":
        return block
    return f"cat > /tmp/example.py <<'END'\n{block}END\npython /tmp/example.py\n"


def missing(expected: str, output: str) -> list[str]:
    """Return the lines that an output does not have in this order; `...` is anything."""
    lines = iter(output.splitlines())
    wanted = [line for line in expected.splitlines() if line.strip() != "..."]
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in wanted]
    return [pattern for pattern in patterns if not any(re.search(f"{pattern}$", x) for x in lines)]


@pytest.mark.skipif(find_weights() is None, reason=str(WeightsMissingError()))
@pytest.mark.parametrize("page", ["quickstart", "new_method"])
def test_a_tutorial_runs_as_printed(page: str, tmp_path: Path) -> None:
    """In a copy of the clone, with packages and files of its own, after `make page-model`."""
    page_model_folder()
    clone, site, log = tmp_path / "clone", tmp_path / "site", tmp_path / "server.log"
    clone.mkdir()
    for path in ROOT.iterdir():
        (clone / path.name).symlink_to(path)
    asked = steps(page)
    if page == "quickstart":
        asked.append(("echo '{policy: reach, budget: 0.2}' > /tmp/kv-eviction.yaml\n", []))
        asked += [(example(name), []) for name in SERVED]
    marked = [f"printf '\n=== step\n'\n{command}" for command, _ in asked]
    port, script = free_port(), "\n".join(["set -e", SERVING, *marked])
    script = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{port}", script)
    script = script.replace("/tmp/", f"{tmp_path}/")
    (tmp_path / "page.sh").write_text(script)
    environment = {
        "LOG": str(log),
        "PORT": str(port),
        "VLLM_LOGGING_LEVEL": "INFO",  # other tests of the process may have set it
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "PIP_TARGET": str(site),
        "PIP_NO_DEPS": "1",
    }
    command = ["bash", "-c", f"cd {clone} && . {tmp_path}/page.sh"]
    with process_group(command, tmp_path / "output", environment) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        outputs = (tmp_path / "output").read_text().split("\n=== step\n")[1:]
        served = log.read_text(errors="replace") if log.exists() else ""
        assert process.returncode == 0, f"{outputs[-1][-3000:]}\n{served[-3000:]}"
    for (asked_for, expected), output in zip(asked, outputs, strict=True):
        found = served if "vllm serve" in asked_for else output
        assert [missing(each, found) for each in expected] == [[] for _ in expected], found


def test_a_line_that_is_not_printed_is_found() -> None:
    assert missing("a ... c\n...\nd\n", "x a b c\nd") == []
    assert missing("d\na\n", "a\nd") == ["a"]
    assert missing("a 1", "a 12") == ["a\\ 1"]
