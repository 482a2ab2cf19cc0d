# SPDX-License-Identifier: Apache-2.0
"""Settings of a server with what only tests change: sizes that are constants elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import Granularity, Mix, Policy, Pooling, Summaries, build_policy
from vllm_tgvkv.policies.registry import POOLINGS, SUMMARIES


def pooling_name(*args: Any, **fields: Any) -> str:
    """Return a name for a pooling in the mixes of this process; arguments are its fields."""
    pooling = Pooling(*args, **fields)
    if str(pooling) not in POOLINGS.names:
        POOLINGS.add(str(pooling), pooling)
    return str(pooling)


def summaries_name(*args: Any, **fields: Any) -> str:
    """Return a name for summaries in the mixes of this process; arguments are their fields."""
    summaries = Summaries(*args, **fields)
    if str(summaries) not in SUMMARIES.names:
        SUMMARIES.add(str(summaries), summaries)
    return str(summaries)


@dataclass(frozen=True)
class AdjustedConfig(EvictionConfig):
    """Settings of which some parts are given instead of derived."""

    granularity: Granularity | None = None
    """Of all methods for which it has a meaning; None for their own."""
    query_rows: int | None = None
    """Rows of the query pool."""
    answer_rows: int | None = None
    """Rows of the answer that vote at each eviction after the first, at most."""

    def build_policy(self, name: str) -> Policy:
        if self.granularity is None:
            return super().build_policy(name)
        mix = replace(self.methods.get(name) or Mix(name), granularity=self.granularity)
        try:
            return build_policy(mix, name, self.head_scores, self.gates)
        except ValueError:
            return super().build_policy(name)

    @property
    def num_query_rows(self) -> int:
        return super().num_query_rows if self.query_rows is None else self.query_rows

    @property
    def num_answer_rows(self) -> int:
        if self.decode is None or self.answer_rows is None:
            return super().num_answer_rows
        return self.answer_rows
