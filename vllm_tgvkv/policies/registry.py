# SPDX-License-Identifier: Apache-2.0
"""Names of policies and of their parts.

A new method is one file: it registers its parts and a recipe, and the package imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_tgvkv.policies.base import Budget, Granularity, Policy, Retention, Score
from vllm_tgvkv.policies.pooling import Pooling

T = TypeVar("T")


class Registry(Generic[T]):
    """Values by name; an unknown name is an error that lists the known ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        if name in self._values:
            raise ValueError(f"{self.kind} {name!r} is already registered")
        self._values[name] = value

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds what it decorates, a class or a function."""

        def decorate(value: T) -> T:
            self.add(name, value)
            return value

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise ValueError(f"unknown {self.kind} {name!r}: choose one of {', '.join(self.names)}")
        return self._values[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)


@dataclass(frozen=True)
class Recipe:
    """Names of a policy's parts, and the granularity its paper works at."""

    score: str
    budget: str
    retention: str
    granularity: Granularity = "layer"


SCORES: Registry[Callable[[], Score]] = Registry("score")
BUDGETS: Registry[Callable[[], Budget]] = Registry("budget")
RETENTIONS: Registry[Callable[[], Retention]] = Registry("retention")
POLICIES: Registry[Recipe] = Registry("policy")


def build_policy(
    name: str,
    granularity: Granularity | None = None,
    pooling: Pooling | None = None,
    score: str | None = None,
    budget: str | None = None,
    retain: str | None = None,
) -> Policy:
    """The policy of that name, with any of its parts replaced.

    Args:
        name: one of ``POLICIES.names``.
        granularity: ``layer`` or ``head``; None is the policy's own.
        pooling: of the scores; None is no pooling.
        score, budget, retain: names of parts to use instead of the policy's own.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    recipe = POLICIES[name]
    granularity = granularity or recipe.granularity
    if granularity not in ("layer", "head"):
        raise ValueError(f"unknown granularity {granularity!r}: choose one of layer, head")
    return Policy(
        name=name,
        score=SCORES[score or recipe.score](),
        budget=BUDGETS[budget or recipe.budget](),
        retention=RETENTIONS[retain or recipe.retention](),
        granularity=granularity,
        pooling=pooling or Pooling(),
    )
