# SPDX-License-Identifier: Apache-2.0
"""`docs/upgrading.md` against the installed vLLM, the next one, and the plugin's code.

Sources are read and not imported, so this covers the CUDA worker on a machine without a GPU.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import io
import logging
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tools.compare_vllm import (
    PAGE,
    Function,
    Listed,
    Sources,
    bare,
    differences,
    installed,
    is_property,
    parameters_of,
    read_page,
)
from tools.next_vllm import FOLDER, VERSION
from vllm_tgvkv.plugin import SUPPORTED_VLLM

pytestmark = pytest.mark.apparatus

LISTED = read_page()
OURS = ROOT / "vllm_tgvkv"
VLLM = installed()
BOTH = Sources(OURS, *VLLM.packages)
"""Ours and the installed vLLM's."""


@functools.cache
def next_sources() -> Sources:
    """Return ours and those of the newest supported vLLM, or skip the test."""
    if not FOLDER.exists():
        pytest.skip(f"no sources of vLLM {VERSION}: `make next-vllm` downloads them")
    return Sources(OURS, FOLDER / "vllm")


each_version = pytest.mark.parametrize(
    "get", [lambda: BOTH, next_sources], ids=["installed", "next"]
)
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted([*OURS.rglob("*.py"), *(OURS / "server").glob("*.py")])
    if OURS / "kernels" not in path.parents
}
"""Modules of the plugin; no file of `kernels/` imports vLLM, which a contract of layers checks."""
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}

OTHERS = frozenset(
    re.findall(
        r"\w+",
        """
        FastAPI, Starlette, httpx: add_api_route api_route app call delete dependant dependencies
        detail headers include_router json model_dump model_extra patch path phrase post receive
        request routes scope state status_code text url vllm_xargs
        Prometheus and torch: children define elapsed_time inc load modules overloadpacket
        named_parameters parameters register_forward_pre_hook synchronize wait
        safetensors: get_tensor; pydantic: validate_python
        Python: __func__ add_argument add_argument_group api_key cache_clear dest hexdigest metadata
        parse_args strerror
        transformers' configurations: attention_chunk_size attn_logit_softcapping
        image_grid_pinpoints image_size layer_types layers_block_type model_type
        num_kv_shared_layers patch_size qk_nope_head_dim sliding_window spatial_merge_size
        use_sliding_window v_head_dim vision_config
        num_experts num_experts_per_tok num_local_experts n_routed_experts
        ours, on parsed flags and on the server's state: answer budgets eviction_cost
        eviction_memory in_flight max_tokens methods model out questions
        flops_share gpu_memory_utilization gpus host_ms kv_eviction kv_eviction_budget
        kv_eviction_config draft load max_inter_token_ms output read_share reserve step_costs
        tensor_parallel_size trust_remote_code
        """,
    )
)
"""Attributes of other packages' objects."""


WITHOUT_VLLM = "vllm_tgvkv.visual_heads"
"""A module that no object of vLLM reaches: a command of its own, with models of transformers."""


def test_a_command_of_its_own_does_not_import_vllm() -> None:
    """Nor any module of ours but that of its file, which imports neither."""
    nodes = list(ast.walk(TREES[WITHOUT_VLLM]))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    ours = {name for name in found if name.startswith("vllm")}
    assert ours == {"vllm_tgvkv.policies.head_scores"}


def definition(owner: str, name: str, sources: Sources = BOTH) -> tuple[str, int] | None:
    """Return module and line of the definition, which is one for a class and its subclasses."""
    found = sources.member(owner, name)
    return None if found is None else (found.module, getattr(found.node, "lineno", 0))


DEFINITIONS = {definition(row.owner, row.name) for row in LISTED} - {None}


RUN_TIME_BASES = {
    "vllm_tgvkv.shared.connector.EvictingConnector": "vllm.distributed.kv_transfer.kv_connector"
    ".v1.nixl.connector.NixlPullConnector"
}
"""A mixin of ours, and the class of vLLM that it extends at run time."""


def lineage(owner: str, sources: Sources = BOTH) -> list[str]:
    """Return a class and all of its bases, ours and vLLM's, nearest first."""
    found = sources.bases(owner)
    if owner in RUN_TIME_BASES:
        found = [RUN_TIME_BASES[owner], *found]
    bases = (one for base in found for one in lineage(base, sources))
    return list(dict.fromkeys([owner, *bases]))


def classes(sources: Sources = BOTH) -> Iterator[tuple[str, ast.ClassDef, list[str], list[str]]]:
    """Yield our classes that extend vLLM's: name, definition, our classes and vLLM's of them."""
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                family = lineage(f"{module}.{node.name}", sources)
                ours = [one for one in family if one.startswith("vllm_tgvkv.")]
                if theirs := [one for one in family if one.startswith("vllm.")]:
                    yield family[0], node, ours, theirs


def names_in(node: ast.AST) -> dict[str, ast.stmt]:
    """Return what a class or module defines directly, by name.

    Without what only annotates a name, for readers and type checkers.
    """
    found: dict[str, ast.stmt] = {}
    for statement in getattr(node, "body", []):
        if isinstance(statement, Function | ast.ClassDef):
            found[statement.name] = statement
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        found.update({target.id: statement for target in targets if isinstance(target, ast.Name)})
    return found


def own(owner: str, sources: Sources = BOTH) -> dict[str, ast.stmt]:
    """Return what a class itself, without its bases, defines."""
    found = sources.find(owner)
    assert found is not None
    return names_in(found.node)


def overrides(sources: Sources) -> Iterator[tuple[str, str, ast.stmt, str]]:
    """Yield what our classes define in place of vLLM: class, name, our definition, vLLM's class.

    A mixin counts where it stands before a class of vLLM.
    """
    for owner, _, ours, theirs in classes(sources):
        for base in ours:
            for name, node in own(base, sources).items():
                replaced = [their for their in theirs if definition(their, name, sources)]
                if replaced:
                    yield owner, name, node, replaced[0]


@each_version
def test_listed_names_exist_with_these_parameters(get: Callable[[], Sources]) -> None:
    assert [f"{row.owner}.{row.name} {how}" for row, how in differences(LISTED, get())] == []
    assert len(LISTED) > 250


@each_version
def test_overrides_are_listed_and_take_what_vllm_passes(get: Callable[[], Sources]) -> None:
    """The scheduler's, the manager's, and those of workers, runners, attention and metrics."""
    sources, checked = get(), 0
    listed = [row for row in LISTED if row.use == "override" and row.is_in(sources.version)]
    as_listed = {definition(row.owner, row.name, sources) for row in listed}
    replaced, owners = {}, set()
    for owner, name, node, their in overrides(sources):
        replaced[definition(their, name, sources)] = f"{owner} overrides {their}.{name}"
        owners.add(owner.rpartition(".")[2])
        found = sources.member(their, name)
        if found and isinstance(node, Function) and isinstance(found.node, Function):
            ours, theirs = bare(node), bare(found.node)
            if name == "__init__":  # we call ours, and give it more
                ours.args = ours.args[: len(theirs.args)]
                ours.defaults = ours.defaults[: len(ours.args)]
            assert incompatible(ours, theirs) == "", f"{owner}.{name}"
            checked += 1
    assert [what for place, what in replaced.items() if place not in as_listed] == []
    assert as_listed == replaced.keys()
    assert owners >= {"EvictionScheduler", "EvictingManager", "EvictionGPUWorker"}
    assert checked > 40


def incompatible(ours: ast.arguments, theirs: ast.arguments) -> str:
    """Return why a call that vLLM's function takes is not taken by ours, or nothing."""
    scope: dict[str, Any] = {}
    exec(f"def f({ast.unparse(ours)}): ...", scope)
    signature = inspect.signature(scope["f"])
    positional = [argument.arg for argument in theirs.args]
    keywords = {argument.arg: argument.arg for argument in theirs.kwonlyargs}
    try:
        bound = signature.bind(*positional, **keywords).arguments
        signature.bind(**keywords, **dict(zip(positional, positional, strict=True)))
    except TypeError as error:
        return str(error)
    moved = {name for name, value in bound.items() if isinstance(value, str) and value != name}
    return f"takes another for {moved}" if moved else ""


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("self, a, b=1", "self, a, b=1", True),
        ("self, *args, **kwargs", "self, a, *, b", True),
        ("self, a, *args, c=0, **kwargs", "self, a, b, c=0", True),
        ("self, a, extra=None", "self, a", True),
        ("self, a, extra", "self, a", False),
        ("self, a", "self, a, b=1", False),
        ("self, b, a", "self, a, b", False),
        ("self, a, *args", "self, a, b", False),
        ("self, a", "self, a, *, b", False),
    ],
)
def test_compatibility_of_parameters(ours: str, theirs: str, fits: bool) -> None:
    def arguments(text: str) -> ast.arguments:
        return ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]

    assert (incompatible(arguments(ours), arguments(theirs)) == "") is fits


@each_version
def test_no_abstract_method_is_left(get: Callable[[], Sources]) -> None:
    """A class that lacks one fails where it is made, here on a GPU with asynchronous scheduling."""
    sources, checked = get(), 0
    for owner, _, ours, theirs in classes(sources):
        family = [own(one, sources) for one in (*ours, *theirs)]
        for name in {name for names in family for name, node in names.items() if is_abstract(node)}:
            nearest = next(names[name] for names in family if name in names)
            assert not is_abstract(nearest), f"{owner} lacks {name}"
            checked += 1
    assert checked > 10


def is_abstract(node: ast.AST) -> bool:
    """Return whether a definition in a class is an abstract method."""
    decorators = node.decorator_list if isinstance(node, Function) else []
    return any("abstractmethod" in ast.unparse(decorator) for decorator in decorators)


def test_the_page_names_what_the_next_version_changes() -> None:
    """Also what was only read and needs nothing."""
    sources = next_sources()
    section = PAGE.read_text().split(f"## What {VERSION} changes")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:\w+\.)*(\w+)", section))
    changed = {row.name for row, _ in differences(LISTED, sources, VLLM)}
    changed |= {row.name for row in LISTED if row.since}
    assert changed - named == set()
    minors = ["{}.{}".format(*minor) for minor in SUPPORTED_VLLM]
    assert minors[-1] == sources.version.rpartition(".")[0]
    assert {row.since for row in LISTED if row.since} <= {*minors[1:]}
    assert [name for _, name in imported() if sources.find(name) is None] == []


def imported() -> Iterator[tuple[str, str]]:
    """Yield our modules and the names of vLLM that they import."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((module, f"{node.module}.{alias.name}") for alias in node.names)


def test_imports_are_listed() -> None:
    """A module or a class may also be an owner of listed names."""
    owners = {row.owner for row in LISTED}
    known = DEFINITIONS | {definition(*owner.rpartition(".")[::2]) for owner in owners}
    for module, name in imported():
        owner, _, last = name.rpartition(".")
        assert name in owners or definition(owner, last) in known, f"{module} imports {name}"


def attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield attributes that are read or written, also by `getattr`, and what they belong to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            yield inner.value, inner.attr
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("getattr", "setattr"):
            name = inner.args[1]
            if isinstance(name, ast.Constant):
                yield inner.args[0], name.value


def set_on_self(node: ast.AST) -> set[str]:
    """Return the names in every `self.x = ...`."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and ast.unparse(inner.value) == "self"
    }


def names_of_others() -> set[str]:
    """Return names that the plugin defines, and attributes of types of Python, NumPy and torch."""
    types: tuple[Any, ...] = (str, bytes, int, float, list, tuple, dict, set, slice, type, Path)
    types += (Counter, defaultdict, deque, BaseException, re.Match, re.Pattern, os.stat_result)
    types += (np.ndarray, torch.Tensor, torch.dtype, logging.Logger, io.FileIO, Future, Executor)
    # vLLM replaces `torch.cuda.Stream` in a process that has run a CPU worker.
    types += (torch.cuda.streams.Stream, asyncio.TaskGroup, BaseExceptionGroup)
    found = OTHERS | {name for kind in types for name in dir(kind)}
    for tree in [*TREES.values(), *(ast.parse(p.read_text()) for p in OURS.glob("kernels/*.py"))]:
        found |= set_on_self(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.Module):
                found |= names_in(node).keys() | declared(node)
    return found


def declared(node: ast.AST) -> set[str]:
    """Return the fields of a class that have an annotation and no value."""
    fields = [s for s in getattr(node, "body", []) if isinstance(s, ast.AnnAssign)]
    return {field.target.id for field in fields if isinstance(field.target, ast.Name)}


def test_attributes_are_listed() -> None:
    """Attributes that are not ours and not another library's are vLLM's, and have to be listed."""
    known, unlisted = {row.name for row in LISTED} | names_of_others(), set()
    for module, tree in TREES.items():
        modules_and_classes = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            and not (isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm")
            for alias in node.names
        }
        for value, name in attributes(tree) if module != WITHOUT_VLLM else ():
            root = re.match(r"\w*", ast.unparse(value))
            if name not in known and root and root[0] not in modules_and_classes:
                unlisted.add(f"{module} uses .{name}")
    assert unlisted == set()


def annotated(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the variables of a function that are annotated, and their annotations."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def test_inherited_attributes_are_listed() -> None:
    """`self.x` in a subclass, also where another class of the plugin has such a name."""
    checked = 0
    for owner, node, ours, theirs in classes():
        nodes = [found.node for found in map(BOTH.find, ours) if found]
        ours_names = {name for one in nodes for name in names_in(one).keys() | set_on_self(one)}
        for value, name in attributes(node):
            found = {definition(their, name) for their in theirs} - {None}
            if ast.unparse(value) == "self" and name not in ours_names and found:
                assert found & DEFINITIONS, f"{owner} uses {name}"
                checked += 1
    assert checked > 50


def test_attributes_of_annotated_variables_are_listed() -> None:
    """`request.x` where `request: Request`, also where a class of the plugin has such a name."""
    checked = 0
    for module, tree in TREES.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            kinds = {name: vllm_class(module, kind) for name, kind in annotated(function)}
            for value, name in attributes(function):
                kind = kinds.get(ast.unparse(value))
                found = definition(kind, name) if kind else None
                if found is not None:
                    assert found in DEFINITIONS, f"{module}: {kind}.{name}"
                    checked += 1
    assert checked > 100


def vllm_class(module: str, annotation: str) -> str | None:
    """Return the class of vLLM that an annotation in one of our modules names."""
    name = annotation.removesuffix(" | None").strip("'\"")
    found = BOTH.find(f"{module}.{name}") if name.isidentifier() else None
    if found is None or not isinstance(found.node, ast.ClassDef):
        return None
    return f"{found.module}.{name}" if found.module.startswith("vllm.") else None


def words(path: Path) -> set[str]:
    """Return every name and word in a file's code and strings; not those in comments."""
    tree = ast.parse(path.read_text())
    return set(re.findall(r"\w+", ast.unparse(tree)))


def test_names_are_used_where_the_page_says() -> None:
    used = {file: words(ROOT / file) for file in {file for row in LISTED for file in row.files}}
    for row in LISTED:
        name = row.name
        if row.files:
            assert any(name in used[file] for file in row.files), f"{row.owner}.{name}"
    for cells in re.findall(
        r"^\| (`.*?) \| .*? \| (`.*?) \|", PAGE.read_text(), flags=re.MULTILINE
    ):
        names = re.findall(r"`(?:[\w.]+\.)?(\w+)(?:\([^`]*\))?`", cells[0])
        for file in re.findall(r"`([\w./]+\.py)`", cells[1]):
            assert used[file] & set(names), f"{file} uses none of {names}"


# The tool


OLD = """
from .other import Base, helper as imported
class Scheduler(Base):
    limit: int = 0
    def __init__(self): self.errors: set[str] = set()
    def kept(self, a, *, b=1): return a  # a comment
    def renamed(self, a): ...
    def changed(self): return 1
    def removed(self): ...
    def grown(self, a): ...
"""
NEW = """
from .other import Base, helper as imported
class Scheduler(Base):
    limit: int = 0
    def __init__(self): self.errors: dict[str, int] = {}
    def kept(self, a, *, b=1):
        '''A docstring.'''
        return a
    def renamed(self, z): ...
    def changed(self): return 2
    def grown(self, a, b): ...
    def added(self): ...
"""
OTHER = "class Base:\n    def inherited(self): ...\ndef helper(x, *rest, **more): ...\n"
MADE_UP = """
### `vllm.core.Scheduler`
| name | use | where | why |
|---|---|---|---|
| `kept(a, *, b)`, `renamed(a)`, `changed()`, `removed()`, `inherited()` | call | `a/b.py` | x |
| `limit`, `errors`, `vllm.core.imported(x, *rest, **more)` | read | `a/c.py` | x |
| `grown(a[, b])` | override | `a/c.py` | x |
| `added()`, `missing()` | override since 0.33 | `a/c.py` | x |
"""


def write_package(folder: Path, core: str, version: str) -> Sources:
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(core)
    (package / "other.py").write_text(OTHER)
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return Sources(package)


def test_the_tool_tells_what_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(MADE_UP)
    listed = read_page(page)
    old = write_package(tmp_path / "old", OLD, "0.32.1+cpu")
    new = write_package(tmp_path / "new", NEW, "0.33.0")
    assert (old.version, new.version) == ("0.32.1+cpu", "0.33.0")
    assert list(differences(listed, old, old)) == []
    assert {(row.name, how) for row, how in differences(listed, new, old)} == {
        ("renamed", "takes (z)"),
        ("changed", "has another body"),
        ("removed", "is gone"),
        ("missing", "is gone"),
        ("errors", "is set or declared otherwise"),
    }
    assert {row.files for row in listed} == {("a/b.py",), ("a/c.py",)}


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [("a", True), ("a, b", True), ("a, c", False), ("", False), (None, False)],
)
def test_parameters_in_brackets_may_be_missing(parameters: str | None, fits: bool) -> None:
    row = Listed("vllm.A", "f", "a[, b]", "call", "", ())
    assert row.takes(parameters) is fits
    assert replace(row, parameters="...").takes(parameters) is (parameters is not None)


def test_properties_are_attributes() -> None:
    source = "class A:\n    @property\n    def a(self): ...\n    def b(self, c, *, d): ...\n"
    a, b = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    assert is_property(a)
    assert not is_property(b)
    assert parameters_of(b) == "c, *, d"
