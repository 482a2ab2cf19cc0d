# SPDX-License-Identifier: Apache-2.0
"""What the user asks for: the server's defaults and one request's wishes.

The same mapping travels everywhere: `--kv-eviction*` flags fill
`additional_config["kv_eviction"]`, `LLM(additional_config=...)` sets it
directly, and vLLM carries it to every process.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from vllm.logger import init_logger

from vllm_tgvkv.budget import Budget
from vllm_tgvkv.errors import EvictionConfigError, quoted
from vllm_tgvkv.policies import (
    POLICY_NAMES,
    Granularity,
    Mix,
    Policy,
    Pooling,
    build_policy,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.tgvkv")

CONFIG_KEY = "kv_eviction"
"""Key of the mapping in vLLM's `additional_config`."""

REQUEST_KEYS = (
    "kv_eviction",
    "kv_eviction_budget",
    "kv_eviction_report",
    "kv_eviction_trace",
)
"""What a request may set in its `vllm_xargs`."""

NONE = "none"
"""The policy name that means: keep everything."""


@dataclass(frozen=True)
class DebugOptions:
    """Switches for tests; each costs time and none changes what is kept."""

    poison: bool = False
    """Fill every block given back with NaN at once, and clear it when it is handed out again."""
    check_integrity: bool = False
    """Recount every block after each scheduler step and raise when something is off."""
    evict_at_full_budget: bool = False
    """Run the eviction even where the budget covers the prompt: every page is dealt anew."""
    record_kept: bool = False
    """Remember the kept positions of the last evictions, for `collective_rpc`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}: give true or false")


@dataclass(frozen=True)
class EvictionConfig:
    """The server's settings. Field names are the keys of `--kv-eviction-config`."""

    policy: str = NONE
    budget: Budget = field(default_factory=lambda: Budget(fraction=0.1))
    granularity: Granularity | None = None
    """`layer`: one token set for all heads of a layer; `head`: a set and a length for each;
    None: what the method's paper does."""
    observation_window: int = 128
    """At most this many of the last text rows vote on what is kept."""
    sinks: int = 4
    """This many first tokens are kept before all others."""
    floor_pages: int = 1
    """Pages every (layer, head) gets before the shares are looked at."""
    min_prompt_tokens: int = 128
    """Shorter prompts pass untouched."""
    text_only: Literal["keep", "evict"] = "keep"
    """What happens to a prompt without an image or video."""
    prefix_reuse: Literal["exact", "full"] = "exact"
    """`exact`: a prefix-cache hit ends before the first observation row, so that a
    prompt keeps the same tokens whatever is cached; `full`: the hit is as long as
    in stock vLLM and the rows inside it do not vote."""
    pooling: Pooling | None = None
    """Pooling of the scores; None: what the method's paper does."""
    methods: Mapping[str, Mix] = field(default_factory=dict)
    """Methods of the user's own, by name, mixed from the parts of others."""
    decode_kernel: Literal["stock", "triton"] = "stock"
    """What decodes: `stock`, the attention kernel that vLLM has for the platform, with a page
    table for every head; `triton`, one of our own that needs no tables (CUDA only)."""
    metrics: bool = True
    """Whether `/metrics` has what eviction did, unless `--disable-log-stats` is given."""
    max_traces: int = 32
    """So many of the last traces that requests asked for are remembered; 0: none may ask."""
    max_trace_mib: int = 64
    """Memory of the remembered traces together, in MiB on the host."""
    defaults_file: str | None = None
    """File with the policy and budget of new requests that may change while the server runs,
    see `defaults.py`."""
    debug: DebugOptions = field(default_factory=DebugOptions)

    @property
    def active(self) -> bool:
        """Whether anything of this package runs at all."""
        return self.policy != NONE

    @classmethod
    def from_mapping(cls, values: Any) -> EvictionConfig:
        """Build and check the settings.

        Raises:
            EvictionConfigError: naming the field, its value and what it may be.
        """
        if not isinstance(values, Mapping):
            raise EvictionConfigError(
                f"additional_config[{CONFIG_KEY!r}] is {quoted(values)}: give a mapping such as "
                "{'policy': 'tgv', 'budget': 0.1}"
            )
        _reject_unknown_keys(values, cls, "kv_eviction")
        converted: dict[str, Any] = dict(values)
        if "budget" in values:
            converted["budget"] = Budget.parse(values["budget"], "kv_eviction.budget")
        for name in _CHOICES:
            _check_choice(converted, name)
        for name, least in _MIN.items():
            _check_count(converted, name, least)
        _check_path(values.get("defaults_file"), "kv_eviction.defaults_file")
        converted["pooling"] = _pooling(values.get("pooling"), "kv_eviction.pooling")
        converted["methods"] = _parse_methods(values.get("methods", {}))
        converted["debug"] = _nested(DebugOptions, values.get("debug", {}), "kv_eviction.debug")
        config = cls(**converted)
        config.check_methods()
        return config

    @property
    def method_names(self) -> tuple[str, ...]:
        """What `policy` and a request's `kv_eviction` may be."""
        return (NONE, *POLICY_NAMES, *self.methods)

    def build_policy(self, name: str) -> Policy:
        """The policy of a method; the server's granularity and pooling come before its own.

        Raises:
            EvictionConfigError: for parts that have no meaning together.
        """
        mix = self.methods.get(name) or Mix(name)
        mix = dataclasses.replace(
            mix,
            granularity=mix.granularity or self.granularity,
            pooling=mix.pooling or self.pooling,
        )
        try:
            return build_policy(mix, name)
        except ValueError as error:
            raise EvictionConfigError(f"kv_eviction method {quoted(name)}: {error}") from error

    def check_method(self, name: Any, budget: Budget, source: str) -> str:
        """Check that a method exists and goes with the settings and a budget; returns its name.

        `source` names the flag or field of the method in the error message.
        """
        if name not in self.method_names:
            raise EvictionConfigError(
                f"{source} is {quoted(name)}: choose one of {', '.join(self.method_names)}"
            )
        if name == NONE:
            return NONE
        policy = self.build_policy(name)
        if budget.is_auto and policy.score.rows == "none":
            raise EvictionConfigError(
                f"budget auto with {source} {name!r}: its scores do not look at attention, whose "
                "share auto guards; give a fraction, or another method"
            )
        return str(name)

    def check_methods(self) -> None:
        """Check that methods, policy, budget and `text_only` go together.

        Raises:
            EvictionConfigError: naming the field, its value and what it may be.
        """
        for name in self.methods:
            self.build_policy(name)
        self.check_method(self.policy, self.budget, "kv_eviction.policy")
        if self.policy == NONE or self.text_only == "keep":
            return
        if self.build_policy(self.policy).allocation.needs_vision:
            raise EvictionConfigError(
                f"kv_eviction.text_only is 'evict' with policy {self.policy!r}, whose layer budget "
                "is the attention to images, which such prompts lack: choose a method without "
                "one, such as snapkv, or text_only: keep"
            )


@dataclass(frozen=True)
class RequestOptions:
    """What one request asked for, after its `vllm_xargs` were applied to the settings."""

    policy: str
    budget: Budget
    report: bool = False
    """Whether the response tells what was evicted, under `kv_transfer_params.kv_eviction`."""
    trace: bool = False
    """Whether the server remembers what was kept, for `GET /kv-eviction/requests`."""

    @classmethod
    def resolve(
        cls, config: EvictionConfig, extra_args: Mapping[str, Any] | None
    ) -> RequestOptions:
        """Apply `vllm_xargs` to the server's settings.

        Raises:
            EvictionConfigError: for an unknown `kv_eviction*` key or a wrong value.
        """
        given = {k: v for k, v in (extra_args or {}).items() if str(k).startswith("kv_eviction")}
        if unknown := sorted(given.keys() - set(REQUEST_KEYS)):
            names = ", ".join(quoted(name, str) for name in unknown)
            raise EvictionConfigError(
                f"vllm_xargs has {names}: known are {', '.join(REQUEST_KEYS)}"
            )
        policy, budget = config.policy, config.budget
        if "kv_eviction" in given:
            policy = given["kv_eviction"]
        if "kv_eviction_budget" in given:
            budget = Budget.parse(given["kv_eviction_budget"], "vllm_xargs.kv_eviction_budget")
        policy = config.check_method(policy, budget, "vllm_xargs.kv_eviction")
        report, trace = (
            _switch(given, f"kv_eviction_{name}", name) for name in ("report", "trace")
        )
        if trace and not config.max_traces:
            raise EvictionConfigError(
                "vllm_xargs.kv_eviction_trace is 1, and this server keeps no traces: start it with "
                "max_traces of at least 1 in --kv-eviction-config, or leave it out"
            )
        return cls(policy, budget, report, trace)


def read_config_file(value: str) -> dict[str, Any]:
    """Read `--kv-eviction-config`: inline JSON (it starts with `{`) or a YAML/JSON file."""
    flag = "--kv-eviction-config"
    inline = value.lstrip().startswith("{")
    try:
        text = value if inline else Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no UTF-8, or a path with a NUL
        raise EvictionConfigError(
            f"{flag} {value}: cannot be read ({error}); give a YAML or JSON file, or inline JSON"
        ) from error
    try:
        parsed = json.loads(text) if inline else yaml.safe_load(text)
    except PARSE_ERRORS as error:
        raise EvictionConfigError(f"{flag} {value}: not valid YAML or JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise EvictionConfigError(
            f"{flag} {value}: holds {quoted(parsed)}; give a mapping such as {{granularity: head}}"
        )
    return parsed


def config_of(vllm_config: VllmConfig) -> EvictionConfig:
    """The eviction settings a `VllmConfig` carries; inactive ones if it carries none."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return EvictionConfig()
    return EvictionConfig.from_mapping(additional[CONFIG_KEY])


PARSE_ERRORS = (ValueError, RecursionError, yaml.YAMLError)
"""What a text may raise in JSON's and YAML's parsers: a date without such a day, a number of too
many digits, brackets without an end."""

_MIN = {
    "observation_window": 1,
    "sinks": 0,
    "floor_pages": 0,
    "min_prompt_tokens": 0,
    "max_traces": 0,
    "max_trace_mib": 1,
}


_MAX_COUNT = 2**31 - 1
"""Largest number of anything; more do not fit the arrays that count them."""


def _switch(given: Mapping[str, Any], name: str, what: str) -> bool:
    value = given.get(name, 0)
    if value not in (0, 1):
        raise EvictionConfigError(
            f"vllm_xargs.{name} is {quoted(value)}: give 1 for a {what}, or 0"
        )
    return bool(value)


def _check_path(value: Any, source: str) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not _is_path(value) or not Path(value).is_absolute():
        raise EvictionConfigError(f"{source} is {quoted(value)}: give the absolute path of a file")
    if not Path(value).parent.is_dir():
        raise EvictionConfigError(
            f"{source} is {quoted(value)}: its folder does not exist; create it"
        )


def _is_path(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _reject_unknown_keys(values: Mapping[str, Any], cls: type, source: str) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := sorted(quoted(key, str) for key in values if key not in known):
        raise EvictionConfigError(
            f"{source} has unknown {', '.join(unknown)}: known are {', '.join(known)}"
        )


_CHOICES = {
    "granularity": (None, "layer", "head"),
    "text_only": ("keep", "evict"),
    "prefix_reuse": ("exact", "full"),
    "decode_kernel": ("stock", "triton"),
    "metrics": (True, False),
}


def _check_choice(values: Mapping[str, Any], name: str) -> None:
    choices = _CHOICES[name]
    value = values.get(name, choices[0])
    if value not in choices:
        names: dict[Any, str] = {None: "null", True: "true", False: "false"}
        named = ", ".join(names.get(choice, str(choice)) for choice in choices)
        raise EvictionConfigError(f"kv_eviction.{name} is {quoted(value)}: choose one of {named}")


def _parse_methods(values: Any) -> dict[str, Mix]:
    source = "kv_eviction.methods"
    if not isinstance(values, Mapping):
        raise EvictionConfigError(f"{source} is {quoted(values)}: give a mapping of names to mixes")
    methods = {}
    for name, entry in values.items():
        where = f"{source}.{quoted(name, str)}"
        if not isinstance(name, str) or name in (NONE, *POLICY_NAMES):
            raise EvictionConfigError(f"{where}: the name is taken or no text; choose another one")
        if isinstance(entry, Mapping) and "pooling" in entry:
            entry = {**entry, "pooling": _pooling(entry["pooling"], f"{where}.pooling")}
        if isinstance(entry, Mapping) and "budget" in entry and "allocation" not in entry:
            logger.warning("%s.budget is now called allocation: rename it", where)
            entry = {("allocation" if k == "budget" else k): v for k, v in entry.items()}
        mix: Mix = _nested(Mix, entry, where)
        if mix.merge not in (None, True, False):
            raise EvictionConfigError(f"{where}.merge is {quoted(mix.merge)}: give true or false")
        for part in ("base", "score", "allocation", "retain", "granularity"):
            value = getattr(mix, part)
            if not isinstance(value, str) and (value is not None or part == "base"):
                raise EvictionConfigError(f"{where}.{part} is {quoted(value)}: give a name")
        methods[name] = mix
    return methods


def _pooling(values: Any, source: str) -> Pooling | None:
    if values is None or isinstance(values, Pooling):
        return values
    pooling: Pooling = _nested(Pooling, values, source)
    return pooling


def _check_count(values: Mapping[str, Any], name: str, least: int) -> None:
    value = values.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_COUNT:
        raise EvictionConfigError(
            f"kv_eviction.{name} is {quoted(value)}: give a whole number, at least {least} and "
            f"at most {_MAX_COUNT}"
        )


def _nested(cls: type, values: Any, source: str) -> Any:
    if not isinstance(values, Mapping):
        raise EvictionConfigError(f"{source} is {quoted(values)}: give a mapping")
    _reject_unknown_keys(values, cls, source)
    try:
        return cls(**values)
    except ValueError as error:
        raise EvictionConfigError(f"{source}: {error}") from error
