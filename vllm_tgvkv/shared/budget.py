# SPDX-License-Identifier: Apache-2.0
"""Budget of an eviction, or of several: how much of a prompt's cache is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tgvkv.shared.errors import EvictionConfigError, quoted

MAX_STEPS = 64
"""Most evictions of a schedule."""

_MAX_TOKENS = 2**31 - 1
"""Upper bound of a number of tokens: larger ones do not fit the arrays that count."""


@dataclass(frozen=True)
class Guard:
    """Guarantee of an `auto:SHARE` budget for one prompt."""

    share: float
    """Fraction of the attention mass that the kept keys must hold."""
    least_blocks: int
    """Lower bound of the retained blocks: the budget's own, and room for the text."""


@dataclass(frozen=True)
class Budget:
    """A fraction of the prompt, tokens per KV head, or `auto:SHARE`."""

    fraction: float | None = None
    """Fraction of the prompt; the largest one, for `auto:SHARE`."""
    tokens: int | None = None
    """Tokens per KV head."""
    share: float | None = None
    """Fraction of the attention that the kept keys hold, for `auto:SHARE`."""
    least: float = 0.0
    """Smallest fraction of the prompt, for `auto:SHARE`."""

    @classmethod
    def parse(cls, value: Any, source: str) -> Budget:
        """Read a budget.

        0 < value <= 1 is a fraction of the prompt, a whole number above 1 is tokens per KV head,
        and `auto:SHARE` is the smallest fraction that keeps SHARE of the attention, with optional
        bounds as in `auto:SHARE,min=0.02,max=0.5`.

        Raises:
            EvictionConfigError: for any other value; the message begins with `source`.
        """
        hint = EvictionConfigError(
            f"{source} is {quoted(value)}: give a fraction of the prompt, 0 < budget <= 1, "
            "a whole number of tokens per KV head, such as 512, or auto:SHARE, such as "
            "auto:0.98 or auto:0.98,min=0.02,max=0.5"
        )
        if isinstance(value, str) and value.startswith("auto:"):
            return cls._parse_auto(value.removeprefix("auto:"), hint)
        if isinstance(value, bool):
            raise hint
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise hint from None
        if 0.0 < number <= 1.0:
            return cls(fraction=number)
        if number > 1.0 and number.is_integer():
            return cls(tokens=int(number))
        raise hint

    @classmethod
    def _parse_auto(cls, text: str, hint: EvictionConfigError) -> Budget:
        share, *bounds = text.split(",")
        given = {"min": "0.02", "max": "0.5"}
        for bound in bounds:
            name, _, value = bound.strip().partition("=")
            if name not in given:
                raise hint
            given[name] = value
        try:
            number, least, most = float(share), float(given["min"]), float(given["max"])
        except ValueError:
            raise hint from None
        # This form of the comparison refuses NaN too.
        if not (0.0 < number < 1.0 and 0.0 < least <= most <= 1.0):
            raise hint
        return cls(fraction=most, share=number, least=least)

    @property
    def is_auto(self) -> bool:
        return self.share is not None

    def retained_blocks(self, num_prompt_tokens: int, block_size: int) -> int:
        """Return the blocks k of the compressed region, 1 <= k <= floor(P / N).

        The region and the tail, which is the partial last block and always kept, stay within the
        budget together, but the region has at least one block. For `auto` this is the upper bound.
        """
        if self.tokens is not None:
            return _blocks_within(self.tokens, num_prompt_tokens, block_size)
        allowance = (self.fraction or 0) * num_prompt_tokens
        return _blocks_within(allowance, num_prompt_tokens, block_size)

    def shortest_prompt(self, num_blocks: int, block_size: int) -> int | None:
        """Return the tokens of the shortest prompt that keeps `num_blocks`; None if none does."""
        if num_blocks == 1:
            return block_size  # also of a smaller budget
        if self.tokens is not None:
            return num_blocks * block_size if num_blocks * block_size <= self.tokens else None
        # A tail takes more of the budget than it adds, so it is a prompt of full blocks.
        first = int(num_blocks / (self.fraction or 1))
        prompts = (max(first + more, num_blocks) * block_size for more in range(3))
        return next(p for p in prompts if self.retained_blocks(p, block_size) >= num_blocks)

    def stages(
        self,
        shares: Sequence[float],
        num_prompt_tokens: int,
        block_size: int,
        least_blocks: int = 0,
    ) -> tuple[int, ...]:
        """Return the blocks k for each of descending shares, and for the budget, which ends them.

        Shares that keep no more than the budget, or no fewer blocks than the one before, are left
        out. They descend, and each is less than the full blocks of the prompt. None is less than
        `least_blocks`.
        """
        least = max(self.retained_blocks(num_prompt_tokens, block_size), least_blocks)
        full = num_prompt_tokens // block_size
        found = {
            Budget(fraction=share).retained_blocks(num_prompt_tokens, block_size)
            for share in shares
        }
        return tuple(sorted((k for k in found | {least} if least <= k < full), reverse=True))

    def guard(self, num_prompt_tokens: int, num_certain: int, block_size: int) -> Guard | None:
        """Return the guarantee of `auto` for a prompt; None for other budgets.

        `num_certain` is the number of sinks and text tokens in full blocks, which are always kept.
        """
        if self.share is None:
            return None
        least = _blocks_within(self.least * num_prompt_tokens, num_prompt_tokens, block_size)
        return Guard(self.share, max(least, -(-num_certain // block_size)))

    @property
    def value(self) -> float | int | str:
        """The budget as `parse` reads it."""
        if self.share is not None:
            return f"auto:{self.share},min={self.least},max={self.fraction}"
        return self.tokens if self.tokens is not None else self.fraction or 0

    @property
    def doubt(self) -> str:
        """What may have been meant by so few tokens; empty for other budgets."""
        if self.tokens is None or self.tokens > 100:
            return ""
        return f"; for {self.tokens} % of the prompt give {self.tokens / 100:g}"

    def __str__(self) -> str:
        if self.share is not None:
            return (
                f"auto for {100 * self.share:g} % of the attention, "
                f"{100 * self.least:g} to {100 * (self.fraction or 0):g} % of the prompt"
            )
        if self.tokens is not None:
            return f"{self.tokens} tokens per head"
        return f"{100 * (self.fraction or 0):g} % of the prompt"


Schedule = tuple[tuple[int, Budget], ...]
"""Evictions of one prompt: after how many tokens of its answer, and the fraction that it keeps."""


def parse_schedule(value: Any, source: str, hint: str = "") -> Schedule:
    """Read a schedule: `"8:0.3,32:0.1"`, or pairs such as `[[8, 0.3], [32, 0.1]]`.

    Tokens of the answer ascend, fractions of the prompt descend.

    Args:
        hint: what else may be given, for the message.

    Raises:
        EvictionConfigError: for any other value; the message begins with `source`.
    """
    schedule: list[tuple[int, Budget]] = []
    try:
        for num_tokens, fraction in _pairs(value):
            budget = Budget.parse(fraction, source)
            last_tokens, last = schedule[-1] if schedule else (-1, Budget(fraction=2.0))
            if budget.fraction is None or budget.is_auto or last.fraction is None:
                raise ValueError
            if not last_tokens < num_tokens <= _MAX_TOKENS or budget.fraction >= last.fraction:
                raise ValueError
            schedule.append((num_tokens, budget))
    except ValueError:  # `EvictionConfigError` is one
        schedule = []
    if not 1 <= len(schedule) <= MAX_STEPS:
        raise EvictionConfigError(
            f'{source} is {quoted(value)}: give pairs of answer tokens and budgets, "8:0.3,32:0.1" '
            "or [[8, 0.3], [32, 0.1]]: ever more tokens, and ever smaller fractions of the prompt, "
            f"at most {MAX_STEPS} pairs{hint}"
        )
    return tuple(schedule)


def written(schedule: Schedule) -> list[list[Any]]:
    """Return a schedule as JSON has it."""
    return [[num_tokens, budget.value] for num_tokens, budget in schedule]


def _pairs(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield the pairs of a schedule.

    Raises:
        ValueError: unless each has two parts, and the first is a whole number.
    """
    if isinstance(value, str):
        value = [part.split(":") for part in value.split(",", MAX_STEPS)]
    if not isinstance(value, Sequence):
        raise ValueError
    for pair in value:
        if not isinstance(pair, Sequence) or isinstance(pair, str | bytes):
            raise ValueError
        tokens, budget = pair
        if isinstance(tokens, str):
            tokens = int(tokens)
        if isinstance(tokens, bool) or not isinstance(tokens, int):
            raise ValueError
        yield tokens, budget


def _blocks_within(allowance: float, num_prompt_tokens: int, block_size: int) -> int:
    num_full_blocks, num_tail_tokens = divmod(num_prompt_tokens, block_size)
    retained = int((allowance - num_tail_tokens) // block_size)
    return min(max(retained, 1), num_full_blocks)
