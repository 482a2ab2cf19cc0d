# SPDX-License-Identifier: Apache-2.0
"""`docs/models.md` against the installed vLLM: which architectures are served or refused."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS
from vllm.platforms import current_platform

from tests.conftest import ROOT

pytestmark = pytest.mark.apparatus

PAGE = (ROOT / "docs/models.md").read_text()
ROWS = [
    (name, section.split("\n", 1)[0], re.split(r" *\| *", line.strip("|").strip()))
    for section in PAGE.split("\n## ")[1:]
    for line in section.splitlines()
    if line.startswith("| ")
    for name in re.findall("`([^`]+)`", line)[: 1 if line.startswith("| `") else None]
]
"""Each architecture, its section and the cells of its row."""


def test_every_architecture_has_one_row_and_the_tested_ones_are_served() -> None:
    assert sorted(name for name, *_ in ROWS) == sorted(_MULTIMODAL_MODELS)
    found = {name.removesuffix("ForConditionalGeneration"): row for name, *row in ROWS}
    tested = (
        "Qwen2_5_VL",
        "Qwen3VL",
        "Qwen3VLMoe",
        "Qwen3_5",
        "Llava",
        "LlavaOnevision",
        "InternVL",
    )
    for name in (*tested, "Gemma3", "Gemma4"):
        section, cells = found[name]
        assert section == "Served"
        assert cells[4].startswith("`"), "its tiny model"
    for name, reason in (
        ("Llama4", "chunked local attention"),
        ("Whisper", "cross attention"),
        ("MiniMaxM3Sparse", "an indexer selects the keys"),
        ("NemotronH_Nano_VL_V2", "state-space models"),
    ):
        section, cells = found[name]
        assert section == "Refused"
        assert reason in cells[3]
    assert found["InternVLChatModel"][0] == "Served"  # its configuration is in architectures.py
    unknown = [cells for _, section, cells in ROWS if section == "Unknown"]
    assert len(unknown) < 5
    assert all(reason for _, reason in unknown)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not current_platform.is_cpu(), reason="the page is of the build for CPU")
def test_the_page_is_of_the_installed_vllm() -> None:
    """If not: python -m docs.write_models. In another process, which loads every model class."""
    code = (
        "from docs.write_models import *; found = tables()\n"
        "print('outdated', [p for p in PAGES if filled(p.read_text(), found) != p.read_text()])"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "outdated []"
