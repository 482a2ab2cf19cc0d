# SPDX-License-Identifier: Apache-2.0
"""Summaries of evicted tokens against their definition, and what makes them exact."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import summaries as definition
from oracle.methods import Image, Layout
from oracle.summaries import Rules
from vllm_tgvkv.config import EvictionConfig
from vllm_tgvkv.errors import EvictionConfigError
from vllm_tgvkv.kernels import summaries as kernel
from vllm_tgvkv.kernels.select import page_offsets
from vllm_tgvkv.kernels.summaries import Summary, load, log_sum_exp, merge, num_rows, store
from vllm_tgvkv.pages import PagePool, page_pool
from vllm_tgvkv.policies import Mix, Prompt, Summaries, build_policy
from vllm_tgvkv.prompt import VisionSpan
from vllm_tgvkv.summaries import rows_of, write_summaries

LAYERS, HEADS, GROUP, SIZE, HEAD_SIZE = 2, 2, 3, 16, 8
PAIRS, SCALE = LAYERS * HEADS, HEAD_SIZE**-0.5
LAYOUT = Layout(117, (Image(6, 20, (4, 5)), Image(26, 12, None), Image(50, 30, (5, 6))))
NUM_FULL = LAYOUT.length // SIZE
CANDIDATES = NUM_FULL * SIZE
ROWS = num_rows(SIZE, HEAD_SIZE, 4)


def new_pool(slots_first: bool, dtype: torch.dtype = torch.float32, blocks: int = 24) -> PagePool:
    """Return a pool of random numbers."""
    caches = torch.randn(blocks, LAYERS, HEADS, SIZE, 2 * HEAD_SIZE).to(dtype)
    return page_pool([caches[:, layer] for layer in range(LAYERS)], slots_first)


def prompt_of(layout: Layout) -> Prompt:
    return Prompt(
        num_tokens=layout.length,
        num_candidates=layout.length // SIZE * SIZE,
        is_vision=torch.tensor(layout.vision),
        sinks=4,
        images=tuple(VisionSpan(image.start, image.length, image.grid) for image in layout.images),
    )


class Cut:
    """A cut of a prompt in a pool, with random kept tokens and scores; its pages are written."""

    def __init__(
        self, part: Summaries, layout: Layout = LAYOUT, per_head: bool = True, **pool: Any
    ) -> None:
        self.part, self.layout, self.pool = part, layout, new_pool(**pool)
        prompt, shape = prompt_of(layout), self.pool.shape(GROUP)
        order = torch.randperm(self.pool.num_blocks - 1) + 1
        full = prompt.num_candidates // SIZE
        self.old, fresh = order[:full].int(), order[full:].int()
        self.kinds = part.kinds(4, bool(layout.images))
        self.blocks = fresh[: len(self.kinds)]
        self.scores = torch.rand(LAYERS, HEADS if per_head else 1, prompt.num_candidates) ** 4
        # Few pages for some pairs, down to none, and many for others.
        counts = torch.randint(0, full, (LAYERS, HEADS))
        pages = []
        self.kept = torch.ones(PAIRS, layout.length, dtype=torch.bool)
        self.kept[:, : prompt.num_candidates] = False
        for pair, count in enumerate(counts.flatten().tolist()):
            best = torch.randperm(prompt.num_candidates)[: count * SIZE].sort().values
            self.kept[pair, best] = True
            pages.append(best.view(-1, SIZE))
        write_summaries(
            part,
            self.kinds,
            prompt,
            self.scores,
            torch.cat(pages).int(),
            page_offsets(counts),
            self.old,
            self.blocks,
            self.pool,
            shape,
        )

    def tokens(self, pair: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values [C, D] of a pair's candidates."""
        pages = self.old.long() * PAIRS + pair
        return self.pool.keys[pages].flatten(0, 1), self.pool.values[pages].flatten(0, 1)

    def wanted(self, pair: int) -> list[definition.Row]:
        """Return a pair's rows by the definition."""
        layer, head = divmod(pair, HEADS)
        scores = self.scores.expand(-1, HEADS, -1)[layer, head].tolist()
        given, rows = self.part, rows_of(self.pool)
        rules = Rules(given.of, given.weight, given.decay, given.gate, rows)
        kept = self.kept[pair, : len(scores)]
        return definition.summaries(
            *self.tokens(pair), kept, scores, self.layout, rules, len(self.kinds)
        )

    def found(self, pair: int) -> Summary:
        """Return what the pages of a pair hold, [m, c, ...]."""
        pages = self.blocks.long() * PAIRS + pair
        return load(self.pool.keys, self.pool.values, pages, rows_of(self.pool))


@pytest.mark.parametrize("weight", ["tokens", "score"])
@pytest.mark.parametrize("of", ["both", "all", "vision", "text"])
@pytest.mark.parametrize("slots_first", [True, False])
def test_summaries_are_those_of_the_definition(slots_first: bool, of: Any, weight: Any) -> None:
    gate, decay = random.choice([1.0, 0.3, 0]), random.choice([1.0, 0.9, 0.6])
    part = Summaries(of, weight, decay, gate)
    layout = random.choice([LAYOUT, Layout(70)])
    cut = Cut(part, layout, random.random() < 0.5, slots_first=slots_first)
    for pair in range(PAIRS):
        found, rows = cut.found(pair), cut.wanted(pair)
        exists = found.log_masses > -torch.inf
        assert int(exists.sum()) == len(rows)
        if not rows:
            continue
        keys = torch.stack([row.key for row in rows])
        values = torch.stack([row.value for row in rows])
        masses = torch.tensor([row.mass for row in rows]).double()
        # Means of float32: a few units in the last place of the largest number, about 4.
        torch.testing.assert_close(found.keys[exists].double(), keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.values[exists].double(), values, rtol=1e-4, atol=1e-5)
        found_masses = found.log_masses[exists].double().exp()
        torch.testing.assert_close(found_masses, masses, rtol=1e-4, atol=0)


def test_a_small_workspace_changes_nothing() -> None:
    pool = new_pool(True)
    tables = torch.randperm(24)[:NUM_FULL] * PAIRS + torch.arange(PAIRS)[:, None]
    weights = torch.rand(PAIRS, CANDIDATES) * (torch.rand(PAIRS, CANDIDATES) < 0.5)
    scores = torch.rand(PAIRS, CANDIDATES)
    zero = torch.zeros(CANDIDATES, dtype=torch.int64)
    places = kernel.Places(zero, zero, torch.arange(CANDIDATES))
    given = (
        pool.keys,
        pool.values,
        tables,
        weights,
        scores,
        places,
        torch.full((CANDIDATES,), 0.9),
    )
    one, many = kernel.absorb(*given, ROWS), kernel.absorb(*given, ROWS, workspace_bytes=1)
    for name in ("keys", "values", "log_masses"):
        torch.testing.assert_close(getattr(one, name), getattr(many, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots_first", [True, False])
def test_pages_hold_what_is_stored(slots_first: bool, dtype: torch.dtype) -> None:
    """Also masses of zero and very large ones; nothing but the given pages changes."""
    pool = new_pool(slots_first, dtype)
    pool.raw.fill_(torch.nan)
    rows = rows_of(pool)
    assert 4 * rows <= (SIZE - rows) * HEAD_SIZE * dtype.itemsize
    assert rows == SIZE - 1 or 4 * (rows + 1) > (SIZE - rows - 1) * HEAD_SIZE * dtype.itemsize
    pages = torch.randperm(len(pool.raw))[:PAIRS]
    keys, values = (torch.randn(PAIRS, rows, HEAD_SIZE).to(dtype).float() for _ in range(2))
    masses = torch.randn(PAIRS, rows) * 30
    masses[:, 1] = -torch.inf
    store(Summary(keys, values, masses), pool.keys, pool.values, pages)
    found = load(pool.keys, pool.values, pages, rows)
    assert torch.equal(found.keys, keys)
    assert torch.equal(found.values, values)
    assert torch.equal(found.log_masses, masses)
    others = torch.ones(len(pool.raw), dtype=torch.bool)
    others[pages] = False
    assert pool.raw[others].isnan().all()


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax attention over keys [H, n, D] and the logarithms of its denominators."""
    logits = torch.einsum("thgd,hnd->thgn", queries.double(), keys.double()) * SCALE
    outputs = torch.einsum("thgn,hnd->thgd", logits.softmax(-1), values.double())
    return outputs, logits.logsumexp(-1)


def of_pages(cut: Cut, num_tokens: int) -> tuple[Summary, Tensor]:
    """Return what tokens read of one layer, [T, H, m, c, ...], and that they read all of it."""
    pages = cut.blocks.long() * PAIRS + torch.arange(HEADS)[:, None]
    pages = pages.expand(num_tokens, -1, -1)
    read = torch.ones(num_tokens, len(cut.kinds), dtype=torch.bool)
    return load(cut.pool.keys, cut.pool.values, pages, rows_of(cut.pool)), read


def test_attention_reads_keys_and_rows_as_one_softmax() -> None:
    cut, tokens = Cut(Summaries(), slots_first=False), 5
    queries = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE) * 2
    keys, values = torch.randn(2, HEADS, 40, HEAD_SIZE)
    outputs, lse = attend(queries, keys, values)
    merged = merge(outputs.float(), lse.float(), queries, *of_pages(cut, tokens), SCALE)
    for head in range(HEADS):
        rows = cut.wanted(head)
        for token in range(tokens):
            for member in range(GROUP):
                wanted = definition.attend(
                    queries[token, head, member], keys[head], values[head], rows, SCALE
                )
                found = merged[token, head, member].double()
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_masses_no_bit_changes(dtype: torch.dtype) -> None:
    """Neither with empty summaries, nor with pages of others, whatever their numbers are."""
    tokens, shape = 7, (7, HEADS, 2, ROWS)
    queries = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE).to(dtype)
    outputs = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE).to(dtype)
    lse = torch.randn(tokens, HEADS, GROUP) * 20
    means = torch.randn(*shape, HEAD_SIZE) * 100
    empty = Summary(means, means, torch.full(shape, -torch.inf))
    read = torch.ones(tokens, 2, dtype=torch.bool)
    assert torch.equal(merge(outputs, lse, queries, empty, read, SCALE), outputs)
    of_others = Summary(means, means, torch.randn(shape) * 50)
    assert torch.equal(merge(outputs, lse, queries, of_others, ~read, SCALE), outputs)


@pytest.mark.parametrize("copies", [1, 2, 9])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_equal_tokens_are_read_exactly(rows: int, copies: int) -> None:
    """A row that absorbed one token, or the same one several times, is as good as the tokens.

    The merged attention is then the softmax over all tokens, so weights of kept and absorbed ones
    add up to 1.
    """
    tokens, kept = 4, torch.randn(2, HEADS, 23, HEAD_SIZE)
    absorbed = torch.randn(2, HEADS, rows, HEAD_SIZE)
    queries = torch.randn(tokens, HEADS, GROUP, HEAD_SIZE) * 2
    everything = torch.cat((kept, absorbed.repeat(1, 1, copies, 1)), dim=2)
    wanted, _ = attend(queries, *everything)
    outputs, lse = attend(queries, *kept)
    masses = torch.full((tokens, HEADS, 1, rows), float(copies)).log()
    summary = Summary(*absorbed[:, None, :, None].expand(-1, tokens, -1, -1, -1, -1), masses)
    read = torch.ones(tokens, 1, dtype=torch.bool)
    merged = merge(outputs.float(), lse.float(), queries, summary, read, SCALE)
    torch.testing.assert_close(merged.double(), wanted, rtol=1e-4, atol=1e-5)


def test_few_evicted_tokens_are_all_read_exactly() -> None:
    """All of them are roots, or copies of one: eviction then changes nothing in the whole chain."""
    layout, pool = Layout(4 * SIZE + 3), new_pool(False)
    prompt, order = prompt_of(layout), torch.randperm(23) + 1
    old, fresh = order[:4].int(), order[4:5].int()
    positions = torch.stack([torch.randperm(4 * SIZE)[: 3 * SIZE] for _ in range(PAIRS)])
    positions = positions.sort(dim=1).values
    dropped = torch.ones(PAIRS, 4 * SIZE, dtype=torch.bool)
    dropped.scatter_(1, positions, False)
    # A block is evicted, which is more than a page has rows: the last root has copies behind it.
    scores, rows = torch.rand(LAYERS, HEADS, 4 * SIZE) + 0.1, rows_of(pool)
    tables = old.long() * PAIRS + torch.arange(PAIRS)[:, None]
    for pair in range(PAIRS):
        last, *copies = dropped[pair].nonzero().flatten()[rows - 1 :].tolist()
        scores[pair // HEADS, pair % HEADS, copies] = 0
        for copy in copies:
            for view in (pool.keys, pool.values):
                original = view[tables[pair, last // SIZE], last % SIZE].clone()
                view[tables[pair, copy // SIZE], copy % SIZE] = original
    offsets = page_offsets(torch.full((LAYERS, HEADS), 3))
    given = (scores, positions.view(-1, SIZE).int(), offsets, old, fresh, pool, pool.shape(GROUP))
    write_summaries(Summaries("text"), ("text",), prompt, *given)
    queries = torch.randn(6, HEADS, GROUP, HEAD_SIZE)
    for layer in range(LAYERS):
        pairs = range(layer * HEADS, (layer + 1) * HEADS)
        keys, values = (
            torch.stack([view[tables[p]].flatten(0, 1) for p in pairs])
            for view in (pool.keys, pool.values)
        )
        kept = ~dropped[list(pairs)]
        wanted, _ = attend(queries, keys, values)
        outputs, lse = attend(
            queries, keys[kept].view(HEADS, -1, HEAD_SIZE), values[kept].view(HEADS, -1, HEAD_SIZE)
        )
        pages = (fresh.long() * PAIRS + torch.tensor(list(pairs))[:, None]).expand(6, -1, -1)
        summary = load(pool.keys, pool.values, pages, rows_of(pool))
        read = torch.ones(6, 1, dtype=torch.bool)
        merged = merge(outputs.float(), lse.float(), queries, summary, read, SCALE)
        torch.testing.assert_close(merged.double(), wanted, rtol=1e-4, atol=1e-5)


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
    assert Summaries().kinds(3, True) == ("vision", "text")
    assert Summaries().kinds(2, True) == ("vision",)
    assert Summaries().kinds(1, True) == ()
    assert Summaries().kinds(3, False) == ("text",)
    assert Summaries("all").kinds(2, True) == ("all",)
    assert Summaries("vision").kinds(5, False) == ()
    assert Summaries("none").kinds(5, True) == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"of": "images"}, "of is 'images'"),
        ({"weight": 3}, "weight is 3"),
        ({"decay": 0}, "decay must be a number above 0 and at most 1, got 0"),
        ({"decay": True}, "decay must be a number above 0"),
        ({"gate": 1.1}, "gate must be a number from 0 and at most 1, got 1.1"),
        ({"states": 2}, "unknown states"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    mixes = {"mine": {"base": "tgv", "summaries": values}}
    with pytest.raises(EvictionConfigError, match=rf"methods\.mine\.summaries.*{message}"):
        EvictionConfig.from_mapping({"policy": "tgv", "methods": mixes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "retentivekv", "budget": "auto:0.9"}, "budget auto with .* 'retentivekv'"),
        (
            {"policy": "retentivekv", "decode": {"max_tokens": 512}},
            "keeps summaries of what it evicts, which are not evicted again",
        ),
        (
            {"methods": {"x": {"base": "elastic", "summaries": {}}}},
            "summaries and merge: true exclude each other",
        ),
        (
            {"methods": {"x": {"base": "rkv", "summaries": {"weight": "score"}}}},
            "summaries.weight 'score' has no meaning with the score 'rkv'",
        ),
    ],
)
def test_what_summaries_do_not_go_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EvictionConfigError, match=message):
        EvictionConfig.from_mapping({"policy": "tgv", **settings})


def test_a_server_without_summaries_refuses_a_request_for_them() -> None:
    config = EvictionConfig.from_mapping({"policy": "tgv"})
    assert "retentivekv" not in config.method_names
    given = ("retentivekv", *config.first_eviction("retentivekv"), "kv_eviction")
    with pytest.raises(EvictionConfigError, match=re.escape("start it with such a method as kv_e")):
        config.check_method(*given)
    mixes = {"mine": {"base": "tgv", "summaries": {"of": "vision"}}}
    config = EvictionConfig.from_mapping({"policy": "tgv", "methods": mixes})
    assert config.check_method(*given) == "retentivekv"
    plain = {"plain": {"base": "retentivekv", "summaries": {"of": "none"}}}
    config = EvictionConfig.from_mapping({"policy": "plain", "methods": plain})
    assert not config.summarises
    assert build_policy(Mix("retentivekv")).summaries == Summaries()
