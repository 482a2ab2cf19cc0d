# SPDX-License-Identifier: Apache-2.0
"""Errors that users see, and the quoting of wrong values in their messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_MAX_QUOTED = 200
"""Characters of a wrong value in a message."""

_ALIKE = "start every node with the same flags and packages"

SILENT_NODE = "runs without the flag, without vllm-tgvkv, or with another release of it; " + _ALIKE
"""The end of a message about a node that does not say how it evicts."""


class EvictionConfigError(ValueError):
    """A flag, field or request parameter is wrong; the message names it and the way out."""


class UnsupportedByEvictionError(EvictionConfigError):
    """Eviction cannot run with a given flag or model."""


def quoted(value: Any, text: Callable[[Any], str] = repr) -> str:
    """Return a value as text for a message, cut to a length that is safe in a log."""
    try:
        whole = text(value)
    except (ValueError, RecursionError):  # Python prints no number of more than 4300 digits
        return f"a very long {type(value).__name__}"
    return whole if len(whole) <= _MAX_QUOTED else f"{whole[:_MAX_QUOTED]}..."


def closest(value: Any, known: Iterable[str]) -> str | None:
    """Return the known name that a wrong one most looks like, or None if none is close."""
    found = difflib.get_close_matches(quoted(value, str).lower(), known, n=1)
    return found[0] if found else None


def choose(value: Any, known: Iterable[str], verb: str = "choose one of") -> str:
    """Return the end of a message about an unknown name: a suggestion and the known ones."""
    names = tuple(known)
    near = closest(value, names)
    listed = f"{verb} {', '.join(names)}"
    return listed if near is None else f"did you mean {near}? {listed[0].upper()}{listed[1:]}"


def differences(kind: str, told: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return the message about settings that differ from number 0; None if none does.

    Args:
        kind: of what the numbers are, such as `rank`.
        told: settings as text, by number and name.
    """
    first = told[0]
    found = [
        f"{name} is {values.get(name, 'unknown')} on {kind} {number} of {len(told)} and "
        f"{first.get(name, 'unknown')} on {kind} 0"
        for number, values in told.items()
        for name in dict.fromkeys((*first, *values))
        if values.get(name) != first.get(name)
    ]
    if not found:
        return None
    return f"{'; '.join(found)}: {_ALIKE}"
