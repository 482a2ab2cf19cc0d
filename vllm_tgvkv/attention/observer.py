# SPDX-License-Identifier: Apache-2.0
"""The protocol through which attention shows a step's layers; it does not mention eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from vllm_tgvkv.cache.pages import PagePool
from vllm_tgvkv.cache.queries import StoredQueries
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.summaries.blocks import SummaryBlocks


class Observer(Protocol):
    """Sees each layer of a step after its attention; the worker's `Evictor` is one."""

    pool: PagePool
    regions: Regions
    """State of compressed rows, which attention reads."""
    summaries: SummaryBlocks
    """Summaries of compressed rows, which attention reads as well."""
    decode_kernel: Literal["auto", "stock", "triton"]
    """The kernel that ragged rows are decoded with; the worker replaces `auto`."""

    query_dtype: torch.dtype
    """Of the queries that attention gets."""

    def record_decodes(self, max_tokens: int) -> None:
        """Store the queries of steps that may be graphs through `stored_queries` from now on.

        So a graph stores them. Nothing changes where no tokens of answers vote. `max_tokens` is the
        most tokens of such a step, padded ones included.
        """

    def has_work(self, may_be_graph: bool) -> bool:
        """Return whether this step's layers are observed.

        Args:
            may_be_graph: whether the step may be replayed as a graph: every request has one token,
                or one and all of its drafts.
        """

    def prepare(self, first_token: Callable[[str], int]) -> None:
        """Find the step's prompts in the batch that is being built.

        `first_token(request_id)` is the index of the request's first token in the batch's
        queries.
        """

    def stored_queries(
        self, num_tokens: int, first_token: Callable[[str], int]
    ) -> StoredQueries | None:
        """Return the store of a step that may be a graph and is not observed, for its attention.

        None if this server records none. `num_tokens` includes padded ones.
        """

    def observe_layer(self, layer: int, queries: torch.Tensor, scale: float) -> None:
        """Observe one layer, once its keys are in the cache and its attention has run.

        Args:
            layer: index among this worker's layers.
            queries: [tokens, H * G, D], rotated, of the whole batch; bytes if they are fp8.
            scale: factor of the products of queries and keys, as both are given.
        """
