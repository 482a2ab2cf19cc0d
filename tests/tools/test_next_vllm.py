# SPDX-License-Identifier: Apache-2.0
"""The folder with the next vLLM's sources over the installed operators."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT
from tools.next_vllm import FOLDER, NEW_REQUIREMENTS, VERSION, assemble
from vllm_tgvkv.plugin import SUPPORTED_VLLM

pytestmark = pytest.mark.apparatus

needs_folder = pytest.mark.skipif(
    not FOLDER.exists(), reason=f"no sources of vLLM {VERSION}: `make next-vllm` downloads them"
)


def test_its_sources_stand_over_the_installed_libraries(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.8.7-any.whl"
    files = {
        "vllm/__init__.py": "value = 'next'",
        "vllm/_C.abi3.so": "of CUDA",
        "vllm/flash/_fa.so": "of CUDA",
        "vllm-9.8.7.dist-info/METADATA": "Metadata-Version: 2.4\nName: vllm\nVersion: 9.8.7\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    installed = tmp_path / "installed"
    (installed / "inner").mkdir(parents=True)
    (installed / "__init__.py").write_text("value = 'installed'")
    (installed / "_C.abi3.so").write_text("of CPU")
    (installed / "inner/_D.so").write_text("of CPU")
    target = tmp_path / "target"
    target.mkdir()
    assemble(wheel, installed, target)
    libraries = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*.so")}
    assert libraries == {"vllm/_C.abi3.so": "of CPU", "vllm/inner/_D.so": "of CPU"}
    code = "import vllm; from importlib.metadata import version; print(vllm.value, version('vllm'))"
    environment = {"PYTHONPATH": str(target)}
    run = [sys.executable, "-S", "-c", code]
    assert subprocess.check_output(run, env=environment, text=True) == "next 9.8.7+cpu\n"


@needs_folder
def test_new_requirements_are_there() -> None:

    (metadata,) = FOLDER.glob("vllm-*.dist-info/METADATA")
    assert f"Version: {VERSION}+cpu\n" in metadata.read_text()
    required = re.findall(r"^Requires-Dist: ([\w.-]+)", metadata.read_text(), flags=re.MULTILINE)
    assert set(NEW_REQUIREMENTS) <= set(required)
    for name in NEW_REQUIREMENTS:
        assert (FOLDER / name).exists()


def test_declared_range_is_that_of_the_check() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r'^dependencies = \["(vllm[^"]*)"', text, flags=re.MULTILINE)
    range_ = Requirement(line).specifier
    first, last = SUPPORTED_VLLM[0], SUPPORTED_VLLM[-1]
    minors = {(0, minor) for minor in range(60) if range_.contains(f"0.{minor}.3")}
    assert minors == set(SUPPORTED_VLLM)
    assert VERSION.startswith("{}.{}.".format(*last))
    for page, text in ((p, (ROOT / p).read_text()) for p in ("Makefile", ".ci/run")):
        assert f"build/vllm-{VERSION}" in text, page
    assert f'version = "{first[0]}.{first[1]}.' in (ROOT / "tools/cpu/pyproject.toml").read_text()
