# SPDX-License-Identifier: Apache-2.0
"""`results.json`: the results that the report is written from, independent of the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evaluation.results import Cell, Comparison
from measure.statistics import Estimate

FILE = "results.json"


@dataclass(frozen=True)
class ResultTable:
    """Cells and the comparisons between them."""

    cells: list[Cell]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """Numbers of the whole table."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ResultTable:
        return cls(
            [Cell(**_estimates(cell)) for cell in values["cells"]],
            [Comparison(**_estimates(claim)) for claim in values["comparisons"]],
            values["notes"],
        )


@dataclass(frozen=True)
class Patches:
    """The parts of one question's first page that methods kept.

    `kept` counts for each patch, `[rows][columns]`, the (layer, head) pairs that kept it.
    """

    task: str
    number: int
    pairs: int
    kept: dict[str, list[list[int]]]
    answers: dict[str, str]


@dataclass(frozen=True)
class Pictures:
    """Pages by layer and head, mean over some questions, and the patches of one of them."""

    budget: float
    questions: int
    pages: dict[str, list[list[float]]]
    """For each method `[layers][heads]`."""
    patches: Patches

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Pictures:
        return cls(**{**values, "patches": Patches(**values["patches"])})


@dataclass
class Record:
    """The results so far, and the facts of how they were made."""

    facts: dict[str, Any]
    tables: dict[str, ResultTable] = field(default_factory=dict)
    pictures: Pictures | None = None

    @classmethod
    def read(cls, folder: Path) -> Record:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        pictures = values["pictures"]
        return cls(
            values["facts"],
            {name: ResultTable.from_json(table) for name, table in values["tables"].items()},
            None if pictures is None else Pictures.from_json(pictures),
        )

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(_lines(_rounded(asdict(self))) + "\n", encoding="utf-8")


def _lines(value: Any, depth: int = 4) -> str:
    """Return JSON with one line per item down to `depth`."""
    if depth == 0 or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        # Items of lists are cells, comparisons or rows of numbers.
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    items = [f"{json.dumps(key)}: {_lines(item, depth - 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(items) + "\n}"


def _estimates(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Estimate(*value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def _rounded(value: Any) -> Any:
    """Return a value with floats of five digits; an estimate becomes a list of three."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        if value.keys() == {"mean", "low", "high"}:
            return [_rounded(item) for item in value.values()]
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
