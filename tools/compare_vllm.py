# SPDX-License-Identifier: Apache-2.0
"""Compare the names of vLLM that docs/upgrading.md lists with another vLLM's sources.

    python tools/compare_vllm.py FOLDER

FOLDER holds `vllm/`, for example an unpacked wheel. Nothing of it is imported or run. Printed are
names that are gone, functions with other parameters, and functions with another body than in the
installed vLLM; docstrings and comments do not count.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/upgrading.md"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Listed:
    """A name of vLLM that the page lists."""

    owner: str
    """Dotted name of its module or class."""
    name: str
    parameters: str | None
    """As `parameters_of` gives them, or `...` if they differ by platform; None if no function.

    In brackets: those that only some supported versions have, `a[, b]`.
    """
    use: str
    since: str
    """First minor version that has it, `0.33`; empty if all have."""
    files: tuple[str, ...]
    """Where the plugin uses it, below the root of the repository."""

    def is_in(self, version: str) -> bool:
        """Return whether a version of vLLM such as `0.33.0` should have it."""
        return numbers(self.since) <= numbers(version)

    def takes(self, parameters: str | None) -> bool:
        """Return whether a definition's parameters are those of the page."""
        if self.parameters is None or parameters is None:
            return self.parameters == parameters
        without = re.sub(r"\[.*?\]", "", self.parameters)
        return parameters in (without, re.sub(r"[\[\]]", "", self.parameters)) or without == "..."


def numbers(version: str) -> list[int]:
    """Return the numbers in a version: [0, 33, 0] of `0.33.0`."""
    return [int(number) for number in re.findall(r"\d+", version)]


def read_page(page: Path = PAGE) -> list[Listed]:
    """Return the names in the first column of the page's tables.

    An owner is a dotted name in the heading above the table, or stands before the name. A use that
    only newer versions have is `override since 0.33`.
    """
    listed, owners = [], [""]
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            owners = re.findall(r"`(vllm[\w.]*)`", line)
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) < 4 or not cells[0].startswith("`"):
            continue
        files = tuple(re.findall(r"`([\w./]+\.py)`", cells[2]))
        for dotted, parameters in re.findall(r"`([\w.]+)(\([^`]*\))?`", cells[0]):
            prefix, _, name = dotted.rpartition(".")
            signature = parameters[1:-1] if parameters else None
            use, _, since = cells[1].partition(" since ")
            listed += [
                Listed(owner, name, signature, use, since, files)
                for owner in ([prefix] if prefix else owners)
            ]
    return listed


def bare(function: Function) -> ast.arguments:
    """Return a function's parameters without `self`, `cls` and annotations; defaults are None."""
    found = copy.deepcopy(function.args)
    named = [a for a in (*found.posonlyargs, *found.args) if a.arg not in ("self", "cls")]
    found.args, found.posonlyargs = named, []
    for argument in (*found.args, *found.kwonlyargs, found.vararg, found.kwarg):
        if argument:
            argument.annotation = None
    none = ast.Constant(None)
    found.defaults = [none] * len(found.defaults)
    found.kw_defaults = [default and none for default in found.kw_defaults]
    return found


def parameters_of(function: Function) -> str:
    """Return a function's parameters by name, without `self` and `cls`: `a, b, *, c, **rest`."""
    return ast.unparse(bare(function)).replace("=None", "")


def is_property(function: Function) -> bool:
    """Return whether a function is read like an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def body_of(node: ast.AST) -> str:
    """Return a function's statements, or a definition, without docstring, comments and layout.

    Of a class nothing: its names are listed one by one.
    """
    if isinstance(node, ast.ClassDef | ast.Module):
        return ""
    if not isinstance(node, Function):
        return ast.unparse(node)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "\n".join(map(ast.unparse, body))


def _statements(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, in every branch of conditions and `try`."""
    for node in ast.iter_child_nodes(parent):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


def _defines(statement: ast.AST, name: str) -> bool:
    if isinstance(statement, Function | ast.ClassDef):
        return statement.name == name
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    is_assignment = isinstance(statement, ast.Assign | ast.AnnAssign)
    return is_assignment and any(ast.unparse(target) == name for target in targets)


@dataclass(frozen=True)
class Found:
    """A definition, and the module it stands in."""

    module: str
    node: ast.AST


class Sources:
    """Definitions in some packages, found without importing them."""

    def __init__(self, *packages: Path) -> None:
        """Take the folders of the packages, which bear their names."""
        self.packages = packages
        self._packages = {package.name: package for package in packages}

    @property
    def version(self) -> str:
        """The version of vLLM, as its package says without being imported."""
        text = (self._packages["vllm"] / "_version.py").read_text()
        (found,) = re.findall(r"^__version__ = .*'(.*)'$", text, re.MULTILINE)
        return found

    @functools.cache  # noqa: B019
    def module(self, name: str) -> tuple[ast.Module, str] | None:
        """Return a parsed module, and the package that its relative imports begin from."""
        package, *names = name.split(".")
        if package in self._packages:
            path = self._packages[package].joinpath(*names)
            for file, home in (
                (path / "__init__.py", name),
                (path.with_name(f"{path.name}.py"), name.rpartition(".")[0]),
            ):
                if file.exists():
                    return ast.parse(file.read_text()), home
        return None

    def find(self, dotted: str) -> Found | None:
        """Return the definition of a module, or of a name in a module or class."""
        if (module := self.module(dotted)) is not None:
            return Found(dotted, module[0])
        owner, _, name = dotted.rpartition(".")
        return self.member(owner, name) if owner else None

    @functools.cache  # noqa: B019
    def member(self, owner: str, name: str) -> Found | None:
        """Return the definition of a name in a module or class, through imports and bases."""
        found = self.find(owner)
        if found is None or not isinstance(found.node, ast.ClassDef | ast.Module):
            return None
        for statement in _statements(found.node):
            if _defines(statement, name):
                return Found(found.module, statement)
            if isinstance(found.node, ast.Module) and (
                imported := self._imported(found.module, statement, name)
            ):
                return imported
        if isinstance(found.node, ast.Module):
            return None
        for inner in ast.walk(found.node):
            if _defines(inner, f"self.{name}"):
                return Found(found.module, inner)
        inherited = (self.member(base, name) for base in self.bases(owner))
        return next(filter(None, inherited), None)

    def bases(self, owner: str) -> list[str]:
        """Return the bases of a class as dotted names; those in other packages are left out."""
        found = self.find(owner)
        named = found.node.bases if found and isinstance(found.node, ast.ClassDef) else []
        names = [ast.unparse(base).partition("[")[0] for base in named]
        resolved = [found and self.find(f"{found.module}.{name}") for name in names]
        return [
            f"{base.module}.{base.node.name}"
            for base in resolved
            if base and isinstance(base.node, ast.ClassDef)
        ]

    def _imported(self, module: str, statement: ast.AST, name: str) -> Found | None:
        """Return the definition of a name if a statement in a module imports it."""
        if not isinstance(statement, ast.ImportFrom):
            return None
        source = statement.module or ""
        if statement.level:
            parsed = self.module(module)
            home = parsed[1].split(".") if parsed else []
            above = home[: len(home) + 1 - statement.level]
            source = ".".join([*above, *filter(None, [source])])
        originals = [
            name if alias.name == "*" else alias.name
            for alias in statement.names
            if name == (alias.asname or alias.name) or alias.name == "*"
        ]
        return next(filter(None, (self.find(f"{source}.{name}") for name in originals)), None)


def installed() -> Sources:
    """Return the sources of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(Path(spec.origin).parent)


def differences(
    listed: Iterable[Listed], sources: Sources, reference: Sources | None = None
) -> Iterator[tuple[Listed, str]]:
    """Yield every listed name that is different in `sources`, and how.

    Where there is a `reference`, bodies of functions and what attributes are set to are compared.
    """
    for row in listed:
        if not row.is_in(sources.version):
            continue
        found = sources.member(row.owner, row.name)
        if found is None:
            yield row, "is gone"
            continue
        parameters = None
        if isinstance(found.node, Function) and not is_property(found.node):
            parameters = parameters_of(found.node)
        if (parameters is None) != (row.parameters is None):
            yield row, "is no function" if parameters is None else "is a function"
        elif not row.takes(parameters):
            yield row, f"takes ({parameters})"
        known = reference.member(row.owner, row.name) if reference else None
        if known and body_of(known.node) != body_of(found.node):
            what = "is set or declared otherwise" if parameters is None else "has another body"
            yield row, what


def main() -> None:
    """Compare the folder of the command line with the installed vLLM."""
    sources = Sources(Path(sys.argv[1]) / "vllm")
    for row, difference in differences(read_page(), sources, installed()):
        print(f"{row.owner}.{row.name} {difference} ({row.use}: {', '.join(row.files)})")


if __name__ == "__main__":
    main()
