# SPDX-License-Identifier: Apache-2.0
"""The CPU set-up of tools/cpu and the installed packages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from measure.messages import image_part, png_url, text_part
from measure.serving import serving
from tests.conftest import ROOT, default_environment
from tests.models import random_image

pytestmark = pytest.mark.apparatus

needs_cpu_setup = pytest.mark.skipif(
    importlib.util.find_spec("vllm_cpu_setup") is None, reason="tools/cpu is not installed"
)


@needs_cpu_setup
@pytest.mark.parametrize(
    "code",
    [
        "import torchvision.transforms.v2",
        "import torchaudio",
        "try: import torchcodec\nexcept (ImportError, RuntimeError): pass",  # as vLLM expects
        # Neither the start of Python nor a look-up of torchvision may import torch.
        "import sys, importlib.util as u\n"
        "assert u.find_spec('torchvision')\n"
        "assert 'torch' not in sys.modules and 'torchvision' not in sys.modules",
    ],
)
def test_companions_of_torch_can_be_imported_and_cost_nothing_before(code: str) -> None:
    assert version("vllm") == version("vllm-cpu") + "+cpu"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@needs_cpu_setup
def test_hook_stands_aside_where_torchvision_works(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_cpu_setup

    executed: list[ModuleType] = []
    package = ModuleType("torchvision")
    package.__path__ = []
    monkeypatch.setattr(vllm_cpu_setup, "_declarations", [])
    monkeypatch.setattr(vllm_cpu_setup, "native_library_loads", lambda locations: True)
    vllm_cpu_setup.run_torchvision(executed.append, package)
    assert executed == [package]
    assert not vllm_cpu_setup._declarations


def test_environment_is_exported_by_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    exported = " ".join(re.findall(r"^export (.*)$", makefile, flags=re.MULTILINE)).split()
    assert sorted(exported) == sorted(default_environment())


@needs_cpu_setup
@pytest.mark.engine
@pytest.mark.slow
def test_stock_server_answers_about_a_png(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The `vllm` command works, and the set-up reaches the server and its engine process."""
    content = [image_part(png_url(random_image(0, 112, 84))), text_part("What is this?")]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    arguments = ["serve", str(tiny_model()), "--served-model-name", "tiny"]
    arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    with serving(arguments, tmp_path / "server.log") as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8
