# SPDX-License-Identifier: Apache-2.0
"""The profile of a load test: a YAML file, checked by pydantic field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from loadtests import model
from measure.arm import Arm

POOL_FLAGS = ("block-size", "num-gpu-blocks-override")
"""Flags of `vllm serve` that decide the size of the pool."""

OWN_FLAGS = ("model", "host", "port", "served-model-name")
"""Flags of `vllm serve` that the load test sets."""


class ProfileError(ValueError):
    """A profile is wrong; the message names the field, its value and the way out."""


def _checked_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags of `vllm serve` after checking them; names have no leading dashes."""
    for flag, value in flags.items():
        if flag.startswith("-") or "_" in flag:
            way_out = flag.lstrip("-").replace("_", "-")
            raise ValueError(f"{flag} is no flag of vllm serve; write it {way_out}")
        if flag in OWN_FLAGS:
            raise ValueError(f"{flag} is set by the load test; leave it out")
        if value is None or value is False:
            raise ValueError(
                f"{flag} is {value!r}; give true for a flag without value, or name its opposite, "
                f"no-{flag}"
            )
    return flags


def _texts(values: Any) -> Any:
    return {k: str(v) for k, v in values.items()} if isinstance(values, dict) else values


Name = Annotated[str, StringConstraints(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Flags = Annotated[dict[str, Any], AfterValidator(_checked_flags)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Workload(_Fields):
    rates: Annotated[list[Positive], Field(min_length=1)]
    """Requests a second, one load each."""
    seconds: Positive
    output_tokens: Count
    """Limit of an answer, or the mean where lengths are drawn."""


class Random(_Workload):
    """Noise images and texts of random length: `random-mm` of `vllm bench serve`."""

    kind: Literal["random"] = "random"
    input_tokens: Count = 48
    """Mean length of the text, without images."""
    spread: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Lengths are uniform between (1 - spread) and (1 + spread) times the mean."""
    prefix_tokens: Number = 0
    """Length of a text that all requests begin with."""
    images: Number = 1
    image_size: Count = 336


class Pages(_Workload):
    """Drawn pages with questions (`loadtests/pages.py`), sent as `custom_image`."""

    kind: Literal["pages"] = "pages"
    pages: Annotated[list[Count], Field(min_length=1)] = [1]
    """Pages of a request, in turn."""
    questions_per_page: Count = 1
    """Consecutive requests that share their pages, and with them their prefix."""
    scale: Count = 1
    """Factor that pages of 336 x 336 pixels are enlarged by; above 1 they are sent as JPEG."""
    natural_end: bool = True
    """Whether the model ends answers; otherwise all have `output_tokens`."""


class ArmFields(_Fields):
    """A server started here with flags of its own, or found at `url`."""

    serve: Flags = {}
    url: Annotated[str, StringConstraints(pattern=r"^https?://")] | None = None
    extra_body: dict[str, Any] = {}
    """Fields of every request."""


class Profile(_Fields):
    """A load test. The other arms are compared with the first."""

    name: Name
    model: Name
    arms: Annotated[
        dict[str, Annotated[ArmFields, BeforeValidator(lambda given: given or {})]],
        Field(min_length=1),
    ]
    workloads: Annotated[
        dict[str, Annotated[Random | Pages, Field(discriminator="kind")]], Field(min_length=1)
    ]
    served_model_name: str | None = None
    tokenizer: str | None = None
    serve: Flags = {}
    """Flags of `vllm serve` for all arms started here."""
    environment: Annotated[dict[str, str], BeforeValidator(_texts)] = {}
    """Environment variables of the servers and of `vllm bench serve`."""
    goodput: dict[Literal["ttft", "tpot", "e2el"], Positive] = {}
    """Latency limits of a good request, in milliseconds."""
    seed: Number = 0
    warmup_requests: Number = 2
    """Requests sent to each server before the measurement."""
    scrape_seconds: Positive = 0.5
    startup_seconds: Positive = 240
    drain_seconds: Positive = 30
    """Time limit for blocks and queues to be empty after a load."""

    @model_validator(mode="after")
    def _has_equal_pools(self) -> Profile:
        started = {name: arm for name, arm in self.arms.items() if arm.url is None}
        if self.serve and not started:
            raise ValueError("serve is given, but every arm has a url; leave serve out")
        for name, arm in self.arms.items():
            if arm.url is not None and arm.serve:
                raise ValueError(
                    f"arms.{name}.url and serve are both given; a server at a URL is not started"
                )
            if own := [flag for flag in POOL_FLAGS if flag in arm.serve]:
                raise ValueError(
                    f"arms.{name}.serve.{own[0]} is given; pools must be equal, "
                    f"give it once as serve.{own[0]}"
                )
        for flag in POOL_FLAGS:
            if started and flag not in self.serve:
                raise ValueError(
                    f"serve.{flag} is missing; give it, so that all arms have the same pool"
                )
        return self

    @property
    def servers(self) -> dict[str, Arm]:
        """Return the arms by name."""
        return {
            name: Arm(name=name, server=arm.serve, url=arm.url, extra_body=arm.extra_body)
            for name, arm in self.arms.items()
        }

    @property
    def model_path(self) -> str:
        """Return the model for `vllm`; the one with random weights is written when it is asked."""
        return str(model.model_folder()) if self.model == model.NAME else self.model

    @property
    def request_model(self) -> str:
        """Return the model's name in requests."""
        return self.served_model_name or self.model

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: naming the file, the field and what it may be.
        """
        try:
            return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except ValidationError as error:
            raise ProfileError(f"{path}: {_words(error)}") from None
        except (OSError, yaml.YAMLError) as error:
            raise ProfileError(f"{path}: {error}") from None


def _words(error: ValidationError) -> str:
    """Return the first error of a profile: the field's path, its value and what it may be."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"] if part != "[key]"]
    owner: type[_Fields] = ArmFields if place[:1] == ["arms"] else Profile
    if place[:1] == ["workloads"] and len(place) > 2:
        owner = Random if place.pop(2) == "random" else Pages
    field, message = ".".join(place), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{field} is no field; choose from {', '.join(owner.model_fields)}"
    if first["type"] == "missing":
        return f"{field} is missing; give it"
    if first["type"] == "value_error":
        return f"{field}.{message}" if field else message
    return f"{field or 'the profile'} is {first['input']!r}: {message}"
