# SPDX-License-Identifier: Apache-2.0
"""`docs/upgrading.md` against the installed vLLM and against the plugin's code.

Sources are read and not imported, so this covers the CUDA worker on a machine without a GPU.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tools.compare_vllm import (
    Function,
    Sources,
    differences,
    installed,
    is_property,
    parameters_of,
    read_page,
)

LISTED = read_page()
OURS = ROOT / "vllm_tgvkv"
VLLM = installed()
BOTH = Sources(OURS, *VLLM.packages)
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in (OURS, OURS / "policies", OURS / "server")
    for path in sorted(folder.glob("*.py"))
}
"""Modules of the plugin; no file of `kernels/` imports vLLM, which a contract of layers checks."""
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}

OTHERS = frozenset(
    re.findall(
        r"\w+",
        """
        FastAPI, Starlette, httpx: add_api_route app call dependant dependencies detail headers
        include_router json model_dump path phrase post receive routes scope state status_code url
        Prometheus and torch: elapsed_time inc load overloadpacket synchronize wait
        Python: __func__ add_argument add_argument_group api_key cache_clear dest metadata
        parse_args strerror
        transformers' configurations: attention_chunk_size attn_logit_softcapping
        image_grid_pinpoints image_size layer_types layers_block_type model_type patch_size
        sliding_window spatial_merge_size use_sliding_window vision_config
        ours, on parsed flags and on the server's state: answer kv_eviction kv_eviction_budget
        kv_eviction_config trust_remote_code
        """,
    )
)
"""Attributes of other packages' objects."""


WITHOUT_VLLM = {"vllm_tgvkv.visual_heads"}
"""Modules that no object of vLLM reaches: a command of its own, with models of transformers."""


def test_commands_of_their_own_do_not_import_vllm() -> None:
    """Nor any module of ours but that of their file, which imports neither."""
    for module in WITHOUT_VLLM:
        nodes = list(ast.walk(TREES[module]))
        found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        assert {name for name in found if name.startswith("vllm")} == {"vllm_tgvkv.head_scores"}


def definition(owner: str, name: str, sources: Sources = BOTH) -> tuple[str, int] | None:
    """Return module and line of the definition, which is one for a class and its subclasses."""
    found = sources.member(owner, name)
    return None if found is None else (found.module, getattr(found.node, "lineno", 0))


DEFINITIONS = {definition(row.owner, row.name) for row in LISTED}
NAMES = {row.name for row in LISTED}


def lineage(owner: str) -> list[str]:
    """Return a class and all of its bases, ours and vLLM's, nearest first."""
    found = [owner]
    for base in BOTH.bases(owner):
        found += [one for one in lineage(base) if one not in found]
    return found


def classes() -> Iterator[tuple[str, ast.ClassDef, list[str], list[str]]]:
    """Yield our classes that extend vLLM's: name, definition, our classes and vLLM's of them."""
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                owner = f"{module}.{node.name}"
                family = lineage(owner)
                ours = [one for one in family if one.startswith("vllm_tgvkv.")]
                theirs = [one for one in family if one.startswith("vllm.")]
                if theirs:
                    yield owner, node, ours, theirs


def names_in(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that a class or module defines directly."""
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            yield statement.name, statement
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, statement


def is_declaration(statement: ast.stmt) -> bool:
    """Return whether it only annotates a name, for readers and type checkers."""
    return isinstance(statement, ast.AnnAssign) and statement.value is None


def overrides() -> Iterator[tuple[str, str, ast.stmt, str]]:
    """Yield what our classes define in place of vLLM: class, name, our definition, vLLM's class.

    A mixin counts where it stands before a class of vLLM.
    """
    for owner, _, ours, theirs in classes():
        for base in ours:
            found = BOTH.find(base)
            assert found is not None
            assert isinstance(found.node, ast.ClassDef)
            for name, ours_node in names_in(found.node.body):
                replaced = [their for their in theirs if definition(their, name)]
                if replaced and not is_declaration(ours_node):
                    yield owner, name, ours_node, replaced[0]


OVERRIDES = list(overrides())


def test_listed_names_exist_with_these_parameters() -> None:
    assert [f"{row.owner}.{row.name} {how}" for row, how in differences(LISTED, VLLM)] == []
    assert len(LISTED) > 250


def test_overrides_are_listed() -> None:
    """The scheduler's, the manager's, and those of workers, runners, attention and metrics."""
    for owner, name, _, their in OVERRIDES:
        assert definition(their, name) in DEFINITIONS, f"{owner} overrides {their}.{name}"
    found = {owner.rpartition(".")[2] for owner, *_ in OVERRIDES}
    assert found >= {"EvictionScheduler", "EvictingManager", "EvictionGPUWorker"}
    as_listed = {definition(r.owner, r.name) for r in LISTED if r.use == "override"}
    assert as_listed == {definition(their, name) for _, name, _, their in OVERRIDES}


def incompatible(ours: ast.arguments, theirs: ast.arguments) -> str:
    """Return why a call that vLLM's function takes is not taken by ours, or nothing."""

    def names(arguments: list[ast.arg]) -> list[str]:
        return [a.arg for a in arguments if a.arg not in ("self", "cls")]

    our, their = names(ours.args), names(theirs.args)
    shared = their[: len(our)]
    if our[: len(shared)] != shared:
        return f"({', '.join(our)}) where vLLM has ({', '.join(their)})"
    if len(our) - len(their) > len(ours.defaults):
        return f"{our[len(their) :]} has no default"
    by_name = names(ours.kwonlyargs)
    for name in their[len(our) :]:
        if ours.vararg is None or not (ours.kwarg or name in by_name):
            return f"{name} is not taken"
    for name in names(theirs.kwonlyargs):
        if not (ours.kwarg or name in by_name):
            return f"{name} is not taken"
    return ""


def test_overrides_take_what_vllm_passes() -> None:
    checked = 0
    for owner, name, node, their in OVERRIDES:
        found = VLLM.member(their, name)
        assert found is not None
        if isinstance(node, Function) and isinstance(found.node, Function):
            ours = node.args
            if name == "__init__":  # we call ours, and give it more
                ours = ast.parse(ast.unparse(node)).body[0].args  # type: ignore[attr-defined]
                ours.args = ours.args[: len(found.node.args.args)]
            assert incompatible(ours, found.node.args) == "", f"{owner}.{name}"
            checked += 1
    assert checked > 40


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


def defined_names() -> set[str]:
    """Return every name that a class or module of the plugin defines."""
    found = set()
    for tree in [*TREES.values(), *(ast.parse(p.read_text()) for p in OURS.glob("kernels/*.py"))]:
        found.update(set_on_self(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.Module):
                found.update(name for name, _ in names_in(node.body))
    return found


def names_of_libraries() -> set[str]:
    """Return the attributes of common types of Python, NumPy and torch."""
    types: tuple[Any, ...] = (str, bytes, int, float, list, tuple, dict, set, slice, type, Path)
    types += (Counter, defaultdict, deque, BaseException, re.Match, re.Pattern, os.stat_result)
    types += (np.ndarray, torch.Tensor, torch.dtype, logging.Logger)
    return {name for kind in types for name in dir(kind)}


def root_of(node: ast.expr) -> str:
    """Return the variable at the start of `a.b[c].d()`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return ""
    return node.id


def test_attributes_are_listed() -> None:
    """Attributes that are not ours and not another library's are vLLM's, and have to be listed."""
    known = NAMES | OTHERS | defined_names() | names_of_libraries()
    unlisted = set()
    for module, tree in TREES.items():
        if module in WITHOUT_VLLM:
            continue
        modules_and_classes = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            and not (isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm")
            for alias in node.names
        }
        for value, name in attributes(tree):
            if name not in known and root_of(value) not in modules_and_classes:
                unlisted.add(f"{module} uses .{name}")
    assert unlisted == set()


def annotated(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the variables of a function that are annotated, and their annotations."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def own_names(owner: str) -> set[str]:
    """Return the names that one class of ours defines, in its body or as `self.x = ...`."""
    found = BOTH.find(owner)
    assert found is not None
    assert isinstance(found.node, ast.ClassDef)
    names = {name for name, node in names_in(found.node.body) if not is_declaration(node)}
    return names | set_on_self(found.node)


def test_inherited_attributes_are_listed() -> None:
    """`self.x` in a subclass, also where another class of the plugin has such a name."""
    checked = 0
    for owner, node, ours, theirs in classes():
        own = set().union(*map(own_names, ours))
        for value, name in attributes(node):
            found = {definition(their, name) for their in theirs} - {None}
            if ast.unparse(value) == "self" and name not in own and found:
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
    for cells in re.findall(r"^\| (`.*?) \| .*? \| (`.*?) \|", page_text(), flags=re.MULTILINE):
        names = re.findall(r"`(?:[\w.]+\.)?(\w+)(?:\([^`]*\))?`", cells[0])
        for file in re.findall(r"`([\w./]+\.py)`", cells[1]):
            assert used[file] & set(names), f"{file} uses none of {names}"


def page_text() -> str:
    return (ROOT / "docs/upgrading.md").read_text()


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
"""
OTHER = "class Base:\n    def inherited(self): ...\ndef helper(x, *rest, **more): ...\n"
PAGE = """
### `vllm.core.Scheduler`
| name | use | where | why |
|---|---|---|---|
| `kept(a, *, b)`, `renamed(a)`, `changed()`, `removed()`, `inherited()` | call | `a/b.py` | x |
| `limit`, `errors`, `vllm.core.imported(x, *rest, **more)` | read | `a/c.py` | x |
"""


def write_package(folder: Path, core: str) -> Sources:
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(core)
    (package / "other.py").write_text(OTHER)
    return Sources(package)


def test_the_tool_tells_what_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    listed = read_page(page)
    old, new = write_package(tmp_path / "old", OLD), write_package(tmp_path / "new", NEW)
    assert list(differences(listed, old, old)) == []
    assert {(row.name, how) for row, how in differences(listed, new, old)} == {
        ("renamed", "takes (z)"),
        ("changed", "has another body"),
        ("removed", "is gone"),
        ("errors", "is set or declared otherwise"),
    }
    assert {row.files for row in listed} == {("a/b.py",), ("a/c.py",)}


def test_properties_are_attributes() -> None:
    source = "class A:\n    @property\n    def a(self): ...\n    def b(self, c, *, d): ...\n"
    a, b = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    assert is_property(a)
    assert not is_property(b)
    assert parameters_of(b) == "c, *, d"
