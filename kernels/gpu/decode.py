# SPDX-License-Identifier: Apache-2.0
"""Ragged decode attention: a fixed number of programs share all chunks of a layer evenly.

Lengths differ by head. With one program per sequence, most of the GPU would wait for the longest
one; a fixed number of programs per sequence would be too many for some and too few for others. Here
each program takes an equal share of the layer's chunks. It finishes the sequences that lie within
its share. For its first and last sequence, which other programs may have parts of, it stores
partial sums, and a second launch adds these up in the order of the programs. The query tokens of a
row are further members of its groups, which read the same keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_tgvkv.kernels.gpu.compile import TYPES, Variant, launches
from vllm_tgvkv.kernels.gpu.page_tables import page_at
from vllm_tgvkv.kernels.gpu.paged_rows import without_fp8

if TYPE_CHECKING:
    from vllm_tgvkv.kernels.decode import DecodePlan, Descales

_SEQUENCES_PER_TILE = 1024
_PROGRAMS_PER_TILE = 128
_PARTIALS_PER_TILE = 16
_LOG2_E = 1.4426950408889634
_LARGE_TILE = 32
"""Queries of a program with four warps; more take eight."""
_OTHER_BYTES = 11 << 10
"""Bound of a program's shared memory without chunks: 16 queries, weights, block ids."""


@triton.jit
def _share(program, num_programs, num_chunks):
    """First chunk of a program."""
    return (program.to(tl.int64) * num_chunks // num_programs).to(tl.int32)


@triton.jit
def _owner(chunk, num_programs, num_chunks):
    """The program that has a chunk: the last one whose first chunk is not after it."""
    return (((chunk.to(tl.int64) + 1) * num_programs - 1) // num_chunks).to(tl.int32)


@triton.jit
def _tokens(starts, row, query):
    """The batch's token of a row's query, and how many queries the row has."""
    if starts is None:  # one each
        return row + query, row * 0 + 1
    first = tl.load(starts + row)
    return (first + query).to(tl.int64), tl.load(starts + row + 1) - first


@triton.jit(do_not_specialize=["num_sequences", "layer_stride", "row_stride", "ends_stride"])
def _ends_kernel(
    lengths,
    ends,
    num_sequences,
    layer_stride,
    row_stride,
    ends_stride,
    NUM_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Running sum of the numbers of chunks of one layer's sequences."""
    layer = tl.program_id(0).to(tl.int64)
    lengths += layer * layer_stride
    ends += layer * ends_stride
    tl.store(ends, 0)
    before = 0
    for tile in range(0, num_sequences, TILE):
        sequence = tile + tl.arange(0, TILE)
        exists = sequence < num_sequences
        place = (sequence // NUM_HEADS).to(tl.int64) * row_stride + sequence % NUM_HEADS
        chunks = (tl.load(lengths + place, mask=exists, other=0) + CHUNK - 1) // CHUNK
        tl.store(ends + 1 + sequence, before + tl.cumsum(chunks, 0), mask=exists)
        before += tl.sum(chunks, 0)


@triton.jit(do_not_specialize=["num_sequences", "num_programs", "num_steps", "ends_stride"])
def _first_kernel(
    ends, first, num_sequences, num_programs, num_steps, ends_stride, TILE: tl.constexpr
):
    """The sequences with the first chunks of TILE programs, by binary search."""
    layer = tl.program_id(0).to(tl.int64)
    ends += layer * ends_stride
    program = tl.program_id(1) * TILE + tl.arange(0, TILE)
    chunk = _share(program, num_programs, tl.load(ends + num_sequences))
    # The number of sequences that end at or before the chunk lies within [low, high].
    low = tl.zeros([TILE], tl.int32)
    high = low + num_sequences
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_open = low < high
        is_before = tl.load(ends + 1 + middle, mask=is_open, other=0) <= chunk
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & is_before, high, middle)
    tl.store(first + layer * num_programs + program, low, mask=program < num_programs)


@triton.jit(do_not_specialize=["layer", "num_sequences", "lengths_stride", "ends_stride"])
def _decode_kernel(
    query,
    keys,
    values,
    block_table,
    lengths,
    starts,
    num_token_blocks,
    replaced,
    offsets,
    ends,
    first,
    partials,
    sinks,
    query_descale,
    key_descale,
    value_descale,
    out,
    layer,
    scale,
    num_sequences,
    query_stride,
    query_head_stride,
    key_page_stride,
    key_slot_stride,
    key_stride,
    value_page_stride,
    value_slot_stride,
    value_stride,
    table_stride,
    lengths_layer_stride,
    lengths_stride,
    offsets_stride,
    ends_stride,
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """Attention over one program's chunks, sequence after sequence."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    ends += layer.to(tl.int64) * ends_stride
    num_chunks = tl.load(ends + num_sequences)
    begin = _share(program, num_programs, num_chunks)
    end = _share(program + 1, num_programs, num_chunks)
    sequence = tl.load(first + layer.to(tl.int64) * num_programs + program)
    lengths += layer.to(tl.int64) * lengths_layer_stride
    if query_descale is not None:
        scale *= tl.load(query_descale) * tl.load(key_descale)

    member = tl.arange(0, GROUP_TILE)  # of the first query token, then of the next one
    dim = tl.arange(0, HEAD_TILE)
    in_group = member < GROUP * MOST_QUERIES
    current = begin
    while current < end:
        # Loads that depend only on the sequence come first, so that their latencies overlap.
        sequence_begin = tl.load(ends + sequence)
        sequence_end = tl.load(ends + sequence + 1)
        row, head = (sequence // NUM_HEADS).to(tl.int64), sequence % NUM_HEADS
        length = tl.load(lengths + row * lengths_stride + head)
        ids = block_table + row * table_stride
        region = tl.load(ids).to(tl.int64)
        tokens, num_queries = _tokens(starts, row, member // GROUP)
        stop = tl.minimum(sequence_end, end)
        if current < stop:
            pair = layer * NUM_HEADS + head
            heads = head * GROUP + member % GROUP
            is_query = in_group & (member // GROUP < num_queries)
            is_element = is_query[:, None] & (dim < HEAD_SIZE)[None, :]
            source = query + tokens[:, None] * query_stride + dim[None, :]
            source += heads[:, None] * query_head_stride
            queries = without_fp8(tl.load(source, mask=is_element, other=0.0))
            has_region = tl.load(num_token_blocks + region) > 0
            start = tl.load(replaced + region)
            offset = offsets + region * offsets_stride + pair
            first_page, end_page = tl.load(offset), tl.load(offset + 1)
            count = tl.where(has_region, end_page - first_page, 0)

            maximum = tl.full([GROUP_TILE], float("-inf"), tl.float32)
            # Kept per column of the chunk, so that warps exchange only the maximum.
            sums = tl.zeros([GROUP_TILE, CHUNK], tl.float32)
            weighted = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
            for chunk in range(current - sequence_begin, stop - sequence_begin):
                token = chunk * CHUNK + tl.arange(0, CHUNK)
                exists = token < length
                index = token // BLOCK_SIZE
                page = page_at(ids, index, exists, first_page, count, start, pair, NUM_PAIRS)
                page = page.to(tl.int64)
                slot = token % BLOCK_SIZE
                if HEAD_SIZE == HEAD_TILE:
                    is_read = exists[:, None]
                else:
                    is_read = exists[:, None] & (dim < HEAD_SIZE)[None, :]
                key_place = page * key_page_stride + slot * key_slot_stride
                chunk_keys = tl.load(
                    keys + key_place[:, None] + dim[None, :] * key_stride, mask=is_read, other=0.0
                )
                chunk_keys = without_fp8(chunk_keys)
                value_place = page * value_page_stride + slot * value_slot_stride
                chunk_values = tl.load(
                    values + value_place[:, None] + dim[None, :] * value_stride,
                    mask=is_read,
                    other=0.0,
                )
                # Weights are rounded to their dtype: in fp8 they would have three bits.
                chunk_values = without_fp8(chunk_values)
                logits = tl.dot(queries, tl.trans(chunk_keys), input_precision="ieee") * scale
                is_seen = exists[None, :]
                if MOST_QUERIES > 1:  # causal: the last query token sees all keys
                    hidden = num_queries - 1 - member // GROUP
                    is_seen = is_seen & (token[None, :] < length - hidden[:, None])
                logits = tl.where(is_seen, logits, float("-inf"))
                # Finite: a chunk of a sequence has at least one token.
                new_maximum = tl.maximum(maximum, tl.max(logits, 1))
                shift = new_maximum
                if MOST_QUERIES > 1:  # unless a query token sees none of its tokens
                    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                weights = tl.exp2(logits - shift[:, None])
                decay = tl.exp2(maximum - shift)
                sums = sums * decay[:, None] + weights
                weighted = tl.dot(
                    weights.to(chunk_values.dtype),
                    chunk_values,
                    weighted * decay[:, None],
                    input_precision="ieee",
                )
                maximum = new_maximum
            sum_of_weights = tl.sum(sums, 1)
            if sequence_begin >= begin and sequence_end <= end:
                result = out + tokens[:, None] * out_stride + dim[None, :]
                result += heads[:, None] * out_head_stride
                if HAS_SINKS:
                    sink = tl.load(sinks + heads, mask=in_group, other=float("-inf"))
                    # A sink far above all logits makes the sum infinite, and the mean zero.
                    sum_of_weights += tl.exp2(sink.to(tl.float32) * LOG2_E - maximum)
                mean = weighted / sum_of_weights[:, None]
                if value_descale is not None:
                    mean *= tl.load(value_descale)
                tl.store(result, mean.to(out.dtype.element_ty), mask=is_element)
            else:
                side = tl.where(sequence_begin <= begin, 0, 1)
                part = (program * 2 + side) * (GROUP * MOST_QUERIES) + member
                part = partials + part * (HEAD_SIZE + 2)
                tl.store(part[:, None] + dim[None, :], weighted, mask=is_element)
                tl.store(part + HEAD_SIZE, maximum, mask=is_query)
                tl.store(part + HEAD_SIZE + 1, sum_of_weights, mask=is_query)
        current = stop
        sequence += 1


@triton.jit(do_not_specialize=["layer", "num_sequences", "num_programs", "ends_stride"])
def _combine_kernel(
    starts,
    ends,
    partials,
    sinks,
    value_descale,
    out,
    layer,
    num_sequences,
    num_programs,
    ends_stride,
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The result of one query if several programs have parts of it, or none has any."""
    sequence, member = tl.program_id(0), tl.program_id(1)
    ends += layer.to(tl.int64) * ends_stride
    num_chunks = tl.load(ends + num_sequences)
    sequence_begin = tl.load(ends + sequence)
    sequence_end = tl.load(ends + sequence + 1)
    row, head = (sequence // NUM_HEADS).to(tl.int64), sequence % NUM_HEADS
    token, num_queries = _tokens(starts, row, member // GROUP)
    dim = tl.arange(0, HEAD_TILE)
    query_head = head * GROUP + member % GROUP
    out += token * out_stride + query_head * out_head_stride + dim
    if member // GROUP >= num_queries:
        return
    if sequence_begin == sequence_end:
        zeros = tl.zeros([HEAD_TILE], tl.float32).to(out.dtype.element_ty)
        tl.store(out, zeros, mask=dim < HEAD_SIZE)
    else:
        first_program = _owner(sequence_begin, num_programs, num_chunks)
        last_program = _owner(sequence_end - 1, num_programs, num_chunks)
        if first_program < last_program:
            maximum = tl.full([1], float("-inf"), tl.float32)
            sum_of_weights = tl.zeros([1], tl.float32)
            if HAS_SINKS:  # one more part, whose value is zero
                sink = tl.load(sinks + query_head).to(tl.float32)
                maximum = tl.full([1], 0.0, tl.float32) + sink * LOG2_E
                sum_of_weights = tl.full([1], 1.0, tl.float32)
            weighted = tl.zeros([HEAD_TILE], tl.float32)
            for tile in range(first_program, last_program + 1, TILE):
                program = tile + tl.arange(0, TILE)
                begin = _share(program, num_programs, num_chunks)
                # If there are fewer chunks than programs, some programs in between have none.
                has_part = begin < _share(program + 1, num_programs, num_chunks)
                has_part = (program <= last_program) & has_part
                side = tl.where(sequence_begin <= begin, 0, 1)
                part = (program * 2 + side) * (GROUP * MOST_QUERIES) + member
                part = partials + part * (HEAD_SIZE + 2)
                maxima = tl.load(part + HEAD_SIZE, mask=has_part, other=float("-inf"))
                sums = tl.load(part + HEAD_SIZE + 1, mask=has_part, other=0.0)
                parts = tl.load(
                    part[:, None] + dim[None, :],
                    mask=has_part[:, None] & (dim < HEAD_SIZE)[None, :],
                    other=0.0,
                )
                # Finite, since the first tile holds the first part.
                new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
                decay = tl.exp2(maximum - new_maximum)
                factors = tl.exp2(maxima - new_maximum)
                sum_of_weights = sum_of_weights * decay + tl.sum(sums * factors, 0)
                weighted = weighted * decay + tl.sum(parts * factors[:, None], 0)
                maximum = new_maximum
            mean = weighted / sum_of_weights
            if value_descale is not None:
                mean *= tl.load(value_descale)
            tl.store(out, mean.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


def chunk_size(head_size: int) -> int:
    """Return the tokens whose keys and values take 32 KiB in 16-bit formats, from 16 to 128."""
    return max(16, min(128, 8192 // _tile(head_size)))


def num_programs(
    device: torch.device, head_size: int, element_size: int = 2, num_queries: int = 1
) -> int:
    """Return how many programs the GPU runs concurrently, for the queries of a KV head."""
    properties = torch.cuda.get_device_properties(device)
    chunk_bytes = _chunk_bytes(chunk_size(head_size), head_size, element_size)
    shared_memory = properties.shared_memory_per_multiprocessor
    programs, _ = _residents(shared_memory, chunk_bytes, _tile(num_queries))
    return int(properties.multi_processor_count * programs)


def _tile(size: int) -> int:
    """Return the least matrix size that a product supports and that holds `size`."""
    return max(16, triton.next_power_of_2(size))


def _chunk_bytes(chunk: int, head_size: int, element_size: int) -> int:
    return 2 * chunk * _tile(head_size) * element_size


def _residents(shared_memory: int, chunk_bytes: int, query_tile: int = 16) -> tuple[int, int]:
    """Return the programs per multiprocessor, and the chunks in the shared memory of each.

    With two programs, one loads chunks while the other is between sequences; there are not always
    enough registers for three, nor for two of many queries. With at least two chunks, a program
    loads the next ones while it computes on one.
    """
    for programs in (2, 1) if query_tile <= _LARGE_TILE else (1,):
        buffers = (shared_memory // programs - _OTHER_BYTES * query_tile // 16) // chunk_bytes
        if buffers >= 2:
            return programs, min(buffers, 4)
    return 1, 1


@functools.cache
def _num_stages(device: torch.device, chunk_bytes: int, query_tile: int) -> int:
    """Return the stages for that many chunks: Triton shares them with the loads of block ids."""
    shared_memory = 228 << 10  # of capability 9.0, for what is compiled without a GPU
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared_memory = properties.shared_memory_per_multiprocessor
    return 2 * _residents(shared_memory, chunk_bytes, query_tile)[1] + 1


def plan_decode(lengths: Tensor, plan: DecodePlan) -> None:
    """Divide the work, in two launches for all layers; see `kernels.decode`.

    Exact. The grids depend only on L, R, H and P.
    """
    num_layers, num_rows, num_heads = lengths.shape
    num_sequences, num_programs = num_rows * num_heads, plan.first.shape[1]
    _ends_kernel[(num_layers,)](
        lengths,
        plan.ends,
        num_sequences,
        lengths.stride(0),
        lengths.stride(1),
        plan.ends.stride(0),
        NUM_HEADS=num_heads,
        CHUNK=plan.chunk,
        TILE=_SEQUENCES_PER_TILE,
        num_warps=8,
    )
    _first_kernel[(num_layers, triton.cdiv(num_programs, _PROGRAMS_PER_TILE))](
        plan.ends,
        plan.first,
        num_sequences,
        num_programs,
        num_sequences.bit_length(),
        plan.ends.stride(0),
        TILE=_PROGRAMS_PER_TILE,
        num_warps=4,
    )


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
    sinks: Tensor | None,
    descales: Descales | None,
    starts: Tensor | None,
    most_queries: int,
) -> None:
    """Compute one layer's attention in two launches; see `kernels.decode.decode`.

    Not exact: float32 sums in an order that depends on P, and weights in the dtype of the values,
    or bfloat16 if they are fp8.
    `query` and `out` must be contiguous in D; it is faster if keys and values are, too.
    """
    num_heads = lengths.shape[2]
    num_sequences, num_programs = lengths.shape[1] * num_heads, plan.first.shape[1]
    head_size = query.shape[2]
    group = query.shape[1] // num_heads
    shape = {"NUM_HEADS": num_heads, "GROUP": group, "HEAD_SIZE": head_size}
    shape["MOST_QUERIES"] = most_queries
    num_queries, query_tile = group * most_queries, _tile(group * most_queries)
    of_sinks = {"HAS_SINKS": sinks is not None, "LOG2_E": _LOG2_E}
    head_tile = _tile(head_size)
    chunk_bytes = _chunk_bytes(plan.chunk, head_size, keys.element_size())
    query_descale, key_descale, value_descale = descales or (None, None, None)
    _decode_kernel[(num_programs,)](
        query,
        keys,
        values,
        block_table,
        lengths,
        starts,
        num_token_blocks,
        replaced,
        offsets,
        plan.ends,
        plan.first,
        plan.partials,
        sinks,
        query_descale,
        key_descale,
        value_descale,
        out,
        layer,
        scale * _LOG2_E,
        num_sequences,
        *query.stride()[:2],
        *keys.stride(),
        *values.stride(),
        block_table.stride(0),
        *lengths.stride()[:2],
        offsets.stride(0),
        plan.ends.stride(0),
        *out.stride()[:2],
        **shape,
        **of_sinks,
        BLOCK_SIZE=keys.shape[1],
        NUM_PAIRS=offsets.shape[1] - 1,
        CHUNK=plan.chunk,
        GROUP_TILE=query_tile,
        HEAD_TILE=head_tile,
        num_warps=4 if query_tile <= _LARGE_TILE else 8,
        num_stages=_num_stages(query.device, chunk_bytes, query_tile),
    )
    _combine_kernel[(num_sequences, num_queries)](
        starts,
        plan.ends,
        plan.partials,
        sinks,
        value_descale,
        out,
        layer,
        num_sequences,
        num_programs,
        plan.ends.stride(0),
        *out.stride()[:2],
        **shape,
        **of_sinks,
        HEAD_TILE=head_tile,
        TILE=_PARTIALS_PER_TILE,
        num_warps=4,
    )


def variants() -> Iterator[Variant]:
    """Yield the specialisations to cross-compile."""
    from vllm_tgvkv.kernels.decode import MOST_QUERIES, DecodePlan

    for dtype, head_size, block_size, heads, layers, group, has_sinks, most in (
        (torch.float16, 64, 32, 2, 24, 7, False, 1),
        (torch.bfloat16, 80, 16, 32, 32, 1, False, 1),
        (torch.bfloat16, 256, 16, 1, 26, 8, False, 1),
        (torch.bfloat16, 512, 16, 2, 10, 8, False, 1),
        (torch.bfloat16, 64, 16, 8, 18, 8, True, 1),  # gpt-oss
        (torch.bfloat16, 128, 16, 8, 32, 4, False, 1),
        (torch.float8_e4m3fn, 64, 32, 2, 24, 7, False, 1),
        (torch.float8_e4m3fn, 128, 16, 8, 32, 4, False, 1),
        (torch.float8_e4m3fn, 256, 16, 1, 26, 8, False, 1),
        (torch.bfloat16, 128, 16, 8, 32, 4, False, 4),  # drafts
        (torch.float8_e4m3fn, 128, 16, 8, 32, 8, False, MOST_QUERIES // 8),
        (torch.bfloat16, 128, 16, 8, 32, 8, False, MOST_QUERIES // 8),
        (torch.bfloat16, 256, 16, 1, 26, 8, False, 4),
    ):
        empty = partial(torch.empty, dtype=torch.int32, device="meta")
        sizes = layers, 9, heads, group, head_size
        plan = DecodePlan.for_device(*sizes, dtype, torch.device("meta"), most)
        lengths = empty(layers, 9, heads)
        query = empty(9 * most, heads * group, head_size, dtype=dtype)
        rows = (None, 1) if most == 1 else (empty(10), most)
        pages = empty(99, block_size, 2 * head_size, dtype=dtype)[..., :head_size]
        state = empty(9, 1001), lengths, empty(99), empty(99), empty(99, layers * heads + 1)
        sinks = empty(heads * group, dtype=dtype) if has_sinks else None
        out, descales = query, None
        if dtype.itemsize == 1:
            descale = empty((), dtype=torch.float32)
            out, descales = query.to(torch.bfloat16), (descale, descale, descale)
        name = f"{TYPES[dtype]} D{head_size} N{block_size} G{group}{' sinks' * has_sinks}"
        name += f" x {most}" * (most > 1)
        given = query, pages, pages, *state, 2, 0.1, plan, out, sinks, descales, *rows
        call = partial(decode, *given)
        large, *others = launches(__name__, name, call)
        if dtype.itemsize > 1 and group * most <= 32:
            # With two chunks, as on GPUs of capabilities 8.0 and 12.0, in place of three.
            fewer = {**large.options, "num_stages": 5}
            yield replace(large, name=f"{name} x5", options=fewer, capabilities=(80, 120))
        yield replace(large, capabilities=(90, 100))
        yield from others
    yield from launches(__name__, f"H{heads}", partial(plan_decode, lengths, plan))
