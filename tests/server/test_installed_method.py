# SPDX-License-Identifier: Apache-2.0
"""The template package in `examples/`: built, installed, checked by its own test, and served."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.conftest import ROOT
from tests.server.serving import report_of, serve
from vllm_tgvkv.policies import METHOD_NAMES
from vllm_tgvkv.policies.base import LayerView, Score
from vllm_tgvkv.policies.registry import POLICIES, SCORES, Recipe
from vllm_tgvkv.testing import MethodError, check_method

TEMPLATE = ROOT / "examples/last_row"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the template as a wheel and install it in a folder of its own."""
    source = tmp_path_factory.mktemp("template") / "last_row"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", folder, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    assert (folder / "tgvkv_last_row.py").read_text() == (
        TEMPLATE / "tgvkv_last_row.py"
    ).read_text()
    return folder


def seeing(site: Path) -> dict[str, str]:
    """Return the environment of a process in which the package is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


@pytest.mark.slow
def test_the_templates_own_test_passes(site: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    run = subprocess.run(
        command, cwd=TEMPLATE, env=seeing(site), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout


@pytest.mark.slow
def test_measuring_programs_and_help_know_it(site: Path) -> None:
    """`evaluation`, `loadtests` and the flags ask for the names when they start."""
    code = (
        "import evaluation.arms, loadtests.mix\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "from vllm_tgvkv.engine import patches\n"
        "assert 'last_row' in evaluation.arms.METHODS\n"
        "assert any(c.xargs.get('kv_eviction') == 'last_row' for c in loadtests.mix.make_cases())\n"
        "parser = patches._add_flags(lambda parser: parser, FlexibleArgumentParser())\n"
        "print([action.metavar for action in parser._actions])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=seeing(site),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert ",".join((*METHOD_NAMES, "last_row")) in run.stdout


@pytest.mark.engine
@pytest.mark.slow
def test_it_is_served_by_its_name(
    site: Path, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As the server's method, as a request's, and in the message about a wrong one."""
    model = tiny_model("llava", image_size=112)
    flags = ["--kv-eviction", "last_row"]  # the last of two wins
    environment = {"PYTHONPATH": seeing(site)["PYTHONPATH"]}
    with serve(model, tmp_path / "log", {}, flags=flags, environment=environment) as server:
        for xargs in ({}, {"kv_eviction": "last_row"}):
            report = report_of(server.ask({**xargs, "kv_eviction_report": 1}))
            assert report["policy"] == "last_row"
            assert report["skip_reason"] is None
            assert report["kept_tokens"] < report["prompt_tokens"]
        assert report_of(server.ask({"kv_eviction": "tgv", "kv_eviction_report": 1}))["cuts"]
        with pytest.raises(openai.BadRequestError, match="did you mean last_row"):
            server.ask({"kv_eviction": "lastrow"})


# -- what `check_method` finds ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tgv", "h2o", "adakv"])
def test_methods_of_this_package_pass(name: str) -> None:
    cases = check_method(name)
    assert len(cases) == {"tgv": 12, "h2o": 14, "adakv": 7}[name]


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="'tgvv': did you mean tgv"):
        check_method("tgvv")


def test_a_reference_that_differs_is_found() -> None:
    assert check_method("snapkv", lambda attention, rows, prompt: attention[rows].sum(0))
    with pytest.raises(
        MethodError, match=r"snapkv, layer, one image, seed .* differ from the refer"
    ):
        check_method("snapkv", lambda attention, rows, prompt: attention[rows[1:]].sum(0))


WRONG = {
    "waits": (lambda votes: votes * votes.max().item(), "it never waits for the device"),
    "masks": (lambda votes: votes.masked_fill(votes > votes[votes > 0].mean(), 0), "never waits"),
    "double": (lambda votes: votes.double(), "scores are float32"),
    "narrow": (lambda votes: votes[:, :-1], "scores of all layers are"),
    "endless": (lambda votes: votes / 0, "scores are finite"),
    "signed": (lambda votes: -votes, "scores are not negative"),
    "chance": (lambda votes: votes * 0 + votes.new_empty(votes.shape).uniform_(), "another time"),
}
"""Scores that break a rule, by what they return for the votes, and the words that tell."""


@pytest.mark.parametrize("name", WRONG)
def test_a_score_that_breaks_a_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (SCORES, POLICIES):
        monkeypatch.setattr(found, "_values", dict(found._values))
    function, words = WRONG[name]

    class Wrong(Score):
        rows = "window"

        def __call__(self, view: LayerView):  # type: ignore[no-untyped-def]
            return function(view.attention.column_sums)

    SCORES.add("wrong", Wrong)
    POLICIES.add("wrong", Recipe("wrong", "uniform", "by_score"))
    with pytest.raises(MethodError, match=words):
        check_method("wrong")


def test_the_page_shows_the_template() -> None:
    page = (ROOT / "docs/new_method.md").read_text()
    module = (TEMPLATE / "tgvkv_last_row.py").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert module.endswith('"""\n\n' + code)
    (entry,) = re.findall(r"```text\n(\[project.*?)```", page, re.DOTALL)
    assert entry in (TEMPLATE / "pyproject.toml").read_text()
    call = (TEMPLATE / "tests/test_last_row.py").read_text().split("\n\n\n")[-1]
    assert call in page
