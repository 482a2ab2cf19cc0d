# SPDX-License-Identifier: Apache-2.0
"""Requests that are served together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Requests of one kind that arrive at once."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    images: bool = True

    @property
    def request_tokens(self) -> int:
        """Return the tokens of prompt and output of one request."""
        return self.prompt_tokens + self.output_tokens
