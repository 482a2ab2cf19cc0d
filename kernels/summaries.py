# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens: how they are made, their pages, and how attention reads them.

A summary is one page of each (layer, head). Its first c slots are *rows*: weighted means of keys
and values. The values of its last slots hold the logarithms of the rows' masses, each as the sum of
numbers of the page's dtype. All of a page is finite, as vLLM's caches are: a kernel multiplies what
an earlier request left in a block with a weight of 0, and 0 times infinity would be no number.
Attention reads a row as one more key, whose logit is raised by the logarithm of its mass: a token
that stands for n equal ones counts n times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_tgvkv.kernels.select import ranking_keys

WORKSPACE_BYTES = 16 << 20
"""Bound of each large buffer, or what one pair of a layer and head needs if that is more."""

_MASS_BYTES = 4

_NO_MASS = -16384.0
"""What is stored for the logarithm of 0, exact in every dtype and below that of any mass."""


@dataclass(frozen=True)
class Places:
    """Where the candidates of a prompt are, int64 ``[C]`` each.

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
    log_masses: Tensor
    """float32 ``[M, c]``; -inf where a pair has fewer rows."""


def num_rows(block_size: int, head_size: int, item_size: int) -> int:
    """Return c, the rows of a summary in a page of N slots of `head_size` values.

    The other slots have room for c masses; there are as few of them as possible.
    """
    slot_bytes = head_size * item_size
    # The least h with h * slot_bytes >= 4 * (N - h).
    num_slots = -(-_MASS_BYTES * block_size // (slot_bytes + _MASS_BYTES))
    return block_size - num_slots


def absorb(
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    weights: Tensor,
    scores: Tensor,
    places: Places,
    decays: Tensor,
    rows: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Summary:
    """Return the summary of the candidates with a positive weight.

    The ``rows`` best of them by score are the *roots*; of equal ones, the first. Every candidate
    joins the nearest root of its run, or the nearest in the sequence if its run has none; of two
    equally near ones, the first. Its weight is multiplied by ``decays ** steps``. A row's mass is
    the sum of its weights.

    Sums are float32 products of matrices: nothing depends on the order in which threads add.

    Args:
        key_pages, value_pages: ``[num_pool_pages, N, D]``, logical views of the pool.
        tables: int64 ``[M, W]``, pages of the C = W * N candidates.
        weights: float32 ``[M, C]``, 0 for candidates that are not absorbed.
        scores: float32 ``[M, C]``.
        decays: float32 ``[C]``.
        rows: c, at most N.
    """
    pairs, num_candidates = weights.shape
    head_size, device = key_pages.shape[2], weights.device
    keys, values = (torch.empty(pairs, rows, head_size, device=device) for _ in range(2))
    masses = torch.empty(pairs, rows, device=device)
    step = max(1, workspace_bytes // (num_candidates * max(4 * head_size, 8 * rows)))
    for first in range(0, pairs, step):
        part = slice(first, first + step)
        joined = _joined(weights[part], scores[part], places, decays, rows)  # [q, C, c]
        masses[part] = joined.sum(dim=1)
        total = masses[part].unsqueeze(-1)
        for pool, means in ((key_pages, keys), (value_pages, values)):
            tokens = pool[tables[part]].flatten(1, 2).float()  # [q, C, D]
            sums = joined.transpose(1, 2) @ tokens
            means[part] = torch.where(total > 0, sums / total, 0)
    return Summary(keys, values, masses.log())


def _joined(weights: Tensor, scores: Tensor, places: Places, decays: Tensor, rows: int) -> Tensor:
    """Return the weight of each candidate in each row, float32 ``[q, C, c]``."""
    num_candidates = weights.shape[1]
    is_absorbed = weights > 0
    ranks = ranking_keys(scores, torch.zeros_like(places.run)).masked_fill(~is_absorbed, -1)
    best = ranks.topk(min(rows, num_candidates), dim=1)
    # Roots ascend; those that do not exist come last.
    roots = best.indices.masked_fill(best.values < 0, num_candidates).sort(dim=1).values
    exists = (roots < num_candidates).unsqueeze(1)
    roots = roots.clamp(max=num_candidates - 1)
    position = torch.arange(num_candidates, device=weights.device)
    steps = _steps(places.row, roots) + _steps(places.column, roots)
    is_own = places.run[:, None] == places.run[roots].unsqueeze(1)
    steps = torch.where(is_own, steps, _steps(position, roots))
    # One key orders roots by whether they are of the same run, by distance and by position.
    far = 2 * int(num_candidates)
    order = torch.where(is_own, steps, steps + far).masked_fill(~exists, 3 * far)
    number = torch.arange(roots.shape[1], device=weights.device)
    nearest = (order * rows + number).amin(dim=2, keepdim=True).remainder_(rows)
    steps = steps.gather(2, nearest).squeeze(2)
    joined = weights.new_zeros(*weights.shape, rows)
    return joined.scatter_(2, nearest, (weights * decays**steps).unsqueeze(2))


def _steps(coordinate: Tensor, roots: Tensor) -> Tensor:
    """Return the distances of all candidates to the roots ``[q, c]`` in one coordinate."""
    return (coordinate[:, None] - coordinate[roots].unsqueeze(1)).abs_()


def store(summary: Summary, key_pages: Tensor, value_pages: Tensor, pages: Tensor) -> None:
    """Write a summary to whole pages of the pool, int64 ``[M]``; see :func:`load`."""
    size, rows = key_pages.shape[1], summary.keys.shape[1]
    pad = (0, 0, 0, size - rows)
    keys = torch.nn.functional.pad(summary.keys, pad).to(key_pages.dtype)
    values = torch.nn.functional.pad(summary.values, pad).to(value_pages.dtype)
    header = values[:, rows:].flatten(1)
    rest = summary.log_masses.clamp(min=_NO_MASS)
    for start in range(0, _num_parts(values) * rows, rows):
        header[:, start : start + rows] = rest
        rest = rest - header[:, start : start + rows].float()
    values[:, rows:] = header.view(len(pages), size - rows, -1)
    key_pages[pages] = keys
    value_pages[pages] = values


def load(key_pages: Tensor, value_pages: Tensor, pages: Tensor, rows: int) -> Summary:
    """Read summaries from pages, int64 of any shape; results have that shape in place of M."""
    values = value_pages[pages]
    header = values[..., rows:, :].flatten(-2)[..., : _num_parts(values) * rows]
    masses = header.float().unflatten(-1, (-1, rows)).sum(dim=-2)
    masses = masses.masked_fill(masses <= _NO_MASS, float("-inf"))
    keys = key_pages[pages][..., :rows, :].float()
    return Summary(keys, values[..., :rows, :].float(), masses)


def _num_parts(values: Tensor) -> int:
    """Return the numbers whose sum is the logarithm of a mass, for values of a dtype."""
    return _MASS_BYTES // values.element_size()


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
    masses = summary.log_masses.masked_fill(~is_read[:, None, :, None], float("-inf"))
    keys, values = (x.flatten(2, 3) for x in (summary.keys, summary.values))  # [T, H, m * c, D]
    logits = (queries.float() @ keys.transpose(2, 3)).mul_(scale)
    logits += masses.flatten(2, 3).unsqueeze(2)
    most = torch.maximum(log_sum_exp, logits.amax(dim=-1)).unsqueeze(-1)
    weights = (logits - most).exp_()
    of_keys = (log_sum_exp.unsqueeze(-1) - most).exp_()
    total = of_keys + weights.sum(dim=-1, keepdim=True)
    merged = (outputs.float() * of_keys + weights @ values) / total
    return merged.to(outputs.dtype)
