# SPDX-License-Identifier: Apache-2.0
"""How attention reads summaries on a CPU, whose kernel returns no softmax denominators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.kernels.summaries import find, load, log_sum_exp, merge
from vllm_tgvkv.summaries.blocks import SummaryBlocks


@dataclass(frozen=True)
class SummaryReads:
    """The T tokens of a step that read summaries, and where these are."""

    summaries: SummaryBlocks
    tokens: Tensor
    """Their places in the part of the batch that holds the ragged rows, int64 [T]."""
    rows: Tensor
    """Their ragged rows, int64 [T]."""
    num_hidden: Tensor
    """Last keys of their rows that they do not see, int32 [T]."""
    blocks: Tensor
    """Blocks of summaries, int64 [T, m]; any of them where a request has fewer."""
    is_read: Tensor
    """Whether a block is the request's, bool [T, m]."""

    @classmethod
    def of_rows(
        cls, summaries: SummaryBlocks, block_table: Tensor, starts: Tensor, places: Tensor
    ) -> SummaryReads | None:
        """Find them among R rows of a batch; None if no row has summaries.

        Args:
            starts: first token of each row of the batch and the end, int32.
            places: the R rows' places in the batch, int64 [R].
        """
        if not summaries.are_used:
            return None
        retained, first_blocks = summaries.regions.num_token_blocks, block_table[:, 0].long()
        rows, blocks, is_read = find(block_table, first_blocks, retained, summaries.counts)
        if not len(rows):
            return None
        ends = starts[places + 1]
        num_tokens = (ends - starts[places])[rows].long()
        of_token = torch.arange(len(rows)).repeat_interleave(num_tokens)
        last = num_tokens.cumsum(0)[of_token] - 1
        num_hidden = last - torch.arange(len(of_token))
        return cls(
            summaries,
            tokens=ends[rows[of_token]].long() - 1 - num_hidden,
            rows=rows[of_token],
            num_hidden=num_hidden.int(),
            blocks=blocks[of_token],
            is_read=is_read[of_token],
        )

    def merge(
        self,
        outputs: Tensor,
        queries: Tensor,
        tables: Tensor,
        lengths: Tensor,
        layer: int,
        scale: float,
    ) -> None:
        """Merge what summaries add into the outputs over keys alone, both [tokens * H, G, D].

        These tokens read their keys once more.

        Args:
            tables: pages of the ragged rows in this layer, int32 [R, H, W].
            lengths: their keys in this layer, int32 [R, H].
        """
        pool, shape = self.summaries.pool, self.summaries.pool.shape
        by_token = (-1, shape.num_heads, *queries.shape[1:])
        reading = queries.view(by_token)[self.tokens]
        heads = torch.arange(shape.num_heads)
        pages = (self.blocks * shape.num_layers + layer).unsqueeze(1) * shape.num_heads
        pages = pages + heads[:, None]
        summary = load(pool.keys, pool.values, pages, self.summaries.num_rows)
        seen = lengths[self.rows] - self.num_hidden[:, None]
        of_keys = log_sum_exp(reading, pool.keys, tables[self.rows], seen, scale)
        of_tokens = outputs.view(by_token)
        of_tokens[self.tokens] = merge(
            of_tokens[self.tokens], of_keys, reading, summary, self.is_read, scale
        )
