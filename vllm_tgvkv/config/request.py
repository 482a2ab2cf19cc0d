# SPDX-License-Identifier: Apache-2.0
"""Options of one request: its `vllm_xargs`, over the server's settings.

A request is evicted after its wait, to its budget, and again as a schedule or a ceiling says.
Each of these comes from the request if it names it, and otherwise from the server. A schedule has a
first eviction of its own, so it stands for wait and budget as well. A request that names a schedule
or a ceiling, or `none` for one, takes nothing of the server's `decode`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from vllm_tgvkv.config.removed import refuse_removed
from vllm_tgvkv.config.server import CONFIG_KEY, NONE, Again, EvictionConfig, check_method
from vllm_tgvkv.config.settings import check_count
from vllm_tgvkv.shared.budget import Budget, Schedule, parse_schedule, written
from vllm_tgvkv.shared.cuts import Ceiling, When
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted

T = TypeVar("T")

PROTECT = "kv_eviction_protect"
PROTECTED_TOKENS = "kv_eviction_protected_tokens"
"""The key that the front end sets for a chat whose instructions are protected."""

REQUEST_KEYS = (
    "kv_eviction",
    "kv_eviction_budget",
    "kv_eviction_when",
    "kv_eviction_defer",
    "kv_eviction_schedule",
    "kv_eviction_max_tokens",
    PROTECT,
    PROTECTED_TOKENS,
    "kv_eviction_recall",
    "kv_eviction_report",
    "kv_eviction_trace",
)
"""Keys that a request may set in its `vllm_xargs`."""


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request, with the settings where it names none."""

    policy: str
    budget: Budget
    """Of the first eviction."""
    defer: int = 0
    """Tokens of the answer that the first eviction waits for; that vote, under pressure."""
    when: When = "always"
    later: Schedule = ()
    """Evictions of the prompt after the first one."""
    ceiling: Ceiling | None = None
    report: bool = False
    """Whether the response reports the eviction, under `kv_transfer_params.kv_eviction`."""
    trace: bool = False
    """Whether the server keeps a trace, for `GET /kv-eviction/requests`."""
    protected: int = 0
    """First tokens of the prompt that every layer and head keeps."""
    recall: bool = False
    """Whether evicted tokens may come back."""

    @property
    def cuts_again(self) -> bool:
        """Whether there are evictions after the first one, in a long enough answer."""
        return bool(self.later) or self.ceiling is not None

    @property
    def decode(self) -> dict[str, Any] | None:
        """The later evictions as the setting `decode` has them; None if there are none."""
        if self.ceiling is not None:
            return {"max_tokens": self.ceiling.max_tokens}
        if not self.later:
            return None
        return {"schedule": written(((self.defer, self.budget), *self.later))}

    @property
    def understood(self) -> str:
        """The options in words, for the report."""
        if self.policy == NONE:
            return "everything is kept"
        return f"{self}{self.budget.doubt}"

    def __str__(self) -> str:
        """Return how much is kept, in words."""
        text = str(self.budget)
        if self.when == "pressure":
            return f"down to {text} when memory is short"
        if self.ceiling is not None:
            least, most = self.ceiling.max_tokens, self.ceiling.max_tokens + self.ceiling.buffer
            return f"{text}, then {least} to {most} tokens per head"
        steps = (f", {budget} after {n} tokens of the answer" for n, budget in self.later)
        return text + "".join(steps)

    @classmethod
    def resolve(
        cls,
        config: EvictionConfig,
        extra_args: Mapping[str, Any] | None,
        block_size: int | None = None,
    ) -> RequestOptions:
        """Apply a request's `vllm_xargs` to the server's settings.

        Args:
            block_size: N, on which the least ceiling depends; None if it is not known yet.

        Raises:
            EvictionConfigError: for an unknown `kv_eviction*` key, one that begins with a misspelt
                `kv_eviction`, a wrong value, or values that do not go together.
        """
        given = {k: v for k, v in (extra_args or {}).items() if is_meant_for_us(str(k))}
        refuse_removed(given, "vllm_xargs")
        if unknown := sorted(given.keys() - set(REQUEST_KEYS)):
            names = ", ".join(quoted(name, str) for name in unknown)
            raise EvictionConfigError(
                f"vllm_xargs has {names}: {choose(unknown[0], REQUEST_KEYS, 'known are')}"
            )
        method = given.get("kv_eviction", config.policy)
        budget, defer, later, ceiling = _evictions(config, given, method)
        again = _again(config, given, bool(later) or ceiling is not None)
        when = _when(config, given, again)
        recalls = config.recall is not None
        if "kv_eviction_recall" in given:
            recalls = _recalls(config, given)
        source, more = "vllm_xargs.kv_eviction", (again, when, ceiling is not None, recalls)
        policy = check_method(config, method, budget, defer, source, *more)
        if policy == NONE:
            later, ceiling, when = (), None, "always"
        elif again.happens:
            _check_room(config, given, again, ceiling, block_size)
        report, trace = (
            _switch(given, f"kv_eviction_{name}", name) for name in ("report", "trace")
        )
        if trace and not config.max_traces:
            raise EvictionConfigError(
                "vllm_xargs.kv_eviction_trace is 1, and this server keeps no traces: start it with "
                "max_traces of at least 1 in --kv-eviction-config, or leave it out"
            )
        own = budget, defer, when, later, ceiling, report, trace, _protected(given), recalls
        return cls(policy, *own)


def is_meant_for_us(key: str) -> bool:
    """Return whether a key of a request begins with `kv_eviction`, perhaps misspelt.

    Other plugins have keys there, too, also such that begin with `kv_`. So the second word has to
    look like "eviction": one letter missing, wrong, doubled or swapped with its neighbour gives a
    ratio of 0.87 or more; words that share its end, such as "section", give 0.8 or less.
    """
    if key.startswith(CONFIG_KEY):
        return True
    words = re.match(r"[kv]{1,3}[^a-z]*([a-z]+)", key.lower())
    if words is None:
        return False
    word, second = words[1], CONFIG_KEY.split("_")[1]
    is_cut_short = len(word) >= 5 and second.startswith(word)
    return is_cut_short or any(
        difflib.SequenceMatcher(None, candidate, second).ratio() > 0.85
        for candidate in {word, word[: len(second)]}
    )


def _evictions(
    config: EvictionConfig, given: Mapping[str, Any], method: Any
) -> tuple[Budget, int, Schedule, Ceiling | None]:
    """Return budget and wait of the first eviction, and what says when others follow."""

    def value(name: str, parse: Callable[[Any, str], T], default: T) -> T:
        key = f"kv_eviction_{name}"
        return parse(given[key], f"vllm_xargs.{key}") if key in given else default

    budget, defer = config.first_eviction(method)
    budget = value("budget", Budget.parse, budget)
    defer = value("defer", config.check_defer, defer)
    schedule = value("schedule", _parse_schedule, None)
    max_tokens = value("max_tokens", _parse_ceiling, None)
    decode, later = config.decode, (schedule or ())[1:]
    if decode is not None and schedule is None and max_tokens is None:
        later = tuple(step for step in decode.later if _follows(step, defer, budget))
        max_tokens = decode.max_tokens
    if schedule:
        for key in ("kv_eviction_budget", "kv_eviction_defer"):
            if key in given:
                raise EvictionConfigError(
                    f"vllm_xargs.{key} is {quoted(given[key])} with kv_eviction_schedule, whose "
                    "first pair says when and how much is evicted first: leave one of them out"
                )
        if max_tokens:
            raise EvictionConfigError(
                f"vllm_xargs.kv_eviction_max_tokens is {max_tokens} with kv_eviction_schedule: a "
                "request has either a schedule or a ceiling; leave one of them out"
            )
        first, budget = schedule[0]
        defer = config.check_defer(first, "the first wait of vllm_xargs.kv_eviction_schedule")
    return budget, defer, later, Ceiling.of(max_tokens) if max_tokens else None


def _follows(step: tuple[int, Budget], defer: int, budget: Budget) -> bool:
    """Return whether a step of the server comes after a request's own first eviction, to less.

    Whether a number of tokens is less than a fraction depends on the prompt, see `plan_cuts`.
    """
    num_tokens, later = step
    may_be_less = budget.fraction is None or budget.is_auto
    return num_tokens > defer and (may_be_less or (later.fraction or 0) < (budget.fraction or 0))


def _parse_schedule(value: Any, source: str) -> Schedule | None:
    return () if value == NONE else parse_schedule(value, source, f', or "{NONE}"')


def _parse_ceiling(value: Any, source: str) -> int | None:
    """Return the tokens of a ceiling, or 0 for none."""
    return 0 if value == NONE else check_count(value, 1, source, f', or "{NONE}"')


def _again(config: EvictionConfig, given: Mapping[str, Any], happens: bool) -> Again:
    """Return where later evictions come from, for messages."""
    own = (key for key in ("kv_eviction_schedule", "kv_eviction_max_tokens") if key in given)
    key = next((key for key in own if given[key] != NONE), None)
    source = "the server's decode" if key is None else f"vllm_xargs.{key}"
    return Again(happens, source, f'set {key or "kv_eviction_schedule"}: "{NONE}" to evict once')


def _when(config: EvictionConfig, given: Mapping[str, Any], again: Again) -> When:
    """Return when the request is evicted; one with later evictions of its own says it by them.

    Raises:
        EvictionConfigError: for another value, or on a server without memory for it.
    """
    key = "kv_eviction_when"
    if key not in given:
        return "always" if again.happens else config.when or "always"
    value, known = given[key], get_args(When)
    if value not in known:
        raise EvictionConfigError(f"vllm_xargs.{key} is {quoted(value)}: {choose(value, known)}")
    if value == "pressure" and not config.keeps_positions:
        raise EvictionConfigError(
            f"vllm_xargs.{key} is 'pressure', and this server has set no memory aside for "
            'evictions in stages: start it with --kv-eviction-when pressure or {"decode": '
            '{"on_request": true}} in --kv-eviction-config, or leave it out'
        )
    found: When = value
    return found


def _check_room(
    config: EvictionConfig,
    given: Mapping[str, Any],
    again: Again,
    ceiling: Ceiling | None,
    block_size: int | None,
) -> None:
    """Check that later evictions fit the server.

    Raises:
        EvictionConfigError: naming the field, its value and the way out.
    """
    if not config.keeps_positions:  # so they are not the server's
        value = given[again.source.removeprefix("vllm_xargs.")]
        raise EvictionConfigError(
            f"{again.source} is {quoted(value)}, which evicts while the answer grows, and this "
            'server has set no memory aside for that: start it with {"decode": {"on_request": '
            "true}} in --kv-eviction-config, or give kv_eviction_budget and kv_eviction_defer, or "
            "a schedule of one pair, which evict once"
        )
    if ceiling is not None and block_size is not None:
        least = config.least_ceiling(block_size)
        if ceiling.max_tokens < least:
            raise EvictionConfigError(
                f"{again.source} is {ceiling.max_tokens}: give at least {least}, one block of "
                f"{block_size} tokens for every head and floor_pages {config.floor_pages}"
            )


def _switch(given: Mapping[str, Any], name: str, what: str) -> bool:
    value = given.get(name, 0)
    if value not in (0, 1):
        raise EvictionConfigError(
            f"vllm_xargs.{name} is {quoted(value)}: give 1 for a {what}, or 0"
        )
    return bool(value)


def _recalls(config: EvictionConfig, given: Mapping[str, Any]) -> bool:
    """Return whether evicted tokens of a request may come back.

    Raises:
        EvictionConfigError: for another value, or on a server without a tier.
    """
    recalls = _switch(given, "kv_eviction_recall", "recall")
    if recalls and config.recall is None:
        raise EvictionConfigError(
            "vllm_xargs.kv_eviction_recall is 1, and this server has no tier to recall from: start "
            'it with {"recall": {}} in --kv-eviction-config, or leave it out'
        )
    return recalls


def _protected(given: Mapping[str, Any]) -> int:
    """Return the protected tokens of a request; the front end counts them where it wants some."""
    setting, source = given.get(PROTECT, "system"), f"vllm_xargs.{PROTECT}"
    if setting not in (known := ("system", NONE)):
        raise EvictionConfigError(f"{source} is {quoted(setting)}: {choose(setting, known)}")
    number = check_count(given.get(PROTECTED_TOKENS, 0), 0, f"vllm_xargs.{PROTECTED_TOKENS}")
    return 0 if setting == NONE else number
