# SPDX-License-Identifier: Apache-2.0
"""Settings declared once, as fields of a dataclass.

A declaration holds the type, the default, the bound and the help text:

    sinks: int = setting(4, at_least=0, help="First tokens that are always kept.")

The checks of a value, the help of `--kv-eviction-config`, `docs/settings.md` and the schema of
`GET /kv-eviction/status` are derived from it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vllm_tgvkv.config.removed import refuse_removed
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
Parser = Callable[[Any, str], Any]
"""Takes a value and the name of its source, which an `EvictionConfigError` begins with."""

MAX_COUNT = 2**31 - 1
"""Upper bound of every whole number: larger ones do not fit the arrays that count."""


def setting(default: T, **declared: Any) -> T:
    """Declare a dataclass field; `Setting` explains the arguments; `help` is required."""
    field: Any = (
        dataclasses.field(default_factory=default.copy, metadata=declared)
        if isinstance(default, dict)
        else dataclasses.field(default=default, metadata=declared)
    )
    found: T = field
    return found


@dataclass(frozen=True)
class Setting:
    """One field of a dataclass, with its declaration if it has one."""

    name: str
    type: Any
    """Type of the field, without None."""
    is_optional: bool
    """Whether None is a value, which users write as null or leave out."""
    default: Any
    help: str = ""
    """Meaning, in Markdown."""
    at_least: int | None = None
    """Lower bound of a whole number. Without one, the dataclass checks the number."""
    accepts: str | None = None
    """Values in Markdown, where the type does not tell them."""
    unset: str = "none"
    """Default in Markdown, where that is None or empty."""
    parser: Parser | None = None
    """Replaces the check that follows from the type."""
    in_status: bool = False
    """Whether `GET /kv-eviction/status` shows it."""
    for_tests: bool = False
    """Whether help and documentation leave it out."""

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def values(self) -> str:
        """Values in Markdown."""
        if self.accepts is not None:
            return self.accepts
        if self.type is bool:
            return "`true`, `false`"
        if self.type is int:
            return f"whole number, at least {self.at_least}"
        return ", ".join(f"`{choice}`" for choice in self.choices)

    @property
    def default_text(self) -> str:
        """Default in Markdown."""
        if self.default in (None, {}, ()):
            return self.unset
        if isinstance(self.default, bool | int):
            return f"`{json.dumps(self.default)}`"
        return f"`{self.default}`" if isinstance(self.default, str) else str(self.default)

    def parse(self, value: Any, source: str) -> Any:
        """Check a value and return it as the dataclass holds it.

        Raises:
            EvictionConfigError: naming `source`, the value and what it may be.
        """
        is_object = dataclasses.is_dataclass(self.type)
        if (value is None and self.is_optional) or (is_object and isinstance(value, self.type)):
            return value
        if self.parser is not None:
            return self.parser(value, source)
        if is_object:
            return read(self.type, value, source)
        if (wanted := self._wanted(value)) is not None:
            raise EvictionConfigError(f"{source} is {quoted(value)}: {wanted}")
        if self.type is int and self.at_least is not None:
            check_count(value, self.at_least, source)
        return bool(value) if self.type is bool else value

    def _wanted(self, value: Any) -> str | None:
        """Return what to give in place of a value; None for right ones, and for numbers."""
        if self.type is bool and value not in (True, False):
            return "give true or false"
        if self.choices and value not in self.choices:
            return f"{choose(value, self.choices)}{', or leave it out' if self.is_optional else ''}"
        return "give a name" if self.type is str and not isinstance(value, str) else None


@functools.cache
def settings_of(cls: type[DataclassInstance]) -> tuple[Setting, ...]:
    """Return the fields of a dataclass in order, also those without a declaration."""
    hints = get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_optional = get_origin(hint) in (Union, types.UnionType)
        if is_optional:
            (hint,) = set(get_args(hint)) - {type(None)}
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        found.append(Setting(field.name, hint, is_optional, default, **field.metadata))
    return tuple(found)


def read(cls: type[D], values: Any, source: str) -> D:
    """Build a dataclass from a mapping of its fields, checking every value.

    Raises:
        EvictionConfigError: naming `source`, the field, its value and what it may be.
    """
    if not isinstance(values, Mapping):
        raise EvictionConfigError(f"{source} is {quoted(values)}: give a mapping")
    settings = {found.name: found for found in settings_of(cls)}
    refuse_removed((key for key in values if key not in settings), source)
    if unknown := sorted(quoted(key, str) for key in values if key not in settings):
        known = [name for name, found in settings.items() if not found.for_tests]
        raise EvictionConfigError(
            f"{source} has unknown {', '.join(unknown)}: {choose(unknown[0], known, 'known are')}"
        )
    parsed = {
        name: settings[name].parse(value, f"{source}.{name}") for name, value in values.items()
    }
    try:
        return cls(**parsed)
    except ValueError as error:
        raise EvictionConfigError(f"{source}: {error}") from error


def help_lines(settings: Iterable[Setting]) -> str:
    """Return a list of settings for a flag's help, one a line."""
    lines = [
        f"- {found.name}: {found.help} ({found.values}; default: {found.default_text})"
        for found in settings
        if not found.for_tests
    ]
    return "\n".join(lines).replace("`", "")


def check_count(value: Any, at_least: int, source: str, hint: str = "") -> int:
    """Return a whole number after checking it; `hint` is what else may be given.

    Raises:
        EvictionConfigError: naming `source`, the value and what it may be.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MAX_COUNT:
        raise EvictionConfigError(
            f"{source} is {quoted(value)}: give a whole number, at least {at_least} and at most "
            f"{MAX_COUNT}{hint}"
        )
    return value


def absolute_path(value: Any, source: str, kind: str) -> str:
    """Return a path after checking it; `kind` says in the message what it is of."""
    try:
        # A path with a NUL, or of characters that the system cannot encode, is none.
        is_path = isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        is_path = False
    if not is_path or not Path(value).is_absolute():
        raise EvictionConfigError(
            f"{source} is {quoted(value)}: give the absolute path of a {kind}"
        )
    return str(value)
