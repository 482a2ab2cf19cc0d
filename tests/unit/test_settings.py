# SPDX-License-Identifier: Apache-2.0
"""Declared settings: checks, help and documentation that follow from a declaration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from docs import write_settings
from docs.write_settings import table
from vllm_tgvkv.config.server import DebugOptions, EvictionConfig
from vllm_tgvkv.config.settings import help_lines, read, setting, settings_of
from vllm_tgvkv.server import schemas
from vllm_tgvkv.shared.errors import EvictionConfigError


@dataclass(frozen=True)
class Part:
    kind: Literal["x", "y"] = "x"
    size: int = 3

    def __post_init__(self) -> None:
        if self.size % 2 == 0:
            raise ValueError(f"size is {self.size}: give an odd number")


def _upper(value: Any, source: str) -> str:
    return f"{source}={value}".upper()


@dataclass(frozen=True)
class Example:
    number: int = setting(5, at_least=2, help="A number.")
    choice: Literal["a", "b"] | None = setting(None, help="`a`: one; `b`: two.", unset="`a` or `b`")
    switch: bool = setting(False, help="A switch.")
    part: Part | None = setting(None, accepts="a part", help="A part.")
    own: str = setting("", parser=_upper, accepts="text", help="Parsed by a function.")
    name: str | None = None


def test_values_are_read_as_declared() -> None:
    assert read(Example, {}, "it") == Example() == Example(5, None, False, None, "", None)
    values = {"number": 2, "choice": "b", "switch": True, "part": {"size": 5}, "own": "x"}
    found = read(Example, values, "it")
    assert found == Example(2, "b", True, Part(size=5), "IT.OWN=X")
    assert read(Example, {"part": found.part, "choice": None}, "it") == Example(part=found.part)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": 1}, "it.number is 1: give a whole number, at least 2 and at most 2147483647"),
        *(
            ({"number": value}, f"it.number is {value}: give a whole number, at least 2")
            for value in (True, 2**31, None)
        ),
        ({"choice": "c"}, "it.choice is 'c': choose one of a, b, or leave it out"),
        ({"choice": ["a"]}, "it.choice is ['a']: choose one of a, b, or leave it out"),
        ({"part": {"kind": None}}, "it.part.kind is None: choose one of x, y"),
        ({"part": {"size": 2}}, "it.part: size is 2: give an odd number"),
        ({"part": {"sise": 3}}, "it.part has unknown sise: did you mean size? Known are kind"),
        ({"part": 3}, "it.part is 3: give a mapping"),
        ({"switch": "yes"}, "it.switch is 'yes': give true or false"),
        ({"name": 3}, "it.name is 3: give a name"),
        ({"nmae": 3, 1: 2}, "it has unknown 1, nmae: known are number, choice, switch, part"),
        ([], "it is []: give a mapping"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_name_and_the_way_out(values: Any, message: str) -> None:
    with pytest.raises(EvictionConfigError) as caught:
        read(Example, values, "it")
    assert str(caught.value).startswith(message)


def test_help_and_table_follow_from_the_declaration() -> None:
    number, choice, *_ = settings_of(Example)
    assert help_lines((number, choice)) == (
        "- number: A number. (whole number, at least 2; default: 5)\n"
        "- choice: a: one; b: two. (a, b; default: a or b)"
    )
    assert table((number, choice)).splitlines()[2:] == [
        "| `number` | A number. | whole number, at least 2 | `5` |",
        "| `choice` | `a`: one; `b`: two. | `a`, `b` | `a` or `b` |",
    ]


def test_every_setting_is_declared_in_full() -> None:
    for declared in (*settings_of(EvictionConfig), *settings_of(DebugOptions)):
        assert declared.help.endswith("."), declared.name
        assert declared.values
        assert declared.default_text
        assert "|" not in f"{declared.help}{declared.values}{declared.default_text}"
        assert declared.type is not int or declared.at_least is not None


def test_a_default_is_not_shared() -> None:
    first, second = EvictionConfig(), EvictionConfig()
    assert first.methods is not second.methods
    assert dataclasses.asdict(first) == dataclasses.asdict(second)


def test_the_status_shows_the_settings_that_decide_what_is_kept() -> None:
    fields = schemas.Settings.model_fields
    words = ("policy", "budget", "when", "protect", "text_only", "granularity")
    numbers = ("observation_window", "defer", "sinks", "floor_pages", "min_prompt_tokens")
    wanted: dict[str, Any] = {**dict.fromkeys(words, str), **dict.fromkeys(numbers, int)}
    wanted["decode"] = schemas.Decode | None
    assert {name: field.annotation for name, field in fields.items()} == wanted
    assert all(field.is_required() for field in fields.values())


def test_the_page_of_settings_is_as_declared() -> None:
    """If not: python -m docs.write_settings."""
    assert write_settings.PAGE.read_text() == write_settings.page()
