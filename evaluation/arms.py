# SPDX-License-Identifier: Apache-2.0
"""The arms of the evaluation: methods and mixes of their parts, at budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tgvkv.config.server import NONE, EvictionConfig

METHODS: tuple[str, ...] = EvictionConfig().method_names[1:]
BUDGETS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
AUTO_SHARES = (0.6, 0.8, 0.9, 0.95, 0.98, 0.99)
CLOSE_BUDGETS = (0.2, 0.1, 0.05)
"""Budgets of the comparisons outside the main grid."""

BLOCK_SIZES = (16, 32, 128)
"""Tokens of a page; vLLM's CPU attention needs multiples of 16."""
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
"""Methods at the granularity that is not their own, where it is defined."""


@dataclass(frozen=True)
class Part:
    """One part of TGV-KV and its replacements: values of a field of a mix."""

    title: str
    name: str
    """Name of the part in methods and reports."""
    field: str
    own: str
    others: tuple[str, ...]

    def method(self, value: str) -> str:
        """Name of TGV-KV with this part replaced."""
        return f"tgv_{self.name}_{value}"


ABLATIONS = (
    Part("Layer budget", "budget", "allocation", "tgv", ("vv", "tt", "uniform", "entropy")),
    Part("Score", "score", "score", "tgv", ("text_rows", "vv_tt", "h2o", "snapkv")),
    Part("Retention", "retain", "retain", "text_first", ("vision_first", "by_score")),
)

MIXES: dict[str, dict[str, Any]] = {
    **OTHER_GRANULARITY,
    **{
        part.method(value): {"base": "tgv", part.field: value}
        for part in ABLATIONS
        for value in part.others
    },
}
"""The server's `methods`: an arm is one of these, a method of the plugin, or `none`."""


@dataclass(frozen=True)
class EvaluatedArm:
    """A method at a budget: a fraction of the prompt, or `auto:SHARE`."""

    method: str
    budget: float | str

    @property
    def key(self) -> str:
        """Return the name of the arm in logs and results."""
        return NONE if self == FULL else f"{self.method}@{self.budget}"

    @property
    def xargs(self) -> dict[str, Any]:
        """Return the `vllm_xargs` of its requests."""
        # Evicted at the prompt's end, also if a method recommends to wait.
        first = {} if self == FULL else {"kv_eviction_budget": self.budget, "kv_eviction_defer": 0}
        return {"kv_eviction": self.method, **first, "kv_eviction_report": 1}


FULL = EvaluatedArm(NONE, 1.0)
"""The full cache: every method at a budget of 100 %."""


def crossed(methods: Sequence[str], budgets: Sequence[float | str]) -> list[EvaluatedArm]:
    """Return every method at every budget; budget 1.0 gives the full cache once."""
    arms = [FULL] if 1.0 in budgets else []
    return arms + [EvaluatedArm(method, b) for b in budgets if b != 1.0 for method in methods]


def auto_arms() -> list[EvaluatedArm]:
    """Return TGV-KV with budgets that follow the attention of each request."""
    return crossed(["tgv"], [f"auto:{share:g}" for share in AUTO_SHARES])


def granularity_arms(methods: Sequence[str], budgets: Sequence[float]) -> list[EvaluatedArm]:
    """Return the given methods at their other granularity, where they have one."""
    names = [name for name, mix in OTHER_GRANULARITY.items() if mix["base"] in methods]
    return crossed(names, [b for b in CLOSE_BUDGETS if b in budgets])


def ablation_arms(budgets: Sequence[float]) -> list[EvaluatedArm]:
    """Return TGV-KV, and TGV-KV with one part replaced."""
    names = ["tgv", *(part.method(value) for part in ABLATIONS for value in part.others)]
    return crossed(names, [b for b in CLOSE_BUDGETS if b in budgets])


def block_arms(methods: Sequence[str], budgets: Sequence[float]) -> list[EvaluatedArm]:
    """Return the methods that are measured with pages of several sizes."""
    return crossed(
        [m for m in BLOCK_METHODS if m in methods], [b for b in BLOCK_BUDGETS if b in budgets]
    )


def engine_methods(methods: Mapping[str, Any] = MIXES) -> dict[str, Any]:
    """Return `methods` of the eviction configuration."""
    return {name: dict(mix) for name, mix in methods.items()}
