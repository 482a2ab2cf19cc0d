# SPDX-License-Identifier: Apache-2.0
"""`docs/models.md` against the installed vLLM: which architectures are served or refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS
from vllm.platforms import current_platform

from tests.conftest import ROOT

pytestmark = pytest.mark.apparatus

PAGE = (ROOT / "docs/models.md").read_text()
ROWS = {
    row[0].strip("`"): (section.split("\n", 1)[0], row)
    for section in PAGE.split("\n## ")[1:]
    for row in (
        re.split(r" *\| *", line.strip("|").strip())
        for line in section.splitlines()
        if line.startswith("| `")
    )
}
"""Section and cells of every architecture."""


def test_every_multimodal_architecture_has_one_row() -> None:
    assert set(ROWS) == set(_MULTIMODAL_MODELS)
    assert len(re.findall(r"^\| `", PAGE, flags=re.MULTILINE)) == len(_MULTIMODAL_MODELS)


def test_families_that_run_in_tests_are_served_and_others_have_their_reason() -> None:
    names = ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Llava", "LlavaOnevision", "InternVL")
    for name in (*names, "Gemma3", "Gemma4"):
        section, cells = ROWS[f"{name}ForConditionalGeneration"]
        assert section == "Served"
        assert cells[4].startswith("`"), "its tiny model"
    for name, reason in (
        ("Llama4ForConditionalGeneration", "chunked local attention"),
        ("WhisperForConditionalGeneration", "cross attention"),
        ("MiniMaxM3SparseForConditionalGeneration", "an indexer selects the keys"),
    ):
        section, cells = ROWS[name]
        assert section == "Refused"
        assert reason in cells[3]
    assert ROWS["InternVLChatModel"][0] == "Unknown"


@pytest.mark.slow
@pytest.mark.skipif(not current_platform.is_cpu(), reason="the page is of the build for CPU")
def test_the_page_is_of_the_installed_vllm(tmp_path: Path) -> None:
    """If not: python -m docs.write_models. In another process, which loads every model class."""
    files = tmp_path / "models.md", tmp_path / "tuning.md"
    code = (
        "import sys; from pathlib import Path; from docs.write_models import *; "
        "found = decisions(); models, tuning = map(Path, sys.argv[1:]); "
        "models.write_text(page(found)); "
        "tuning.write_text(with_gains(TUNING.read_text(), found))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert files[0].read_text() == PAGE
    assert files[1].read_text() == (ROOT / "docs/tuning.md").read_text()
