# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens: how they are made, their pages, and how attention reads them.

A summary is one page of each (layer, head). Its first c slots are *rows*: weighted means of keys
and values. The values of its last slots hold the rows' masses, float32, each byte as a number from
0 to 255. So all of a page is finite, as vLLM's caches are: a kernel multiplies what an earlier
request left in a block with a weight of 0, and 0 times infinity would be no number. Attention reads
a row as one more key, whose logit is raised by the logarithm of its mass: a token that stands for n
equal ones counts n times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.kernels.select import ranking_keys

WORKSPACE_BYTES = 16 << 20
"""Bound of each large buffer, or what one pair of a layer and head needs if that is more."""

_MASS_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Places:
    """Where the C candidates of a cut are, int64 ``[C]`` each.

    Two tokens of one run are ``|row - row'| + |column - column'|`` steps apart. A run is an image,
    or all text, which has one row.
    """

    run: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class Summary:
    """Rows of M pairs of a layer and a head."""

    keys: Tensor
    """float32 ``[M, c, D]``; 0 where a pair has fewer rows."""
    values: Tensor
    """float32 ``[M, c, D]``."""
    masses: Tensor
    """float32 ``[M, c]``; 0 where a pair has fewer rows."""


@dataclass(frozen=True)
class Rooted:
    """A summary that may absorb more."""

    summary: Summary
    roots: Tensor
    """Positions of the rows' roots, int64 ``[M, c]``, ascending; any where a pair has fewer."""


def num_rows(block_size: int, head_size: int) -> int:
    """Return c, the rows of a summary in a page of N slots of `head_size` values.

    The other slots have room for the bytes of c masses; there are as few of them as possible.
    """
    # The least h with h * head_size >= 4 * (N - h).
    num_slots = -(-_MASS_BYTES * block_size // (head_size + _MASS_BYTES))
    return block_size - num_slots


def absorb(
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    positions: Tensor,
    weights: Tensor,
    scores: Tensor,
    places: Places,
    decays: Tensor,
    rows: int,
    earlier: Rooted | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Rooted:
    """Return the summary of the tokens with a positive weight, and of an earlier summary's rows.

    A row that exists already counts as a token: it stands at its root's position and weighs its
    mass. At most ``rows`` of all become *roots*: every other existing row, then the best tokens by
    score (of equal ones, the first), then the remaining rows, the last one first. Every other token
    joins the nearest root of its run, or the nearest in the sequence if its run has none; of two
    equally near ones, the first. Its weight is multiplied by ``decays ** steps``. A row's mass is
    the sum of its weights. A row that nothing joins keeps its bits.

    Sums are float32 products of matrices: nothing depends on the order in which threads add.

    Args:
        key_pages, value_pages: ``[num_pool_pages, N, D]``, logical views of the pool.
        tables: int64 ``[M, W]``, pages of the tokens, of which there are n, at most W * N.
        positions: int64 ``[M, n]``, below C.
        weights: float32 ``[M, n]``, 0 for tokens that are not absorbed, whatever their pages hold.
        scores: float32 ``[M, n]``.
        decays: float32 ``[C]``.
        rows: c, at most N.
    """
    pairs, num_tokens = weights.shape
    head_size, device = key_pages.shape[2], weights.device
    tiers = torch.ones(num_tokens, dtype=torch.int32, device=device)
    if earlier is not None:
        order = torch.arange(rows, device=device)
        tiers = torch.cat((tiers, 2 * (1 - order % 2).int()))
        positions = torch.cat((positions, earlier.roots), dim=1)
        weights = torch.cat((weights, earlier.summary.masses), dim=1)
        scores = torch.cat((scores, order.to(scores.dtype).expand(pairs, -1)), dim=1)
    keys, values = (torch.empty(pairs, rows, head_size, device=device) for _ in range(2))
    masses = torch.empty(pairs, rows, device=device)
    roots = torch.empty(pairs, rows, dtype=torch.int64, device=device)
    step = max(1, workspace_bytes // (weights.shape[1] * max(4 * head_size, 8 * rows)))
    for first in range(0, pairs, step):
        part = slice(first, first + step)
        ranks = ranking_keys(scores[part], tiers).masked_fill(weights[part] <= 0, -1)
        joined, roots[part] = _joined(positions[part], weights[part], ranks, places, decays, rows)
        masses[part] = joined.sum(dim=1)
        # The share of a single token is exactly 1.
        shares = (joined / masses[part].clamp(min=_TINY).unsqueeze(1)).transpose(1, 2)
        is_absent = (weights[part, :num_tokens] <= 0).unsqueeze(-1)
        for pool, means, name in ((key_pages, keys, "keys"), (value_pages, values, "values")):
            tokens = pool[tables[part]].flatten(1, 2)[:, :num_tokens].float()  # [q, n, D]
            tokens.masked_fill_(is_absent, 0)
            if earlier is not None:
                tokens = torch.cat((tokens, getattr(earlier.summary, name)[part]), dim=1)
            means[part] = shares @ tokens
    return Rooted(Summary(keys, values, masses), roots)


def _joined(
    positions: Tensor, weights: Tensor, ranks: Tensor, places: Places, decays: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Return the weight of each of I tokens in each row, float32 ``[q, I, c]``, and the roots.

    Args:
        ranks: int64 ``[q, I]``; the highest become roots, and negative ones never.
    """
    end, num_roots = len(places.run), min(rows, weights.shape[1])
    best = ranks.topk(num_roots, dim=1)
    # Roots ascend; those that do not exist come last.
    roots = positions.gather(1, best.indices).masked_fill_(best.values < 0, end).sort(dim=1).values
    exists = (roots < end).unsqueeze(1)
    roots = roots.clamp(max=end - 1)
    steps = _steps(places.row[positions], places.row[roots])
    steps += _steps(places.column[positions], places.column[roots])
    is_own = places.run[positions].unsqueeze(2) == places.run[roots].unsqueeze(1)
    steps = torch.where(is_own, steps, _steps(positions, roots))
    # One key orders roots by whether they are of the same run, by distance and by position.
    far = 2 * end
    order = torch.where(is_own, steps, steps + far).masked_fill(~exists, 3 * far)
    number = torch.arange(num_roots, device=weights.device)
    nearest = (order * rows + number).amin(dim=2, keepdim=True).remainder_(rows)
    steps = steps.gather(2, nearest).squeeze(2)
    joined = weights.new_zeros(*weights.shape, rows)
    joined.scatter_(2, nearest, (weights * decays[positions] ** steps).unsqueeze(2))
    return joined, torch.nn.functional.pad(roots, (0, rows - num_roots))


def _steps(coordinates: Tensor, of_roots: Tensor) -> Tensor:
    """Return distances in one coordinate, of tokens ``[q, I]`` to roots ``[q, c]``."""
    return (coordinates.unsqueeze(2) - of_roots.unsqueeze(1)).abs_()


def store(summary: Summary, key_pages: Tensor, value_pages: Tensor, pages: Tensor) -> None:
    """Write a summary to whole pages of the pool, int64 ``[M]``; see :func:`load`."""
    size, rows = key_pages.shape[1], summary.keys.shape[1]
    pad = (0, 0, 0, size - rows)
    keys = torch.nn.functional.pad(summary.keys, pad).to(key_pages.dtype)
    values = torch.nn.functional.pad(summary.values, pad).to(value_pages.dtype)
    header = values[:, rows:].flatten(1)
    header[:, : _MASS_BYTES * rows] = summary.masses.contiguous().view(torch.uint8)
    values[:, rows:] = header.view(len(pages), size - rows, -1)
    key_pages[pages] = keys
    value_pages[pages] = values


def load(key_pages: Tensor, value_pages: Tensor, pages: Tensor, rows: int) -> Summary:
    """Read summaries from pages, int64 of any shape; results have that shape in place of M."""
    values = value_pages[pages]
    masses = values[..., rows:, :].flatten(-2)[..., : _MASS_BYTES * rows]
    masses = masses.to(torch.uint8).view(torch.float32)
    keys = key_pages[pages][..., :rows, :].float()
    return Summary(keys, values[..., :rows, :].float(), masses)


def log_sum_exp(
    queries: Tensor,
    key_pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Return the logarithm of the softmax denominator of each query, float32 ``[T, H, G]``.

    It reads the keys again, for kernels that do not return it.

    Args:
        queries: ``[T, H, G, D]``.
        tables: int ``[T, H, W]``, pages of the keys of each (token, head).
        lengths: int ``[T, H]``, keys that each sees, at least 1.
    """
    size, head_size = key_pages.shape[1:]
    num_tokens, num_heads, width = tables.shape
    result = torch.empty(queries.shape[:3], device=queries.device)
    step = max(1, workspace_bytes // (num_heads * width * size * head_size * 4))
    columns = torch.arange(width * size, device=queries.device)
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        keys = key_pages[tables[part].long()].flatten(2, 3).float()  # [t, H, W * N, D]
        logits = (queries[part].float() @ keys.transpose(2, 3)).mul_(scale)
        is_hidden = (columns >= lengths[part].unsqueeze(-1)).unsqueeze(2)
        result[part] = logits.masked_fill_(is_hidden, float("-inf")).logsumexp(dim=-1)
    return result


def merge(
    outputs: Tensor,
    log_sum_exp: Tensor,
    queries: Tensor,
    summary: Summary,
    is_read: Tensor,
    scale: float,
) -> Tensor:
    """Return the attention over keys and summaries together, from that over the keys alone.

    Where all masses are 0, the result has the bits of ``outputs``.

    Args:
        outputs: ``[T, H, G, D]``, attention over the keys.
        log_sum_exp: float32 ``[T, H, G]``, its softmax denominators.
        queries: ``[T, H, G, D]``.
        summary: of m pages of each (token, head), so its M is ``[T, H, m]``.
        is_read: bool ``[T, m]``, false for pages that hold no summary of the token's request.
    """
    masses = summary.masses.masked_fill(~is_read[:, None, :, None], 0)
    keys, values = (x.flatten(2, 3) for x in (summary.keys, summary.values))  # [T, H, m * c, D]
    logits = (queries.float() @ keys.transpose(2, 3)).mul_(scale)
    logits += masses.log_().flatten(2, 3).unsqueeze(2)
    most = torch.maximum(log_sum_exp, logits.amax(dim=-1)).unsqueeze(-1)
    weights = (logits - most).exp_()
    of_keys = (log_sum_exp.unsqueeze(-1) - most).exp_()
    total = of_keys + weights.sum(dim=-1, keepdim=True)
    merged = (outputs.float() * of_keys + weights @ values) / total
    return merged.to(outputs.dtype)
