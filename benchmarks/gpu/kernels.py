# SPDX-License-Identifier: Apache-2.0
"""Times of the kernels against what they have to read and write."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cache import CompressedCache
from benchmarks.gpu.timing import seconds_per_call
from vllm_tgvkv.kernels.apportion import apportion
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.decode import DecodePlan, decode, plan_decode
from vllm_tgvkv.kernels.page_tables import write_lengths, write_page_tables
from vllm_tgvkv.kernels.ragged import kept_slots, whole_tables
from vllm_tgvkv.kernels.select import page_offsets, select_tokens
from vllm_tgvkv.kernels.statistics import Scratch, observe

_AUTO, _IN_GRAPHS = 0, 32
"""Values of FlashAttention's `num_splits`: its own choice, and vLLM's bound inside graphs."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels' arguments, by default Qwen3-VL-8B's."""

    copy_bytes: int = 1 << 30
    rows: int = 32
    layers: int = 36
    heads: int = 8
    group: int = 4
    head_size: int = 128
    mean_blocks: int = 100
    """Kept blocks of a request, of 16 tokens in every head on average."""
    prompt_blocks: int = 1000
    prompts: tuple[int, ...] = (8192, 32768)
    """Lengths of the prompts that are evicted, in tokens."""
    observed: int = 64
    decode_batch: int = 64


FULL = Sizes()
SMOKE = Sizes(1 << 16, 2, 2, 2, 2, 32, 3, 8, (128,), 8, 2)


@dataclass(frozen=True)
class Case:
    """A call, the bytes that it has to move, and the error of its result."""

    name: str
    call: Callable[[], Any]
    bytes: float
    note: str = ""
    error: Callable[[], float] | None = None


class Kernels:
    """All cases on one device."""

    def __init__(self, sizes: Sizes, device: str = "") -> None:
        self.sizes = sizes
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = torch.bfloat16
        torch.manual_seed(1)
        source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = seconds_per_call(lambda: target.copy_(source), self.device)
        self._bandwidth = 2 * source.nbytes / seconds
        """Bytes per second of a plain copy, read and written ones."""
        self._cases = {
            "decode attention, ragged": partial(self.decode_attention, ragged=True),
            "decode attention, uniform": partial(self.decode_attention, ragged=False),
            **{f"prompt of {n}": partial(self.end_of_prefill, n) for n in sizes.prompts},
            "decode step": self.decode_step,
        }

    def groups(self) -> list[str]:
        """Return the names of all groups of cases by importance."""
        return ["copy bandwidth", *self._cases]

    def measure(self, group: str) -> list[dict[str, Any]]:
        """Measure the cases of a group; one that fails leaves the others alone."""
        if group == "copy bandwidth":
            return [{"name": group, "bandwidth": self._bandwidth}]
        found: list[dict[str, Any]] = []
        try:
            found.extend({"name": c.name, **self._measured(c)} for c in self._cases[group]())
        except Exception:  # the other groups are still measured
            found.append({"name": group, "failed": traceback.format_exc()})
        return found

    def _measured(self, case: Case) -> dict[str, Any]:
        try:
            error = case.error() if case.error else None
            seconds = seconds_per_call(case.call, self.device)
        except Exception:  # the next case is still measured
            return {"failed": traceback.format_exc()}
        share = case.bytes / seconds / self._bandwidth
        found = {"seconds": seconds, "bytes": case.bytes, "share": share}
        return {**found, "error": error, "note": case.note}

    # -- decode -------------------------------------------------------------------------

    def decode_attention(self, ragged: bool) -> Iterator[Case]:
        """Yield one layer's decode attention of 32 rows, on average over 1,600 tokens a head."""
        sizes, scale = self.sizes, self.sizes.head_size**-0.5
        cache = self._cache((1, sizes.rows, sizes.heads), sizes.mean_blocks, ragged)
        lengths, tables = cache.lengths(), cache.tables()[0]
        query, out = self._noise(2, sizes.rows, sizes.heads * sizes.group, sizes.head_size)
        kind = "ragged" if ragged else "uniform"
        size = float(lengths.sum()) * 2 * cache.keys[0, 0].nbytes + 2 * query.nbytes
        mean = lengths.double().mean()
        spread = f"coefficient of variation {lengths.double().std() / mean:.2f}"
        note = f"{sizes.rows} rows, mean {mean:.0f} tokens a head, {spread}"
        expected = _reference(cache, lengths, query)
        plan = self._plan(cache)
        plan_decode(lengths, plan)
        call = partial(
            decode, query, cache.keys, cache.values, cache.block_table, lengths, cache.retained,
            cache.replaced, cache.offsets, 0, scale, plan, out,
        )  # fmt: skip
        error = partial(_checked, call, out, expected)
        yield Case(f"decode attention, {kind}, our kernel", call, size, note, error)
        attend = self._flash_attention()
        if attend is None:
            return
        by_head = (-1, sizes.group, sizes.head_size)
        length = int(lengths.max())
        stock, table = self._stock_cache(length)
        for splits, name in ((_IN_GRAPHS, ""), (_AUTO, ", splits chosen by it")):
            # One virtual sequence per row and KV head; the host knows no better bound.
            call = _attention(
                attend, query.view(by_head), cache.keys.unsqueeze(2), cache.values.unsqueeze(2),
                out.view(by_head), lengths[0].flatten(), int(cache.seq_lens.max()),
                tables.flatten(0, 1), splits,
            )  # fmt: skip
            error = partial(_checked, call, out, expected)
            what = f"decode attention, {kind}, FlashAttention"
            yield Case(f"{what} over pages{name}", call, size, note, error)
            if not ragged:
                same = torch.full((sizes.rows,), length, dtype=torch.int32, device=self.device)
                call = _attention(attend, query, *stock, out, same, length, table, splits)
                yield Case(f"{what} stock cache{name}", call, size)

    def decode_step(self) -> Iterator[Case]:
        """Yield the computations that a step does once for all layers."""
        sizes = self.sizes
        shape = (sizes.layers, sizes.decode_batch, sizes.heads)
        cache = self._cache(shape, max(1, sizes.mean_blocks // 2), ragged=True)
        lengths, tables, plan = cache.lengths(), cache.tables(), self._plan(cache)
        note = f"batch {sizes.decode_batch}, all {sizes.layers} layers"
        call = partial(write_lengths, *cache.state, lengths)
        yield Case("lengths of virtual sequences", call, 3 * lengths.nbytes, note)
        call = partial(write_page_tables, *cache.state, 0, tables)
        num_pages = int(lengths.sum()) / cache.block_size
        yield Case("page tables", call, 4 * num_pages + 3 * lengths.nbytes, note)
        size = lengths.nbytes + plan.ends.nbytes + plan.first.nbytes
        yield Case("plan of decode", partial(plan_decode, lengths, plan), size, note)

    # -- eviction -----------------------------------------------------------------------

    def end_of_prefill(self, tokens: int) -> Iterator[Case]:
        """Yield a layer's statistics, and the eviction of all layers at a budget of 10 %."""
        sizes, device, where = self.sizes, self.device, f"prompt of {tokens}"
        blocks = tokens // 16
        kept, pairs = max(1, blocks // 10), sizes.layers * sizes.heads
        ids = (torch.randperm(blocks + kept, device=device) + 1).int()
        pool = self._noise(blocks + kept + 1, sizes.layers, sizes.heads, 16, 2 * sizes.head_size)
        keys, values = pool.split(sizes.head_size, dim=-1)
        yield self._statistics_case(keys[:, 0], ids[:blocks], tokens, where)

        shares = torch.empty(pairs, device=device).exponential_()
        deal = partial(apportion, shares, kept * pairs, 1, blocks)
        yield Case(f"apportionment, {where}", deal, 2 * 8 * pairs, f"{pairs} heads")
        counts = deal().view(sizes.layers, sizes.heads)
        scores = torch.rand(*counts.shape, blocks * 16, device=device)
        tiers = torch.zeros(blocks * 16, dtype=torch.int64, device=device)
        choose = partial(select_tokens, scores, tiers, counts, kept * pairs, 16)
        size = scores.nbytes + kept * pairs * 16 * 4
        yield Case(f"selection, {where}", choose, size, "a ranking per head, all layers")
        offsets = page_offsets(counts)
        tables = whole_tables(ids[:blocks], pairs)
        find = partial(kept_slots, choose(), offsets, tables, None, keys.flatten(0, 3).shape[0])
        size = kept * pairs * 16 * (4 + 4)
        yield Case(f"slots of the kept tokens, {where}", find, size, "all layers")
        move = partial(
            copy_kept, keys.flatten(0, 2), values.flatten(0, 2), find(), offsets, ids[blocks:],
            sizes.layers, sizes.heads,
        )  # fmt: skip
        size = 2 * kept * pairs * 16 * 2 * sizes.head_size * self.dtype.itemsize
        yield Case(f"copy, {where}", move, size, "all layers")

    def _statistics_case(self, keys: Tensor, ids: Tensor, tokens: int, where: str) -> Case:
        sizes, device = self.sizes, self.device
        rows = torch.arange(tokens - sizes.observed, tokens, device=device)
        queries = self._noise(sizes.observed, sizes.heads, sizes.group, sizes.head_size)
        weights = torch.rand(1, sizes.observed, device=device)
        scratch = Scratch()

        def statistics() -> None:
            observed = observe(
                queries, keys, ids, rows, tokens, sizes.head_size**-0.5,
                per_head=False, statistics=frozenset({"row_averages"}), scratch=scratch,
            )  # fmt: skip
            _ = observed.column_sums, observed.weighted_column_sums(weights)

        size = tokens * sizes.heads * sizes.head_size * self.dtype.itemsize
        note = f"a layer, {sizes.observed} rows; the bytes are those of its keys"
        return Case(f"statistics, {where}", statistics, size, note)

    # -- pieces -------------------------------------------------------------------------

    def _cache(self, shape: tuple[int, int, int], blocks: int, ragged: bool) -> CompressedCache:
        """Return a cache of prompts that were about ten times as long."""
        replaced = self.sizes.prompt_blocks * blocks // self.sizes.mean_blocks
        head_size = self.sizes.head_size
        return CompressedCache.build(
            shape, head_size, blocks, replaced, ragged, self.device, self.dtype
        )

    def _noise(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def _plan(self, cache: CompressedCache) -> DecodePlan:
        """Return a plan with the chunks and programs that the backend uses."""
        sizes, chunk, programs = self.sizes, 32, 4
        if self.device.type == "cuda":
            from vllm_tgvkv.kernels.gpu.decode import chunk_size, num_programs

            chunk = chunk_size(sizes.head_size)
            programs = num_programs(self.device, sizes.head_size)
        layers, rows, heads = cache.shape
        return DecodePlan.allocate(
            layers, rows, heads, sizes.group, sizes.head_size, chunk, programs, self.device
        )

    def _flash_attention(self) -> Callable[..., Tensor] | None:
        """Return vLLM's function, in the version that vLLM would choose."""
        if self.device.type != "cuda":
            return None
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        version = get_flash_attn_version(head_size=self.sizes.head_size) or 3
        return partial(flash_attn_varlen_func, fa_version=version, causal=True, max_seqlen_q=1)

    def _stock_cache(self, length: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return keys and values of sequences of `length` tokens, and their block table."""
        sizes, blocks = self.sizes, -(-length // 16)
        cache = self._noise(1 + sizes.rows * blocks, sizes.heads, 16, 2 * sizes.head_size)
        keys, values = cache.transpose(1, 2).split(sizes.head_size, dim=-1)
        table = torch.randperm(sizes.rows * blocks, device=self.device).int() + 1
        return (keys, values), table.view(sizes.rows, blocks)


def _attention(
    attend: Callable[..., Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lengths: Tensor,
    longest: int,
    table: Tensor,
    num_splits: int,
) -> Callable[[], Tensor]:
    """Return a call of FlashAttention for one query of each sequence."""
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    return partial(
        attend, q=query, k=keys, v=values, out=out, cu_seqlens_q=starts, seqused_k=lengths,
        max_seqlen_k=longest, softmax_scale=query.shape[-1] ** -0.5, block_table=table,
        num_splits=num_splits,
    )  # fmt: skip


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
