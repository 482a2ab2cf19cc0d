# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted tokens into their nearest kept neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_evicted(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
) -> None:
    """Replace each kept token's key and value by means over the candidates nearest to it.

    A candidate belongs to the kept candidate of its (layer, head) that is nearest in position, the
    lower one of two; a kept candidate belongs to itself. The tail is neither merged nor merged
    into. Means are float32. Call this after :func:`~vllm_tgvkv.kernels.copy.copy_kept`, with the
    same arguments; the tokens of a pair without pages are lost, as they are there. Scratch memory:
    one layer's candidates and the whole region in float32.
    """
    pairs = num_layers * num_heads
    block_size = key_pages.shape[1]
    num_candidates = len(old_blocks) * block_size
    device = positions.device
    region = torch.arange(len(positions), device=device)
    pair = torch.searchsorted(offsets, region, right=True).sub_(1)
    has_pair = pair < pairs
    starts = _first_of_cluster(positions.long().flatten(), pair.repeat_interleave(block_size))
    # Clusters are ordered by (pair, first candidate), so one search finds each candidate's cluster.
    clusters = pair.repeat_interleave(block_size) * num_candidates + starts
    page_of = new_blocks.long()[region // pairs] * pairs + region % pairs
    counts = torch.zeros(len(clusters), device=device)
    candidates = torch.arange(num_candidates, device=device)
    members = [  # cluster of each candidate, layer by layer
        torch.searchsorted(
            clusters,
            (torch.arange(num_heads, device=device)[:, None] + layer * num_heads) * num_candidates
            + candidates,
            right=True,
        ).sub_(1)
        for layer in range(num_layers)
    ]
    has_pages = offsets.diff() > 0
    for layer, member in enumerate(members):
        weights = has_pages[layer * num_heads : (layer + 1) * num_heads].float()
        counts.index_add_(
            0, member.clamp(min=0).flatten(), weights.repeat_interleave(num_candidates)
        )
    for pool in (key_pages, value_pages):
        sums = torch.zeros(len(clusters), pool.shape[2], device=device)
        for layer, member in enumerate(members):
            heads = torch.arange(num_heads, device=device)[:, None] + layer * num_heads
            source = old_blocks.long()[candidates // block_size] * pairs + heads
            tokens = pool[source, candidates % block_size].float()  # [H, C, D]
            # A pair without pages has no cluster; its tokens must not enter another pair's.
            keeps = has_pages[layer * num_heads : (layer + 1) * num_heads, None, None]
            tokens.masked_fill_(~keeps, 0)
            sums.index_add_(0, member.clamp(min=0).flatten(), tokens.flatten(0, 1))
        means = (sums / counts[:, None].clamp(min=1)).view(len(region), block_size, -1)
        old = pool[page_of].float()
        pool[page_of] = torch.where(has_pair[:, None, None], means, old).to(pool.dtype)


def _first_of_cluster(positions: Tensor, pair: Tensor) -> Tensor:
    """Return the first candidate of each kept one's cluster, int64; positions ascend in a pair."""
    previous = positions.roll(1)
    first = pair != pair.roll(1)
    first[:1] = True
    return torch.where(first, 0, (previous + positions) // 2 + 1)
