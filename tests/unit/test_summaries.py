# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens against their definition, and what makes them exact."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import summaries as definition
from oracle.methods import Image, Layout
from oracle.summaries import Rules
from vllm_tgvkv.cache.pages import PagePool, page_pool
from vllm_tgvkv.cache.ragged import RaggedKeys
from vllm_tgvkv.cache.regions import Regions
from vllm_tgvkv.cache.row_keys import RowKeys
from vllm_tgvkv.config.request import RequestOptions
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.kernels import summaries as kernel
from vllm_tgvkv.kernels.copy import copy_kept
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.summaries import Summary, load, log_sum_exp, merge, num_rows, store
from vllm_tgvkv.policies import Mix, Prompt, Summaries, build_policy
from vllm_tgvkv.shared.prompt import VisionSpan
from vllm_tgvkv.summaries.blocks import CutTokens, SummaryBlocks

LAYERS, HEADS, GROUP, SIZE, HEAD_SIZE = 2, 2, 3, 16, 8
PAIRS, SCALE = LAYERS * HEADS, HEAD_SIZE**-0.5
LAYOUT = Layout(117, (Image(6, 20, (4, 5)), Image(26, 12, None), Image(50, 30, (5, 6))))
NUM_FULL = LAYOUT.length // SIZE
ROWS = num_rows(SIZE, HEAD_SIZE)


def new_pool(slots_first: bool, dtype: torch.dtype = torch.float32, blocks: int = 24) -> PagePool:
    """Return a pool of random numbers."""
    caches = torch.randn(blocks, LAYERS, HEADS, SIZE, 2 * HEAD_SIZE).to(dtype)
    return page_pool([caches[:, layer] for layer in range(LAYERS)], GROUP, slots_first)


def prompt_of(layout: Layout) -> Prompt:
    return Prompt(
        num_tokens=layout.length,
        num_candidates=layout.length // SIZE * SIZE,
        is_vision=torch.tensor(layout.vision),
        sinks=4,
        images=tuple(VisionSpan(image.start, image.length, image.grid) for image in layout.images),
    )


class Request:
    """A row with its blocks, whose cuts keep random tokens by random scores.

    Slots without a token are NaN, and so are blocks that a cut gave back.
    """

    def __init__(
        self,
        part: Summaries,
        layout: Layout = LAYOUT,
        per_head: bool = True,
        slots_first: bool = False,
        two_tokens: bool = False,
    ) -> None:
        """Compute the prompt, with `two_tokens` of one vision token and one text token alone."""
        self.part, self.layout, self.per_head = part, layout, per_head
        self.workspace_bytes = kernel.WORKSPACE_BYTES
        self.two = torch.randn(2, PAIRS, 2, HEAD_SIZE) if two_tokens else None
        self.pool = new_pool(slots_first, blocks=48)
        self.pool.raw.fill_(torch.nan)
        self.shape = self.pool.shape
        self.regions = Regions(48, self.shape, torch.device("cpu"), keeps_positions=True)
        self.summaries = SummaryBlocks(self.pool, self.regions, are_used=True)
        self.free = (torch.randperm(47) + 1).int()
        self.row = self.take(0)
        self.retained = self.replaced = 0
        self.keys, self.values = torch.empty(2, PAIRS, 0, HEAD_SIZE)
        self.kept = torch.ones(PAIRS, 0, dtype=torch.bool)
        self.wanted: list[list[list[definition.Row]]] = [[] for _ in range(PAIRS)]
        """By pair and summary, what the definition says."""
        self.blocks = self.row
        """Of summaries."""
        self.kinds: tuple[Any, ...] = ()
        self.grow(layout.length)

    def take(self, number: int) -> Tensor:
        blocks, self.free = self.free[:number], self.free[number:]
        return blocks

    def grow(self, number: int) -> None:
        """Compute more tokens."""
        position = torch.arange(number) + self.kept.shape[1]
        tokens = torch.randn(2, PAIRS, number, HEAD_SIZE)
        if self.two is not None:
            vision = replace(self.layout, length=len(position) + self.kept.shape[1]).vision
            tokens = self.two[:, :, torch.tensor(vision)[position].long()]
        self.kept = torch.nn.functional.pad(self.kept, (0, number), value=True)
        more = -(-self.kept.shape[1] // SIZE) - len(self.row)
        self.row = torch.cat((self.row, self.take(more)))
        self.keys, self.values = (
            torch.cat((x, new), dim=1)
            for x, new in zip((self.keys, self.values), tokens, strict=True)
        )
        pages = self.row[position // SIZE].long() * PAIRS + torch.arange(PAIRS)[:, None]
        for view, new in zip((self.pool.keys, self.pool.values), tokens, strict=True):
            view[pages, position % SIZE] = new

    def cut(self, retained: int, replaced: int) -> None:
        """Replace the first blocks of the row, by pages and by the definition.

        `retained` may be more than the row has left of these.
        """
        if self.retained:
            retained = min(retained, self.retained + replaced - self.replaced)
        length, size = self.kept.shape[1], (LAYERS, HEADS)
        layout = replace(self.layout, length=length)
        prompt = replace(prompt_of(layout), num_candidates=replaced * SIZE)
        self.kinds = self.part.kinds(retained, replaced, bool(layout.images))
        filled = retained - len(self.kinds)
        scores = torch.rand(LAYERS, HEADS if self.per_head else 1, replaced * SIZE) ** 4
        # Few pages for some pairs, down to none, and many for others.
        most = self.kept[:, : replaced * SIZE].sum(1) // SIZE
        counts = torch.zeros_like(most)
        for _ in range(filled * PAIRS):
            pair = random.choice((counts < most).nonzero().flatten().tolist())
            counts[pair] += 1
        pages, evicted = [], self.kept.clone()
        for pair, count in enumerate(counts.tolist()):
            left = self.kept[pair, : replaced * SIZE].nonzero().flatten()
            best = left[torch.randperm(len(left))[: count * SIZE]].sort().values
            evicted[pair, best] = False
            pages.append(best.view(-1, SIZE))
        evicted[:, replaced * SIZE :] = False
        self._define(layout, scores.expand(-1, HEADS, -1).flatten(0, 1), evicted)
        positions, offsets = torch.cat(pages).int(), page_offsets(counts.view(size))
        fresh, self.blocks = self.take(filled), self.take(len(self.kinds))
        if not self.retained:
            keys = RowKeys.of_blocks(self.row, length, self.shape)
        else:
            keys = RaggedKeys.of_row(self.row, length, self.regions)
        sources = keys.slots(positions, offsets, len(self.pool.raw) * SIZE)
        copy_kept(self.pool.keys, self.pool.values, sources, offsets, fresh, *size)
        is_vision = prompt.is_vision[: replaced * SIZE]
        tokens = CutTokens(keys, is_vision, prompt.images, scores, positions, offsets)
        earlier = self.row[self.summaries.columns(int(self.row[0]))]
        given = (self.kinds, tokens, earlier, self.blocks, self.workspace_bytes)
        self.summaries.write(self.part, *given)
        if self.retained:
            self.regions.release([int(self.row[0])])
            self.summaries.release([int(self.row[0])])
        self.retained, self.replaced = retained, replaced
        self.regions.store_positions(fresh, positions)
        self.regions.add("r", int(fresh[0]), filled, replaced, offsets)
        self.summaries.add(int(fresh[0]), filled, len(self.kinds))
        self.kept &= ~evicted
        old = self.row[:replaced]
        self.pool.fill(old[old > 0].tolist(), torch.nan)
        nulls = torch.zeros(replaced - retained, dtype=torch.int32)
        self.row = torch.cat((fresh, self.blocks, nulls, self.row[replaced:]))

    def _define(self, layout: Layout, scores: Tensor, evicted: Tensor) -> None:
        part = self.part
        rules = Rules(part.of, part.weight, part.decay, part.gate, ROWS)
        for pair in range(PAIRS):
            self.wanted[pair] = definition.summaries(
                self.keys[pair],
                self.values[pair],
                evicted[pair],
                scores[pair].tolist(),
                layout,
                rules,
                len(self.kinds),
                self.wanted[pair],
            )

    def found(self, pair: int) -> Summary:
        """Return what the pages of a pair hold, [m, c, ...]."""
        pages = self.blocks.long() * PAIRS + pair
        return load(self.pool.keys, self.pool.values, pages, ROWS)

    def assert_as_defined(self) -> None:
        for pair in range(PAIRS):
            found, wanted = self.found(pair), self.wanted[pair]
            exists = found.masses > 0
            assert exists.sum(1).tolist() == [len(rows) for rows in wanted]
            rows = [row for of_kind in wanted for row in of_kind]
            if not rows:
                continue
            roots = self.regions.positions[self.blocks.long() * PAIRS + pair, : exists.shape[1]]
            assert roots[exists].tolist() == [row.root for row in rows]
            masses = torch.tensor([row.mass for row in rows]).double()
            # Means of float32: a few units in the last place of the largest number, about 4.
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
            close(found.keys[exists].double(), torch.stack([row.key for row in rows]))
            close(found.values[exists].double(), torch.stack([row.value for row in rows]))
            torch.testing.assert_close(found.masses[exists].double(), masses, rtol=1e-4, atol=0)


LATER = [(5, 9, 60), (4, 9, 0), (4, 11, 30)]
"""Of cuts after the first: retained and replaced blocks, and tokens that are computed before."""


@pytest.mark.parametrize("weight", ["tokens", "score"])
@pytest.mark.parametrize("of", ["both", "all", "vision", "text"])
@pytest.mark.parametrize("slots_first", [True, False])
def test_summaries_are_those_of_the_definition(slots_first: bool, of: Any, weight: Any) -> None:
    """Over several cuts, with the answer's tokens in between."""
    gate, decay = random.choice([1.0, 0.3, 0]), random.choice([1.0, 0.9, 0.6])
    part = Summaries(of, weight, decay, gate)
    layout = random.choice([LAYOUT, Layout(117)])
    request = Request(part, layout, random.random() < 0.5, slots_first)
    request.cut(random.choice([1, 3, 6, 7]), 7)  # no room for a summary, and for all tokens, too
    request.assert_as_defined()
    for retained, replaced, more in LATER:
        request.grow(more)
        request.cut(retained, replaced)
        request.assert_as_defined()


@pytest.mark.parametrize("of", ["both", "all"])
def test_no_mass_is_lost_over_several_cuts(of: Any) -> None:
    """Kept tokens and masses are all tokens, exactly.

    Where summaries absorb equal tokens only, attention is what it would be over all tokens.
    """
    request = Request(Summaries(of, decay=1.0), two_tokens=True)
    for retained, replaced, more in [(6, 7, 0), *LATER]:
        request.grow(more)
        request.cut(retained, replaced)
        for pair in range(PAIRS):
            summary, kept = request.found(pair), request.kept[pair]
            assert int(kept.sum()) + int(summary.masses.sum()) == len(kept)
            if of == "all":
                continue
            keys, values = request.keys[pair, None], request.values[pair, None]
            queries = torch.randn(3, 1, GROUP, HEAD_SIZE) * 2
            wanted, _ = attend(queries, keys, values)
            outputs, lse = attend(queries, keys[:, kept], values[:, kept])
            rows = [x.expand(3, 1, *x.shape) for x in (summary.keys, summary.values)]
            read = torch.ones(3, len(summary.keys), dtype=torch.bool)
            masses = summary.masses.expand(3, 1, -1, -1)
            merged = merge(
                outputs.float(), lse.float(), queries, Summary(*rows, masses), read, SCALE
            )
            torch.testing.assert_close(merged.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots_first", [True, False])
def test_pages_hold_what_is_stored(slots_first: bool, dtype: torch.dtype) -> None:
    """Also masses of zero and very large ones; nothing but the given pages changes.

    What is stored is finite: a later request's attention multiplies it with a weight of 0.
    """
    pool = new_pool(slots_first, dtype)
    pool.raw.fill_(torch.nan)
    rows = num_rows(SIZE, HEAD_SIZE)
    assert 4 * rows <= (SIZE - rows) * HEAD_SIZE
    assert 4 * (rows + 1) > (SIZE - rows - 1) * HEAD_SIZE
    pages = torch.randperm(len(pool.raw))[:PAIRS]
    keys, values = (torch.randn(PAIRS, rows, HEAD_SIZE).to(dtype).float() for _ in range(2))
    masses = (torch.randn(PAIRS, rows) * 20).exp()
    masses[:, 1] = 0
    store(Summary(keys, values, masses), pool.keys, pool.values, pages)
    found = load(pool.keys, pool.values, pages, rows)
    assert torch.equal(found.keys, keys)
    assert torch.equal(found.values, values)
    assert torch.equal(found.masses, masses)
    assert pool.raw[pages].isfinite().all()
    others = torch.ones(len(pool.raw), dtype=torch.bool)
    others[pages] = False
    assert pool.raw[others].isnan().all()


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax attention over keys [H, n, D] and the logarithms of its denominators."""
    logits = torch.einsum("thgd,hnd->thgn", queries.double(), keys.double()) * SCALE
    outputs = torch.einsum("thgn,hnd->thgd", logits.softmax(-1), values.double())
    return outputs, logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_masses_no_bit_changes(dtype: torch.dtype) -> None:
    """Neither with empty summaries, nor with pages of others, whatever their numbers are."""
    tokens, shape = 7, (7, HEADS, 2, ROWS)
    queries = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE).to(dtype)
    outputs = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE).to(dtype)
    lse = torch.randn(tokens, HEADS, GROUP) * 20
    means = torch.randn(*shape, HEAD_SIZE) * 100
    empty = Summary(means, means, torch.zeros(shape))
    read = torch.ones(tokens, 2, dtype=torch.bool)
    assert torch.equal(merge(outputs, lse, queries, empty, read, SCALE), outputs)
    of_others = Summary(means, means, (torch.randn(shape) * 20).exp())
    assert torch.equal(merge(outputs, lse, queries, of_others, ~read, SCALE), outputs)


@pytest.mark.parametrize("workspace", [1, 1 << 24])
def test_log_sum_exp_of_keys_of_different_number(workspace: int) -> None:
    """Slots behind a token's last key are NaN."""
    pool = new_pool(False)
    lengths = torch.randint(1, 3 * SIZE, (6, HEADS), dtype=torch.int32)
    tables = torch.randint(len(pool.raw), (6, HEADS, 3), dtype=torch.int32)
    queries = torch.randn(6, HEADS, GROUP, HEAD_SIZE)
    found = log_sum_exp(queries, pool.keys, tables, lengths, SCALE, workspace)
    for token in range(6):
        for head in range(HEADS):
            keys = pool.keys[tables[token, head].long()].flatten(0, 1)[: lengths[token, head]]
            logits = queries[token, head].double() @ keys.double().T * SCALE
            torch.testing.assert_close(
                found[token, head].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5
            )
    last = tables[0, 0, 2].long()
    pool.keys[last] = torch.nan
    uses = (tables == last).any(-1) & (lengths > 2 * SIZE) | (tables[..., :2] == last).any(-1)
    again = log_sum_exp(queries, pool.keys, tables, lengths, SCALE, workspace)
    assert torch.equal(again[~uses], found[~uses])


def test_blocks_of_summaries_leave_one_for_tokens() -> None:
    for of, *sizes, wanted in (
        ("both", 3, 9, True, ("vision", "text")),
        ("both", 2, 9, True, ("vision",)),
        ("both", 1, 9, True, ()),
        ("both", 9, 9, True, ()),
        ("both", 3, 9, False, ("text",)),
        ("all", 2, 9, True, ("all",)),
        ("vision", 5, 9, False, ()),
        ("none", 5, 9, True, ()),
    ):
        assert Summaries(of).kinds(*sizes) == wanted  # type: ignore[arg-type]


def test_a_server_with_summaries_takes_a_request_for_them() -> None:
    """Others refuse it, see `test_refusals.py`. A mix may take a method's summaries away."""
    assert "retentivekv" not in EvictionConfig.from_mapping({"policy": "tgv"}).method_names
    mixes = {"mine": {"base": "tgv", "summaries": "vision"}}
    config = EvictionConfig.from_mapping({"policy": "tgv", "methods": mixes})
    assert RequestOptions.resolve(config, {"kv_eviction": "retentivekv"}).policy == "retentivekv"
    plain = {"plain": {"base": "retentivekv", "summaries": "none"}}
    config = EvictionConfig.from_mapping({"policy": "plain", "methods": plain})
    assert not config.summarises
    assert build_policy(Mix("retentivekv")).summaries == Summaries()
    unnamed = EvictionConfig.from_mapping({"methods": {"mine": {"summaries": None}}})
    assert unnamed.methods["mine"] == Mix("tgv")
