# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted tokens into their nearest kept neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tgvkv.kernels.checks import indexable

WORKSPACE_BYTES = 16 << 20
"""Bound of the candidates that are merged at a time, in float32."""

_FLOAT_BYTES = 4


def merge_evicted(
    key_pages: Tensor,
    value_pages: Tensor,
    positions: Tensor,
    offsets: Tensor,
    old_blocks: Tensor,
    new_blocks: Tensor,
    num_layers: int,
    num_heads: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> None:
    """Replace each kept token's key and value by means over the candidates nearest to it.

    A candidate belongs to the kept candidate of its (layer, head) that is nearest in position, the
    lower one of two; a kept candidate belongs to itself. The tail is neither merged nor merged
    into. Call this after `copy_kept` of the same tokens; a pair without pages loses its tokens, as
    it does there. `old_blocks` are the prompt's full
    blocks in order, and `positions` are as in `kept_slots`.

    Means are float32 and add their tokens in the order of the prompt, on every device: a cluster is
    a range of positions, so no two programs add to one sum. Equal calls give equal bits.

    Scratch memory: five times `workspace_bytes`, and 64 bytes for each candidate of a pair.
    """
    pairs, num_pages = num_layers * num_heads, len(positions)
    if num_pages == 0:
        return
    block_size = key_pages.shape[1]
    num_candidates = len(old_blocks) * block_size
    device = positions.device
    offsets, old_blocks, new_blocks = offsets.long(), old_blocks.long(), new_blocks.long()
    candidates = torch.arange(num_candidates, device=device)
    values = max(pool.shape[2] for pool in (key_pages, value_pages))
    step = max(1, workspace_bytes // (num_candidates * values * _FLOAT_BYTES))
    # Where one pair's candidates are more, some of their numbers at a time.
    width = max(1, min(values, workspace_bytes // (num_candidates * _FLOAT_BYTES)))
    for first in range(0, pairs, step):
        last = min(first + step, pairs)
        # How many pages the pairs own is known on the device only: take as many as they can own.
        # The pairs' own pages come first. None is listed twice.
        most = min(num_pages, (last - first) * len(old_blocks))
        pages = (offsets[first] + torch.arange(most, device=device)) % num_pages
        pair = torch.searchsorted(offsets, pages, right=True).sub_(1)
        is_own = (pair >= first) & (pair < last)
        lengths = _cluster_lengths(positions, offsets, pages, pair, num_candidates)
        lengths = torch.where(is_own[:, None], lengths, 0).flatten()
        # Pairs without pages have no cluster. They go last, so that clusters lie side by side.
        owns_pages = offsets[first : last + 1].diff() > 0
        order = first + (~owns_pages).int().argsort(stable=True)
        source = old_blocks[candidates // block_size] * pairs + order[:, None]
        target = new_blocks[pages // pairs] * pairs + pages % pairs
        for pool in (*key_pages.split(width, dim=2), *value_pages.split(width, dim=2)):
            stored = indexable(pool)
            tokens = stored[source, candidates % block_size].view(pool.dtype)
            tokens = tokens.float().flatten(0, 1)  # [pairs * C, D]
            # `unsafe` leaves out checks that would wait for the device.
            means = torch.segment_reduce(tokens, "mean", lengths=lengths, axis=0, unsafe=True)
            del tokens
            means = means.view(most, block_size, -1)
            old = stored[target].view(pool.dtype).float()
            merged = torch.where(is_own[:, None, None], means, old).to(pool.dtype)
            stored[target] = merged.view(stored.dtype)


def _cluster_lengths(
    positions: Tensor, offsets: Tensor, pages: Tensor, pair: Tensor, num_candidates: int
) -> Tensor:
    """Return the candidates of each slot's cluster, int64 `[pages, N]`.

    Only for pages that a pair owns; others get any number.
    """
    num_pages = len(positions)
    kept = positions[pages].long()
    before = positions[(pages - 1) % num_pages, -1:]
    after = positions[(pages + 1) % num_pages, :1]
    neighbours = torch.cat((before, kept, after), dim=1)
    # A cluster ends half way to the next kept token of the pair.
    borders = (neighbours[:, :-1] + neighbours[:, 1:]) // 2 + 1
    pair = pair.clamp(max=len(offsets) - 2)
    borders[:, 0].masked_fill_(pages == offsets[pair], 0)
    borders[:, -1].masked_fill_(pages + 1 == offsets[pair + 1], num_candidates)
    return borders.diff(dim=1)
