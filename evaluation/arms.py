# SPDX-License-Identifier: Apache-2.0
"""What is compared: methods, budgets, and mixes of the methods' parts, each a request's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tgvkv.config import NONE
from vllm_tgvkv.policies import POLICY_NAMES

METHODS: tuple[str, ...] = tuple(POLICY_NAMES)
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
AUTO_SHARES = (0.6, 0.8, 0.9, 0.95, 0.98, 0.99)
CLOSE_BUDGETS = (0.2, 0.1, 0.05)
"""Budgets of the comparisons beside the main grid."""

BLOCK_SIZES = (16, 32, 128)
"""Tokens of a page; vLLM's CPU attention has multiples of 16."""
BLOCK_METHODS = ("tgv", "snapkv", "random")
BLOCK_BUDGETS = (0.5, 0.2, 0.1, 0.05)

OTHER_GRANULARITY: dict[str, dict[str, Any]] = {
    f"{method}_{granularity}": {"base": method, "granularity": granularity}
    for granularity, methods in {
        "head": ("tgv", "vlcache", "aircache", "prefixkv", "elastic", "random"),
        "layer": ("snapkv", "pyramidkv", "h2o"),
    }.items()
    for method in methods
}
"""Methods at the granularity that is not their own, where it has a meaning."""


@dataclass(frozen=True)
class Part:
    """One part of TGV-KV and what replaces it: field of a mix, and the values it takes."""

    title: str
    field: str
    own: str
    others: tuple[str, ...]

    def method(self, value: str) -> str:
        """Name of TGV-KV with this part replaced."""
        return f"tgv_{self.field}_{value}"


ABLATIONS = (
    Part("Layer budget", "budget", "tgv", ("vv", "tt", "uniform", "entropy")),
    Part("Score", "score", "tgv", ("text_rows", "vv_tt", "h2o", "snapkv")),
    Part("Retention", "retain", "text_first", ("vision_first", "by_score")),
)

MIXES: dict[str, dict[str, Any]] = {
    **OTHER_GRANULARITY,
    **{
        part.method(value): {"base": "tgv", part.field: value}
        for part in ABLATIONS
        for value in part.others
    },
}
"""The server's `methods`: every arm of an evaluation is one of these, a method, or `none`."""


@dataclass(frozen=True)
class Arm:
    """A method at a budget: a fraction of the prompt, or `auto:SHARE`."""

    method: str
    budget: float | str

    @property
    def key(self) -> str:
        """Names the arm in logs and results."""
        return NONE if self == FULL else f"{self.method}@{self.budget}"

    @property
    def xargs(self) -> dict[str, Any]:
        """`vllm_xargs` of its requests."""
        wish = {} if self == FULL else {"kv_eviction_budget": self.budget}
        return {"kv_eviction": self.method, **wish, "kv_eviction_report": 1}


FULL = Arm(NONE, 1.0)
"""The full cache, which all methods share as their budget of 100 %."""


def crossed(methods: Sequence[str], budgets: Sequence[float | str]) -> list[Arm]:
    """Every method at every budget; at 1.0 all are the full cache, which comes once."""
    arms = [FULL] if 1.0 in budgets else []
    return arms + [Arm(method, b) for b in budgets if b != 1.0 for method in methods]


def auto_arms() -> list[Arm]:
    """TGV-KV with a budget that follows the attention of each request."""
    return crossed(["tgv"], [f"auto:{share:g}" for share in AUTO_SHARES])


def granularity_arms(methods: Sequence[str], budgets: Sequence[float]) -> list[Arm]:
    """The methods named, at their other granularity, where they have one."""
    names = [name for name, mix in OTHER_GRANULARITY.items() if mix["base"] in methods]
    return crossed(names, [b for b in CLOSE_BUDGETS if b in budgets])


def ablation_arms(budgets: Sequence[float]) -> list[Arm]:
    """TGV-KV whole, and with one part replaced."""
    names = ["tgv", *(part.method(value) for part in ABLATIONS for value in part.others)]
    return crossed(names, [b for b in CLOSE_BUDGETS if b in budgets])


def block_arms(methods: Sequence[str], budgets: Sequence[float]) -> list[Arm]:
    """The few methods whose pages are measured at several sizes."""
    return crossed(
        [m for m in BLOCK_METHODS if m in methods], [b for b in BLOCK_BUDGETS if b in budgets]
    )


def engine_methods(methods: Mapping[str, Any] = MIXES) -> dict[str, Any]:
    """`methods` of the eviction config."""
    return {name: dict(mix) for name, mix in methods.items()}
