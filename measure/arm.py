# SPDX-License-Identifier: Apache-2.0
"""One side of a comparison: what is asked or served under a name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Options = tuple[tuple[str, Any], ...]

FULL_CACHE = "none"
"""The method of requests that are not evicted."""

SCHEDULE = "schedule"
"""Name of the option with the steps of an eviction: tokens of the answer, and what is kept."""
CEILING = "max_tokens"
"""Name of the option with the tokens to which prompt and answer are cut again and again."""


@dataclass(frozen=True)
class Arm:
    """A method at a budget with the options of its requests, and the engine that serves it.

    Arms of one engine differ in their requests; arms of several in `server`. Without a method,
    requests name none, and the engine's default holds: that of a stock engine is the full cache.
    """

    method: str | None = None
    """Method or mix of the plugin, or `none` for the full cache."""
    budget: float | str | None = None
    """Share of the prompt that is kept; of a schedule, the share of its last step."""
    options: Options = ()
    """Further options of its requests: names after `kv_eviction_`, and their values."""
    mix: Mapping[str, Any] | None = field(default=None, hash=False)
    """Parts of the method if it is a mix: its entry of the setting `methods`."""
    gates: str = ""
    """Folder of the gates that the method reads, relative to the repository."""
    recall: Options = ()
    """The setting `recall` of its engine: names and values; () for none."""
    drafts: int = 0
    """Tokens that the model drafts for itself in each step, with a full cache of its own."""
    name: str = ""
    """Given name, for arms that their method and budget do not tell apart."""
    server: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Engine arguments, or flags of `vllm serve`, that set it apart."""
    url: str | None = None
    """Server that runs already; others are started."""
    threads: int | None = None
    """Of the model's computations; None: one for each core."""
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of its HTTP requests beside those that follow from the method."""

    @property
    def evicts(self) -> bool:
        """Return whether its requests name a method, or its engine is configured to evict."""
        return self.method not in (None, FULL_CACHE) or "additional_config" in self.server

    @property
    def key(self) -> str:
        """Return its name in logs and results."""
        if self.name:
            return self.name
        if self.method in (None, FULL_CACHE):
            return f"{FULL_CACHE}{self.suffix}"
        budget = f"{self.budget:g}" if isinstance(self.budget, float | int) else self.budget
        return f"{self.method}@{budget}{self.suffix}"

    @property
    def identity(self) -> str:
        """Return the key with the mix spelled out, so that a changed mix is another arm."""
        mix = [json.dumps(dict(self.mix), sort_keys=True)] if self.mix else []
        return " ".join([self.key, *mix])

    @property
    def label(self) -> str:
        """Return its name without the budget, or without the ceiling that replaces one."""
        options = tuple(option for option in self.options if option[0] != CEILING)
        return f"{self.method}{replace(self, options=options).suffix}"

    @property
    def suffix(self) -> str:
        """Return options, recall, drafts, and the gates' folder if it is not the method's name."""
        folder = Path(self.gates).name
        gates = () if folder in ("", self.method) else (("gates", folder),)
        drafts = (("drafts", self.drafts),) if self.drafts else ()
        told = (*self.options, *gates, *self.recall, *drafts)
        return "".join(f",{name}={value}" for name, value in told)

    @property
    def has_ceiling(self) -> bool:
        """Return whether prompt and answer are evicted whenever they exceed a number of tokens."""
        return CEILING in dict(self.options)

    @property
    def has_schedule(self) -> bool:
        """Return whether the prompt is evicted in steps, which say when and how much."""
        return SCHEDULE in dict(self.options)

    @property
    def steps(self) -> Iterator[tuple[int, float]]:
        """Yield its evictions: tokens of the answer, and the share of the prompt that is kept."""
        options = dict(self.options)
        if not self.has_schedule:
            yield options.get("defer", 0), float(self.budget or 1)
            return
        for step in options[SCHEDULE].split(","):
            after, budget = step.split(":")
            yield int(after), float(budget)

    @property
    def xargs(self) -> dict[str, Any]:
        """Return the `vllm_xargs` of its requests.

        They evict in any case, and wait only if an option says so.
        """
        if self.method is None:
            return {}
        if self.method == FULL_CACHE:
            return {"kv_eviction": self.method}
        # A method is measured by evicting, also if memory is not short.
        first: dict[str, Any] = {"kv_eviction_when": "always"}
        if self.budget is not None and not self.has_schedule:
            # Without a wait, an arm has none, also if its method recommends one.
            first |= {"kv_eviction_budget": self.budget, "kv_eviction_defer": 0}
        options = {f"kv_eviction_{name}": value for name, value in self.options}
        return {"kv_eviction": self.method, **first, **options}


FULL = Arm(FULL_CACHE, 1.0)
"""The full cache. What it answers wrong says nothing about a method."""
