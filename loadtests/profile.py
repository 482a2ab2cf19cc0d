# SPDX-License-Identifier: Apache-2.0
"""The profile of a load test: a YAML file, read into dataclasses and checked by field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from loadtests import model
from measure.arm import Arm

POOL_FLAGS = ("block-size", "num-gpu-blocks-override")
"""Flags of `vllm serve` that decide the size of the pool."""

OWN_FLAGS = ("model", "host", "port", "served-model-name")
"""Flags of `vllm serve` that the load test sets."""

ARM_FIELDS = ("serve", "url", "extra_body")
GOODPUT = ("ttft", "tpot", "e2el")

T = TypeVar("T")


class ProfileError(ValueError):
    """A profile is wrong; the message names the field, its value and the way out."""


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, sent at each of `rates` (requests a second) for `seconds`."""

    rates: tuple[float, ...]
    seconds: float
    output_tokens: int
    """Limit of an answer, or the mean where lengths are drawn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", _list("rates", self.rates, "numbers, as [1, 2]"))
        for rate in self.rates:
            _above_zero("rates", rate)
        _above_zero("seconds", self.seconds)
        _whole("output_tokens", self.output_tokens)

    def requests(self, rate: float) -> int:
        """Return the number of requests at a rate."""
        return max(1, round(rate * self.seconds))


@dataclass(frozen=True)
class Random(Workload):
    """Noise images and texts of random length: `random-mm` of `vllm bench serve`."""

    input_tokens: int = 48
    """Mean length of the text, without images."""
    spread: float = 0.5
    """Lengths are uniform between (1 - spread) and (1 + spread) times the mean."""
    prefix_tokens: int = 0
    """Length of a text that all requests begin with."""
    images: int = 1
    image_size: int = 336

    natural_end = False
    """Answers have the lengths that were drawn for them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("input_tokens", self.input_tokens)
        _whole("prefix_tokens", self.prefix_tokens, least=0)
        _whole("images", self.images, least=0)
        _whole("image_size", self.image_size)
        if not _is_number(self.spread) or not 0 <= self.spread < 1:
            raise ProfileError(f"spread is {self.spread!r}; give a number from 0 to below 1")


@dataclass(frozen=True)
class Pages(Workload):
    """Drawn pages with questions (`loadtests/pages.py`), sent as `custom_image`."""

    pages: tuple[int, ...] = (1,)
    """Pages of a request, in turn."""
    questions_per_page: int = 1
    """Consecutive requests that share their pages, and with them their prefix."""
    scale: int = 1
    """Factor that pages of 336 x 336 pixels are enlarged by; above 1 they are sent as JPEG."""
    natural_end: bool = True
    """Whether the model ends answers; otherwise all have `output_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pages", _list("pages", self.pages, "numbers, as [1, 2]"))
        for number in self.pages:
            _whole("pages", number)
        _whole("scale", self.scale)
        _whole("questions_per_page", self.questions_per_page)
        if not isinstance(self.natural_end, bool):
            raise ProfileError(f"natural_end is {self.natural_end!r}; give true or false")


KINDS: dict[str, type[Random] | type[Pages]] = {"random": Random, "pages": Pages}


@dataclass(frozen=True)
class Profile:
    """A load test. The other arms are compared with the first."""

    name: str
    model: str
    arms: dict[str, Arm]
    workloads: dict[str, Random | Pages]
    served_model_name: str | None = None
    tokenizer: str | None = None
    serve: Mapping[str, Any] = field(default_factory=dict)
    """Flags of `vllm serve` for all arms started here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the servers and of `vllm bench serve`."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Latency limits of a good request, in milliseconds."""
    seed: int = 0
    warmup_requests: int = 2
    """Requests sent to each server before the measurement."""
    scrape_seconds: float = 0.5
    startup_seconds: float = 240
    drain_seconds: float = 30
    """Time limit for blocks and queues to be empty after a load."""

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ProfileError(f"{name} is {getattr(self, name)!r}; give a text")
        object.__setattr__(self, "serve", _flags("serve", self.serve))
        if not isinstance(self.environment, Mapping):
            raise ProfileError(f"environment is {self.environment!r}; give variables and values")
        values = {str(key): str(value) for key, value in self.environment.items()}
        object.__setattr__(self, "environment", values)
        for name in ("scrape_seconds", "startup_seconds", "drain_seconds"):
            _above_zero(name, getattr(self, name))
        _whole("seed", self.seed, least=0)
        _whole("warmup_requests", self.warmup_requests, least=0)
        if not isinstance(self.goodput, Mapping):
            raise ProfileError(f"goodput is {self.goodput!r}; give milliseconds for its fields")
        _check_names("goodput.", self.goodput, GOODPUT)
        for name, value in self.goodput.items():
            _above_zero(f"goodput.{name}", value)
        self._check_pools()

    @property
    def model_path(self) -> str:
        """Return the model for `vllm`; the one with random weights is written when it is asked."""
        return str(model.model_folder()) if self.model == model.NAME else self.model

    @property
    def request_model(self) -> str:
        """Return the model's name in requests."""
        return self.served_model_name or self.model

    def _check_pools(self) -> None:
        started = {name: arm for name, arm in self.arms.items() if arm.url is None}
        if self.serve and not started:
            raise ProfileError("serve is given, but every arm has a url; leave serve out")
        for name, arm in started.items():
            if own := [flag for flag in POOL_FLAGS if flag in arm.server]:
                raise ProfileError(
                    f"arms.{name}.serve.{own[0]} is given; pools must be equal, "
                    f"give it once as serve.{own[0]}"
                )
        for flag in POOL_FLAGS:
            if started and flag not in self.serve:
                raise ProfileError(
                    f"serve.{flag} is missing; give it, so that all arms have the same pool"
                )

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: naming the file, the field and what it may be.
        """
        try:
            return cls.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ProfileError) as error:
            raise ProfileError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Build a profile from the content of a YAML file, checking all fields."""
        values = dict(_mapping("", values))
        for name, build in (("arms", _arm), ("workloads", _workload)):
            given = _mapping(name, values.get(name))
            values[name] = {str(key): build(str(key), value) for key, value in given.items()}
        return _build(cls, values, "")


def _arm(name: str, given: Any) -> Arm:
    """Build an arm: a server started here with flags of its own, or found at `url`."""
    where = f"arms.{name}"
    values = dict(_mapping(where, given)) if given not in (None, {}) else {}
    _check_names(f"{where}.", values, ARM_FIELDS)
    serve, url = _flags(f"{where}.serve", values.get("serve", {})), values.get("url")
    body = values.get("extra_body", {})
    if not isinstance(body, Mapping):
        raise ProfileError(f"{where}.extra_body is {body!r}; give fields of a request")
    if url is not None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ProfileError(f"{where}.url is {url!r}; give it as http://HOST:PORT")
        if serve:
            raise ProfileError(
                f"{where}.url and serve are both given; a server at a URL is not started"
            )
    return Arm(name=name, server=serve, url=url, extra_body=body)


def _workload(name: str, given: Any) -> Random | Pages:
    where = f"workloads.{name}"
    values = dict(_mapping(where, given))
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ProfileError(f"{where}.kind is {kind!r}; choose from {', '.join(KINDS)}")
    build: Callable[..., Random | Pages] = KINDS[kind]
    return _build(build, values, where)


def _build(cls: Callable[..., T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a mapping; `where` is the path of its field."""
    prefix = f"{where}." if where else ""
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    _check_names(prefix, values, known)
    for name, its in known.items():
        required = its.default is MISSING and its.default_factory is MISSING
        if required and name not in values:
            raise ProfileError(f"{prefix}{name} is missing; give it")
    try:
        return cls(**values)
    except ProfileError as error:
        raise ProfileError(f"{prefix}{error}") from None


def _check_names(prefix: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            way_out = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
            raise ProfileError(f"{prefix}{name} is no field; {way_out}")


def _mapping(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not given:
        place = where or "the profile"
        raise ProfileError(f"{place} is {given!r}; give at least one `name: value`")
    return given


def _flags(where: str, given: Any) -> dict[str, Any]:
    """Return flags of `vllm serve` after checking them; names have no leading dashes."""
    if not isinstance(given, Mapping):
        raise ProfileError(f"{where} is {given!r}; give flags of vllm serve as `name: value`")
    for flag, value in given.items():
        if not isinstance(flag, str) or flag.startswith("-") or "_" in flag:
            way_out = str(flag).lstrip("-").replace("_", "-")
            raise ProfileError(f"{where}.{flag} is no flag of vllm serve; write it {way_out}")
        if flag in OWN_FLAGS:
            raise ProfileError(f"{where}.{flag} is set by the load test; leave it out")
        if value is None or value is False:
            raise ProfileError(
                f"{where}.{flag} is {value!r}; give true for a flag without value, "
                f"or name its opposite, no-{flag}"
            )
    return dict(given)


def _list(name: str, values: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ProfileError(f"{name} is {values!r}; give a list of {what}")
    return tuple(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _above_zero(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ProfileError(f"{name} is {value!r}; give a number above 0")


def _whole(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProfileError(f"{name} is {value!r}; give a whole number of at least {least}")
