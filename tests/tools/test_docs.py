# SPDX-License-Identifier: Apache-2.0
"""The documentation against the repository: links, commands, names and the dashboard's pictures."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.conftest import ROOT
from tests.inputs import write_gates
from tests.tools.test_configs import engine_args, serve_parser
from vllm_tgvkv.config import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.head_scores import write
from vllm_tgvkv.metrics import METRICS
from vllm_tgvkv.request import REQUEST_KEYS, RequestOptions

__all__ = ["serve_parser"]  # a fixture

PAGES = [ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DASHBOARD = ROOT / "configs/grafana/dashboards/kv-eviction.json"
PICTURES = ROOT / "docs/dashboard"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.text.split(maxsplit=2)[:2]}"


def blocks(page: Path) -> list[Block]:
    found = re.finditer(
        r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    name = str(page.relative_to(ROOT))
    return [Block(name, m[2], re.sub(f"^{m[1]}", "", m[3], flags=re.MULTILINE)) for m in found]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    fenced = r"^( *)```.*?^\1```$"
    return re.sub(fenced, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language in ("", "bash")]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of every command of a shell block, without variables set for it."""
    text = re.sub(r"(^|\s)#.*$", "", block.text.replace("\\\n", " "), flags=re.MULTILINE)
    ends = ";&|()<>\n"
    lexer = shlex.shlex(text, posix=True, punctuation_chars=ends)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= set(ends):
            if words:
                yield words
            words = []
        elif words or not re.match(r"\w+=", word):
            words.append(word)


COMMANDS = [words for block in SHELL for words in commands(block)]


# Links


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        number = sum(re.fullmatch(f"{re.escape(anchor)}(-\\d+)?", one) is not None for one in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    for target in targets:
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", prose(page)):
            file = (page.parent / target).resolve()
            if file in PAGES and file not in reached:
                reached.add(file)
                todo.append(file)
    assert set(PAGES) - reached == set()


def test_pictures_are_shown() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", prose(page))
    }
    for page in PAGES:
        for alt in re.findall(r"!\[([^]]*)\]", prose(page)):
            assert alt, f"{page}: a picture without a description"
    assert set(PICTURES.glob("*.png")) <= shown


@each_page
def test_named_tests_exist(page: Path) -> None:
    """`engine/test_engine.py::test_x` names one; `::test_y` after it another of the same file."""
    for name in re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)", page.read_text()):
        assert (ROOT / "tests" / name).exists(), name
    file = ""
    for name, test in re.findall(
        r"`(?:tests/)?((?:\w+/)?test_\w+\.py)?::(test_\w+)`", page.read_text()
    ):
        file = name or file
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test


# Commands


@each_block
def test_a_block_parses(block: Block) -> None:
    if block.language in ("", "bash"):
        run = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "python":
        ast.parse(block.text)
    else:
        assert block.language == "text"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {words[1] for words in COMMANDS if words[0] == "make"}
    for page in PAGES:
        named.update(re.findall(r"`make ([a-z-]+)", prose(page)))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_modules_that_are_run_exist() -> None:
    run = [words[words.index("-m") + 1] for words in COMMANDS if "-m" in words]
    for page in PAGES:
        run += re.findall(r"`python -m ([\w.]+)", prose(page))
        run += re.findall(r"^    python -m ([\w.]+)", prose(page), flags=re.MULTILINE)
    assert "loadtests.run" in run
    assert [name for name in run if importlib.util.find_spec(name) is None] == []


def test_commands_that_serve_are_understood(
    serve_parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's parser with the plugin's flags reads them, and the eviction settings are valid."""
    monkeypatch.chdir(ROOT)  # for --config
    (tmp_path / "etc/vllm").mkdir(parents=True)
    write(tmp_path / "etc/vllm/heads.json", "a model", 1, [[1.0]], {})
    write_gates(tmp_path / "etc/vllm/gates", "rg10", 1, 8, 1)
    served = [words[2:] for words in COMMANDS if words[:2] == ["vllm", "serve"]]
    evicting = 0
    for arguments in served:
        if any(argument.startswith("--help") for argument in arguments):
            continue
        existing = [word.replace("/etc/vllm", f"{tmp_path}/etc/vllm") for word in arguments]
        made = engine_args(serve_parser, *existing)
        if CONFIG_KEY in made.additional_config:
            evicting += EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY]).active
    assert evicting > 4


# Names


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a value's mappings at any depth, including itself."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from mappings(child)


def test_settings_and_request_options_are_accepted() -> None:
    checked = 0
    for block in BLOCKS:
        if block.language not in ("yaml", "json"):
            continue
        for mapping in mappings(yaml.safe_load(block.text)):
            if settings := mapping.get("kv-eviction-config"):
                name = {"policy": mapping["kv-eviction"]} if "kv-eviction" in mapping else {}
                EvictionConfig.from_mapping({**settings, **name})
                checked += 1
            if "vllm_xargs" in mapping:
                RequestOptions.resolve(EvictionConfig(), mapping["vllm_xargs"])
                checked += 1
    for word in itertools.chain(*COMMANDS):
        if word.startswith('{"kv_eviction') and "$" not in word:
            RequestOptions.resolve(EvictionConfig(), json.loads(word))
            checked += 1
    assert checked > 4


@each_page
def test_names_of_flags_keys_and_metrics_exist(page: Path) -> None:
    text = page.read_text()
    flags = re.findall(r"--kv-eviction[\w-]*", text)
    assert set(flags) <= {"--kv-eviction", "--kv-eviction-budget", "--kv-eviction-config"}

    # Methods of `collective_rpc` have names of the same beginning.
    known = {*REQUEST_KEYS, "kv_eviction_stats"}
    assert set(re.findall(r"(?<![\w:/])kv_eviction_?\w*(?![\w.]*::|\.py)", text)) <= known

    metrics = {f"{m.name}{'_total' if m.kind == 'counter' else ''}" for m in METRICS.values()}
    named = re.findall(r"vllm:kv_eviction_(\w+)", text)
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= metrics


# The dashboard's pictures


def test_pictures_are_of_the_dashboard_as_it_is() -> None:
    """If not: python -m docs.draw_dashboard."""
    results = json.loads((PICTURES / "results.json").read_text())
    panels = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]
    drawn = {
        panel: [(answer["expr"], bool(answer["series"])) for answer in answers]
        for panel, answers in results["panels"].items()
    }
    assert drawn == {str(p["id"]): [(t["expr"], True) for t in p["targets"]] for p in panels}
