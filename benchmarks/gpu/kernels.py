# SPDX-License-Identifier: Apache-2.0
"""Kernels alone, each compared with the time that copying its bytes takes.

`python -m benchmarks.gpu.kernels RESULTS [--smoke]` appends a JSON line per case to RESULTS.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cache import CompressedCache
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.timing import seconds_per_call
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.copy import copy_kept, slots_of_positions
from vllm_tgvkv.kernels.decode import DecodePlan, decode, plan_decode
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.select import page_offsets, select_tokens
from vllm_tgvkv.kernels.statistics import Scratch, observe

_AUTO, _UNSPLIT, _IN_GRAPHS = 0, 1, 32
"""Values of FlashAttention's `num_splits`: its own choice, none, vLLM's bound inside graphs."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels' arguments."""

    copy_bytes: int
    rows: int
    layers: int
    heads: int
    group: int
    head_size: int
    mean_blocks: int
    """Kept blocks of a request, of 16 tokens in every head on average."""
    prompt_blocks: int
    many_sequences: tuple[int, ...]
    prompts: tuple[int, ...]
    """Lengths of the prompts that are evicted, in tokens."""
    observed: int
    decode_batch: int


FULL = Sizes(
    copy_bytes=1 << 30,
    rows=32,
    layers=36,
    heads=8,
    group=4,
    head_size=128,
    mean_blocks=100,
    prompt_blocks=1000,
    many_sequences=(256, 512, 1024, 2048, 4096, 8192),
    prompts=(8192, 32768),
    observed=64,
    decode_batch=64,
)
SMOKE = Sizes(
    copy_bytes=1 << 16,
    rows=2,
    layers=2,
    heads=2,
    group=2,
    head_size=32,
    mean_blocks=3,
    prompt_blocks=8,
    many_sequences=(4,),
    prompts=(128,),
    observed=8,
    decode_batch=2,
)


@dataclass(frozen=True)
class Case:
    """A call, the bytes that it has to move, and the error of its result."""

    name: str
    call: Callable[[], Any]
    bytes: float
    error: Callable[[], float] | None = None
    note: str = ""


class Kernels:
    """All cases on one device."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = torch.bfloat16

    def groups(self) -> list[Callable[[], Iterator[Case]]]:
        """Return groups of cases by importance; each frees its memory before the next."""
        sizes = self.sizes
        many = [partial(self.many_sequences, number) for number in sizes.many_sequences]
        ends = [partial(self.end_of_prefill, tokens) for tokens in sizes.prompts]
        return [
            partial(self.decode_attention, ragged=True),
            partial(self.decode_attention, ragged=False),
            *ends,
            self.decode_step,
            *many,
        ]

    # -- decode -------------------------------------------------------------------------

    def decode_attention(self, ragged: bool) -> Iterator[Case]:
        """Yield one layer's decode attention of 32 rows, on average over 1,600 tokens a head."""
        sizes = self.sizes
        cache = self._cache(sizes.rows, 1, sizes.mean_blocks, sizes.prompt_blocks, ragged)
        lengths = cache.lengths()
        query, out = self._queries(sizes.rows, 2)
        kind = "ragged" if ragged else "uniform"
        size = self._decode_bytes(cache, lengths, query)
        spread = lengths.double().std() / lengths.double().mean()
        note = (
            f"R {sizes.rows}, H {sizes.heads}, G {sizes.group}, D {sizes.head_size}, mean "
            f"{lengths.double().mean():.0f} tokens, coefficient of variation {spread:.2f}"
        )
        expected = _reference(cache, lengths, query)
        chunk, programs = self._launch()
        for name, plan in (
            ("our kernel", self._plan(cache)),
            *(
                (f"our kernel with chunks of {c}, {p} programs", self._plan(cache, c, p))
                for c, p in ((chunk // 2, programs), (chunk, programs // 2), (chunk, 2 * programs))
            ),
        ):
            plan_decode(lengths, plan)
            call = partial(self._decode, cache, lengths, plan, query, out)
            error = partial(_checked, call, out, expected)
            yield Case(f"decode attention, {kind}, {name}", call, size, error, note)
        attend = self._flash_attention()
        if attend is None:
            return
        for splits, name in ((_IN_GRAPHS, ""), (_AUTO, ", splits chosen by it")):
            virtual = self._virtual_sequences(attend, cache, lengths, query, out, splits)
            error = partial(_checked, virtual, out, expected)
            name = f"decode attention, {kind}, FlashAttention over pages{name}"
            yield Case(name, virtual, size, error, note)
            if not ragged:
                stock = self._stock_cache(attend, int(lengths.max()), query, out, splits)
                yield Case(name.replace("over pages", "stock cache"), stock, size)

    def many_sequences(self, number: int) -> Iterator[Case]:
        """Yield attention over a batch of many short virtual sequences."""
        attend = self._flash_attention()
        if attend is None:
            return
        rows = max(1, number // self.sizes.heads)
        cache = self._cache(rows, 1, max(1, self.sizes.mean_blocks // 10), 200, ragged=True)
        lengths = cache.lengths()
        query, out = self._queries(rows, 2)
        size = self._decode_bytes(cache, lengths, query)
        expected = _reference(cache, lengths, query)
        for name, splits in (("splits chosen by it", _AUTO), ("unsplit", _UNSPLIT)):
            call = self._virtual_sequences(attend, cache, lengths, query, out, splits)
            error = partial(_checked, call, out, expected)
            yield Case(f"FlashAttention, {number} virtual sequences, {name}", call, size, error)
        plan = self._plan(cache)
        plan_decode(lengths, plan)
        ours = partial(self._decode, cache, lengths, plan, query, out)
        error = partial(_checked, ours, out, expected)
        yield Case(f"our kernel, {number} virtual sequences", ours, size, error)

    def decode_step(self) -> Iterator[Case]:
        """Yield the computations that a step does once for all layers."""
        sizes = self.sizes
        blocks = max(1, sizes.mean_blocks // 2)
        cache = self._cache(sizes.decode_batch, sizes.layers, blocks, 10 * blocks, ragged=True)
        lengths, tables = cache.new_lengths(), cache.new_tables()
        note = f"batch {sizes.decode_batch}, all {sizes.layers} layers"
        write = partial(write_lengths, *cache.state, lengths)
        yield Case("lengths of virtual sequences", write, 3 * lengths.nbytes, None, note)
        num_pages = int(cache.lengths().sum()) / cache.block_size
        write = partial(write_page_tables, *cache.state, 0, tables)
        yield Case("page tables", write, 4 * num_pages + 3 * lengths.nbytes, None, note)
        plan = self._plan(cache)
        size = lengths.nbytes + plan.ends.nbytes + plan.first.nbytes
        yield Case("plan of decode", partial(plan_decode, cache.lengths(), plan), size, None, note)

    # -- eviction -----------------------------------------------------------------------

    def end_of_prefill(self, tokens: int) -> Iterator[Case]:
        """Yield a layer's statistics, and the eviction of all layers at a budget of 10 %."""
        sizes, device = self.sizes, self.device
        blocks = tokens // 16
        kept = max(1, blocks // 10)
        torch.manual_seed(1)
        ids = (torch.randperm(blocks + kept, device=device) + 1).int()
        shape = (blocks + kept + 1, sizes.layers, sizes.heads, 16, 2 * sizes.head_size)
        pool = torch.empty(shape, dtype=self.dtype, device=device).normal_()
        keys, values = pool.split(sizes.head_size, dim=-1)
        where = f"prompt of {tokens}"
        yield self._statistics_case(keys[:, 0], ids[:blocks], tokens, where)

        pairs = sizes.layers * sizes.heads
        shares = torch.empty(pairs, device=device).exponential_()
        deal = partial(apportion, shares, kept * pairs, 1, blocks)
        yield Case(f"apportionment, {where}", deal, 2 * 8 * pairs, None, f"{pairs} heads")
        counts = deal().view(sizes.layers, sizes.heads)
        scores = torch.rand(*counts.shape, blocks * 16, device=device)
        tiers = torch.zeros(blocks * 16, dtype=torch.int64, device=device)
        choose = partial(select_tokens, scores, tiers, counts, kept * pairs, 16)
        size = scores.nbytes + kept * pairs * 16 * 4
        yield Case(f"selection, {where}", choose, size, None, "a ranking per head, all layers")
        offsets = page_offsets(counts)
        find = partial(slots_of_positions, choose(), offsets, ids[:blocks], pairs)
        size = kept * pairs * 16 * (4 + 8)
        yield Case(f"slots of the kept tokens, {where}", find, size, None, "all layers")
        move = partial(
            copy_kept,
            keys.flatten(0, 2),
            values.flatten(0, 2),
            find(),
            offsets,
            ids[blocks:],
            sizes.layers,
            sizes.heads,
        )
        size = 2 * kept * pairs * 16 * 2 * sizes.head_size * self.dtype.itemsize
        yield Case(f"copy, {where}", move, size, None, "all layers")

    def _statistics_case(self, keys: Tensor, ids: Tensor, tokens: int, where: str) -> Case:
        sizes, device = self.sizes, self.device
        rows = torch.arange(tokens - sizes.observed, tokens, device=device)
        shape = (sizes.observed, sizes.heads, sizes.group, sizes.head_size)
        queries = torch.empty(shape, dtype=self.dtype, device=device).normal_()
        weights = torch.rand(1, sizes.observed, device=device)
        scratch = Scratch()

        def statistics() -> None:
            observed = observe(
                queries,
                keys,
                ids,
                rows,
                tokens,
                sizes.head_size**-0.5,
                per_head=False,
                statistics=frozenset({"row_averages"}),
                scratch=scratch,
            )
            _ = observed.column_sums, observed.weighted_column_sums(weights)

        size = tokens * sizes.heads * sizes.head_size * self.dtype.itemsize
        note = f"a layer, {sizes.observed} rows; the bytes are those of its keys"
        return Case(f"statistics, {where}", statistics, size, None, note)

    # -- pieces -------------------------------------------------------------------------

    def _cache(
        self, rows: int, layers: int, retained: int, replaced: int, ragged: bool
    ) -> CompressedCache:
        sizes = self.sizes
        return CompressedCache.build(
            rows, layers, sizes.heads, sizes.head_size, retained, replaced, ragged,
            self.device, self.dtype,
        )  # fmt: skip

    def _queries(self, rows: int, number: int) -> list[Tensor]:
        shape = (number, rows, self.sizes.heads * self.sizes.group, self.sizes.head_size)
        return list(torch.empty(shape, dtype=self.dtype, device=self.device).normal_())

    def _decode_bytes(self, cache: CompressedCache, lengths: Tensor, query: Tensor) -> float:
        return float(lengths.sum()) * cache.token_bytes() + 2 * query.nbytes

    def _launch(self) -> tuple[int, int]:
        """Return the tokens of a chunk and the number of programs that the backend uses."""
        if self.device.type != "cuda":
            return 32, 4
        from vllm_tgvkv.kernels.gpu.decode import chunk_size, num_programs

        head_size = self.sizes.head_size
        return chunk_size(head_size), num_programs(self.device, head_size)

    def _plan(
        self, cache: CompressedCache, chunk: int | None = None, programs: int | None = None
    ) -> DecodePlan:
        sizes = self.sizes
        usual_chunk, usual_programs = self._launch()
        return DecodePlan.allocate(
            cache.num_layers, len(cache.seq_lens), sizes.heads, sizes.group, sizes.head_size,
            chunk or usual_chunk, programs or usual_programs, self.device,
        )  # fmt: skip

    def _decode(
        self, cache: CompressedCache, lengths: Tensor, plan: DecodePlan, query: Tensor, out: Tensor
    ) -> None:
        decode(
            query, cache.keys, cache.values, cache.block_table, lengths, cache.retained,
            cache.replaced, cache.offsets, 0, self.sizes.head_size**-0.5, plan, out,
        )  # fmt: skip

    def _flash_attention(self) -> Callable[..., Tensor] | None:
        """Return vLLM's function, in the version that vLLM would choose."""
        if self.device.type != "cuda":
            return None
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        version = get_flash_attn_version(head_size=self.sizes.head_size) or 3
        return partial(flash_attn_varlen_func, fa_version=version, causal=True, max_seqlen_q=1)

    def _virtual_sequences(
        self,
        attend: Callable[..., Tensor],
        cache: CompressedCache,
        lengths: Tensor,
        query: Tensor,
        out: Tensor,
        num_splits: int,
    ) -> Callable[[], Tensor]:
        """Return a call over one virtual sequence per (row, KV head)."""
        by_head = (-1, self.sizes.group, self.sizes.head_size)
        starts = torch.arange(lengths.numel() + 1, dtype=torch.int32, device=self.device)
        return partial(
            attend,
            q=query.view(by_head),
            k=cache.keys.unsqueeze(2),
            v=cache.values.unsqueeze(2),
            out=out.view(by_head),
            cu_seqlens_q=starts,
            seqused_k=lengths[0].flatten(),
            max_seqlen_k=int(cache.seq_lens.max()),  # the host knows no better bound
            softmax_scale=self.sizes.head_size**-0.5,
            block_table=cache.tables()[0].flatten(0, 1),
            num_splits=num_splits,
        )

    def _stock_cache(
        self,
        attend: Callable[..., Tensor],
        length: int,
        query: Tensor,
        out: Tensor,
        num_splits: int,
    ) -> Callable[[], Tensor]:
        """Return a call over sequences of `length` tokens in a cache [block, head, slot, KV]."""
        sizes = self.sizes
        blocks = -(-length // 16)
        shape = (1 + sizes.rows * blocks, sizes.heads, 16, 2 * sizes.head_size)
        cache = torch.empty(shape, dtype=self.dtype, device=self.device).normal_()
        keys, values = cache.transpose(1, 2).split(sizes.head_size, dim=-1)
        table = torch.randperm(sizes.rows * blocks, device=self.device).int() + 1
        return partial(
            attend,
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=torch.arange(sizes.rows + 1, dtype=torch.int32, device=self.device),
            seqused_k=torch.full((sizes.rows,), length, dtype=torch.int32, device=self.device),
            max_seqlen_k=length,
            softmax_scale=sizes.head_size**-0.5,
            block_table=table.view(sizes.rows, blocks),
            num_splits=num_splits,
        )


def _reference(cache: CompressedCache, lengths: Tensor, query: Tensor) -> Tensor:
    """Return the attention of the first and the last row, float32 [2, H * G, D]."""
    tables = cache.tables()[0]
    rows = []
    for row in (0, len(query) - 1):
        heads = query[row].float().view(lengths.shape[2], -1, query.shape[2])
        results = []
        for head, length in enumerate(lengths[0, row].tolist()):
            pages = tables[row, head, : -(-length // cache.block_size)].long()
            k, v = (p[pages].flatten(0, 1)[:length].float() for p in (cache.keys, cache.values))
            weights = (heads[head] @ k.T * query.shape[2] ** -0.5).softmax(1)
            results.append(weights @ v)
        rows.append(torch.cat(results))
    return torch.stack(rows)


def _checked(call: Callable[[], Any], out: Tensor, expected: Tensor) -> float:
    """Return the relative error of the first and the last row."""
    out.fill_(torch.nan)
    call()
    found = out[[0, -1]].float()
    return float((found - expected).norm() / expected.norm())


def copy_bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Return the bytes per second of a plain copy, read and written ones."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_per_call(lambda: target.copy_(source), device)


def main() -> int:
    """Measure all cases; one that fails is recorded and leaves the others alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--until", type=float, default=float("inf"), help="end as time.time()")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SMOKE if options.smoke else FULL
    journal = Journal(options.results, part="kernels")
    bandwidth = copy_bandwidth(sizes, device)
    journal.write(name="copy bandwidth", bandwidth=bandwidth)
    for group in Kernels(sizes, device).groups():
        if time.time() > options.until:
            journal.write(skipped="the remaining kernels", reason="time is up")
            break
        try:
            _measure(group(), journal, device, bandwidth)
        except Exception:  # the other groups are still measured
            journal.write(name=_name(group), failed=traceback.format_exc())
    return 0


def _measure(
    cases: Iterator[Case], journal: Journal, device: torch.device, bandwidth: float
) -> None:
    for case in cases:
        try:
            error = case.error() if case.error else None
            seconds = seconds_per_call(case.call, device)
        except Exception:
            journal.write(name=case.name, failed=traceback.format_exc())
            continue
        journal.write(
            name=case.name,
            seconds=seconds,
            bytes=case.bytes,
            share=case.bytes / seconds / bandwidth,
            error=error,
            note=case.note,
        )


def _name(group: Callable[[], Iterator[Case]]) -> str:
    if not isinstance(group, partial):
        return group.__name__
    given = [*map(str, group.args), *(f"{name}={value}" for name, value in group.keywords.items())]
    return f"{group.func.__name__}({', '.join(given)})"


if __name__ == "__main__":
    sys.exit(main())
