# SPDX-License-Identifier: Apache-2.0
"""Names of methods and of their parts.

A new method is one file that registers its parts and a recipe. This package imports its own. Those
of other installed packages are found by the entry points of the group `vllm_tgvkv.methods`, whose
names are methods and whose values are modules.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from vllm_tgvkv.gates.folder import AUTHORS, GateKind, Gates
from vllm_tgvkv.policies.base import (
    FEW_ROWS,
    Allocation,
    Granularity,
    Policy,
    Reduction,
    Retention,
    Score,
)
from vllm_tgvkv.policies.head_scores import COMMAND, HeadScores
from vllm_tgvkv.policies.pooling import Pooling
from vllm_tgvkv.shared.cuts import When
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted
from vllm_tgvkv.shared.prompt import RowSet
from vllm_tgvkv.summaries.options import KINDS, Summaries

T = TypeVar("T")

logger = logging.getLogger("vllm.tgvkv")

METHODS_GROUP = "vllm_tgvkv.methods"
"""Group of entry points by which installed packages add methods."""


class Registry(Generic[T]):
    """Values by name; looking up an unknown name raises an error that lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        if name in self._values:
            raise ValueError(f"{self.kind} {name!r} is already registered")
        self._values[name] = value

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds a class or function under `name`."""

        def decorate(value: T) -> T:
            self.add(name, value)
            return value

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise ValueError(f"unknown {self.kind} {quoted(name)}: {choose(name, self.names)}")
        return self._values[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)


SCORES: Registry[type[Score]] = Registry("score")
ALLOCATIONS: Registry[type[Allocation]] = Registry("allocation")
RETENTIONS: Registry[Callable[[], Retention]] = Registry("retention")
POOLINGS: Registry[Pooling] = Registry("pooling")
SUMMARIES: Registry[Summaries] = Registry("summaries")

for _kind in KINDS:
    SUMMARIES.add(_kind, Summaries(_kind))
POOLINGS.add("none", Pooling())
POOLINGS.add("sequence", Pooling("sequence"))
POOLINGS.add("grid", Pooling("grid"))


@dataclass(frozen=True)
class Recipe:
    """Names of a method's parts, and its paper's settings."""

    score: str
    allocation: str
    retain: str
    granularity: Granularity = "layer"
    pooling: Pooling = field(default_factory=Pooling)
    merge: bool = False
    rows: RowSet | None = None
    """Rows that vote on the score; None for the score's own."""
    reduce: Reduction = "mean"
    budget: float = 0.1
    """Share of the prompt that is kept where neither server nor request says how much."""
    defer: int = 0
    """Tokens of the answer to wait for, likewise."""
    when: When = "always"
    """When prompts are evicted where the server does not say it."""
    summaries: Summaries | None = None


POLICIES: Registry[Recipe] = Registry("policy")


def _named(registry: Registry[T]) -> Callable[[Any, str], T]:
    """Return a parser of a mix's value that takes one of the names of a registry."""

    def parse(value: Any, source: str) -> T:
        if not isinstance(value, str) or value not in registry.names:
            known = choose(value, registry.names)
            raise EvictionConfigError(f"{source} is {quoted(value)}, and takes a name: {known}")
        return registry[value]

    return parse


@dataclass(frozen=True)
class Mix:
    """A user-defined method: another method with some parts and settings replaced.

    The fields are the keys of an entry of ``methods`` in the configuration, where pooling and
    summaries have names; None inherits the value from ``base``.
    """

    base: str = "tgv"
    score: str | None = None
    allocation: str | None = None
    retain: str | None = None
    granularity: Granularity | None = None
    pooling: Pooling | None = field(default=None, metadata={"parser": _named(POOLINGS)})
    merge: bool | None = None
    rows: RowSet | None = None
    reduce: Reduction | None = None
    summaries: Summaries | None = field(default=None, metadata={"parser": _named(SUMMARIES)})


@functools.cache
def broken_methods() -> Mapping[str, str]:
    """Import the methods of installed packages, once; return those that fail, with the reason.

    A method that fails is logged. It stops nothing until somebody asks for it by name.
    """
    broken = {}
    for entry in entry_points(group=METHODS_GROUP):
        package = entry.dist.name if entry.dist else entry.value
        try:
            entry.load()
            if entry.name not in POLICIES.names:
                raise ValueError(f"{entry.value} registers no method of this name")
        except Exception as error:
            why = (
                f"is of the package {package} and cannot be used ({type(error).__name__}: {error})"
            )
            broken[entry.name] = why
            logger.warning("KV eviction: the method %s %s", entry.name, why)
    return broken


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, of this package and of other installed ones."""
    broken_methods()
    return POLICIES.names


def recipe_of(mix: Mix) -> Recipe:
    """Return the recipe of a mix: its own values over its base method's.

    Raises:
        ValueError: for an unknown method, with a list of the known ones.
    """
    broken = broken_methods()
    if mix.base in broken and mix.base not in POLICIES.names:
        raise ValueError(f"the method {mix.base} {broken[mix.base]}")
    own = {name: value for name, value in vars(mix).items() if value not in (None, "")}
    del own["base"]
    recipe = replace(POLICIES[mix.base], **own)
    keeps_none = recipe.summaries is not None and recipe.summaries.of == "none"
    return replace(recipe, summaries=None) if keeps_none else recipe


def build_policy(
    mix: Mix | str,
    name: str | None = None,
    head_scores: HeadScores | None = None,
    gates: Gates | None = None,
) -> Policy:
    """Build the policy of a mix, or of a registered method by its name.

    Args:
        name: of the policy, by default the base method's.
        head_scores: of the model, for allocations that need them.
        gates: of the model, for scores that need them.

    Raises:
        ValueError: for an unknown name, with a list of the known ones, for parts that cannot be
            combined, or without head scores or gates that are needed.
    """
    if isinstance(mix, str):
        mix = Mix(mix)
    recipe = recipe_of(mix)
    score, allocation = SCORES[recipe.score], ALLOCATIONS[recipe.allocation]
    retention = RETENTIONS[recipe.retain]()
    problems = itertools.chain(
        _problems_of_rows(recipe, score),
        _problems_of_granularity(recipe, score, allocation),
        _problems_of_files(recipe, score, allocation, head_scores, gates),
        _problems_of_parts(recipe, score, allocation),
    )
    for problem in problems:
        raise ValueError(problem)
    return Policy(
        name=name or mix.base,
        score=score(recipe.rows, gates if score.gates else None),
        allocation=allocation(head_scores if allocation.needs_head_scores else None),
        retention=retention,
        granularity=recipe.granularity,
        pooling=recipe.pooling,
        merge=recipe.merge,
        reduction=recipe.reduce,
        summaries=recipe.summaries,
    )


def _problems_of_rows(recipe: Recipe, score: type[Score]) -> Iterator[str]:
    if recipe.rows not in (None, score.rows, *score.other_rows):
        known = [kind for kind in (score.rows, *score.other_rows) if kind != "none"]
        yield (
            f"rows {recipe.rows!r} have no meaning with the score {recipe.score!r}: "
            f"leave rows out{' or choose one of ' + ', '.join(known) if known else ''}"
        )
    if recipe.reduce not in score.reductions:
        others = [name for name in SCORES.names if "max" in SCORES[name].reductions]
        yield (
            f"reduce {recipe.reduce!r} has no meaning with the score {recipe.score!r}, which does "
            f"more than add up the rows' attention: leave reduce out, or choose one of the scores "
            f"{', '.join(others)}"
        )
    if recipe.reduce == "max" and (recipe.rows or score.rows) == "all":
        yield (
            f"reduce 'max' has no meaning with the score {recipe.score!r} and rows 'all', which "
            f"are only added up: choose rows {', '.join(FEW_ROWS)}, or leave reduce out"
        )


def _problems_of_granularity(
    recipe: Recipe, score: type[Score], allocation: type[Allocation]
) -> Iterator[str]:
    if recipe.granularity not in ("layer", "head"):
        yield f"unknown granularity {recipe.granularity!r}: choose one of layer, head"
    for part, granularities in (
        (f"allocation {recipe.allocation!r}", allocation.granularities),
        (f"score {recipe.score!r}", score.granularities),
    ):
        if recipe.granularity not in granularities:
            yield (
                f"{part} has no meaning at granularity {recipe.granularity!r}: "
                f"choose {' or '.join(granularities)}"
            )


def _problems_of_files(
    recipe: Recipe,
    score: type[Score],
    allocation: type[Allocation],
    head_scores: HeadScores | None,
    gates: Gates | None,
) -> Iterator[str]:
    if allocation.needs_head_scores and head_scores is None:
        yield (
            f"allocation {recipe.allocation!r} goes by a file of head scores: make one with "
            f"{COMMAND}, and set head_scores to it in --kv-eviction-config"
        )
    if score.gates is not None and (gates is None or gates.kind != score.gates):
        found = f", and {gates.folder} has those of {AUTHORS[gates.kind]}" if gates else ""
        yield (
            f"score {recipe.score!r} reads gates of {AUTHORS[score.gates]}{found}: "
            "give their folder with --kv-eviction-gates"
        )


def _problems_of_parts(
    recipe: Recipe, score: type[Score], allocation: type[Allocation]
) -> Iterator[str]:
    """Yield what excludes each other: above all, scores that may be negative and sums of them."""
    if score.is_signed and recipe.pooling.halve is not None:
        yield (
            f"pooling with halve has no meaning with the score {recipe.score!r}, whose values may "
            "be negative: leave halve out, or choose another score"
        )
    if score.is_signed and allocation.adds_scores:
        fitting = [name for name in ALLOCATIONS.names if not ALLOCATIONS[name].adds_scores]
        yield (
            f"allocation {recipe.allocation!r} has no meaning with the score {recipe.score!r}, "
            f"whose values may be negative: choose one of {', '.join(fitting)}"
        )
    if recipe.summaries is not None and recipe.merge:
        yield (
            "summaries and merge: true exclude each other: evicted tokens are either summarised or "
            "merged into kept ones; set merge: false, or summaries: none"
        )
    if score.is_signed and recipe.summaries is not None and recipe.summaries.weight == "score":
        yield (
            f"summaries.weight 'score' has no meaning with the score {recipe.score!r}, whose "
            "values may be negative: choose weight: tokens"
        )


def needs_head_scores(name: str) -> bool:
    """Return whether a registered method goes by a file of head scores."""
    return ALLOCATIONS[POLICIES[name].allocation].needs_head_scores


def gates_of(name: str) -> GateKind | None:
    """Return the kind of gates that a registered method reads, or None."""
    return SCORES[POLICIES[name].score].gates


def has_summaries(name: str) -> bool:
    """Return whether a registered method keeps summaries of what it evicts."""
    return POLICIES[name].summaries is not None
