# SPDX-License-Identifier: Apache-2.0
"""What the user asks for: the server's defaults and one request's wishes.

The same mapping travels everywhere: `--kv-eviction*` flags fill
`additional_config["kv_eviction"]`, `LLM(additional_config=...)` sets it
directly, and vLLM carries it to every process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from vllm_tgvkv.policies import POLICY_NAMES, Pooling

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "kv_eviction"
"""Key of the mapping in vLLM's `additional_config`."""

REQUEST_KEYS = ("kv_eviction", "kv_eviction_budget", "kv_eviction_report")
"""What a request may set in its `vllm_xargs`."""

NONE = "none"
"""The policy name that means: keep everything."""


class EvictionConfigError(ValueError):
    """A flag, field or request parameter is wrong; the message names it and the way out."""


@dataclass(frozen=True)
class Budget:
    """How much of a prompt's cache is kept: a fraction, or tokens per KV head."""

    fraction: float | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, value: Any, source: str) -> Budget:
        """Read 0 < value <= 1 as a fraction of the prompt, a whole number above 1 as tokens.

        `source` names the flag or field in the error message.
        """
        hint = (
            f"{source} is {value!r}: give a fraction of the prompt, 0 < budget <= 1, "
            "or a whole number of tokens per KV head, such as 512"
        )
        if isinstance(value, bool):
            raise EvictionConfigError(hint)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise EvictionConfigError(hint) from None
        if 0.0 < number <= 1.0:
            return cls(fraction=number)
        if number > 1.0 and number.is_integer():
            return cls(tokens=int(number))
        raise EvictionConfigError(hint)

    def retained_blocks(self, num_prompt_tokens: int, block_size: int) -> int:
        """Blocks k of the compressed region, 1 <= k <= floor(P / N).

        The region and the tail (the partial last block, always kept) together
        stay within the budget; the region has at least one block.
        """
        num_full_blocks, num_tail_tokens = divmod(num_prompt_tokens, block_size)
        if self.tokens is not None:
            allowance: float = self.tokens
        else:
            assert self.fraction is not None
            allowance = self.fraction * num_prompt_tokens
        retained = int((allowance - num_tail_tokens) // block_size)
        return min(max(retained, 1), num_full_blocks)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens per head"
        return f"{100 * (self.fraction or 0):g} % of the prompt"


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
    budget: Budget = Budget(fraction=0.1)
    granularity: Literal["layer", "head"] = "layer"
    """`layer`: one token set for all heads of a layer; `head`: a set and a length for each."""
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
    pooling: Pooling = field(default_factory=Pooling)
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
                f"additional_config[{CONFIG_KEY!r}] is {values!r}: give a mapping such as "
                "{'policy': 'tgv', 'budget': 0.1}"
            )
        _reject_unknown_keys(values, cls, "kv_eviction")
        converted: dict[str, Any] = dict(values)
        converted["policy"] = parse_policy_name(values.get("policy", NONE), "kv_eviction.policy")
        if "budget" in values:
            converted["budget"] = Budget.parse(values["budget"], "kv_eviction.budget")
        for name in ("granularity", "text_only", "prefix_reuse"):
            _check_choice(converted, name)
        for name, least in _LEAST.items():
            _check_count(converted, name, least)
        converted["pooling"] = _nested(Pooling, values.get("pooling", {}), "kv_eviction.pooling")
        converted["debug"] = _nested(DebugOptions, values.get("debug", {}), "kv_eviction.debug")
        return cls(**converted)


@dataclass(frozen=True)
class RequestWish:
    """What one request asked for, after its `vllm_xargs` were applied to the settings."""

    policy: str
    budget: Budget
    report: bool = False
    """Whether the response tells what was evicted, under `kv_transfer_params.kv_eviction`."""

    @classmethod
    def resolve(cls, config: EvictionConfig, extra_args: Mapping[str, Any] | None) -> RequestWish:
        """Apply `vllm_xargs` to the server's settings.

        Raises:
            EvictionConfigError: for an unknown `kv_eviction*` key or a wrong value.
        """
        given = {k: v for k, v in (extra_args or {}).items() if k.startswith("kv_eviction")}
        if unknown := sorted(given.keys() - set(REQUEST_KEYS)):
            raise EvictionConfigError(
                f"vllm_xargs has {', '.join(unknown)}: known are {', '.join(REQUEST_KEYS)}"
            )
        policy, budget = config.policy, config.budget
        if "kv_eviction" in given:
            policy = parse_policy_name(given["kv_eviction"], "vllm_xargs.kv_eviction")
        if "kv_eviction_budget" in given:
            budget = Budget.parse(given["kv_eviction_budget"], "vllm_xargs.kv_eviction_budget")
        report = given.get("kv_eviction_report", 0)
        if report not in (0, 1):
            raise EvictionConfigError(
                f"vllm_xargs.kv_eviction_report is {report!r}: give 1 for a report, or 0"
            )
        return cls(policy, budget, bool(report))


def parse_policy_name(value: Any, source: str) -> str:
    """Check a policy name; `source` names the flag or field in the error message."""
    names = (NONE, *POLICY_NAMES)
    if value not in names:
        raise EvictionConfigError(f"{source} is {value!r}: choose one of {', '.join(names)}")
    return str(value)


def read_config_file(value: str) -> dict[str, Any]:
    """Read `--kv-eviction-config`: inline JSON (it starts with `{`) or a YAML/JSON file."""
    flag = "--kv-eviction-config"
    inline = value.lstrip().startswith("{")
    try:
        text = value if inline else Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvictionConfigError(
            f"{flag} {value}: cannot be read ({error}); give a YAML or JSON file, or inline JSON"
        ) from error
    try:
        parsed = json.loads(text) if inline else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise EvictionConfigError(f"{flag} {value}: not valid YAML or JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise EvictionConfigError(
            f"{flag} {value}: holds {parsed!r}; give a mapping such as {{granularity: head}}"
        )
    return parsed


def config_of(vllm_config: VllmConfig) -> EvictionConfig:
    """The eviction settings a `VllmConfig` carries; inactive ones if it carries none."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return EvictionConfig()
    return EvictionConfig.from_mapping(additional[CONFIG_KEY])


_LEAST = {"observation_window": 1, "sinks": 0, "floor_pages": 0, "min_prompt_tokens": 0}


def _reject_unknown_keys(values: Mapping[str, Any], cls: type, source: str) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := sorted(str(key) for key in values if key not in known):
        raise EvictionConfigError(
            f"{source} has unknown {', '.join(unknown)}: known are {', '.join(known)}"
        )


def _check_choice(values: Mapping[str, Any], name: str) -> None:
    choices = {
        "granularity": ("layer", "head"),
        "text_only": ("keep", "evict"),
        "prefix_reuse": ("exact", "full"),
    }[name]
    value = values.get(name, choices[0])
    if value not in choices:
        raise EvictionConfigError(
            f"kv_eviction.{name} is {value!r}: choose one of {', '.join(choices)}"
        )


def _check_count(values: Mapping[str, Any], name: str, least: int) -> None:
    value = values.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EvictionConfigError(
            f"kv_eviction.{name} is {value!r}: give a whole number, at least {least}"
        )


def _nested(cls: type, values: Any, source: str) -> Any:
    if not isinstance(values, Mapping):
        raise EvictionConfigError(f"{source} is {values!r}: give a mapping")
    _reject_unknown_keys(values, cls, source)
    try:
        return cls(**values)
    except ValueError as error:
        raise EvictionConfigError(f"{source}: {error}") from error
