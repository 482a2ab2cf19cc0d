# SPDX-License-Identifier: Apache-2.0
"""Answers that are given token by token, so that each next token can be asked for.

A small model writes poor long answers by itself, and one early mistake hides all that follows.
vLLM's raw log-probabilities come before its logits processors and tell what it would have said.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "forced"
"""Key of a request's extra arguments: tokens of the answer that are given one by one."""


class Forced(AdapterLogitsProcessor):
    """Leaves requests with `FORCED` no choice."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        tokens = (params.extra_args or {}).get(FORCED)
        if not tokens:
            return None

        def force(said: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(said) < len(tokens):
                logits.fill_(float("-inf"))
                logits[tokens[len(said)]] = 0.0
            return logits

        return force
