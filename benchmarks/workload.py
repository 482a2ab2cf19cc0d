# SPDX-License-Identifier: Apache-2.0
"""Work for engines and schedulers on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.models import Shape
from benchmarks.prompts import QUESTION_TOKENS, image_prompt


@dataclass(frozen=True)
class Workload:
    """A kind of prompt, see `image_prompt`.

    The plugin observes the last rows of the question, at most `observation_window`.
    """

    prompt_tokens: int
    question_tokens: int = QUESTION_TOKENS

    def prompt(self, shape: Shape, seed: int) -> dict[str, Any]:
        """Return a prompt in vLLM's format."""
        return image_prompt(shape, self.prompt_tokens, seed, self.question_tokens)


@dataclass(frozen=True)
class SchedulerLoad:
    """Requests for a scheduler, each an image with text around it, all of them evicted."""

    name: str
    running: int
    prompt_tokens: int
    output_tokens: int | None
    """None: no request ends. Otherwise as many begin as end, spread evenly over the steps."""
    chunk: int = 0
    """Tokens of one prompt a step, so that several prefill at once; 0: all of them."""
    pool_blocks: int | None = None
    """Size of our pool, so small that prompts wait for each other; None: enough for all."""

    @property
    def steps_of_prompt(self) -> int:
        return -(-self.prompt_tokens // self.chunk) if self.chunk else 1

    @property
    def begin_per_step(self) -> int:
        """Few enough that a step runs all of its new prompts, and that they do not end in waves."""
        if self.output_tokens is None:
            return 4
        return max(1, self.running // (self.output_tokens + self.steps_of_prompt - 1))

    @property
    def warm_up(self) -> int:
        """Steps until all have begun and, if they end, as many have ended."""
        return 2 * self.running // self.begin_per_step + 16
