# SPDX-License-Identifier: Apache-2.0
"""The mix of prompts that a fleet answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_tgvkv.shared.errors import EvictionConfigError, quoted


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
    """Read `TOKENS,VISUAL,ANSWER` or `TOKENS,VISUAL,ANSWER,WEIGHT` each.

    Raises:
        EvictionConfigError: for anything else; the message names the value.
    """
    return tuple(map(_prompt, values))


def _prompt(value: str) -> Prompt:
    try:
        tokens, visual, answer, *weight = value.split(",")
        prompt = Prompt(int(tokens), float(visual), int(answer), *map(float, weight))
        fits = prompt.tokens >= 1 and 0 <= prompt.visual <= 1 and prompt.answer >= 1
        if fits and 0 < prompt.weight < float("inf"):
            return prompt
    except (TypeError, ValueError):
        pass
    raise EvictionConfigError(
        f"--mix is {quoted(value)}: give TOKENS,VISUAL,ANSWER or TOKENS,VISUAL,ANSWER,WEIGHT: "
        "tokens of a prompt, the share of visual ones from 0 to 1, tokens of the answer, and a "
        "weight above 0, such as 8192,0.9,256"
    )


def mean(mix: Mix, value: Callable[[Prompt], float]) -> float:
    """Return the mean of a value over the requests of a mix."""
    return sum(each.weight * value(each) for each in mix) / sum(each.weight for each in mix)
