# SPDX-License-Identifier: Apache-2.0
"""The public Python interface: the lines of docs/python.md in a real engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError

import vllm_tgvkv
from tests.conftest import ROOT
from tests.engine import running  # noqa: F401  sets the environment of engines
from tests.models import random_image
from vllm_tgvkv import api
from vllm_tgvkv.config.request import REQUEST_KEYS, RequestOptions
from vllm_tgvkv.config.server import EvictionConfig

NAMES = (
    "CutReport",
    "EvictionConfigError",
    "EvictionOptions",
    "EvictionReport",
    "KeptTokens",
    "MemoryReport",
    "UnsupportedByEvictionError",
    "kept_tokens",
    "method_names",
    "report_of",
)
"""The public names. One that goes or changes its meaning is a new major version."""


def test_public_names_are_frozen() -> None:
    assert api.__all__ == vllm_tgvkv.__all__ == NAMES
    for name in NAMES:
        assert getattr(vllm_tgvkv, name) is getattr(api, name)
        assert name in dir(vllm_tgvkv)
    with pytest.raises(AttributeError, match="no attribute 'kept'"):
        _ = vllm_tgvkv.kept


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, vllm_tgvkv; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_options_cover_every_key_of_a_request() -> None:
    more = {"protect": "system", "protected_tokens": 90, "recall": False}
    full = api.EvictionOptions(
        "snapkv", 0.25, 3, "8:0.3", 512, "always", report=True, trace=True, **more
    ).extra_args()
    assert full == {
        "kv_eviction": "snapkv",
        "kv_eviction_budget": 0.25,
        "kv_eviction_defer": 3,
        "kv_eviction_schedule": "8:0.3",
        "kv_eviction_max_tokens": 512,
        "kv_eviction_when": "always",
        "kv_eviction_report": 1,
        "kv_eviction_trace": 1,
        "kv_eviction_protect": "system",
        "kv_eviction_protected_tokens": 90,
        "kv_eviction_recall": 0,
    }
    assert set(full) == set(REQUEST_KEYS)
    options = api.EvictionOptions("snapkv", 0.25, 3, trace=True).extra_args()
    config = EvictionConfig.from_mapping({"policy": "tgv", "budget": 0.5})
    resolved = RequestOptions.resolve(config, options)
    assert (resolved.policy, resolved.budget.fraction, resolved.defer) == ("snapkv", 0.25, 3)
    assert resolved.report
    assert resolved.trace
    plain = api.EvictionOptions(report=False).extra_args()
    assert plain == {"kv_eviction_report": 0, "kv_eviction_trace": 0}
    assert RequestOptions.resolve(config, plain) == RequestOptions.resolve(config, None)
    with pytest.raises(vllm_tgvkv.EvictionConfigError, match="did you mean snapkv"):
        RequestOptions.resolve(config, api.EvictionOptions("snapkb").extra_args())


def write_example(tiny_model: Callable[..., Path], folder: Path) -> Path:
    """Write the page's file, and a tiny model and an image where it finds the page's own."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    (folder / "build/models").mkdir(parents=True)
    model = tiny_model(image_size=224)  # 256 tokens of vision
    (folder / "build/models/page-reader-tiny").symlink_to(model)
    (folder / "build/demo").mkdir()
    random_image(1, 224, 224).save(folder / "build/demo/page.png")
    (folder / "example.py").write_text(lines)
    return folder / "example.py"


@pytest.mark.apparatus
@pytest.mark.engine
@pytest.mark.slow
def test_the_page_runs_as_a_file(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Where processes read it again, and nothing says how much memory the pool may have."""
    example = write_example(tiny_model, tmp_path)
    variables = {**os.environ, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        variables.pop(name, None)
    ended = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "EvictionReport(policy='reach', prompt_tokens=" in ended.stdout
    assert "vision tokens per head" in ended.stdout


@pytest.mark.engine
@pytest.mark.slow
def test_the_lines_of_the_page_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """What they print is right, and what they find agrees with the worker's own record.

    A tiny model stands where the page's model would.
    """
    lines = write_example(tiny_model, tmp_path).read_text()
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(lines, found)
        llm, output, kept = found["llm"], found["output"], found["kept"]
        printed = capsys.readouterr().out
        assert "EvictionReport(policy='reach', prompt_tokens=" in printed
        report = api.report_of(output)
        assert report == kept.report
        assert report is not None
        assert isinstance(report.memory, api.MemoryReport)
        num_tokens = len(output.prompt_token_ids)
        assert report.prompt_tokens == num_tokens == len(kept.kept_by) == len(kept.is_vision)
        assert f"{kept.text:.1f} text and {kept.vision:.1f} vision tokens per head" in printed
        # Another count of each number, by the positions.
        counted = np.zeros(num_tokens, dtype=np.int64)
        assert (len(kept.positions), len(kept.positions[0])) == kept.pages.shape
        for of_layer in kept.positions:
            for positions in of_layer:
                assert (np.diff(positions) > 0).all()
                counted[positions] += 1
        np.testing.assert_array_equal(counted, kept.kept_by)
        assert round(kept.text + kept.vision) == report.kept_tokens
        image = llm.get_tokenizer().convert_tokens_to_ids("<image>")
        is_image = np.asarray(output.prompt_token_ids) == image
        np.testing.assert_array_equal(is_image, kept.is_vision)
        # Reasons for which there is nothing to return.
        question = [{"role": "user", "content": "Hello?"}]
        for options, reason in (
            (api.EvictionOptions(trace=True), "nothing was evicted"),
            (api.EvictionOptions(report=False), "has no report"),
        ):
            sampling = found["SamplingParams"](max_tokens=2, extra_args=options.extra_args())
            (answer,) = llm.chat(question, sampling)
            with pytest.raises(ValueError, match=reason):
                api.kept_tokens(llm, answer)
        # What stands before the question, by the template.
        system = {"role": "system", "content": "Be brief."}
        sampling = found["SamplingParams"](
            max_tokens=2, extra_args=api.EvictionOptions(protect="system").extra_args()
        )
        (answer,) = llm.chat([system, *question], sampling)
        report = api.report_of(answer)
        assert report is not None
        protected = llm.get_tokenizer().decode(answer.prompt_token_ids[: report.protected_tokens])
        assert protected == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        sampling = found["SamplingParams"](extra_args={"kv_eviction": "snapkb"})
        with pytest.raises(VLLMValidationError, match="did you mean snapkv"):
            llm.chat(question, sampling)
    finally:
        if "llm" in found:
            found["llm"].llm_engine.engine_core.shutdown()
