# SPDX-License-Identifier: Apache-2.0
"""Decode attention over heads of different lengths, directly from block table and regions.

A virtual sequence is one (row, KV head) of a layer. Its pages are those that
`write_page_tables` would list, computed instead of listed. A row has one query token, or several
with drafts to verify.
On CUDA a fixed number of programs share the chunks of all virtual sequences evenly, for any
lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_tgvkv.kernels import gpu
from vllm_tgvkv.kernels.checks import FLOATS, check

MOST_QUERIES = 64
"""Most queries of a virtual sequence: query heads of a KV head, times query tokens."""

Descales: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Scales of stored queries, keys and values, float32 with one element each."""


@dataclass(frozen=True)
class DecodePlan:
    """Division of a step's work among P programs, in buffers that every step fills again.

    The C chunks of a layer are numbered sequence by sequence; program p has chunks `p*C // P` to
    `(p + 1)*C // P - 1`.
    """

    chunk: int
    """Tokens that a program handles at a time, a power of two, at least 16."""
    ends: Tensor
    """int32 `[L, R*H + 1]`: 0, then the number of chunks up to every sequence's last one."""
    first: Tensor
    """int32 `[L, P]`, the sequence of each program's first chunk; undefined if it has none."""
    partials: Tensor
    """float32 `[P, 2, G*Q, D + 2]`: for a program's first and last sequence, if it has only a part
    of it, the weighted sum of values, the maximal logit (base 2) and the sum of weights, for each
    query. Layers share the buffer, since they run in turn."""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        group_size: int,
        head_size: int,
        chunk: int,
        num_programs: int,
        device: torch.device | str,
        most_queries: int = 1,
    ) -> DecodePlan:
        """Allocate the buffers for up to `num_rows` rows of at most `most_queries` query tokens.

        `chunk_size` and `num_programs` of `kernels.gpu.decode` return the best
        values for a GPU; results are right with any.
        """
        return cls(
            chunk,
            torch.zeros(num_layers, num_rows * num_heads + 1, dtype=torch.int32, device=device),
            torch.zeros(num_layers, num_programs, dtype=torch.int32, device=device),
            torch.zeros(num_programs, 2, group_size * most_queries, head_size + 2, device=device),
        )

    @classmethod
    def for_device(
        cls,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        group_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_queries: int = 1,
    ) -> DecodePlan:
        """Allocate the buffers for as many programs as the device runs concurrently."""
        from vllm_tgvkv.kernels.gpu import decode as triton_decode

        num_programs = 8  # under the interpreter
        if device.type == "cuda":
            num_programs = triton_decode.num_programs(
                device, head_size, dtype.itemsize, group_size * most_queries
            )
        sizes = num_layers, num_rows, num_heads, group_size, head_size
        chunk = triton_decode.chunk_size(head_size)
        return cls.allocate(*sizes, chunk, num_programs, device, most_queries)

    def for_sequences(self, num_sequences: int, num_queries: int) -> DecodePlan:
        """Return a plan for fewer virtual sequences, R*H, and queries of each, in the same buffers.

        `num_queries` is G*Q.
        """
        partials = self.partials.view(-1)
        size = len(self.partials), 2, num_queries, self.partials.shape[-1]
        partials = partials[: math.prod(size)].view(size)
        return replace(self, ends=self.ends[:, : num_sequences + 1], partials=partials)


def plan_decode(lengths: Tensor, plan: DecodePlan) -> None:
    """Divide the work of a step, for all layers, once the lengths are known.

    Args:
        lengths: int32 `[L, R, H]`, contiguous in H.
        plan: `ends` and `first` are written.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check_plan(lengths, plan)
    if gpu.runs(lengths):
        from vllm_tgvkv.kernels.gpu import decode as triton_decode

        triton_decode.plan_decode(lengths, plan)
        return
    chunks = (lengths.flatten(1) + (plan.chunk - 1)) // plan.chunk
    plan.ends[:, :1] = 0
    plan.ends[:, 1:] = chunks.cumsum(1)
    num_programs = plan.first.shape[1]
    programs = torch.arange(num_programs, device=lengths.device)
    begins = programs * plan.ends[:, -1:].long() // num_programs
    plan.first.copy_(torch.searchsorted(plan.ends[:, 1:].long().contiguous(), begins, right=True))


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    num_token_blocks: Tensor,
    replaced: Tensor,
    offsets: Tensor,
    layer: int,
    scale: float,
    plan: DecodePlan,
    out: Tensor,
    sinks: Tensor | None = None,
    descales: Descales | None = None,
    starts: Tensor | None = None,
    most_queries: int = 1,
) -> None:
    """Compute attention of each row's query tokens in one layer; rows of length 0 get zero.

    The last query token of a row sees all of its keys, each one before it one key less. Rows of
    another length than 0 have at least as many keys as query tokens.

    With M = L*H, p = layer*H + h, b the first block of row r, o = `offsets[b, p]` and n =
    `offsets[b, p + 1] - o` (0 where `num_token_blocks[b]` is 0), page i of head h is page
    `(o + i) % M` of block `block_table[r, (o + i) // M]` for i < n, then page p of block
    `block_table[r, t0 + i - n]` with t0 = `replaced[b]`. Slots from the length on and other
    pages are not read.

    On CUDA, products and sums are float32, and weights are rounded to the dtype of the values
    (bfloat16 for fp8) before they are multiplied, as usual. Equal calls give bit-identical results.
    Nothing is allocated and the host reads no device value, so the call works in a CUDA graph.

    Args:
        query: `[T, H*G, D]`, contiguous in D; head j belongs to KV head j // G. Any float dtype or
            float8_e4m3fn, the same for keys and values.
        keys: `[num_pages, N, D]`, logical view of the whole pool; any strides.
        values: `[num_pages, N, D]`, likewise.
        block_table: int32 `[R, W]`.
        lengths: int32 `[L, R, H]` of
            `write_lengths`. Rows of length 0 are not read.
        num_token_blocks: int32 `[num_blocks]`, as in
            `write_page_tables`.
        replaced: int32 `[num_blocks]`, likewise.
        offsets: int32 `[num_blocks, M + 1]`, likewise.
        layer: index of the layer.
        scale: factor of the logits.
        plan: filled by `plan_decode` from the same lengths.
        out: `[T, H*G, D]`, contiguous in D, any float dtype, written for the rows' tokens.
        sinks: float `[H*G]`, the logit of one more key of each query head, whose value is zero;
            it is not scaled. None for no such key.
        descales: of a quantised cache; None for none.
        starts: int32 `[R + 1]`, contiguous: the first query token of every row, and the end of the
            last. None if every row has one, and T is R.
        most_queries: most query tokens of a row, Q, with G*Q at most `MOST_QUERIES`.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the argument.
    """
    _check_plan(lengths, plan)
    num_layers, num_rows, num_heads = lengths.shape
    fits = query.dim() == 3 and query.shape[1] > 0 and query.shape[1] % num_heads == 0
    num_tokens = "T" if starts is not None else num_rows
    check("query", query, (num_tokens, f"{num_heads}*G", "D"), fits=fits)
    check("out", out, query.shape, FLOATS)
    for name, tensor in (("query", query), ("out", out)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in D, got strides {tensor.stride()}")
    head_size = query.shape[2]
    check("keys", keys, ("num_pages", "N", head_size), (query.dtype,))
    check("values", values, (*keys.shape[:2], head_size), (query.dtype,))
    int32, num_blocks = (torch.int32,), len(num_token_blocks)
    check("block_table", block_table, (num_rows, "W"), int32)
    check("num_token_blocks", num_token_blocks, (num_blocks,), int32)
    check("replaced", replaced, (num_blocks,), int32)
    check("offsets", offsets, (num_blocks, num_layers * num_heads + 1), int32)
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be within the {num_layers} of lengths, got {layer}")
    group = query.shape[1] // num_heads
    limit = 1 if starts is None else max(1, MOST_QUERIES // group)
    if not 1 <= most_queries <= limit:
        raise ValueError(f"most_queries must be from 1 to {limit} here, got {most_queries}")
    check("plan.partials", plan.partials, ("P", 2, group * most_queries, query.shape[2] + 2))
    if starts is not None:
        check("starts", starts, (num_rows + 1,), int32, starts.is_contiguous())
    if sinks is not None:
        check("sinks", sinks, (num_heads * group,), FLOATS, sinks.is_contiguous())
    for descale in descales or ():
        check("descales", descale, descale.shape, (torch.float32,), descale.numel() == 1)
    if gpu.runs(query):
        from vllm_tgvkv.kernels.gpu import decode as triton_decode

        triton_decode.decode(
            query,
            keys,
            values,
            block_table,
            lengths,
            num_token_blocks,
            replaced,
            offsets,
            layer,
            scale,
            plan,
            out,
            sinks,
            descales,
            starts,
            most_queries,
        )
        return
    exact = torch.promote_types(out.dtype, torch.float32)
    if descales is not None:
        scale *= descales[0].item() * descales[1].item()
    value_scale = 1.0 if descales is None else descales[2].item()
    pairs, block_size = offsets.shape[1] - 1, keys.shape[1]
    grouped = query.unflatten(1, (num_heads, group)).to(exact)
    bounds = list(range(num_rows + 1)) if starts is None else starts.tolist()
    for row, row_lengths in enumerate(lengths[layer].tolist()):
        tokens, num_queries = slice(*bounds[row : row + 2]), bounds[row + 1] - bounds[row]
        for head, length in enumerate(row_lengths):
            heads = slice(head * group, (head + 1) * group)
            if length == 0 or num_queries == 0:
                out[tokens, heads] = 0
                continue
            block = int(block_table[row, 0])
            pair = layer * num_heads + head
            first, end = (
                offsets[block, pair : pair + 2].tolist() if num_token_blocks[block] > 0 else (0, 0)
            )
            num_tail = -(-length // block_size) - (end - first)
            start = int(replaced[block])
            region = torch.arange(first, end, device=query.device)
            tail = block_table[row, start : start + num_tail].long() * pairs + pair
            region_pages = block_table[row, region // pairs].long() * pairs + region % pairs
            pages = torch.cat((region_pages, tail))
            k, v = (pool[pages].flatten(0, 1)[:length].to(exact) for pool in (keys, values))
            logits = grouped[tokens, head] @ k.T * scale  # [queries, G, length]
            seen = torch.arange(length - num_queries, length, device=query.device) + 1
            is_hidden = torch.arange(length, device=query.device) >= seen[:, None]
            logits.masked_fill_(is_hidden[:, None], float("-inf"))
            if sinks is not None:
                sink = sinks[heads, None].to(exact).expand(num_queries, group, 1)
                logits = torch.cat((logits, sink), dim=2)
            weights = logits.softmax(2)[..., :length]
            out[tokens, heads] = (weights @ v * value_scale).to(out.dtype)


def _check_plan(lengths: Tensor, plan: DecodePlan) -> None:
    fits = lengths.dim() == 3 and (lengths.shape[2] <= 1 or lengths.stride(2) == 1)
    check("lengths", lengths, ("L", "R", "H, contiguous"), (torch.int32,), fits)
    layers, rows, heads = lengths.shape
    if plan.chunk < 16 or plan.chunk & (plan.chunk - 1):
        raise ValueError(f"plan.chunk must be a power of two from 16 on, got {plan.chunk}")
    check("plan.ends", plan.ends, (layers, rows * heads + 1), (torch.int32,))
    first, partials = plan.first, plan.partials
    check("plan.first", first, (layers, "P, contiguous"), (torch.int32,), first.is_contiguous())
    shape = (first.shape[1], 2, "G", "D + 2, contiguous")
    check("plan.partials", partials, shape, (torch.float32,), partials.is_contiguous())
