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

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import check
from vllm_tgvkv.kernels.select import ranking_keys

WORKSPACE_BYTES = 256 << 20
"""Bound of what absorbing takes at a time, or what one pair of a layer and head needs if that is
more. Each slice of the pairs takes some 80 launches for each summary."""

_READING_BYTES = 16 << 20
"""Bound of each large buffer of `log_sum_exp`."""

_SCALAR_BYTES = 128
"""Of a token: its position, score, weight, rank and nearest root, with intermediate results."""

_MASS_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Places:
    """Where the C candidates of a cut are, int64 `[C]` each.

    Two tokens of one run are `|row - row'| + |column - column'|` steps apart. A run is an image,
    or all text, which has one row.
    """

    run: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class Summary:
    """Rows of M pairs of a layer and a head."""

    keys: Tensor
    """float32 `[M, c, D]`; 0 where a pair has fewer rows."""
    values: Tensor
    """float32 `[M, c, D]`."""
    masses: Tensor
    """float32 `[M, c]`; 0 where a pair has fewer rows."""


@dataclass(frozen=True)
class Rooted:
    """A summary that may absorb more."""

    summary: Summary
    roots: Tensor
    """Positions of the rows' roots, int64 `[M, c]`, ascending; any where a pair has fewer."""


def num_rows(block_size: int, head_size: int) -> int:
    """Return c, the rows of a summary in a page of N slots of `head_size` values.

    The other slots have room for the bytes of c masses; there are as few of them as possible.
    """
    # The least h with h * head_size >= 4 * (N - h).
    num_slots = -(-_MASS_BYTES * block_size // (head_size + _MASS_BYTES))
    return block_size - num_slots


def bytes_per_token(rows: int, head_size: int, num_candidates: int) -> int:
    """Return the most bytes that `absorb` takes for a token of a pair.

    Its arguments of this size are counted, and pages in a format of 2 bytes.
    """
    # Steps of three kinds, and whether runs are equal; or keys, also in float32, and shares.
    joining = (3 * _order_dtype(num_candidates, rows).itemsize + 1) * rows
    return _SCALAR_BYTES + max(joining, 6 * head_size + 8 * rows)


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
) -> Rooted:
    """Return the summary of the tokens with a positive weight, and of an earlier summary's rows.

    A row that exists already counts as a token: it stands at its root's position and weighs its
    mass. At most `rows` of all become *roots*: every other existing row, then the best tokens by
    score (of equal ones, the first), then the remaining rows, the last one first. Every other token
    joins the nearest root of its run, or the nearest in the sequence if its run has none; of two
    equally near ones, the first. Its weight is multiplied by `decays ** steps`. A row's mass is
    the sum of its weights. A row that nothing joins keeps its bits.

    Sums are float32 products of matrices: nothing depends on the order in which threads add. The
    host reads no device value.

    Args:
        key_pages, value_pages: `[num_pool_pages, N, D]`, logical views of the pool.
        tables: int64 `[M, W]`, pages of the n tokens, which are at most W * N.
        positions: int64 `[M, n]`, below C.
        weights: float32 `[M, n]`, 0 for tokens that are not absorbed, whatever their pages hold.
        scores: float32 `[M, n]`.
        decays: float32 `[C]`.
        rows: c, at most N.
    """
    pairs, num_tokens = weights.shape
    device = weights.device
    is_absent = (weights <= 0).unsqueeze(-1)
    tiers = torch.ones(num_tokens, dtype=torch.int32, device=device)
    if earlier is not None:
        order = torch.arange(rows, device=device)
        tiers = torch.cat((tiers, 2 * (1 - order % 2).int()))
        positions = torch.cat((positions, earlier.roots), dim=1)
        weights = torch.cat((weights, earlier.summary.masses), dim=1)
        scores = torch.cat((scores, order.to(scores.dtype).expand(pairs, -1)), dim=1)
    ranks = ranking_keys(scores, tiers).masked_fill_(weights <= 0, -1)
    joined, roots = _joined(positions, weights, ranks, places, decays, rows)
    masses = joined.sum(dim=1)
    # The share of a single token is exactly 1.
    shares = joined.div_(masses.clamp(min=_TINY).unsqueeze(1)).transpose(1, 2)  # [M, c, I]
    means = []
    for pool, name in ((key_pages, "keys"), (value_pages, "values")):
        tokens = pool[tables].flatten(1, 2)[:, :num_tokens].float()  # [M, n, D]
        mean = shares[..., :num_tokens] @ tokens.masked_fill_(is_absent, 0)
        if earlier is not None:
            mean += shares[..., num_tokens:] @ getattr(earlier.summary, name)
        means.append(mean)
        del tokens
    mean_keys, mean_values = means
    return Rooted(Summary(mean_keys, mean_values, masses), roots)


def _joined(
    positions: Tensor, weights: Tensor, ranks: Tensor, places: Places, decays: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Return the weight of each of I tokens in each row, float32 `[M, I, c]`, and the roots.

    Args:
        ranks: int64 `[M, I]`; the highest become roots, and negative ones never.
    """
    end, num_roots = len(places.run), min(rows, weights.shape[1])
    best = ranks.topk(num_roots, dim=1)
    # Roots ascend; those that do not exist come last.
    roots = positions.gather(1, best.indices).masked_fill_(best.values < 0, end).sort(dim=1).values
    exists = (roots < end).unsqueeze(1)
    roots = roots.clamp(max=end - 1)
    dtype = _order_dtype(end, rows)
    row, column = places.row.to(dtype), places.column.to(dtype)
    order = _steps(row[positions], row[roots])
    order += _steps(column[positions], column[roots])
    # One key orders roots by whether they are of the same run, by distance and by position.
    far = 2 * end
    is_own = places.run[positions].unsqueeze(2) == places.run[roots].unsqueeze(1)
    order = torch.where(is_own, order, _steps(positions.to(dtype), roots.to(dtype)).add_(far))
    del is_own
    order.masked_fill_(~exists, 3 * far)
    order.mul_(rows).add_(torch.arange(num_roots, dtype=dtype, device=order.device))
    first = order.amin(dim=2)
    del order
    nearest, steps = (first % rows).long(), first // rows % far
    joined = weights.new_zeros(*weights.shape, rows)
    joined.scatter_(2, nearest.unsqueeze(2), (weights * decays[positions] ** steps).unsqueeze(2))
    return joined, torch.nn.functional.pad(roots, (0, rows - num_roots))


def _order_dtype(num_candidates: int, rows: int) -> torch.dtype:
    """Return an integer type that holds what `_joined` orders roots by."""
    return torch.int32 if (6 * num_candidates + 1) * rows < 1 << 31 else torch.int64


def _steps(coordinates: Tensor, of_roots: Tensor) -> Tensor:
    """Return distances in one coordinate, of tokens `[q, I]` to roots `[q, c]`."""
    return (coordinates.unsqueeze(2) - of_roots.unsqueeze(1)).abs_()


def store(summary: Summary, key_pages: Tensor, value_pages: Tensor, pages: Tensor) -> None:
    """Write a summary to whole pages of the pool, int64 `[M]`; see `load`."""
    size, rows, head_size = key_pages.shape[1], *summary.keys.shape[1:]
    header = summary.masses.contiguous().view(torch.uint8).to(value_pages.dtype)
    header = torch.nn.functional.pad(header, (0, (size - rows) * head_size - header.shape[1]))
    header = header.view(len(pages), size - rows, head_size)
    keys = summary.keys.to(key_pages.dtype)
    key_pages[pages] = torch.nn.functional.pad(keys, (0, 0, 0, size - rows))
    value_pages[pages] = torch.cat((summary.values.to(value_pages.dtype), header), dim=1)


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
    workspace_bytes: int = _READING_BYTES,
) -> Tensor:
    """Return the logarithm of the softmax denominator of each query, float32 `[T, H, G]`.

    It reads the keys again, for kernels that do not return it.

    Args:
        queries: `[T, H, G, D]`.
        tables: int `[T, H, W]`, pages of the keys of each (token, head).
        lengths: int `[T, H]`, keys that each sees, at least 1.
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

    Where all masses are 0, the result has the bits of `outputs`.

    Args:
        outputs: `[T, H, G, D]`, attention over the keys.
        log_sum_exp: float32 `[T, H, G]`, its softmax denominators.
        queries: `[T, H, G, D]`.
        summary: of m pages of each (token, head), so its M is `[T, H, m]`.
        is_read: bool `[T, m]`, false for pages that hold no summary of the token's request.
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


def find(
    block_table: Tensor, first_blocks: Tensor, num_token_blocks: Tensor, num_summaries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows of a block table have summaries, int64 `[T]`, and where these are.

    That is in blocks, int64 `[T, m]`, any of them where a row has fewer than others; whether it
    has them is bool `[T, m]`. The host reads device values: this is for CPUs.

    Args:
        first_blocks: int64 `[R]`, under which regions are found. Others as in `merge_rows`.
    """
    counts = num_summaries[first_blocks]
    (rows,) = counts.nonzero(as_tuple=True)
    counts = counts[rows, None].long()
    number = torch.arange(int(counts.max()) if len(rows) else 0, device=counts.device)
    # Fewer summaries: the row's last one again, which is not read.
    column = torch.minimum(number, counts - 1) + num_token_blocks[first_blocks[rows], None]
    return rows, block_table[rows[:, None], column].long(), number < counts


def merge_rows(
    outputs: Tensor,
    log_sum_exp: Tensor,
    queries: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_token_blocks: Tensor,
    num_summaries: Tensor,
    num_pairs: int,
    layer: int,
    scale: float,
) -> None:
    """Merge the summaries of the rows of a block table into their attention over keys, in place.

    With b the first block of row r, its summaries are in the `num_summaries[b]` blocks of the row
    from column `num_token_blocks[b]` on, of head h in page `layer * H + h` of each. Rows without
    summaries keep their bits, and none of their pages is read.

    On CUDA, weights of rows are rounded to the dtype of the values before they are multiplied, as
    FlashAttention does. It is one launch, nothing is allocated and the host reads no device value,
    so the call works in a CUDA graph.

    Args:
        outputs: `[R * H, G, D]`, ordered by row, then head, changed in place.
        log_sum_exp: float32 `[G, R * H]`, its softmax denominators, as FlashAttention returns
            them.
        queries: `[R * H, G, D]`.
        key_pages, value_pages: `[num_pool_pages, N, D]`, logical views of the pool.
        block_table: int32 `[R, W]`.
        seq_lens: int32 `[R]`; rows of length 0 are not read.
        num_token_blocks, num_summaries: int32 `[num_blocks]`; 0 where no region starts.
        num_pairs: pages of a block.
        scale: factor of the logits.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    check("outputs", outputs, ("R * H", "G", "D"))
    num_sequences, group, head_size = outputs.shape
    check("queries", queries, outputs.shape)
    check("key_pages", key_pages, ("num_pool_pages", "N", head_size))
    check("value_pages", value_pages, ("num_pool_pages", "N", head_size))
    check("log_sum_exp", log_sum_exp, (group, num_sequences), (torch.float32,))
    int32, batch = (torch.int32,), len(block_table)
    fits = batch > 0 and num_sequences % batch == 0
    check("block_table", block_table, (f"R, a divisor of {num_sequences}", "W"), int32, fits)
    check("seq_lens", seq_lens, (batch,), int32)
    check("num_token_blocks", num_token_blocks, ("num_blocks",), int32)
    check("num_summaries", num_summaries, num_token_blocks.shape, int32)
    if gpu.runs(outputs):
        from vllm_tgvkv.kernels.gpu import summaries as triton_summaries

        triton_summaries.merge_rows(
            outputs,
            log_sum_exp,
            queries,
            key_pages,
            value_pages,
            block_table,
            seq_lens,
            num_token_blocks,
            num_summaries,
            num_pairs,
            layer,
            scale,
        )
        return
    by_row = (len(block_table), len(outputs) // len(block_table))
    first_blocks = block_table[:, 0].masked_fill(seq_lens <= 0, 0).long()
    rows, blocks, is_read = find(block_table, first_blocks, num_token_blocks, num_summaries)
    if not len(rows):
        return
    heads = layer * by_row[1] + torch.arange(by_row[1])
    pages = (blocks * num_pairs).unsqueeze(1) + heads[:, None]  # [T, H, m]
    whole = outputs.unflatten(0, by_row)
    whole[rows] = merge(
        whole[rows],
        log_sum_exp.unflatten(1, by_row).permute(1, 2, 0)[rows],
        queries.unflatten(0, by_row)[rows],
        load(key_pages, value_pages, pages, num_rows(*key_pages.shape[1:])),
        is_read,
        scale,
    )
