# SPDX-License-Identifier: Apache-2.0
"""The profile of a load test: a YAML file, read into dataclasses and checked by field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from demo.tasks import TASKS

POOL_FLAGS = ("block-size", "num-gpu-blocks-override")
"""Flags of `vllm serve` that decide the size of the pool."""

OWN_FLAGS = ("model", "host", "port", "served-model-name")
"""Flags of `vllm serve` that the load test sets."""

GOODPUT = ("ttft", "tpot", "e2el")
ONE_MESSAGE_TASKS = tuple(task for task in TASKS if task != "chat")
"""`vllm bench serve` sends one message per request, so no chats of several turns."""

MAX_SOAK_SECONDS = 24 * 3600

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
        object.__setattr__(self, "rates", _numbers("rates", self.rates))
        _check_number("seconds", self.seconds)
        _check_whole("output_tokens", self.output_tokens)

    def requests(self, rate: float) -> int:
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
        _check_whole("input_tokens", self.input_tokens)
        _check_whole("prefix_tokens", self.prefix_tokens, least=0)
        _check_whole("images", self.images, least=0)
        _check_whole("image_size", self.image_size)
        if not _is_number(self.spread) or not 0 <= self.spread < 1:
            raise ProfileError(f"spread is {self.spread!r}; give a number from 0 to below 1")


@dataclass(frozen=True)
class Pages(Workload):
    """Drawn pages with questions (`demo/tasks.py`), sent as `custom_image`."""

    tasks: tuple[str, ...] = ("value",)
    """Tasks that requests cycle through; `two_images` has twice the image tokens."""
    questions_per_image: int = 1
    """Consecutive requests that share an image, and with it their prefix."""
    scales: tuple[int, ...] = (1,)
    """Factors that pages are enlarged by, in turn; above 1 they are sent as JPEG."""
    natural_end: bool = True
    """Whether the model ends answers; otherwise all have `output_tokens`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tasks", _names("tasks", self.tasks, ONE_MESSAGE_TASKS))
        object.__setattr__(self, "scales", _numbers("scales", self.scales))
        for scale in self.scales:
            _check_whole("scales", scale)
        _check_whole("questions_per_image", self.questions_per_image)
        if self.questions_per_image > 1 and self.tasks != ("value",):
            raise ProfileError(
                f"questions_per_image is {self.questions_per_image} with tasks "
                f"{', '.join(self.tasks)}; requests that share a page have the task value alone"
            )
        if not isinstance(self.natural_end, bool):
            raise ProfileError(f"natural_end is {self.natural_end!r}; give true or false")


KINDS: dict[str, type[Random] | type[Pages]] = {"random": Random, "pages": Pages}


@dataclass(frozen=True)
class ServedArm:
    """The server of one arm: started here with its own flags, or found at `url`."""

    serve: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every request, such as `{"vllm_xargs": {"kv_eviction": "none"}}`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "serve", _flags("serve", self.serve))
        if not isinstance(self.extra_body, Mapping):
            raise ProfileError(f"extra_body is {self.extra_body!r}; give fields of a request")
        if self.url is None:
            return
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise ProfileError(f"url is {self.url!r}; give it as http://HOST:PORT")
        if self.serve:
            raise ProfileError("url and serve are both given; a server at a URL is not started")


@dataclass(frozen=True)
class Soak:
    """A soak: the workloads repeated for `seconds` while memory and blocks are watched."""

    seconds: float = 600
    max_growth_mib: float = 64
    """Limit on the growth of the server's memory from the middle to the last third."""

    def __post_init__(self) -> None:
        _check_number("seconds", self.seconds)
        _check_number("max_growth_mib", self.max_growth_mib)
        if self.seconds > MAX_SOAK_SECONDS:
            raise ProfileError(f"seconds is {self.seconds}; give at most {MAX_SOAK_SECONDS}")


@dataclass(frozen=True)
class Profile:
    """A load test. The other arms are compared with the first."""

    name: str
    model: str
    arms: dict[str, ServedArm]
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
    soak: Soak | None = None

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
            _check_number(name, getattr(self, name))
        _check_whole("seed", self.seed, least=0)
        _check_whole("warmup_requests", self.warmup_requests, least=0)
        self._check_goodput()
        self._check_pools()

    @property
    def request_model(self) -> str:
        """Return the model's name in requests."""
        return self.served_model_name or self.model

    def _check_goodput(self) -> None:
        if not isinstance(self.goodput, Mapping):
            raise ProfileError(f"goodput is {self.goodput!r}; give milliseconds for its fields")
        for name, value in self.goodput.items():
            if name not in GOODPUT:
                raise ProfileError(f"goodput.{name} {_no_such_field(str(name), GOODPUT)}")
            _check_number(f"goodput.{name}", value)

    def _check_pools(self) -> None:
        started = {name: arm for name, arm in self.arms.items() if arm.url is None}
        if self.serve and not started:
            raise ProfileError("serve is given, but every arm has a url; leave serve out")
        for name, arm in started.items():
            if own := [flag for flag in POOL_FLAGS if flag in arm.serve]:
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
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ProfileError(f"{path}: {error}") from None
        try:
            return cls.from_dict(values)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """Build a profile from the content of a YAML file, checking all fields."""
        values = dict(_mapping("", values))
        arms = _mapping("arms", values.get("arms"))
        values["arms"] = {
            str(name): _build(ServedArm, arm, f"arms.{name}") for name, arm in arms.items()
        }
        workloads = _mapping("workloads", values.get("workloads"))
        values["workloads"] = {
            str(name): _workload(given, f"workloads.{name}") for name, given in workloads.items()
        }
        if values.get("soak") is not None:
            values["soak"] = _build(Soak, values["soak"], "soak")
        return _build(cls, values, "")


def _workload(given: Any, where: str) -> Random | Pages:
    values = dict(_mapping(where, given))
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ProfileError(f"{where}.kind is {kind!r}; choose from {', '.join(KINDS)}")
    return _build(KINDS[kind], values, where)


def _build(cls: type[T], given: Any, where: str) -> T:
    """Build a dataclass from a mapping; `where` is the path of its field."""
    values = _mapping(where, given) if given not in (None, {}) else {}
    prefix = f"{where}." if where else ""
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ProfileError(f"{prefix}{name} {_no_such_field(str(name), known)}")
    for name, its in known.items():
        required = its.default is MISSING and its.default_factory is MISSING
        if required and name not in values:
            raise ProfileError(f"{prefix}{name} is missing; give it")
    try:
        return cls(**values)
    except ProfileError as error:
        raise ProfileError(f"{prefix}{error}") from None


def _no_such_field(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    way_out = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
    return f"is no field; {way_out}"


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ProfileError(f"{name} is {value!r}; give a number above 0")


def _check_whole(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProfileError(f"{name} is {value!r}; give a whole number of at least {least}")


def _numbers(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ProfileError(f"{name} is {values!r}; give a list of numbers, as [1, 2]")
    for value in values:
        _check_number(name, value)
    return tuple(values)


def _names(name: str, values: Any, known: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ProfileError(f"{name} is {values!r}; give a list of {', '.join(known)}")
    for value in values:
        if value not in known:
            raise ProfileError(f"{name} has {value!r}; choose from {', '.join(known)}")
    return tuple(values)
