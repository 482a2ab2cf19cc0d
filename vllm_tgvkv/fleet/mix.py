# SPDX-License-Identifier: Apache-2.0
"""The mix of prompts that a fleet answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllm_tgvkv.shared.errors import EvictionConfigError, quoted

_FIELDS = ("tokens", "visual", "answer", "weight")


@dataclass(frozen=True)
class Prompt:
    """Requests of one kind."""

    tokens: int
    """Of the prompt, visual ones included."""
    visual: float
    """Share of visual tokens. Prompts without any keep their cache."""
    answer: int
    """Tokens of the answer."""
    weight: float = 1.0
    """Requests of this kind among all, in any unit."""

    @property
    def num_visual(self) -> float:
        """Visual tokens."""
        return self.tokens * self.visual


Mix = tuple[Prompt, ...]


def parse_mix(values: Sequence[str]) -> Mix:
    """Read `TOKENS,VISUAL SHARE,ANSWER TOKENS[,WEIGHT]` each, or the name of a YAML or JSON file.

    A file has a list of mappings with the keys tokens, visual, answer and weight.

    Raises:
        EvictionConfigError: for anything else; the message names the value.
    """
    if len(values) == 1 and "," not in values[0]:
        return _read(values[0])
    return tuple(
        _prompt(dict(zip(_FIELDS, value.split(","), strict=False)), value, value.count(","))
        for value in values
    )


def mean(mix: Mix, value: Callable[[Prompt], float]) -> float:
    """Return the mean of a value over the requests of a mix."""
    return sum(each.weight * value(each) for each in mix) / sum(each.weight for each in mix)


def _read(name: str) -> Mix:
    hint = (
        "give TOKENS,VISUAL SHARE,ANSWER TOKENS[,WEIGHT], such as 8192,0.9,256, or a YAML or JSON "
        "file with a list of {tokens: 8192, visual: 0.9, answer: 256, weight: 1}"
    )
    try:
        found = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvictionConfigError(f"--mix is {quoted(name)}, no readable file: {hint}") from error
    if not isinstance(found, list) or not found:
        raise EvictionConfigError(f"--mix {name} holds no list: {hint}")
    return tuple(_prompt(each, each, 3) for each in found)


def _prompt(fields: Any, shown: Any, num_commas: int) -> Prompt:
    error = EvictionConfigError(
        f"--mix has {quoted(shown)}: give tokens >= 1, a visual share from 0 to 1, answer >= 1 "
        "and, if there are several, weight > 0"
    )
    if not isinstance(fields, dict) or not set(fields) <= set(_FIELDS) or num_commas > 3:
        raise error
    try:
        prompt = Prompt(
            tokens=int(fields["tokens"]),
            visual=float(fields["visual"]),
            answer=int(fields["answer"]),
            weight=float(fields.get("weight", 1)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise error from None
    in_bounds = prompt.tokens >= 1 and 0 <= prompt.visual <= 1 and prompt.answer >= 1
    if not in_bounds or not 0 < prompt.weight < float("inf"):
        raise error
    return prompt
