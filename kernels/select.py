# SPDX-License-Identifier: Apache-2.0
"""Selection of the tokens that fill the pages of each (layer, KV head)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import SMALL_INTEGERS, check

_TIER_BITS = 4
_SCORE_BITS = 32
_INT32_MAX = 2**31 - 1

MAX_TIERS = 2**_TIER_BITS
MAX_CANDIDATES = 2 ** (62 - _SCORE_BITS - _TIER_BITS)

KEY_BYTES = 32 << 20
"""Bound of the ranking keys that exist at a time, see `key_slices`."""

_KEY_BYTES = 8


def select_tokens(
    scores: Tensor, tiers: Tensor, counts: Tensor, num_pages: int, block_size: int
) -> Tensor:
    """Return the positions of the kept tokens, page by page.

    Pair (l, h) keeps its `counts[l, h] * block_size` best candidates, ordered by tier (high
    first), then score (high first), then position (low first). A NaN score ranks last in its tier.
    Pages are in prefix-sum order of the pairs l*H + h, see `page_offsets`. All pages of a
    pair are full, and positions ascend through them.

    Args:
        scores: float32 `[L, H, C]`, or `[L, 1, C]` for one ranking in all heads of a layer.
        tiers: integer `[C]`, `[L, H, C]` or `[L, 1, C]`, values in `0..MAX_TIERS - 1`.
        counts: int64 `[L, H]`, pages of each pair: each at most C / N, together at most
            `num_pages`.
        num_pages: rows of the result, known on the host. Rows after the last dealt page hold valid
            but meaningless positions.
        block_size: N.

    Returns:
        int32 `[num_pages, N]`.

    Raises:
        ValueError: if a shape, dtype or number does not fit; the message names the argument.
    """
    check("counts", counts, ("L", "H"), (torch.int64,))
    layers, heads = counts.shape
    num_candidates = scores.shape[-1]
    sets = 1 if scores.shape[1:2] == (1,) else heads
    check("scores", scores, (layers, sets, "C"), (torch.float32,))
    sets = 1 if tiers.shape[1:2] == (1,) else heads
    shape = (num_candidates,) if tiers.dim() == 1 else (layers, sets, num_candidates)
    check("tiers", tiers, shape, SMALL_INTEGERS)
    if num_candidates > MAX_CANDIDATES:
        raise ValueError(f"scores must have at most {MAX_CANDIDATES} candidates")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if not 0 <= num_pages * block_size <= layers * heads * num_candidates:
        raise ValueError(
            f"num_pages must be between 0 and {layers * heads * num_candidates // block_size}, "
            f"got {num_pages}"
        )
    if gpu.runs(scores):
        from vllm_tgvkv.kernels.gpu import select as triton_select

        return triton_select.select_tokens(scores, tiers, counts, num_pages, block_size)
    wanted = counts * block_size
    keys = ranking_keys(scores, tiers)
    kept = keys >= thresholds(keys, wanted).unsqueeze(-1)  # [L, H, C]
    return _compact(kept, num_pages * block_size).view(num_pages, block_size)


def page_offsets(counts: Tensor) -> Tensor:
    """Return the prefix sums of page counts `[L, H]`, int32 `[L*H + 1]`, starting with 0.

    Pair p owns the region's pages `offsets[p] .. offsets[p + 1] - 1`.
    """
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts.flatten(), dim=0, dtype=torch.int32, out=offsets[1:])
    return offsets


def ranking_keys(scores: Tensor, tiers: Tensor) -> Tensor:
    """Return int64 keys that order candidates by tier, score and -position, distinct in a row.

    Scores are float32 `[..., C]`, tiers integer `[C]` or `[..., C]`. Keys are not negative
    and below 2^62.
    """
    num_candidates = scores.shape[-1]
    position_bits = _position_bits(num_candidates)
    bits = (scores + 0.0).view(torch.int32)  # the addition turns -0 into +0
    # Reversing the magnitude of negative floats makes their bits order like the floats.
    ordered = torch.where(bits < 0, bits ^ _INT32_MAX, bits)
    ordered = ordered.masked_fill(scores.isnan(), -_INT32_MAX - 1)
    positions = torch.arange(num_candidates, device=scores.device)
    base = (tiers.long() << (_SCORE_BITS + position_bits)) + (num_candidates - 1 - positions)
    return ((ordered.long() + _INT32_MAX + 1) << position_bits) + base


def key_slices(scores: Tensor) -> Iterator[slice]:
    """Yield slices of the layers of `scores`, `[L, S, C]`, that are ranked one after the other.

    Their keys take at most `KEY_BYTES` each, or one layer's if that is more. Keys and what is
    computed from them take several times the memory of all scores otherwise.
    """
    num_layers, num_sets, num_candidates = scores.shape
    step = max(1, KEY_BYTES // max(1, num_sets * num_candidates * _KEY_BYTES))
    for first in range(0, num_layers, step):
        yield slice(first, first + step)


def thresholds(keys: Tensor, wanted: Tensor, num_bits: int | None = None) -> Tensor:
    """Return the `wanted`-th largest key of each row, int64 in the shape of `wanted`.

    The keys are found bit by bit: a few dozen counting passes are several times faster than a sort
    of 64-bit keys. On a CPU, PyTorch is faster still where all rows want as many. Where `wanted` is
    0, the threshold is above every key.

    Args:
        keys: int64 `[..., C]`, not negative.
        wanted: int64, of a shape that `keys.shape[:-1]` broadcasts to.
        num_bits: keys are below `2**num_bits`; the default fits `ranking_keys`.
    """
    if num_bits is None:
        num_bits = key_bits(keys.shape[-1])
    if gpu.runs(keys):
        from vllm_tgvkv.kernels.gpu import select as triton_select

        return triton_select.thresholds(keys, wanted, num_bits)
    if keys.is_cpu and wanted.numel() and wanted.shape == keys.shape[:-1]:
        numbers = wanted.numpy()
        number = int(numbers.flat[0])
        if number and (numbers == number).all():
            return keys.kthvalue(keys.shape[-1] - number + 1, dim=-1).values
    thresholds = torch.zeros_like(wanted)
    # Comparing into int64 saves the sum a conversion, half of its time.
    at_least = torch.empty(*wanted.shape, keys.shape[-1], dtype=torch.int64, device=keys.device)
    for bit in range(num_bits - 1, -1, -1):
        candidates = thresholds | (1 << bit)
        torch.ge(keys, candidates.unsqueeze(-1), out=at_least)
        enough = at_least.sum(dim=-1) >= wanted
        thresholds = torch.where(enough, candidates, thresholds)
    return thresholds


def key_bits(num_candidates: int) -> int:
    """Return the bits of a threshold of `ranking_keys`: one more than the keys have."""
    return _TIER_BITS + _SCORE_BITS + _position_bits(num_candidates) + 1


def _position_bits(num_candidates: int) -> int:
    return max(1, (num_candidates - 1).bit_length())


def _compact(kept: Tensor, num_kept: int) -> Tensor:
    """Return the last index of each of `num_kept` true entries, int32, in row-major order."""
    rank = kept.flatten().cumsum(dim=0) - 1
    # One extra slot takes all entries that are not kept, so no shape depends on data.
    slots = torch.where(kept.flatten(), rank, num_kept).clamp_(max=num_kept)
    positions = torch.arange(kept.shape[-1], dtype=torch.int32, device=kept.device)
    compacted = torch.zeros(num_kept + 1, dtype=torch.int32, device=kept.device)
    compacted.scatter_(0, slots, positions.expand_as(kept).reshape(-1))
    return compacted[:num_kept]
