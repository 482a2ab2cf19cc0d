# SPDX-License-Identifier: Apache-2.0
"""The memory that an answer held, from the report of its request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_tgvkv.config.server import CONFIG_KEY


@dataclass(frozen=True)
class Held:
    """The part of a prompt that a request holds after its evictions, from its report."""

    prompt_tokens: int
    kept_tokens: float
    blocks_before: int
    blocks_after: int

    @classmethod
    def of(cls, output: Any) -> Held:
        """Return it; a prompt that was not evicted is held whole."""
        report = output.kv_transfer_params[CONFIG_KEY]
        tokens, before = report["prompt_tokens"], report["blocks_before"]
        if report["blocks_after"] is None:
            return cls(tokens, tokens, before, before)
        return cls(tokens, report["kept_tokens"], before, report["blocks_after"])
