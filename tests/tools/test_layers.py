# SPDX-License-Identifier: Apache-2.0
"""The order of layers in pyproject.toml: the contracts hold, cover every package, and can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.apparatus


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the `pyproject.toml` in a folder."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_lower_layers_import_no_higher_ones() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_package_is_looked_at() -> None:
    """`kernels` and `server` are part of `vllm_tgvkv`, through links in it."""
    (names,) = re.findall(
        r"^root_packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"kernels", "server"}
    assert set(re.findall(r'"(\w+)"', names)) == packages


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("vllm_tgvkv/kernels/select.py", "vllm_tgvkv.cache.pages", "Layers of the plugin"),
        (
            "vllm_tgvkv/scheduler/scheduler.py",
            "vllm_tgvkv.worker.evictor",
            "scheduler's side does not",
        ),
        ("vllm_tgvkv/policies/tgv.py", "vllm.envs", "do not know vLLM"),
        ("oracle/methods.py", "vllm_tgvkv.config.server", "shares no code"),
        ("vllm_tgvkv/newcomer.py", "vllm_tgvkv.shared.errors", "newcomer"),
    ],
)
def test_a_wrong_import_is_noticed(
    tmp_path: Path, module: str, imported: str, contract: str
) -> None:
    """In a folder of links to the repository in which one file is another."""
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    for package in {path.parent for path in ROOT.glob("*/__init__.py")}:
        (tmp_path / package.name).mkdir()
        link_files(package, tmp_path / package.name)
    changed = tmp_path / module
    text = changed.read_text() if changed.exists() else ""
    changed.unlink(missing_ok=True)
    changed.write_text(f"{text}\nimport {imported}\n")
    run = lint_imports(tmp_path)
    assert run.returncode == 1, run.stderr
    assert contract in run.stdout.split("Broken contracts")[-1]


def link_files(source: Path, target: Path) -> None:
    """Link a package's modules one by one, those of its subpackages too."""
    for path in source.iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            (target / path.name).mkdir()
            link_files(path, target / path.name)
        elif path.suffix == ".py":
            (target / path.name).symlink_to(path.resolve())
