# SPDX-License-Identifier: Apache-2.0
"""Attention over summaries, merged into attention over keys: one program for each (row, head).

The grid depends only on the number of rows and nothing is allocated, so a launch can be captured in
a CUDA graph and replayed with other contents. A program of a row without summaries ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import TYPES, Variant, launches
from vllm_tgvkv.kernels.summaries import num_rows

_LOG2_E = math.log2(math.e)
_MOST_ROWS = 64
"""Rows of a summary that a program reads at a time."""


@triton.jit(do_not_specialize=["layer", "table_stride", "sum_member_stride", "sum_sequence_stride"])
def _merge_kernel(
    outputs,
    log_sums,
    queries,
    keys,
    values,
    block_table,
    seq_lens,
    num_token_blocks,
    num_summaries,
    layer,
    scale,
    log2_e,
    output_stride,
    output_member_stride,
    sum_member_stride,
    sum_sequence_stride,
    query_stride,
    query_member_stride,
    key_page_stride,
    key_slot_stride,
    key_stride,
    value_page_stride,
    value_slot_stride,
    value_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge the summaries of one (row, head) into the outputs of its GROUP queries."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_tokens = tl.load(seq_lens + row) > 0
    ids = block_table + row * table_stride
    region = tl.load(ids, mask=has_tokens, other=0).to(tl.int64)
    count = tl.load(num_summaries + region, mask=has_tokens, other=0)
    if count > 0:
        ids += tl.load(num_token_blocks + region)
        member, dim = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
        in_group = (member < GROUP)[:, None] & (dim < HEAD_SIZE)[None, :]
        sequence = row * NUM_HEADS + head
        source = queries + sequence * query_stride + member[:, None] * query_member_stride
        query = tl.load(source + dim[None, :], mask=in_group, other=0.0)
        target = outputs + sequence * output_stride + member[:, None] * output_member_stride
        target += dim[None, :]
        # Exponents are of base 2. Attention over the keys counts as one key of that logit.
        weighted = tl.load(target, mask=in_group, other=0.0).to(tl.float32)
        log_sum = log_sums + member * sum_member_stride + sequence * sum_sequence_stride
        maximum = tl.load(log_sum, mask=member < GROUP, other=0.0) * log2_e
        total = tl.full([GROUP_TILE], 1.0, tl.float32)
        NUM_TILES: tl.constexpr = (ROWS + TILE - 1) // TILE
        for number in range(count * NUM_TILES):
            block = tl.load(ids + number // NUM_TILES).to(tl.int64)
            page = block * NUM_PAIRS + layer * NUM_HEADS + head
            slot = number % NUM_TILES * TILE + tl.arange(0, TILE)
            exists = slot < ROWS
            value_page = values + page * value_page_stride
            bits = tl.zeros([TILE], tl.int32)
            for byte in tl.static_range(4):
                index = slot * 4 + byte
                part = value_page + (ROWS + index // HEAD_SIZE) * value_slot_stride
                part += index % HEAD_SIZE * value_stride
                stored = tl.load(part, mask=exists, other=0.0).to(tl.float32)
                bits |= stored.to(tl.int32) << (8 * byte)
            masses = bits.to(tl.float32, bitcast=True)
            exists = exists & (masses > 0)
            is_read = exists[:, None] & (dim < HEAD_SIZE)[None, :]
            key_place = keys + page * key_page_stride + slot[:, None] * key_slot_stride
            row_keys = tl.load(key_place + dim[None, :] * key_stride, mask=is_read, other=0.0)
            value_place = value_page + slot[:, None] * value_slot_stride
            row_values = tl.load(value_place + dim[None, :] * value_stride, mask=is_read, other=0.0)
            logits = tl.dot(query, tl.trans(row_keys), input_precision="ieee") * scale
            logits += tl.log2(tl.where(exists, masses, 1.0))[None, :]
            logits = tl.where(exists[None, :], logits, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(logits, 1))  # finite
            weights = tl.exp2(logits - new_maximum[:, None])
            decay = tl.exp2(maximum - new_maximum)
            total = total * decay + tl.sum(weights, 1)
            weighted = tl.dot(
                weights.to(row_values.dtype),
                row_values,
                weighted * decay[:, None],
                input_precision="ieee",
            )
            maximum = new_maximum
        mean = weighted / total[:, None]
        tl.store(target, mean.to(outputs.dtype.element_ty), mask=in_group)


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
    """Merge in one launch; see `kernels.summaries.merge_rows`.

    Not exact: sums are float32, and weights are rounded to the dtype of the values. `outputs` and
    `queries` must be contiguous in D, and `block_table` in its columns.
    """
    batch, (_, group, head_size) = len(block_table), outputs.shape
    num_heads, rows = len(outputs) // batch, num_rows(*key_pages.shape[1:])
    _merge_kernel[(batch, num_heads)](
        outputs,
        log_sum_exp,
        queries,
        key_pages,
        value_pages,
        block_table,
        seq_lens,
        num_token_blocks,
        num_summaries,
        layer,
        scale * _LOG2_E,
        _LOG2_E,
        *outputs.stride()[:2],
        *log_sum_exp.stride(),
        *queries.stride()[:2],
        *key_pages.stride(),
        *value_pages.stride(),
        block_table.stride(0),
        **_shape(num_heads, num_pairs, group, head_size, rows),
        num_warps=4,
    )


def _shape(num_heads: int, num_pairs: int, group: int, head_size: int, rows: int) -> dict[str, int]:
    """Return the constants of a launch; a product of matrices has at least 16 rows."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_PAIRS": num_pairs,
        "GROUP": group,
        "GROUP_TILE": max(16, triton.next_power_of_2(group)),
        "HEAD_SIZE": head_size,
        "HEAD_TILE": max(16, triton.next_power_of_2(head_size)),
        "ROWS": rows,
        "TILE": max(16, min(_MOST_ROWS, triton.next_power_of_2(rows))),
    }


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    for dtype, head_size, block_size, heads, layers, group in (
        (torch.bfloat16, 128, 16, 8, 36, 4),
        (torch.float16, 64, 32, 2, 24, 7),
        (torch.bfloat16, 128, 128, 32, 32, 1),
    ):
        empty = partial(torch.empty, dtype=dtype, device="meta")
        rows = empty(9 * heads, group, head_size)
        pages = empty(99, block_size, 2 * head_size)[..., :head_size]
        of_keys = empty(group, 9 * heads, dtype=torch.float32)
        table, of_rows, of_blocks = (
            empty(*shape, dtype=torch.int32) for shape in ((9, 1001), (9,), (99,))
        )
        state = table, of_rows, of_blocks, of_blocks
        call = partial(
            merge_rows, rows, of_keys, rows, pages, pages, *state, layers * heads, 2, 0.1
        )
        name = f"{TYPES[dtype]} D{head_size} N{block_size} G{group}"
        yield from launches(__name__, name, call)
